"""What a test does to a trainer before it trains, by name: functions cannot be sent to another process."""

import errno
import os
import sys
from typing import Any

from tests.resume.moments import MOMENT


def full_disk(trainer: Any) -> None:
    """No room for anything that is written while the checkpoint of update 4 is saved."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if not (MOMENT.saving and trainer.state.global_step == 4 and event == "open"):
            return
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR) and "checkpoint-4" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    sys.addaudithook(refuse)
