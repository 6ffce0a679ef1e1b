"""Which backend samples, and what is said about it."""

import logging
from typing import Any

import pytest
import torch

from gruppo import GRPOTrainer
from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError
from gruppo.policy.sharding import Sharding
from gruppo.rollout import builtin
from gruppo.rollout.continuous import ContinuousBatchingBackend
from gruppo.rollout.hf import TransformersBackend
from gruppo.rollout.select import ShardedSampling, choose_backend
from gruppo.rollout.settings import generation_config
from tests.helpers import base_args, tiny_model, tiny_tokenizer
from tests.trainer.runs import make, stored

REASONS = ["num_beams=2: no beam search.", "it keeps a recurrent state"]


class Engine:
    """Stands for the built-in backend and keeps what it was made with."""

    name = "builtin"

    def __init__(self, policy: Any, config: Any, **kwargs: Any):
        self.policy, self.config, self.kwargs = policy, config, kwargs

    def sample(self, requests: Any) -> Any:
        raise AssertionError("not asked to")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The reasons against the engine, which a test may fill in."""
    reasons: list[str] = []
    monkeypatch.setattr(builtin, "why_not", lambda model, config, **kwargs: list(reasons))
    monkeypatch.setattr(builtin, "BuiltinBackend", Engine)
    return reasons


def choose(needed: bool = True, sharded: ShardedSampling | None = None, **settings: Any) -> Any:
    args = GRPOConfig(**base_args("unused", **settings))
    model = tiny_model()
    config = generation_config(args, pad_token_id=0, bos_token_id=None, stop_ids=[1])
    precision = "bf16" if args.bf16 else "no"
    return choose_backend(
        args,
        lambda: model,
        config,
        stop_ids=[1],
        tokenizer=tiny_tokenizer(),
        mixed_precision=precision,
        needed=needed,
        sharded=sharded,
    )


@pytest.mark.parametrize("name", ["auto", "builtin"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [({}, None), ({"bf16": True}, torch.bfloat16), ({"bf16": False}, None)]
)
def test_the_engine_is_taken_where_it_can_run(name, precision, dtype, engine, caplog):
    made = choose(rollout_backend=name, **precision)
    assert type(made) is Engine
    assert (made.kwargs["stop_ids"], made.kwargs["autocast_dtype"]) == ([1], dtype)
    assert made.kwargs["tokenizer"].eos_token == "<eos>"
    assert made.config.max_new_tokens == 6
    assert not caplog.records


def test_auto_says_once_why_it_takes_transformers(engine, caplog):
    engine += REASONS
    made = choose(pad_to_multiple_of=8)
    assert type(made) is TransformersBackend
    assert made.pad_to_multiple_of == 8
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "cannot sample here: num_beams=2: no beam search; it keeps a recurrent state. tr" in record.message


def test_only_the_first_process_says_so(engine, caplog, monkeypatch):
    engine += REASONS
    monkeypatch.setattr(GRPOConfig, "process_index", property(lambda self: 1))
    assert type(choose()) is TransformersBackend
    assert not caplog.records


def test_the_engine_by_name_or_not_at_all(engine):
    engine += REASONS
    with pytest.raises(ConfigError, match=r"'builtin' cannot sample here: num_beams=2: .*; it keeps .* state. Change"):
        choose(rollout_backend="builtin")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rollout_backend": "transformers"}, TransformersBackend),
        ({"use_transformers_continuous_batching": True}, ContinuousBatchingBackend),
        ({"use_transformers_continuous_batching": True, "rollout_backend": "transformers"}, ContinuousBatchingBackend),
        ({"needed": False}, TransformersBackend),
    ],
    ids=["transformers", "continuous", "both", "rollouts-from-elsewhere"],
)
def test_who_never_asks_the_engine(settings, expected, caplog, monkeypatch):
    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the engine was asked")

    monkeypatch.setattr(builtin, "why_not", asked)
    assert type(choose(**settings)) is expected
    assert not caplog.records


def test_continuous_batching_needs_all_weights():
    sharded = ShardedSampling(Sharding.FSDP2, None, reserved=lambda: 0, from_main=lambda value: value)
    with pytest.raises(ConfigError, match=r"weights that are sharded over processes \(FSDP2\)"):
        choose(use_transformers_continuous_batching=True, sharded=sharded)


def test_the_older_name_chooses_continuous_batching(engine):
    with pytest.warns(FutureWarning, match="use_transformers_paged"):
        assert type(choose(use_transformers_paged=True)) is ContinuousBatchingBackend


# ---- in a run


def test_a_run_says_so_once(engine, caplog, tmp_path):
    engine += REASONS
    trainer = make(tmp_path, GRPOTrainer, max_steps=3)
    trainer.train()
    assert len([r for r in caplog.records if "cannot sample here" in r.message]) == 1
    assert trainer.backend.name == "transformers"


def test_a_rollout_function_needs_no_backend(engine, caplog, tmp_path):
    engine += REASONS
    answers = {f"p{i}:": ["a<eos>", "b<eos>"] for i in range(8)}
    trainer = make(tmp_path, GRPOTrainer, rollout_func=stored(answers), max_steps=1)
    trainer.train()
    assert not [r for r in caplog.records if "cannot sample" in r.message]


@pytest.mark.parametrize("settings", [{"generation_kwargs": {"num_beams": 2}}, {"cache_implementation": "static"}])
def test_what_the_engine_lacks_selects_transformers(settings, tmp_path, caplog):
    name, value = next(iter((settings.get("generation_kwargs") or settings).items()))
    trainer = make(tmp_path, GRPOTrainer, **settings)
    assert type(trainer.backend) is TransformersBackend
    assert [r.message for r in caplog.records if f"{name}={value!r}" in r.message and "built-in" in r.message]
    with pytest.raises(ConfigError, match=f"'builtin' cannot sample here: {name}={value!r}"):
        make(tmp_path, GRPOTrainer, rollout_backend="builtin", **settings)


@pytest.mark.parametrize("name", ["auto", "builtin", "transformers"])
def test_no_sampling_is_greedy_everywhere(name, tmp_path):
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    trainer = make(tmp_path, GRPOTrainer, rollout_backend=name, generation_kwargs=greedy)
    ids, _ = trainer._generate_single_turn([[9, 10], [9, 10], [20], [20]])
    row = [9, 10]
    with torch.no_grad():
        while len(row) < 8 and row[-1] != 1:
            row.append(int(trainer.model.eval()(torch.tensor([row])).logits[0, -1].argmax()))
    assert ids[0] == ids[1] == row[2:]
    assert ids[2] == ids[3] != ids[0]
