"""The parity guard in a run: when it looks, what it decides, and that it stops a run whose kernels are broken."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer, RLOOTrainer
from gruppo.errors import ParityError
from gruppo.kernels import head as head_kernel
from gruppo.plan.budgets import UpdatePlan, plan_update
from gruppo.policy import packed as packed_policy
from gruppo.policy import packing
from gruppo.rollout.builtin import BuiltinBackend
from gruppo.trainer.update import guard, parity, planning
from tests.trainer.runs import logs, make, run
from tests.trainer.scripted import make_trainer

BREAK = {
    "attention off by one": (packed_policy, "packed_attention", "packed_update=False"),
    "attention of the wrong scale": (packed_policy, "packed_attention", "packed_update=False"),
    "attention without the prompt": (packed_policy, "packed_attention", "packed_update=False"),
    "head of the wrong temperature": (None, "", "fused_head=False"),
    "positions off by one": (packing.PackedRows, "to", "packed_update=False"),
}


def broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a kernel out of order, as a slip of the pen would."""
    from gruppo.kernels.attention import Segments, packed_attention
    from gruppo.policy import head

    def shifted(query: Any, key: Any, value: Any, segments: Any, **options: Any) -> Any:
        return packed_attention(query, key.roll(1, 0), value, segments, **options)

    def scaled(*args: Any, scale: float, **options: Any) -> Any:
        return packed_attention(*args, scale=1.2 * scale, **options)

    def alone(query: Any, key: Any, value: Any, segments: Any, **options: Any) -> Any:
        lone = Segments.of(segments.lengths, [-1] * len(segments.lengths), query.device)
        return packed_attention(query, key, value, lone, **options)

    def lukewarm(*args: Any, temperature: float, **options: Any) -> Any:
        return head_kernel.head_scores(*args, temperature=1.3 * temperature, **options)

    original = packing.PackedRows.to

    def late(self: Any, device: Any) -> Any:
        moved = original(self, device)
        moved.position_ids.add_((moved.position_ids > 1).long())
        return moved

    attention = {"attention off by one": shifted, "attention of the wrong scale": scaled}
    attention["attention without the prompt"] = alone
    if name in attention:
        monkeypatch.setattr(packed_policy, "packed_attention", attention[name])
    elif name.startswith("head"):
        monkeypatch.setattr(head, "head_scores", lukewarm)
    else:
        monkeypatch.setattr(packing.PackedRows, "to", late)


@pytest.mark.parametrize("name", BREAK)
def test_a_broken_kernel_stops_the_run_before_its_first_update(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("dapo", tmp_path, dtype=torch.float32, per_device_train_batch_size=16)
    before = [weight.clone() for weight in trainer.model.parameters()]
    broken(name, monkeypatch)
    with pytest.raises(ParityError, match=BREAK[name][2]):
        trainer.train()
    assert trainer.state.global_step == 0
    for weight, start in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(weight, start)


def test_told_not_to_look_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("dapo", tmp_path, per_device_train_batch_size=16, parity_check="off")
    broken("attention of the wrong scale", monkeypatch)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(("when", "looks"), [("off", 0), ("first", 1), ("every:2", 3), ("every:5", 1)])
def test_it_looks_as_often_as_it_is_asked_to(
    when: str, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return parity.check_parity(*args, **kwargs)

    monkeypatch.setattr(guard, "check_parity", watched)
    run(tmp_path, GRPOTrainer, parity_check=when, max_steps=5)
    assert len(seen) == looks


def test_padded_rows_have_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "check_parity", lambda *args, **kwargs: pytest.fail("there is no fast path"))
    run(tmp_path, GRPOTrainer, packed_update=False, max_steps=1)


def test_the_table_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, GRPOTrainer, max_steps=1)
    shown = capsys.readouterr().out
    for word in ("Parity", "log-probs", "entropies", "gradients", "sampling log-probs"):
        assert word in shown


class CountsPasses(GRPOTrainer):
    """Counts passes for old log-probs."""

    passes = 0

    def _frozen_logps(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += 1
        return super()._frozen_logps(*args, **kwargs)


def test_log_probs_of_the_engine_are_reused_once_they_are_known_to_agree(tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "max_steps": 4}
    trainer = run(tmp_path, CountsPasses, **settings)
    assert isinstance(trainer.backend, BuiltinBackend)
    assert trainer.parity.reuses_engine_logps
    assert trainer.passes == 0
    for further in ({"reuse_sampling_logps": False}, {"parity_check": "off"}):
        anew = run(tmp_path, CountsPasses, **settings, **further)
        assert anew.passes == 2
        for a, b in zip(trainer.model.parameters(), anew.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_log_probs_that_differ_too_much_are_computed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_SAME_LOGPS", 1e-12)
    trainer = run(tmp_path, CountsPasses, num_iterations=2, max_steps=4)
    assert not trainer.parity.reuses_engine_logps
    assert trainer.passes == 2


def test_a_kl_that_is_charged_to_the_reward_is_the_difference_of_two_passes_of_a_kind(tmp_path: Path) -> None:
    """The engine's log-probs, though known to agree, would leave its rounding in a KL that is 0."""
    trainer = run(tmp_path, RLOOTrainer, beta=0.05, num_iterations=2, max_steps=4)
    assert trainer.parity.reuses_engine_logps
    first, second, third, _ = (line.get("kl") for line in logs(trainer))
    assert first == 0.0, "the policy is the reference still"
    assert second is None, "the same generation"
    assert third != 0.0


# ---- memory


def test_out_of_memory_in_the_pass_for_old_log_probs_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "reuse_sampling_logps": False}
    calm = run(tmp_path, GRPOTrainer, parity_check="off", **settings)
    original, failures = GRPOTrainer._logps_of_packs, [1]

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("injected")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_logps_of_packs", failing)
    with caplog.at_level(logging.WARNING):
        shaken = run(tmp_path, GRPOTrainer, parity_check="off", **settings)
    assert "Out of memory" in caplog.text
    assert shaken.planner.in_force.tokens < calm.planner.in_force.tokens
    for a, b in zip(calm.model.parameters(), shaken.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_resumed_run_keeps_the_plan(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    first = make(tmp_path, GRPOTrainer, max_steps=1, **settings)
    first.train()
    resumed = make(tmp_path, GRPOTrainer, max_steps=2, **settings)
    folder = tmp_path / "checkpoint-1"
    state = folder / "run_state-00000.json"
    state.write_text(state.read_text(encoding="utf-8").replace("4096", "77"), encoding="utf-8")
    (folder / "manifest.json").unlink()
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.planner.in_force.tokens == 77


def resumed(folder: Path, change: Any, **settings: Any) -> Any:
    """The trainer of a run that was saved after its first update, with the plan in the checkpoint changed."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    make(folder, GRPOTrainer, max_steps=1, **saving, **settings).train()
    checkpoint = folder / "checkpoint-1"
    path = checkpoint / "run_state-00000.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    change(state["parts"]["update_plan"])
    path.write_text(json.dumps(state), encoding="utf-8")
    (checkpoint / "manifest.json").unlink()
    return make(folder, GRPOTrainer, max_steps=2, **saving, **settings)


CHECKPOINTS = {"of now": lambda plan: None, "older": lambda plan: plan.pop("longest", None)}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_resumed_run_recomputes_layers_before_it_cuts_rows(kind: str, tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": None, "max_tokens_per_micro_batch": 8, "parity_check": "off"}
    trainer = resumed(tmp_path, CHECKPOINTS[kind], **settings)
    failures = [1]

    def fail_once(*_: Any) -> None:
        if torch.is_grad_enabled() and failures:
            failures.pop()
            raise torch.OutOfMemoryError("injected")

    trainer.model.model.layers[0].register_forward_pre_hook(fail_once)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not failures
    assert trainer.planner.in_force == UpdatePlan(8, 8, checkpointing=True)


def test_a_plan_knows_the_precision_that_a_launcher_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def watched(shape: Any, passes: Any, **options: Any) -> UpdatePlan:
        seen.append((passes.stream, passes.product))
        return plan_update(shape, passes, **options)

    monkeypatch.setattr(planning, "plan_update", watched)
    run(tmp_path / "plain", GRPOTrainer, max_steps=1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    launched = run(tmp_path / "launched", GRPOTrainer, max_steps=1)
    assert not launched.args.bf16
    assert seen == [(4, 4), (4, 2)]
