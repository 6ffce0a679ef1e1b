"""Run code as the main program, as `python` runs a file, or as a notebook cell."""

import builtins
import resource
import signal
import sys
from _ast import Expr, Interactive, Module, PyCF_ONLY_AST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

FILE = "<code>"


def run(code: str, path: list[str], show_last: bool) -> None:
    """Execute the code in a new `__main__`; `show_last` prints the value of a trailing expression."""
    names = _new_main(path)
    try:
        for part in _parts(code, show_last):
            exec(part, names)
    except SystemExit:
        raise
    except BaseException as error:
        if isinstance(error, MemoryError):
            _use_last_words()
        _print_traceback(error, code)
        sys.exit(1)


def _parts(code: str, show_last: bool) -> "list[CodeType]":
    tree = compile(code, FILE, "exec", PyCF_ONLY_AST)
    assert isinstance(tree, Module)
    if not (show_last and tree.body and isinstance(tree.body[-1], Expr)):
        return [compile(tree, FILE, "exec")]
    last = tree.body.pop()
    before = Module(body=tree.body, type_ignores=[])
    return [compile(before, FILE, "exec"), compile(Interactive(body=[last]), FILE, "single")]


def _new_main(path: list[str]) -> dict[str, object]:
    """Make the interpreter look newly started, and return the namespace of its new main module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.split(".")[0] == "gruppo"]:
        del sys.modules[name]
    sys.path[:] = path
    sys.argv[:] = [FILE]
    sys.dont_write_bytecode = True
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps what was printed before a kill
    module = type(sys)("__main__")
    vars(module)["__builtins__"] = builtins
    sys.modules["__main__"] = module
    if not hasattr(builtins, "exit"):  # the interpreter started without `site`
        from _sitebuiltins import Quitter

        builtins.exit = Quitter("exit", "Ctrl-D")
        builtins.quit = Quitter("quit", "Ctrl-D")
    return vars(module)


def _print_traceback(error: BaseException, code: str) -> None:
    import linecache  # slow to import, and most runs do not need it
    import traceback

    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE:
        frames = frames.tb_next  # skip frames of the sandbox itself
    try:
        sys.stdout.flush()
    finally:
        traceback.print_exception(type(error), error, frames)


def _use_last_words() -> None:
    """Release the reserved address space, so that the error can be printed."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
