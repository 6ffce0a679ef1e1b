"""The folder of a run, made sure of before anything costs time."""

from pathlib import Path
from typing import Any

from gruppo.config.folder import make_absolute
from gruppo.runs.links import names_written, refuse_links


def own_folder(args: Any) -> None:
    """Make output_dir absolute, and raise for links in it.

    A reward, a tool or a callback may change the working directory: the run stays in the folder it was given.
    """
    make_absolute(args)
    refuse_links(Path(args.output_dir), names_written(args.record, completions=args.log_completions))
