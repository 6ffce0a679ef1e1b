"""The folder of a run, made sure of before anything costs time."""

import os
from pathlib import Path
from typing import Any

from gruppo.config.validate import why_no_path
from gruppo.runs.links import refuse_links


def own_folder(args: Any) -> None:
    """Make output_dir absolute, and raise for links in it.

    A reward, a tool or a callback may change the working directory: the run stays in the folder it was given.
    """
    whole = os.path.abspath(args.output_dir)
    if why_no_path(whole) is None:  # else the current folder has a name that libraries cannot take: as it was given
        args.output_dir = whole
    refuse_links(Path(args.output_dir))
