"""The source itself: nothing runs what it reads, nothing listens, nothing trusts code from elsewhere by default."""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gruppo
from gruppo.view.server import HOST
from tests.test_layout import FILES, ROOT, TELEMETRY, imports, name

REPOSITORY = Path(__file__).parents[2]

# Reading these formats can run code. Those who may read them read what a process of the same run wrote into a pipe.
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
LOADERS = {"load", "loads", "Unpickler", "open", "decode"}
MAY_UNPICKLE = {
    "evaluation/worker.py": "an exception of its own, to see whether it can be copied",
    "rewards/process.py": "replies of a worker, through its pipe",
    "rewards/worker.py": "the function and the arguments, through the pipe from the run",
    "rewards/calling.py": "values that a reward logged, out of such a reply",
    "sandbox/host.py": "reports of the guard, through a pipe that the code in the jail lacks; marshal runs nothing",
    "sandbox/jail/main.py": "what to run, from a sealed memory file; marshal runs nothing",
}
MAY_RUN_TEXT = {"sandbox/jail/runner.py": "the code of the model, inside the jail"}
MAY_LISTEN = {"view/server.py": "the page of `gruppo view`, on loopback, which can only be read"}
SOCKETS = {
    "socket",
    "socketserver",
    "http.server",
    "xmlrpc.server",
    "wsgiref",
    "uvicorn",
    "fastapi",
    "flask",
    "aiohttp",
}
LISTENING = {"start_server", "start_unix_server", "create_server", "create_unix_server", "run_server", "serve"}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Every call in a file, by the dotted name of what is called."""
    return calls_in(path.read_text(encoding="utf-8"))


@functools.cache  # several tests walk the whole library
def calls_in(source: str) -> list[tuple[str, ast.Call]]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [(ast.unparse(node.func), node) for node in nodes if isinstance(node.func, ast.Name | ast.Attribute)]


def argument(call: ast.Call, keyword: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == keyword), None)


def unpickling(path: Path) -> list[str]:
    aliases = {item.module for item in imports(path) if item.module.split(".")[0] in UNSAFE}
    called = [c for c, _ in calls(path) if c.split(".")[0] in UNSAFE and c.split(".")[-1] in LOADERS]
    return called + [module for module in aliases if module.split(".")[-1] in LOADERS]  # `from pickle import loads`


def running_text(path: Path) -> list[str]:
    return [c for c, _ in calls(path) if c in ("eval", "exec", "compile", "__import__", "runpy.run_path", "os.system")]


def unsafe_loads(path: Path) -> list[str]:
    """Calls that could run code from a file, by how they are called."""
    found = []
    for called, call in calls(path):
        last = called.split(".")[-1]
        if called == "torch.load" and argument(call, "weights_only") != "True":
            found.append("torch.load without weights_only=True")
        is_yaml = called.split(".")[0] == "yaml" and last in ("load", "load_all", "unsafe_load", "full_load")
        if is_yaml and (last != "load" or argument(call, "Loader") not in safe_loaders(path)):
            found.append(f"{called}: use yaml.safe_load, or a loader derived from yaml.SafeLoader")
        if last in ("load", "memmap") and called.split(".")[0] in ("np", "numpy") and argument(call, "allow_pickle"):
            found.append("numpy.load with allow_pickle")
        if called.split(".")[0] in ("subprocess", "asyncio", "os") and argument(call, "shell") not in (None, "False"):
            found.append("a shell")
        if called in ("os.popen", "asyncio.create_subprocess_shell", "subprocess.getoutput"):
            found.append(f"{called}: a shell")
    return found


def safe_loaders(path: Path) -> set[str]:
    """Classes of a file that derive from YAML's safe loader and make nothing but what it makes."""
    classes = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)
    ]
    constructing = ("construct", "add_constructor", "add_multi_constructor")
    safe = {node.name for node in classes if [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]}
    return safe if not any(called.split(".")[-1].startswith(constructing) for called, _ in calls(path)) else set()


def trusting(path: Path) -> list[str]:
    """Loads from the hub that do not say whose code they trust, or trust any."""
    found = []
    for called, call in calls(path):
        told = argument(call, "trust_remote_code")
        passes_dict = any(k.arg is None for k in call.keywords)
        if called.endswith(".from_pretrained") and told is None and not passes_dict:
            found.append(f"{called}: line {call.lineno} leaves trust_remote_code open")
        if told == "True":
            found.append(f"{called}: line {call.lineno} trusts everybody")
    return found


def listening(path: Path) -> list[str]:
    found = [c for c, _ in calls(path) if "." in c and c.split(".")[-1] in LISTENING]
    modules = [item.module for item in imports(path)]
    return found + [m for m in modules if any(m == s or m.startswith(f"{s}.") for s in SOCKETS)]


def places(check: Any, allowed: dict[str, str] | None = None) -> dict[str, list[str]]:
    return {name(path): found for path in FILES if (found := check(path)) and name(path) not in (allowed or {})}


# ---- the walk


def test_nothing_is_unpickled_but_messages_between_our_own_processes() -> None:
    assert places(unpickling, MAY_UNPICKLE) == {}
    assert set(places(unpickling)) == set(MAY_UNPICKLE), "each exception is needed"


def test_no_text_is_run_but_in_the_sandbox() -> None:
    assert places(running_text, MAY_RUN_TEXT) == {}
    assert set(places(running_text)) == set(MAY_RUN_TEXT)


def test_files_are_loaded_without_running_them_and_commands_without_a_shell() -> None:
    assert places(unsafe_loads) == {}


def test_only_the_viewer_listens() -> None:
    """And on loopback only, which no option changes: tests/view/test_server.py asks it."""
    assert places(listening, MAY_LISTEN) == {}
    assert set(places(listening)) == set(MAY_LISTEN)
    assert HOST == "127.0.0.1"
    (configured,) = (call for called, call in calls(ROOT / "view/server.py") if called == "uvicorn.Config")
    assert argument(configured, "host") == "HOST"


def test_no_code_from_the_hub_is_trusted() -> None:
    assert places(trusting) == {}


@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("import pickle\npickle.loads(b'')", unpickling),
        ("import pickle\npickle.Unpickler(f).load()", unpickling),
        ("from pickle import loads\nloads(b'')", unpickling),
        ("from marshal import load", unpickling),
        ("eval('1')", running_text),
        ("exec('1')", running_text),
        ("torch.load(f)", unsafe_loads),
        ("torch.load(f, weights_only=False)", unsafe_loads),
        ("torch.load(f, weights_only=trusted)", unsafe_loads),
        ("yaml.load(f, Loader=yaml.Loader)", unsafe_loads),
        ("class Own(yaml.Loader): pass\nyaml.load(f, Loader=Own)", unsafe_loads),
        ("class Own(yaml.SafeLoader): pass\nOwn.add_constructor('!x', run)\nyaml.load(f, Loader=Own)", unsafe_loads),
        ("np.load(f, allow_pickle=True)", unsafe_loads),
        ("subprocess.run('ls', shell=True)", unsafe_loads),
        ("AutoModel.from_pretrained('x')", trusting),
        ("AutoModel.from_pretrained('x', trust_remote_code=True)", trusting),
        ("import socket", listening),
        ("from http.server import HTTPServer", listening),
        ("asyncio.start_server(f, '127.0.0.1')", listening),
    ],
)
def test_the_walk_sees(source: str, check: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(source)
    assert check(file)


# ---- defaults


def modules() -> list[Any]:
    """Everything of the package that can be imported here."""
    found = []
    for info in pkgutil.walk_packages(gruppo.__path__, "gruppo."):
        if not info.name.endswith("__main__") and ".jail" not in info.name and ".gpu" not in info.name:
            found.append(importlib.import_module(info.name))
    return found


def test_trust_is_off_in_every_config_and_signature() -> None:
    defaults: dict[str, Any] = {}
    for module in modules():
        for label, thing in vars(module).items():
            if getattr(thing, "__module__", None) != module.__name__:
                continue
            if dataclasses.is_dataclass(thing):
                fields = {f.name: f.default for f in dataclasses.fields(thing)}
                if "trust_remote_code" in fields:
                    defaults[f"{module.__name__}.{label}"] = fields["trust_remote_code"]
            elif inspect.isfunction(thing) and "trust_remote_code" in inspect.signature(thing).parameters:
                default = inspect.signature(thing).parameters["trust_remote_code"].default
                defaults[f"{module.__name__}.{label}"] = False if default is inspect.Parameter.empty else default
    assert {"gruppo.config.grpo.GRPOConfig", "gruppo.config.rloo.RLOOConfig"} <= set(defaults)
    assert "gruppo.rewards.models.load_reward_model" in defaults
    assert not any(defaults.values()), defaults


# ---- at work

WATCHED_IMPORT = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append((event, str(args))) if event.startswith("socket.") else None)
import gruppo
for public in gruppo.__all__:
    getattr(gruppo, public)
loud = {"socket.bind", "socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"}
print([found for found in opened if found[0] in loud])
print(sorted(set(sys.modules) & set(sys.argv[1:])))
"""


@pytest.mark.medium
def test_importing_all_of_it_opens_no_connection_and_loads_no_telemetry() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, *TELEMETRY],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
        check=True,
    )
    connections, telemetry = found.stdout.splitlines()[-2:]
    assert connections == "[]"
    assert telemetry == "[]"
