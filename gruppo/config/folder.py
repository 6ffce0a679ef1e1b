"""The folder of a run as a setting: names that files cannot have, and what is said of it elsewhere."""

import os
import sys
from typing import Any

from gruppo.errors import ConfigError

# On a config whose output_dir was made absolute: the absolute path, and what the user had written.
GIVEN = "_output_dir_given"


def why_no_path(path: str) -> str | None:
    """Why files cannot be written at a path, in a few words; None if its name is not the reason.

    Example: why_no_path("runs/\\udcff") == "it is not valid text (bytes of another encoding)"
    """
    try:
        os.fsencode(path)  # Python's own calls
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        return f"this Python encodes names as {encoding}, which lacks its letters: set PYTHONUTF8=1 or a UTF-8 locale"
    try:
        path.encode("utf-8")  # those of torch, safetensors and Arrow
    except UnicodeEncodeError:
        return "it is not valid text (bytes of another encoding)"
    return "a name cannot hold the character NUL" if "\0" in path else None


def check_output_dir(config: Any) -> None:
    if (why := why_no_path(str(config.output_dir))) is not None:
        raise ConfigError(f"output_dir={config.output_dir!r} cannot be written to: {why}. Choose another name.")


def make_absolute(config: Any) -> None:
    """Make output_dir absolute, and remember how the user wrote it."""
    whole, given = os.path.abspath(config.output_dir), config.output_dir
    if whole == given or why_no_path(whole) is not None:
        return  # it is, or the current folder has a name that libraries cannot take: as it was given
    config.output_dir = whole
    setattr(config, GIVEN, (whole, given))


def as_given(config: Any) -> Any:
    """output_dir as the user wrote it, without the folders of this machine above it."""
    whole, given = getattr(config, GIVEN, (None, None))
    return given if whole is not None and whole == config.output_dir else config.output_dir
