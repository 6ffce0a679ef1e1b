"""`gruppo view`: a local web page for run folders, or a report on them in one HTML file."""

from collections.abc import Sequence
from pathlib import Path

from gruppo.cli.options import CommandParser

EXAMPLES = """\
examples:
  gruppo view runs/demo                           # prints an address on this machine to open in a browser
  gruppo view runs/a runs/b evaluations           # runs side by side, and what was evaluated
  gruppo view runs/demo --port 8123 --open        # a chosen port; opens the browser
  gruppo view runs/demo --export report.html      # one file to share, without a server

A run on another machine: `ssh -L 8123:127.0.0.1:8123 HOST gruppo view RUN --port 8123`, then http://127.0.0.1:8123/
"""


def parser() -> CommandParser:
    arguments = CommandParser(
        prog="gruppo view",
        description="A local web page for run folders: curves, groups, tokens, prompts and evaluations. It is "
        "read-only, can be reached from this machine only, and needs no network.",
        epilog=EXAMPLES,
    )
    arguments.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folders of runs and evaluations, or folders that hold some of them",
    )
    arguments.add_argument("--port", type=int, default=0, help="the port to listen on (default: a free one)")
    arguments.add_argument("--open", action="store_true", help="open the page in a browser")
    arguments.add_argument("--export", type=Path, metavar="FILE", help="write a report into one HTML file and exit")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 on success."""
    from gruppo.view.folders import find_folders
    from gruppo.view.queries import Desk

    arguments = parser()
    options = arguments.parse_args(argv)
    if options.export is not None and (options.open or options.port):
        arguments.error("--export only writes a file: it cannot be combined with --port or --open")
    if not 0 <= options.port <= 65535:
        arguments.error(f"--port {options.port}: a port is a number from 1 to 65535; 0 takes a free one")
    desk = Desk(find_folders(options.folders))
    if options.export is not None:
        from gruppo.view.export import export

        size = export(desk, options.export)
        print(f"{options.export}: {size / 1e6:.1f} MB. It opens in any browser and loads nothing from elsewhere.")
        return 0
    from gruppo.view.server import serve

    def ready(address: str) -> None:
        runs, evaluations = len(desk.runs), len(desk.evaluations)
        print(
            f"{_count(runs, 'run')} and {_count(evaluations, 'evaluation')} at {address}   (Ctrl-C to stop)",
            flush=True,
        )

    try:
        serve(desk, options.port, ready=ready, open_page=options.open)
    except KeyboardInterrupt:
        print("Stopped. Nothing in the folders was changed.")
    return 0


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
