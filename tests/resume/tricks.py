"""Modifications of a trainer before it trains, referred to by name: functions cannot be sent to another process."""

import errno
import os
import sys
from typing import Any

from tests.resume.moments import MOMENT


def full_disk(trainer: Any) -> None:
    """Writing to the checkpoint of update 4 fails with ENOSPC."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if not (MOMENT.saving and trainer.state.global_step == 4 and event == "open"):
            return
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR) and "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(refuse)
