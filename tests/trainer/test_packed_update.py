"""The update of packed rows is that of padded ones, through the real trainer, whatever is set and whatever happens.

`test_invariance.py` has the recipes on one model; here are other models, adapters, budgets, processes and failures.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TrainerCallback

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.algo import loss
from gruppo.algo.ratios import log_ratio
from gruppo.plan import UpdatePlan
from gruppo.policy.packed import ATTENTION_NAME, PackedPolicy
from gruppo.policy.packing import PackedRows
from gruppo.trainer.update import planning
from tests.helpers import CHARACTERS, SPECIAL, base_args, length_reward, prompts, tiny_model, tiny_tokenizer
from tests.policy.twins import ADAPTERS, altered, exact
from tests.processes import run_together
from tests.trainer import packed_two_processes as two_processes
from tests.trainer import scripted
from tests.trainer.runs import run
from tests.trainer.scripted import RECIPES, make_trainer, relative_difference, update_of

CUT: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "parity_check": "off"}
OFF_POLICY: dict[str, Any] = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.1}
SWITCHES = ("fused_head", "fused_layers", "max_tokens_per_micro_batch")  # of packed rows only
MODELS = ["qwen2", "qwen3", "gemma2", "gemma3", "mistral"]
FAST = ("grpo", "dapo", "rloo")


def tiered(recipes: Iterable[str], fast: Iterable[str] = FAST) -> list[Any]:
    return [recipe if recipe in fast else pytest.param(recipe, marks=pytest.mark.medium) for recipe in recipes]


def trainer_of(recipe: str, folder: Any, **settings: Any) -> Any:
    return make_trainer(recipe, folder, **(CUT | settings))


def moved(trainer: Any) -> dict[str, Tensor]:
    """The change of every weight that is trained."""
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    return {name: change for name, change in update_of(trainer).items() if name in trained}


def both(recipe: str, folder: Any, **settings: Any) -> tuple[Any, Any]:
    """Trainers that have made the same update in packed and in padded rows, which was tested."""
    fast = trainer_of(recipe, folder, **settings)
    assert fast.packed is not None
    ours = moved(fast)  # before the other is made: rows are shuffled with the seed that a trainer sets
    shared = {name: value for name, value in settings.items() if name not in SWITCHES}
    slow = trainer_of(recipe, folder, packed_update=False, **shared)
    assert slow.packed is None
    assert relative_difference(moved(slow), ours) < 1e-9
    return fast, slow


class Models:
    """Lets `make_trainer` train other models than its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch

    def use(self, make: Callable[[int], Any]) -> None:
        self.monkeypatch.setattr(scripted, "policy", lambda seed, dtype: make(seed))

    def architecture(self, name: str) -> None:
        self.use(lambda seed: exact(sized(name, seed)))

    def adapter(self, kind: str = "attention", **settings: Any) -> None:
        def make(seed: int) -> Any:
            torch.manual_seed(seed)
            adapter = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **(ADAPTERS[kind] | settings))
            return exact(get_peft_model(sized("llama", seed), adapter))

        self.use(make)


def sized(name: str, seed: int) -> Any:
    """A tiny model for the tiny tokenizer."""
    return altered(name, seed, vocab_size=len(SPECIAL) + len(CHARACTERS), bos_token_id=None)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    return Models(monkeypatch)


class Pass(NamedTuple):
    model: Any
    pack: PackedRows
    has_gradient: bool


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """Every pack that is scored."""
    seen: list[Pass] = []
    score = PackedPolicy.score

    def watched(self: PackedPolicy, model: Any, pack: PackedRows, **options: Any) -> Any:
        seen.append(Pass(model, pack, torch.is_grad_enabled()))
        return score(self, model, pack, **options)

    monkeypatch.setattr(PackedPolicy, "score", watched)
    return seen


# ---- models and settings


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_other_models(recipe: str, name: str, models: Models, tmp_path: Path) -> None:
    models.architecture(name)
    both(recipe, tmp_path, max_tokens_per_micro_batch=60)


@pytest.mark.parametrize("backend", ["builtin", "transformers"])
def test_eager_attention_of_padding_in_float64(backend: str, tmp_path: Path) -> None:
    """Padding that sees no key: sampling, log-probs of policy and reference, padded updates and evaluation."""
    model = sized("gemma2", 0).double()
    trainer = run(
        tmp_path,
        GRPOTrainer,
        model=model,
        dataset=Dataset.from_dict({"prompt": ["a", "several letters", "bcd"] * 8}),
        eval_dataset=Dataset.from_dict({"prompt": ["some letters", "b"]}),
        packed_update=False,
        rollout_backend=backend,
        beta=0.1,
        num_iterations=2,
        max_completion_length=9,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
    )
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert len(logs) == 4
    assert all(math.isfinite(log[name]) for log in logs for name in ("loss", "grad_norm", "kl", "entropy"))
    assert sum(log["grad_norm"] > 0 for log in logs) >= 2
    assert all(weight.isfinite().all() for weight in model.parameters())


ENTROPY = {
    "fixed": {"entropy_coef": 0.05},
    "adaptive": {
        "entropy_coef": 0.02,
        "use_adaptive_entropy": True,
        "entropy_target": 9.0,
        "entropy_coef_delta": 0.01,
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bonus", ENTROPY)
@pytest.mark.parametrize(
    "recipe", tiered(["grpo", "dapo", "gspo", "cispo", "bnpo", "top_entropy", "kl"], ["grpo", "dapo"])
)
def test_an_entropy_bonus(recipe: str, bonus: str, tmp_path: Path) -> None:
    settings = {"num_iterations": 3, "max_steps": 3, "learning_rate": 0.1, "max_tokens_per_micro_batch": 40}
    fast, slow = both(recipe, tmp_path, **settings, **ENTROPY[bonus])
    coefficients = [
        [log["entropy_coef"] for log in t.state.log_history if "entropy_coef" in log] for t in (fast, slow)
    ]
    assert coefficients[0] == coefficients[1]
    assert len(set(coefficients[0])) == (1 if bonus == "fixed" else 3)
    for name in ("loss", "policy_loss", "entropy"):
        values = [[log[name] for log in t.state.log_history if name in log] for t in (fast, slow)]
        assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-8)
        assert len(values[0]) == 3


@pytest.mark.parametrize("packed", [True, False])
def test_an_entropy_bonus_moves_rows_without_an_advantage(packed: bool, tmp_path: Path) -> None:
    def equal(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    norms = {}
    for skip in (True, False):
        settings = {"entropy_coef": 0.5, "packed_update": packed, "skip_zero_advantage": skip}
        trainer = run(tmp_path, GRPOTrainer, rewards=equal, parity_check="off", max_steps=1, **settings)
        norms[skip] = trainer.state.log_history[0]["grad_norm"]
    assert norms[True] == pytest.approx(norms[False], rel=1e-4)
    assert norms[True] > 1e-3


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("budget", [None, 20])
def test_a_threshold_that_is_the_entropy_of_a_token(share: float, budget: int | None, tmp_path: Path) -> None:
    """61 tokens: these quantiles need no interpolation, and the token itself must pass."""
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    fast, _ = both("top_entropy", tmp_path, top_entropy_quantile=share, max_tokens_per_micro_batch=budget, **settings)
    tokens = 16 * fast.state.log_history[0]["completions/mean_length"]
    assert ((tokens - 1) * share) % 1 == pytest.approx(0.0, abs=1e-6)


def test_a_threshold_among_entropies_that_differ_only_by_rounding(tmp_path: Path) -> None:
    """In float32: the tokens at the threshold are the same in packed and in padded rows."""
    settings = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "top_entropy_quantile": 0.75}
    updates = [
        moved(trainer_of("top_entropy", tmp_path, dtype=torch.float32, **settings, **layout))
        for layout in ({"max_tokens_per_micro_batch": 30}, {"packed_update": False})
    ]
    assert relative_difference(*updates) < 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("recipe", tiered(["grpo", "rloo", "kl"], ["grpo"]))
def test_adapters(recipe: str, kind: str, models: Models, tmp_path: Path) -> None:
    """With a KL the reference is the adapter as it was."""
    models.adapter(kind)
    fast, _ = both(recipe, tmp_path, **OFF_POLICY)
    trained = [name for name, weight in fast.model.named_parameters() if weight.requires_grad]
    assert all(".default." in name for name in trained)
    assert len(trained) >= 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("checkpointing", [True, False, None])
def test_checkpointing(
    checkpointing: bool | None, reentrant: bool | None, adapter: bool, models: Models, tmp_path: Path
) -> None:
    if adapter:
        models.adapter()
    kwargs = None if reentrant is None else {"use_reentrant": reentrant}
    settings = {"gradient_checkpointing": checkpointing, "gradient_checkpointing_kwargs": kwargs}
    trainer = trainer_of("grpo", tmp_path, **settings)
    plain = trainer_of("grpo", tmp_path, packed_update=False)
    assert relative_difference(moved(plain), moved(trainer)) < 1e-9
    assert trainer.model.is_gradient_checkpointing == bool(checkpointing)
    assert trainer.planner.in_force.checkpointing == bool(checkpointing)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", [{"fused_head": False}, {"fused_layers": False}, {"temperature": 0.6}], ids=str)
@pytest.mark.parametrize("recipe", ["grpo", "rloo"])
def test_settings_of_the_fast_path(recipe: str, setting: dict[str, Any], tmp_path: Path) -> None:
    both(recipe, tmp_path, **setting, **OFF_POLICY)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_the_smallest_and_the_largest_budget(recipe: str, passes: list[Pass], tmp_path: Path) -> None:
    updates, largest = [], []
    for budget in (1, 10, 10**6):
        passes.clear()
        trainer = trainer_of(recipe, tmp_path, max_tokens_per_micro_batch=budget)
        updates.append(moved(trainer))
        assert trainer.planner.in_force.tokens == budget
        run = [one.pack for one in passes if one.has_gradient]
        largest.append(max(len(pack.rows) for pack in run))
        assert all(pack.tokens <= budget or len(pack.rows) == 1 for pack in run)
    assert max(relative_difference(updates[0], other) for other in updates[1:]) < 1e-9
    assert largest[0] == 1 < largest[2]


def test_mixed_precision(tmp_path: Path) -> None:
    """No further from float32 than twice the padded update is."""
    settings = {"dtype": torch.float32}
    true = moved(trainer_of("grpo", tmp_path, packed_update=False, **settings))
    fast, slow = (moved(trainer_of("grpo", tmp_path, bf16=True, packed_update=p, **settings)) for p in (True, False))

    def error(update: dict[str, Tensor]) -> float:
        squares = [(update[name] - change).norm().square() for name, change in true.items()]
        return (torch.stack(squares).sum() / sum(c.norm().square() for c in true.values())).sqrt().item()

    assert 0 < error(fast) < 2 * error(slow) < 0.1


def test_evaluation(tmp_path: Path) -> None:
    metrics = []
    for packed in (True, False):
        trainer = trainer_of("kl", tmp_path, packed_update=packed, per_device_eval_batch_size=8)
        found = trainer.evaluate(eval_dataset=prompts(4))
        metrics.append(
            {k: v for k, v in found.items() if k in ("eval_loss", "eval_entropy", "eval_kl", "eval_reward")}
        )
    assert len(metrics[0]) == 4
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_siblings_share_their_prompt_unless_they_would_share_noise(
    dropout: float, models: Models, passes: list[Pass], tmp_path: Path
) -> None:
    models.adapter(lora_dropout=dropout)
    trainer = trainer_of("grpo", tmp_path)
    passes.clear()
    trainer.train()
    (one,) = passes
    assert len(one.pack.rows) == 16
    assert one.pack.segments.parents.count(-1) == (16 if dropout else 4)
    assert trainer.state.log_history[0]["grad_norm"] > 0


# ---- two processes


@pytest.mark.medium
def test_two_processes_with_unequal_work(tmp_path: Path) -> None:
    run_together(2, two_processes.__name__, tmp_path)  # one that waits for what the other never sends is ended
    for name, case in two_processes.CASES.items():
        zero, one = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in (0, 1))
        alone = two_processes.update_in_order(two_processes.trainer_of(case, tmp_path, 1))
        for key, change in alone.items():
            assert torch.equal(zero["update"][key], one["update"][key]), f"{name}: {key}"
            assert (zero["update"][key] - change).norm() <= 1e-9 * change.norm(), f"{name}: {key}"
        stands_still = name == "both stand still"
        assert any(change.any() for change in alone.values()) != stands_still
        assert zero["packs"] != one["packs"] or stands_still, name
        assert min(len(zero["packs"]), len(one["packs"])) > 0, "every process has a backward pass"
        halves = case.failure is not None and "parity_check" not in case.settings
        assert one["left"] == case.budgets[1] // (2 if halves else 1), name


# ---- rows that do not move


class Gradients(TrainerCallback):
    """The gradients that the optimizer is given, of every parameter that is trained."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor | None]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.seen.append({name: None if w.grad is None else w.grad.clone() for name, w in trained})


def all_equal(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def first_group_equal(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0 if p == "p0:" else len(c) / 8 for p, c in zip(prompts, completions, strict=True)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("why", ["equal rewards", "nothing to score"])
def test_an_update_that_no_row_moves(
    why: str, adapter: bool, packed: bool, models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The optimizer sees zeros, not None, and decays the weights as ever."""
    if adapter:
        models.adapter("own head")
    settings: dict[str, Any] = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 0.1, "reward": all_equal}
    recipe = "grpo"
    if why == "nothing to score":
        recipe, settings["reward"] = "truncated", length_reward
        rollout = scripted.scripted_rollout
        endless = lambda p, t: rollout(p, t) | {"completion_ids": [[20 + i, 21, 22] for i in range(len(p))]}  # noqa: E731
        monkeypatch.setattr(scripted, "scripted_rollout", endless)
    trainer = trainer_of(recipe, tmp_path, packed_update=packed, **settings)
    gradients = Gradients()
    trainer.add_callback(gradients)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    changes = moved(trainer)
    (seen,) = gradients.seen
    assert seen.keys() == changes.keys()
    assert all(gradient is not None and not gradient.any() for gradient in seen.values())
    decayed = {name for name in changes if "norm" not in name}
    for name, change in changes.items():
        expected = 0.01 * before[name] if name in decayed else torch.zeros_like(change)
        assert torch.allclose(change, expected, rtol=1e-6), name
    assert decayed


def sampled(folder: Any, trainer_class: Any = GRPOTrainer, reward: Any = length_reward, **settings: Any) -> Any:
    """A trainer whose completions the built-in engine samples, in float32."""
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    defaults: dict[str, Any] = dict(
        beta=0.0,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        optim="sgd",
        learning_rate=0.1,
        shuffle_dataset=False,
    )
    return trainer_class(
        model=tiny_model(3),
        reward_funcs=reward,
        args=config(**base_args(folder, **(CUT | defaults | {"max_grad_norm": 0.0} | settings))),
        train_dataset=prompts(8),
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_entropies_of_rows_that_are_left_out_come_from_the_engine(
    trainer_class: Any, passes: list[Pass], tmp_path: Path
) -> None:
    logs, run = [], []
    for skip in (True, False):
        trainer = sampled(tmp_path, trainer_class, first_group_equal, skip_zero_advantage=skip)
        passes.clear()
        trainer.train()
        assert trainer.backend.name == "builtin"
        assert all(one.has_gradient for one in passes)
        run.append(sum(len(one.pack.rows) for one in passes))
        logs.append(trainer.state.log_history[0])
    assert run == [12, 16]
    for name in ("entropy", "loss", "grad_norm", "clip_ratio/region_mean"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-4, abs=1e-6), name


def test_entropies_of_rows_that_are_left_out_are_computed_without_an_engine(
    passes: list[Pass], tmp_path: Path
) -> None:
    trainer = trainer_of("grpo", tmp_path, reward=first_group_equal)
    passes.clear()
    trainer.train()
    assert [(one.has_gradient, len(one.pack.rows)) for one in passes] == [(False, 4), (True, 12)]
    rest = trainer_of("grpo", tmp_path, reward=first_group_equal, skip_zero_advantage=False)
    rest.train()
    entropies = [t.state.log_history[0]["entropy"] for t in (trainer, rest)]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-6)


# ---- out of memory


class Shortage:
    """A hook on a layer: the calls of these numbers find no memory."""

    def __init__(self, *calls: int):
        self.calls, self.count = set(calls), 0

    def __call__(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.count += 1
            if self.count - 1 in self.calls:
                raise torch.OutOfMemoryError("not enough")

    def strike(self, trainer: Any, where: str) -> None:
        """Forward: as the second layer begins. Backward: as the first layer's ends, when later ones have gradients."""
        first, second = trainer.model.model.layers
        if where == "forward":
            second.register_forward_pre_hook(self)
        else:
            first.register_full_backward_hook(lambda *_: self.in_backward())

    def in_backward(self) -> None:
        with torch.enable_grad():
            self()


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("calls", "left"), [((0,), 30), ((1,), 30), ((0, 1, 2), 7), ((1, 3), 15)])
@pytest.mark.parametrize("recipe", ["grpo", pytest.param("top_entropy", marks=pytest.mark.medium)])
def test_a_failed_allocation_costs_time_only(
    recipe: str, calls: tuple[int, ...], left: int, where: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = {"max_tokens_per_micro_batch": 60, **OFF_POLICY}
    calm = trainer_of(recipe, tmp_path, **settings)
    undisturbed = moved(calm)
    struck = trainer_of(recipe, tmp_path, **settings)
    released: list[int] = []
    struck.planner.release = lambda: released.append(1)
    shortage = Shortage(*calls)
    shortage.strike(struck, where)
    assert relative_difference(undisturbed, moved(struck)) < 1e-9
    assert shortage.count > max(calls) + 1
    assert struck.planner.in_force == UpdatePlan(left, left, checkpointing=False), (
        "halved, and so for the second update"
    )
    assert len(released) == len(calls) == len(warnings_of(caplog, "Out of memory in the update: continuing with"))
    for a, b in zip(calm.state.log_history[:2], struck.state.log_history[:2], strict=True):
        for name in ("loss", "entropy", "clip_ratio/region_mean"):
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-7), "nothing is counted twice"


def test_the_engine_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calm, struck = (sampled(tmp_path, max_tokens_per_micro_batch=60, max_steps=2) for _ in range(2))
    Shortage(1).strike(struck, "backward")
    held: list[tuple[bool, bool]] = []
    release = struck.backend.engine.release

    def watched() -> None:
        before = struck.backend.engine._runner is not None
        release()
        held.append((before, struck.backend.engine._runner is not None))

    monkeypatch.setattr(struck.backend.engine, "release", watched)
    difference = relative_difference(moved(calm), moved(struck))
    assert (True, False) in held
    assert difference < 1e-4
    assert struck.planner.in_force.tokens == 30


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_at_one_row_at_a_time_checkpointing_is_the_last_resort(
    where: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = {"gradient_checkpointing": None, "max_tokens_per_micro_batch": 2}
    calm, struck = (trainer_of("grpo", tmp_path, **settings) for _ in range(2))
    Shortage(1, 2).strike(struck, where)
    assert relative_difference(moved(calm), moved(struck)) < 1e-9
    assert struck.planner.in_force == UpdatePlan(1, 1, checkpointing=True)
    assert struck.model.is_gradient_checkpointing
    assert not calm.model.is_gradient_checkpointing
    assert len(warnings_of(caplog, "gradient checkpointing is turned on")) == 1


@pytest.mark.parametrize(("checkpointing", "failures"), [(False, 1), (None, 2), (True, 1)])
def test_when_nothing_helps_the_error_says_what_would(
    checkpointing: bool | None, failures: int, tmp_path: Path
) -> None:
    trainer = trainer_of("grpo", tmp_path, gradient_checkpointing=checkpointing, max_tokens_per_micro_batch=1)
    shortage = Shortage(*range(failures), 50)
    shortage.strike(trainer, "forward")
    with pytest.raises(torch.OutOfMemoryError, match=r"a single row. Lower max_completion_length .*peft_config"):
        trainer.train()
    assert shortage.count == failures
    assert trainer.model.config._attn_implementation != ATTENTION_NAME


@pytest.mark.sampled(2)
@pytest.mark.parametrize("free", [0, 2**40])
@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_checkpointing_by_memory(
    packed: bool,
    checkpointing: bool | None,
    free: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(planning, "free_memory", lambda device: free)
    settings = {"gradient_checkpointing": checkpointing, "packed_update": packed}
    trainer = trainer_of("grpo", tmp_path, **settings)
    update = moved(trainer)
    short = checkpointing is None and free == 0
    assert trainer.planner.in_force.checkpointing == bool(checkpointing or short)
    assert trainer.planner.in_force.tokens >= 3 + 8, "the longest row fits, whatever the plan believes"
    assert trainer.model.is_gradient_checkpointing == bool(checkpointing or short)
    assert len(warnings_of(caplog, "Memory is short")) == short
    assert relative_difference(moved(trainer_of("grpo", tmp_path)), update) < 1e-9


# ---- old log-probs and the reference


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The largest |log ratio| of every loss."""
    seen: list[float] = []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        found = log_ratio(*args, **kwargs)
        seen.append(found.abs().max().item())
        return found

    monkeypatch.setattr(loss, "log_ratio", watched)
    return seen


@pytest.mark.parametrize("recipe", ["grpo", "gspo", "rloo"])
def test_strictly_on_policy_the_ratio_is_one_without_a_pass(
    recipe: str, passes: list[Pass], ratios: list[float], tmp_path: Path
) -> None:
    reused = {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2}
    trainer = trainer_of(recipe, tmp_path, beta=0.0, max_steps=2, **reused)
    assert trainer.args.rollouts_stay_on_policy
    calls: list[int] = []
    trainer.model.register_forward_hook(lambda *_: calls.append(1))
    passes.clear()
    trainer.train()
    assert [one.has_gradient for one in passes] == [True] * 2, "a pack for each of two updates"
    assert len(calls) == 2
    assert set(ratios) == {0.0}


@pytest.mark.parametrize("recipe", ["grpo", "rloo"])
def test_off_policy_there_is_one_pass_per_generation(
    recipe: str, passes: list[Pass], ratios: list[float], tmp_path: Path
) -> None:
    trainer = trainer_of(recipe, tmp_path, beta=0.0, **OFF_POLICY)
    passes.clear()
    trainer.train()
    assert [one.has_gradient for one in passes] == [False, True, True]
    assert len(passes[0].pack.rows) == 16
    assert max(ratios) > 1e-4


@pytest.mark.parametrize("recipe", ["kl", "rloo"])
def test_policy_and_reference_are_scored_in_the_same_packs(recipe: str, passes: list[Pass], tmp_path: Path) -> None:
    trainer = trainer_of(recipe, tmp_path, max_tokens_per_micro_batch=40, **OFF_POLICY)
    passes.clear()
    trainer.train()
    frozen = [one for one in passes if not one.has_gradient]
    by_policy, by_reference = frozen[: len(frozen) // 2], frozen[len(frozen) // 2 :]
    assert len(by_policy) > 1
    assert all(a.pack is b.pack for a, b in zip(by_policy, by_reference, strict=True))
    assert all(one.model is trainer.ref_model for one in by_reference)
    assert all(one.model is trainer.model for one in by_policy)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_log_probs_of_the_engine_may_stand_for_a_pass(
    trainer_class: Any, reuse: bool, passes: list[Pass], tmp_path: Path
) -> None:
    trainer = sampled(tmp_path, trainer_class, **OFF_POLICY)
    trainer.parity.reuses_engine_logps = reuse
    collected: list[dict[str, Tensor]] = []
    collect = trainer._generate_and_score_completions

    def watched(rows: Any) -> dict[str, Tensor]:
        collected.append(collect(rows))
        return collected[-1]

    trainer._generate_and_score_completions = watched  # on the instance: hooks of subclasses see padded rows
    passes.clear()
    trainer.train()
    assert [one.has_gradient for one in passes] == ([] if reuse else [False]) + [True, True]
    (batch,) = collected
    if trainer_class is GRPOTrainer:
        assert torch.equal(batch["old_per_token_logps"], batch["engine_logps"]) or not reuse
        assert torch.allclose(batch["old_per_token_logps"], batch["engine_logps"], atol=1e-5)
    else:
        sums = (batch["engine_logps"] * batch["completion_mask"]).sum(1)
        assert torch.equal(batch["old_logps"], sums) or not reuse
        assert torch.allclose(batch["old_logps"], sums, atol=1e-4)


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_the_distance_of_engine_and_trainer_is_logged(trainer_class: Any, tmp_path: Path) -> None:
    trainer = sampled(tmp_path, trainer_class, max_steps=2)
    trainer.train()
    for log in trainer.state.log_history[:2]:
        mean, largest = (log[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max"))
        assert 0 < mean < largest < 1e-4
    told = trainer_of("grpo", tmp_path)
    told.train()
    assert not any("sampling_logp_difference" in key for key in told.state.log_history[0])


# ---- hooks of subclasses


def overriding(name: str) -> Any:
    """A trainer that extends one of the methods which see padded rows."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("called", []).append(name)
        return getattr(GRPOTrainer, name)(self, *args, **kwargs)

    return type("Mine", (GRPOTrainer,), {name: method})


@pytest.mark.parametrize(
    "hook",
    [
        "_compute_loss",
        "_get_per_token_logps_and_entropies",
        "_generate_and_score_completions",
        "compute_loss",
        "training_step",
    ],
)
def test_hooks_see_padded_rows_and_one_message_says_so(
    hook: str, caplog: pytest.LogCaptureFixture, passes: list[Pass], tmp_path: Path
) -> None:
    trainer = trainer_of("dapo", tmp_path, subclass=overriding(hook))
    plain = trainer_of("dapo", tmp_path)
    assert trainer.packed is None
    assert plain.packed is not None
    passes.clear()
    update = moved(trainer)
    assert not passes
    assert set(trainer.called) == {hook}
    (message,) = warnings_of(caplog, "Rows are padded")
    assert f"Mine overrides {hook}, which expects padded rows" in message
    assert relative_difference(moved(plain), update) < 1e-9


def test_padding_that_was_asked_for_is_no_news(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert trainer_of("dapo", tmp_path, packed_update=False, subclass=overriding("_compute_loss")).packed is None
    assert trainer_of("dapo", tmp_path, packed_update=False).packed is None
    assert warnings_of(caplog, "Rows are padded") == []


def test_a_model_that_cannot_be_packed_is_padded_with_a_message(
    models: Models, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def dropping(seed: int) -> nn.Module:
        return exact(altered("llama", seed, vocab_size=len(SPECIAL) + len(CHARACTERS), attention_dropout=0.5))

    models.use(dropping)
    trainer = trainer_of("grpo", tmp_path)
    assert trainer.packed is None
    (message,) = warnings_of(caplog, "Rows are padded")
    assert "LlamaAttention applies dropout to attention weights (0.5)" in message
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_the_search_for_unused_weights_is_not_written_into_the_config(tmp_path: Path) -> None:
    for is_reentrant in (True, False):
        kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant}}
        trainer = make_trainer("grpo", tmp_path, **kwargs)
        assert trainer.args.ddp_find_unused_parameters is None
        assert trainer.accelerator.ddp_handler.find_unused_parameters is not is_reentrant
