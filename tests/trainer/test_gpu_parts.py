"""On a CUDA device: every kind of model, and the parts of a run that other tests try on a CPU.

What is on one device and should be on another shows here only.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from gruppo import GRPOTrainer
from gruppo.replay import replay
from gruppo.runs import Run
from tests.helpers import tiny_model
from tests.policy.methods import METHODS
from tests.replay.worlds import RUNS, trained
from tests.tools.scripted import random_caller
from tests.trainer import sharded_run, zero_run
from tests.trainer.runs import SaveAt, logs, make, run
from tests.trainer.test_tools import add
from tests.vision.families import FAMILIES
from tests.vision.runs import make as make_vision

pytestmark = pytest.mark.gpu
ON = "cuda"
THERE: dict[str, Any] = {"use_cpu": ON == "cpu"}
IDS = torch.tensor([[9, 10, 11, 12]])


@pytest.fixture(autouse=True)
def same_bits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's deterministic algorithms, as far as it has them."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in trainer.model.named_parameters()}


def check_resumed(first: Any, again: Any, checkpoint: Path) -> None:
    """The rest of a run from a checkpoint ends where the run ended; both were there, and moved."""
    assert first.accelerator.device.type == ON
    before = weights(first)
    first.train()
    straight = weights(first)
    assert any(not torch.equal(weight, before[name]) for name, weight in straight.items())
    assert all(weight.isfinite().all() for weight in straight.values())
    assert all(log["grad_norm"] > 0 for log in logs(first))
    again.train(resume_from_checkpoint=str(checkpoint))
    assert [name for name, weight in weights(again).items() if not torch.equal(weight, straight[name])] == []


# ---- models


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter(method: str, tmp_path: Path) -> None:
    """Sampled by the engine, trained in packs under autocast, resumed, loaded by plain peft."""
    settings = {**THERE, "bf16": True, "max_steps": 3, "learning_rate": 0.05, "num_iterations": 2, "beta": 0.1}

    def made(folder: Path, **more: Any) -> Any:
        policy = {"model": tiny_model(hidden_size=32), "peft_config": METHODS[method]()}
        return make(folder, GRPOTrainer, rollout_backend="builtin", **policy, **settings, **more)

    first = made(tmp_path / "run", callbacks=[SaveAt(2)])
    assert first.packed is not None
    check_resumed(first, made(tmp_path / "again"), tmp_path / "run" / "checkpoint-2")
    first.save_model(str(tmp_path / "final"))
    loaded = peft.PeftModel.from_pretrained(tiny_model(hidden_size=32), tmp_path / "final").eval()
    with torch.no_grad():
        ours = first.model.eval()(input_ids=IDS.to(ON)).logits.cpu()
        assert (loaded(input_ids=IDS).logits - ours).abs().max() < 0.03  # ours are computed in bfloat16


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_images(family: str, kind: str, tmp_path: Path) -> None:
    """From inside a generation, whose rows wait with their images; some rows have two, some none."""

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    settings = {**THERE, "bf16": True, "max_steps": 3, "save_strategy": "steps", "save_steps": 1, "beta": 0.1}
    settings |= {"steps_per_generation": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    first, again = (
        make_vision(tmp_path / name, family, kind, rewards=reward, **settings) for name in ("run", "again")
    )
    before = weights(first)
    check_resumed(first, again, tmp_path / "run" / "checkpoint-1")
    moved = {name for name, weight in weights(first).items() if not torch.equal(weight, before[name])}
    assert any("visual" in name or "vision" in name for name in moved)
    assert logs(first)[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference sees the same images"


def test_compiled_by_inductor(tmp_path: Path) -> None:
    settings = {**THERE, "max_steps": 2, "learning_rate": 0.05, "beta": 0.1}
    compiled = run(tmp_path / "a", torch_compile=True, torch_compile_backend="inductor", **settings)
    assert hasattr(compiled.model_wrapped, "_orig_mod")
    plain = run(tmp_path / "b", packed_update=False, **settings)
    for name, weight in weights(plain).items():
        assert torch.allclose(weights(compiled)[name], weight, atol=1e-3), name


# ---- parts of a run


def test_a_whole_run_is_that_on_a_cpu(tmp_path: Path) -> None:
    """Groups without spread are replaced, a reward model scores beside a function, and there are evaluations."""
    here = zero_run.trainer_of(tmp_path / "here", 1)
    here.train()
    there = zero_run.trainer_of(tmp_path / "there", 1, **THERE)  # only now: accelerate has one device at a time
    there.train()
    assert there.accelerator.device.type == ON
    found, expected = sharded_run.seen(there), sharded_run.seen(here)
    assert found["completions"] == expected["completions"]
    for name, weight in expected["weights"].items():
        assert torch.allclose(found["weights"][name].cpu(), weight, atol=1e-3), name
    for ours, theirs in zip(logs(there), logs(here), strict=True):
        same = {name: theirs[name] for name in ("loss", "reward", "reward_std", "entropy", "completions/mean_length")}
        assert {name: ours[name] for name in same} == pytest.approx(same, rel=1e-2, abs=1e-3)


def test_a_reference_that_follows_the_policy(tmp_path: Path) -> None:
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "beta": 0.1}
    trainer = make(tmp_path, GRPOTrainer, **sync, **THERE, max_steps=3, learning_rate=1e-2)
    trainer.train()
    assert all(abs(log["kl"]) < 1e-6 for log in logs(trainer))


@pytest.mark.parametrize("name", RUNS)
def test_a_record_is_replayed(name: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", **RUNS[name], **THERE)
    found = replay(tmp_path / "run")
    logged = {line["update"]: line for line in Run(tmp_path / "run").metrics("train")}
    assert [update["update"] for update in found.updates] == list(logged)
    for update in found.updates:
        assert update["loss"] == pytest.approx(logged[update["update"]]["loss"], abs=1e-3)
        assert update["advantage_difference"] <= 1e-5
    assert found.notes == []


@pytest.mark.parametrize("backend", ["builtin", "transformers"])
def test_tools(backend: str, tmp_path: Path) -> None:
    settings = {"rollout_backend": backend, "max_tool_calling_iterations": 2, **THERE}
    trainer = random_caller(tmp_path, "add", {"a": 1, "b": 2}, arguments={"tools": [add]}, **settings)
    trainer.train()
    assert trainer.accelerator.device.type == ON
    logged = logs(trainer)[0]
    assert logged["tools/turns"] == 3
    if backend == "builtin":
        assert logged["sampling/sampling_logp_difference/mean"] < 1e-3


def test_what_is_left_of_a_run_can_be_read(tmp_path: Path) -> None:
    """Log-probs of every update, rollouts and tables; nothing of them is a tensor on a device."""
    settings = {"record": "all", "log_completions": True, "max_steps": 2, "num_iterations": 2, "beta": 0.1}
    trainer = make(tmp_path, GRPOTrainer, **settings, **THERE)
    trainer.train()
    record = Run(tmp_path)
    rows = record.update_logps(["logps", "ref_logps"]).to_pylist()
    assert len(rows) == 2 * len(record.rollouts())
    assert all(logp <= 0 for row in rows for logp in row["logps"])
    json.dumps(trainer.state.log_history)
