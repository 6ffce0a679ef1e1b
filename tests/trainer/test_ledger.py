"""Where tokens and seconds went: shares by hand, operations against those that torch counts."""

from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gruppo.plan import ModelShape, peak_flops
from gruppo.trainer.books.ledger import CLASSES, Ledger, countable_shape, keys_seen
from tests.helpers import tiny_gpt2, tiny_model
from tests.trainer.test_metrics import documented_keys

LARGE = ModelShape(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocabulary=151936)
H200 = "NVIDIA H200"
PHASE_KEYS = {"rollout/seconds", "rollout/tokens_per_second", "update/seconds", "update/tokens_per_second"}
SHARE_KEYS = {f"ledger/{kind}/{name}" for kind in ("tokens", "seconds") for name in CLASSES} | {"ledger/useful_tokens"}


def ledger(device: str | None = None, shape: ModelShape | None = LARGE) -> Ledger:
    return Ledger(shape, device, torch.bfloat16)


def shares(values: dict[str, float], kind: str) -> dict[str, float]:
    """The shares of a kind that are not 0, by class."""
    found = {name: values[f"ledger/{kind}/{name}"] for name in CLASSES}
    return {name: share for name, share in found.items() if share}


# ---- shares


def one_update(sampled: dict[str, Any], scored: dict[str, Any], ran: dict[str, Any]) -> dict[str, float]:
    """Two rows of one prompt of 10 tokens: 20 and 30 tokens sampled in 3 seconds, all but the last run in 1."""
    book = ledger()
    book.sampled(prompts=[10, 10], completions=[20, 30], seconds=3.0, prompt_tokens=10, **sampled)
    book.scored_rows([20, 30], **scored)
    book.ran(prompts=[10, 10], completions=[19, 29], scored=50, prompt_tokens=10, **ran)
    book.took(1.0)
    return book.metrics()


ROLLOUT, UPDATE = 10 + 20 + 30, 10 + 19 + 29
ONE_OF_TWO = [False, True]


@pytest.mark.parametrize(
    ("sampled", "scored", "ran", "name", "tokens"),
    [
        ({}, {"zero_advantage": ONE_OF_TWO}, {"zero_advantage": ONE_OF_TWO}, "zero_advantage", (30, 29)),
        ({}, {"zero_advantage": [True, False]}, {}, "zero_advantage", (20, 0)),
        ({}, {"truncated": ONE_OF_TWO}, {"truncated": ONE_OF_TWO}, "truncated", (30, 29)),
        ({}, {}, {"stale": [True, True]}, "stale", (0, 48)),
    ],
)
def test_shares_of_completions(
    sampled: dict[str, Any], scored: dict[str, Any], ran: dict[str, Any], name: str, tokens: tuple[int, int]
) -> None:
    values = one_update(sampled, scored, ran)
    total = ROLLOUT + UPDATE
    assert shares(values, "tokens") == pytest.approx({"prompt": 20 / total, name: sum(tokens) / total})
    seconds = {"prompt": (3 * 10 / ROLLOUT + 10 / UPDATE) / 4}
    seconds[name] = (3 * tokens[0] / ROLLOUT + tokens[1] / UPDATE) / 4
    assert shares(values, "seconds") == pytest.approx(seconds)
    assert values["ledger/useful_tokens"] == pytest.approx(1 - (20 + sum(tokens)) / total)


def test_padding_of_both_phases() -> None:
    values = one_update({"padding_tokens": 40}, {}, {"padding_tokens": 12})
    assert shares(values, "tokens") == pytest.approx({"prompt": 20 / 170, "padding": 52 / 170})
    assert shares(values, "seconds") == pytest.approx(
        {"prompt": (3 * 0.1 + 10 / 70) / 4, "padding": (3 * 0.4 + 12 / 70) / 4}
    )
    assert values["ledger/useful_tokens"] == pytest.approx(98 / 170)


def test_prompts_count_once_for_each_time_they_are_read() -> None:
    book = ledger()
    book.sampled(prompts=[10, 10], completions=[20, 30], seconds=1.0)
    book.ran(prompts=[10, 10], completions=[19, 29], scored=50, prompt_tokens=10)
    assert shares(book.metrics(), "tokens") == pytest.approx({"prompt": 30 / (70 + 58)})


def test_a_token_in_several_classes_is_in_each_and_useful_is_what_is_in_none() -> None:
    both: dict[str, Any] = {"zero_advantage": [False, True, True, False], "truncated": [False, False, True, True]}
    book = ledger()
    book.ran(prompts=[0] * 4, completions=[1, 2, 4, 8], scored=15, stale=[False, True, False, False], **both)
    values = book.metrics()
    expected = {"zero_advantage": 6 / 15, "truncated": 12 / 15, "stale": 2 / 15}
    assert shares(values, "tokens") == pytest.approx(expected)
    assert sum(expected.values()) > 1
    assert values["ledger/useful_tokens"] == pytest.approx(1 / 15)


def test_rows_that_were_replaced_are_part_of_the_rollout() -> None:
    book = ledger()
    book.sampled(prompts=[5, 5], completions=[10, 10], seconds=1.0, prompt_tokens=5)
    book.scored_rows([10, 10], zero_advantage=[True, True])
    book.sampled(prompts=[5, 5], completions=[20, 30], seconds=1.0, prompt_tokens=5)
    book.scored_rows([20, 30], zero_advantage=[False, False])
    values = book.metrics()
    assert shares(values, "tokens") == pytest.approx({"prompt": 10 / 80, "zero_advantage": 20 / 80})
    assert values["rollout/seconds"] == 2.0


def test_rows_of_several_turns_give_their_shares_to_what_was_sampled() -> None:
    """A row of 100 tokens, of which the model wrote 40 and an environment the others."""
    book = ledger()
    book.sampled(prompts=[10, 50], completions=[30, 10], seconds=1.0)
    book.scored_rows([100, 300], truncated=[True, False])
    values = book.metrics()
    assert values["ledger/tokens/truncated"] == pytest.approx(40 * 0.25 / 100)
    assert values["ledger/useful_tokens"] == pytest.approx(40 * 0.75 / 100)


def test_what_nobody_scored_is_taken_for_useful() -> None:
    book = ledger()
    book.sampled(prompts=[10], completions=[30], seconds=1.0)
    assert book.metrics()["ledger/useful_tokens"] == pytest.approx(0.75)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans(), st.booleans()), max_size=6),
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), max_size=6),
    st.integers(0, 9),
    st.floats(0.1, 10),
)
def test_shares_lie_between_0_and_1(ran: Any, sampled: Any, padding: int, seconds: float) -> None:
    book = ledger(H200)
    lengths = [row[0] for row in sampled]
    book.sampled(prompts=lengths, completions=lengths[::-1], seconds=seconds, padding_tokens=padding)
    book.scored_rows(lengths, zero_advantage=[row[1] for row in sampled], truncated=[row[2] for row in sampled])
    tails = [row[0] for row in ran]
    without, cut, old = ([row[i] for row in ran] for i in (1, 2, 3))
    book.ran(prompts=tails, completions=tails, scored=sum(tails), zero_advantage=without, truncated=cut, stale=old)
    book.took(1.0)
    values = book.metrics()
    found = {key: value for key, value in values.items() if key.startswith("ledger/")}
    assert set(found) in (set(), SHARE_KEYS)
    assert all(-1e-12 <= share <= 1 + 1e-12 for share in found.values())


# ---- what is missing


def test_nothing_sampled() -> None:
    """The later updates of a generation."""
    book = ledger(H200)
    book.ran(prompts=[10], completions=[30], scored=31, stale=[True])
    book.took(2.0)
    values = book.metrics()
    assert set(values) == SHARE_KEYS | {"update/seconds", "update/tokens_per_second", "update/mfu"}
    assert shares(values, "tokens") == shares(values, "seconds") == {"prompt": 0.25, "stale": 0.75}
    assert values["update/tokens_per_second"] == 20.0


def test_nothing_at_all_and_an_update_is_forgotten_once_it_is_told() -> None:
    book = ledger(H200)
    assert book.metrics() == {}
    book.sampled(prompts=[10], completions=[30], seconds=1.0)
    assert book.metrics() != {}
    assert book.metrics() == {}
    book.ran(prompts=[10], completions=[30], scored=31)
    book.forget()
    assert book.metrics() == {}


def test_no_time_taken() -> None:
    book = ledger(H200)
    book.ran(prompts=[10], completions=[30], scored=31)
    assert set(book.metrics()) == {f"ledger/tokens/{name}" for name in CLASSES} | {"ledger/useful_tokens"}


@pytest.mark.parametrize(("device", "shape"), [(None, LARGE), ("Some Accelerator 9000", LARGE), (H200, None)])
def test_no_utilisation_without_a_peak_or_a_shape(device: str | None, shape: ModelShape | None) -> None:
    book = ledger(device, shape)
    book.sampled(prompts=[10], completions=[30], seconds=1.0)
    book.ran(prompts=[10], completions=[30], scored=31)
    book.took(2.0)
    assert set(book.metrics()) == SHARE_KEYS | PHASE_KEYS


def test_rows_and_their_flags_must_agree() -> None:
    with pytest.raises(ValueError, match="zip"):
        ledger().scored_rows([20, 30], truncated=[True])


# ---- speed


def test_seconds_and_speed() -> None:
    book = ledger()
    book.sampled(prompts=[10, 10], completions=[20, 30], seconds=4.0, padding_tokens=99)
    book.ran(prompts=[10, 10], completions=[19, 29], scored=50, prompt_tokens=10, padding_tokens=99)
    book.took(1.5)
    book.took(0.5)
    values = book.metrics()
    assert {key: values[key] for key in PHASE_KEYS} == {
        "rollout/seconds": 4.0,
        "rollout/tokens_per_second": 50 / 4,
        "update/seconds": 2.0,
        "update/tokens_per_second": 58 / 2,
    }


def test_a_backend_that_logs_its_own_speed() -> None:
    book = ledger()
    book.sampled(prompts=[10], completions=[30], seconds=1.0, speed_is_logged=True)
    values = book.metrics()
    assert "rollout/tokens_per_second" not in values
    assert values["rollout/seconds"] == 1.0
    book.sampled(prompts=[10], completions=[30], seconds=1.0)
    assert book.metrics()["rollout/tokens_per_second"] == 30.0


def test_utilisation() -> None:
    """In a second of each: operations by hand, of the peak."""
    book = ledger(H200)
    book.sampled(prompts=[3, 3], completions=[2, 2], seconds=1.0, prompt_tokens=3)
    book.ran(prompts=[3, 3], completions=[1, 1], scored=4, prompt_tokens=3, padding_tokens=1000)
    book.took(1.0)
    values = book.metrics()
    key, head, layers = 4 * 28 * 12 * 128, 2 * 1536 * 151_936, 2 * LARGE.layer_weights
    rollout = 7 * layers + (1 + 2 + 3 + 2 * (4 + 5)) * key + 4 * head
    update = 5 * layers + (1 + 2 + 3 + 2 * 4) * key + 4 * head
    assert values["rollout/mfu"] == pytest.approx(rollout / 989e12)
    assert values["update/mfu"] == pytest.approx(3 * update / 989e12)


def test_utilisation_of_adapters_and_of_passes_without_gradients() -> None:
    def use(adapters: bool, backward: bool) -> float:
        book = Ledger(LARGE, H200, torch.bfloat16, adapters=adapters)
        book.ran(prompts=[3], completions=[2], scored=3, backward=backward)
        book.took(1.0)
        return book.metrics()["update/mfu"]

    once = use(adapters=False, backward=False)
    assert use(adapters=False, backward=True) == pytest.approx(3 * once)
    assert use(adapters=True, backward=True) == pytest.approx(2 * once)
    assert use(adapters=True, backward=False) == pytest.approx(once)


def test_small_sums() -> None:
    assert keys_seen([3, 3], [2, 2], 3) == 6 + 2 * 9
    assert keys_seen([3, 3], [2, 2], 6) == 2 * 6 + 2 * 9
    assert keys_seen([], [], 0) == 0


# ---- operations and peaks


def test_operations_of_a_model_of_1_5_billion_against_six_per_weight_and_token() -> None:
    weights = 1.5437e9  # of the real model, whose head is its embedding
    tokens, context = 8192, 400
    assert 3 * LARGE.forward_flops(tokens, context, tokens) == pytest.approx(6 * weights * tokens, rel=0.1)
    assert 3 * LARGE.forward_flops(tokens, 0, tokens) == pytest.approx(6 * weights * tokens, rel=1e-3)
    # At 30,000 tokens of context, attention is most of the work.
    assert LARGE.forward_flops(1, 30_000, 1) > 2 * LARGE.forward_flops(1, 0, 1)


@pytest.mark.parametrize("scored", [1, 7])
def test_operations_are_those_that_torch_counts(scored: int) -> None:
    """Its count takes every token for one that sees all others."""
    model = tiny_model(attn_implementation="eager")
    shape = countable_shape(model)
    assert shape is not None
    ids = torch.arange(2 * 7).view(2, 7)
    with FlopCounterMode(display=False) as forward:
        logits = model(ids, logits_to_keep=scored).logits
    # Rotary frequencies may be a product too, a small one.
    assert forward.get_total_flops() == pytest.approx(shape.forward_flops(14, 7, 2 * scored), rel=1e-3)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == pytest.approx(2 * shape.forward_flops(14, 7, 2 * scored), rel=1e-3)


def test_the_shape_of_a_model_whose_matrices_it_accounts_for() -> None:
    model = tiny_model()
    assert countable_shape(model) == ModelShape.from_config(model.config)
    tied = tiny_model(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert countable_shape(tied) == ModelShape.from_config(tied.config)
    assert countable_shape(tiny_gpt2(n_embd=32)) is None, "its MLPs have no gate"
    size = dict(vocab_size=101, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    experts = tf.MixtralForCausalLM(tf.MixtralConfig(**size, num_key_value_heads=1, num_local_experts=4))
    assert countable_shape(experts) is None
    bare = nn.Linear(2, 2)
    bare.config = tf.PretrainedConfig()  # type: ignore[assignment]
    assert countable_shape(bare) is None


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.float16, 989e12),
        ("NVIDIA H200", torch.float32, 67e12),
        ("NVIDIA H200", torch.float64, None),
        ("NVIDIA H200 NVL", torch.bfloat16, 835e12),
        ("NVIDIA H20", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312e12),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA L40", torch.bfloat16, 181e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, 71e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("AMD Instinct MI300X", torch.bfloat16, 1307e12),
        ("Tesla T4", torch.bfloat16, None),
        ("", torch.bfloat16, None),
        (None, torch.bfloat16, None),
    ],
)
def test_peaks(device: str | None, dtype: Any, peak: float | None) -> None:
    assert peak_flops(device, dtype) == peak


# ---- the documentation


def test_every_key_has_a_row_in_the_documentation_and_every_row_a_key() -> None:
    book = ledger(H200)
    book.sampled(prompts=[10], completions=[30], seconds=1.0)
    book.ran(prompts=[10], completions=[30], scored=31)
    book.took(1.0)
    keys = set(book.metrics())
    assert keys == SHARE_KEYS | PHASE_KEYS | {"rollout/mfu", "update/mfu"}
    documented = documented_keys()
    assert keys <= set(documented)
    assert {key for key in documented if key.startswith(("ledger/", "update/"))} <= keys
