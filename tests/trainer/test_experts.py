"""Mixtures of experts through the real trainers: sampling, the load-balancing loss, checkpointing, resuming."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from gruppo import GRPOConfig, GRPOTrainer, RLOOTrainer
from gruppo.engine.support import trial
from gruppo.errors import ConfigError
from gruppo.types import SampleRequest, TrainBatch
from tests.engine.test_models import generate, greedy
from tests.helpers import prompts
from tests.policy.experts import NAMES, SHOWS_ROUTER, experts
from tests.policy.families import family
from tests.policy.test_routing import slow_loss
from tests.policy.twins import exact
from tests.processes import run_together
from tests.trainer import experts_two_processes as two_processes
from tests.trainer import scripted
from tests.trainer.runs import SaveAt, logs, make
from tests.trainer.scripted import make_trainer, relative_difference, update_of

CUT: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "parity_check": "off"}
COEFFICIENT = 3.0  # large enough to be seen beside the loss of the policy
RAGGED = [[5], [5, 6], [9, 8, 7], [30 + i for i in range(12)], [60 - i for i in range(20)]]


def equal_rewards(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


class Policies:
    """Lets `make_trainer` train a mixture of experts in float64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch

    def use(self, name: str) -> None:
        def make(seed: int, dtype: torch.dtype) -> Any:
            model = exact(experts(name, seed))
            model.set_experts_implementation("eager")
            return model

        self.monkeypatch.setattr(scripted, "policy", make)
        home = sys.modules[type(experts(name)).__module__]
        self.monkeypatch.setattr(home, "load_balancing_loss_func", slow_loss)


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Policies:
    return Policies(monkeypatch)


def update(recipe: str, folder: Any, **settings: Any) -> tuple[dict[str, Tensor], Any]:
    trainer = make_trainer(recipe, folder, **(CUT | settings))
    return update_of(trainer), trainer


# ---- the engine


@pytest.mark.sampled(6)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_samples_what_transformers_would(name: str, shown: bool, implementation: str) -> None:
    model = experts(name, output_router_logits=shown)
    model.set_experts_implementation(implementation)
    assert trial(model) is None
    expected = [generate(model, ids) for ids in RAGGED]
    assert [list(c.ids) for c in greedy(model, [SampleRequest(ids, 1) for ids in RAGGED])] == expected
    assert len({tuple(ids) for ids in expected}) > 3


# ---- the loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize("budget", [None, 30])
@pytest.mark.parametrize(
    "recipe",
    ["grpo", "rloo", *(pytest.param(name, marks=pytest.mark.medium) for name in ("dapo", "top_entropy", "truncated"))],
)
def test_packed_updates_are_padded_ones(recipe: str, budget: int | None, policies: Policies, tmp_path: Path) -> None:
    policies.use("mixtral")
    settings = {"router_aux_loss_coef": COEFFICIENT}
    ours, fast = update(recipe, tmp_path, max_tokens_per_micro_batch=budget, **settings)
    theirs, slow = update(recipe, tmp_path, packed_update=False, **settings)
    assert (fast.packed is None, slow.packed is None) == (False, True)
    assert relative_difference(theirs, ours) < 1e-9
    for name in ("loss", "aux_loss"):
        found = [trainer.state.log_history[0][name] for trainer in (fast, slow)]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
    without, _ = update(recipe, tmp_path, router_aux_loss_coef=0.0)
    assert relative_difference(theirs, without) > 1e-2


@pytest.mark.medium
@pytest.mark.parametrize("name", [param for param in SHOWS_ROUTER if param.values[0] != "mixtral"])
def test_other_mixtures(name: str, policies: Policies, tmp_path: Path) -> None:
    policies.use(name)
    ours, fast = update("grpo", tmp_path, router_aux_loss_coef=COEFFICIENT, max_tokens_per_micro_batch=40)
    theirs, slow = update("grpo", tmp_path, router_aux_loss_coef=COEFFICIENT, packed_update=False)
    assert (fast.packed is None, slow.packed is None) == (False, True)
    assert relative_difference(theirs, ours) < 1e-9


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recipe", ["grpo", "rloo"])
def test_the_gradient_is_that_of_the_mean_over_micro_batches(
    recipe: str, packed: bool, policies: Policies, tmp_path: Path
) -> None:
    """With equal rewards nothing else moves: worked out with the model's own loss on padded micro-batches."""
    policies.use("mixtral")
    settings = {"reward": equal_rewards, "router_aux_loss_coef": COEFFICIENT, "packed_update": packed, "beta": 0.0}
    trainer = make_trainer(recipe, tmp_path, **(CUT | settings))
    seen: list[TrainBatch] = []
    size = trainer.update_size

    def watched(batches: Any) -> Any:
        seen.extend(batches)
        return size(batches)

    trainer.update_size = watched
    found = update_of(trainer)
    model, losses = scripted.policy(3, torch.float64).train(), []
    for batch in seen:
        ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
        mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, output_router_logits=True)
        losses.append(output.aux_loss)
    assert len(losses) == 2
    (COEFFICIENT * torch.stack(losses).mean()).backward()
    for name, weight in model.named_parameters():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert (found[name] - expected).norm() <= 1e-9 * expected.norm() + 1e-12, name
    assert trainer.state.log_history[0]["aux_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(
        COEFFICIENT * torch.stack(losses).mean().item(), rel=1e-4
    )


@pytest.mark.parametrize(("asked", "own", "logged"), [(None, 0.5, True), (None, 0.0, False), (0.0, 0.5, False)])
def test_the_coefficient(asked: float | None, own: float, logged: bool, tmp_path: Path) -> None:
    model = experts("mixtral", router_aux_loss_coef=own)
    trainer = make(tmp_path, model=model, router_aux_loss_coef=asked, max_steps=1)
    trainer.train()
    assert trainer.router_aux_loss_coef == (own if asked is None else asked)
    assert ("aux_loss" in logs(trainer)[0]) == logged == trainer.aux_loss_enabled


@pytest.mark.parametrize("packed", [True, False])
def test_evaluation_has_it_too(packed: bool, policies: Policies, tmp_path: Path) -> None:
    policies.use("mixtral")
    metrics = []
    for coefficient in (COEFFICIENT, 0.0):
        settings = {"router_aux_loss_coef": coefficient, "packed_update": packed, "per_device_eval_batch_size": 8}
        metrics.append(make_trainer("grpo", tmp_path, **settings).evaluate(eval_dataset=prompts(2)))
    assert "eval_aux_loss" not in metrics[1]
    difference = metrics[0]["eval_loss"] - metrics[1]["eval_loss"]
    assert difference == pytest.approx(COEFFICIENT * metrics[0]["eval_aux_loss"], rel=1e-6)


# ---- beside other things


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"early_stop": False}])
def test_checkpointing(
    options: dict[str, Any], packed: bool, adapter: bool, policies: Policies, tmp_path: Path
) -> None:
    policies.use("mixtral")
    if adapter:
        plain = scripted.policy
        policies.monkeypatch.setattr(scripted, "policy", lambda seed, dtype: with_adapter(plain(seed, dtype)))
    settings = {"router_aux_loss_coef": COEFFICIENT, "packed_update": packed}
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
    saving, _ = update("grpo", tmp_path, **settings, **kwargs)
    plainly, _ = update("grpo", tmp_path, **settings)
    assert all("lora" in name for name in saving) == adapter
    assert relative_difference(plainly, saving) < 1e-9


def with_adapter(model: Any) -> Any:
    from peft import get_peft_model

    config = LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "gate"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(5)  # two runs that are compared begin with the same adapter
        return get_peft_model(model, config).double()


def test_checkpoints_that_hide_the_router_are_refused(tmp_path: Path) -> None:
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match=r"use_reentrant=True hides the router.*'use_reentrant': False.*coef=0"):
        make(tmp_path, model=experts("mixtral"), router_aux_loss_coef=0.1, **kwargs)
    trainer = make(tmp_path, model=experts("mixtral"), router_aux_loss_coef=0.0, max_steps=1, **kwargs)
    trainer.train()
    assert logs(trainer)[0]["grad_norm"] > 0


@pytest.mark.parametrize("hidden_by", ["the model", "checkpoints"])
def test_a_coefficient_that_only_the_model_asks_for_is_left_out(
    hidden_by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, kwargs = family("llama4") if hidden_by == "the model" else experts("mixtral"), {}
    if hidden_by == "checkpoints":
        kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    own = model.config.router_aux_loss_coef
    assert own > 0
    trainer = make(tmp_path, model=model, max_steps=1, **kwargs)
    assert f"router_aux_loss_coef={own:g} is not used" in caplog.text
    trainer.train()
    assert "aux_loss" not in logs(trainer)[0]
    with pytest.raises(ConfigError, match="router_aux_loss_coef=0"):
        make(tmp_path, model=model, router_aux_loss_coef=0.5, **kwargs)


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_resumed_run_ends_with_the_same_weights(trainer_class: Any, tmp_path: Path) -> None:
    settings = {"rollout_backend": "builtin", "max_steps": 3, "learning_rate": 0.05, "router_aux_loss_coef": 0.1}
    first = make(tmp_path, trainer_class, model=experts("qwen3-moe"), callbacks=[SaveAt(2)], **settings)
    assert first.packed is not None
    first.train()
    again = make(tmp_path / "again", trainer_class, model=experts("qwen3-moe"), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, weight), other in zip(first.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
    assert logs(first)[2]["aux_loss"] == logs(again)[2]["aux_loss"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert type(loaded) is type(first.model)


def test_a_hook_that_returns_no_auxiliary_loss(tmp_path: Path) -> None:
    class Other(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)[:2]

    trainer = make(tmp_path, Other, model=experts("mixtral"), max_steps=1)
    with pytest.raises(ConfigError, match=r"Other._get_per.* returned no auxiliary loss .*coef is 0.001"):
        trainer.train()


def test_memory_that_is_short(tmp_path: Path, policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted before a failed allocation is not counted twice."""
    policies.use("mixtral")
    expected, _ = update("grpo", tmp_path, router_aux_loss_coef=COEFFICIENT)
    trainer = make_trainer("grpo", tmp_path, router_aux_loss_coef=COEFFICIENT, max_tokens_per_micro_batch=100, **CUT)
    score, calls = trainer._logps_of_pack, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError
        return score(*args, **kwargs)

    monkeypatch.setattr(trainer, "_logps_of_pack", failing)
    assert relative_difference(expected, update_of(trainer)) < 1e-9
    assert calls[0] > 3


@pytest.mark.medium
def test_two_processes(policies: Policies, tmp_path: Path) -> None:
    """Each has micro-batches of its own; the loss is the mean over all of them."""
    run_together(2, two_processes.__name__, tmp_path)
    policies.use("mixtral")
    alone, logged = two_processes.update(tmp_path, 1, packed=False)
    for way in two_processes.WAYS:
        (zero, said), (one, _) = (torch.load(tmp_path / f"{way}.{rank}.pt") for rank in (0, 1))
        assert said == pytest.approx(logged, rel=1e-6)
        for name, change in alone.items():
            assert torch.equal(zero[name], one[name]), (way, name)
            assert (zero[name] - change).norm() <= 1e-9 * change.norm(), (way, name)


def test_config_takes_the_coefficient(tmp_path: Path) -> None:
    assert GRPOConfig(str(tmp_path), router_aux_loss_coef=0.1, use_cpu=True, bf16=False).router_aux_loss_coef == 0.1


def test_the_best_model_is_loaded_with_all_its_experts(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        model=experts("mixtral"),
        eval_dataset=prompts(1),
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        max_steps=2,
        learning_rate=0.05,
        rewards=staged,
    )
    trainer.train()
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for (name, weight), kept, later in zip(
        trainer.model.named_parameters(), best.parameters(), last.parameters(), strict=True
    ):
        assert torch.equal(weight, kept), name
        assert not torch.equal(weight, later) or "experts" not in name


def staged(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
    """In evaluations the first update is the best."""
    if len(completions) == 2:
        return [float(trainer_state.global_step == 1)] * 2
    return [float(len(completion)) for completion in completions]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", SHOWS_ROUTER)
def test_on_cuda(name: str, implementation: str, tmp_path: Path) -> None:
    """Sampled in graphs where those can be captured, trained in packs under autocast, resumed."""

    def made(folder: Path, **more: Any) -> Any:
        model = experts(name)
        model.set_experts_implementation(implementation)
        settings = {"use_cpu": False, "bf16": True, "max_steps": 3, "learning_rate": 1e-3, "router_aux_loss_coef": 0.1}
        return make(folder, GRPOTrainer, model=model, rollout_backend="builtin", **settings, **more)

    first = made(tmp_path, callbacks=[SaveAt(2)])
    assert first.packed is not None
    first.train()
    for log in logs(first):
        assert log["grad_norm"] > 0
        assert 1.9 < log["aux_loss"] < 4.1  # of 4 experts, 2 for each token: 2 if even, 4 at worst
        assert log["sampling/sampling_logp_difference/mean"] < 0.2
    again = made(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (key, weight), other in zip(first.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.allclose(weight, other, atol=1e-5), key
