"""Output that no locale can stop."""

import io

from rich.console import Console


def printing(console: Console) -> Console:
    """The console, whose file now escapes the characters that its encoding lacks, as stderr does.

    A completion that a terminal cannot show is no reason to end a run.
    """
    file = console.file
    if isinstance(file, io.TextIOWrapper) and file.errors in ("strict", "surrogateescape"):
        file.reconfigure(errors="backslashreplace")
    return console
