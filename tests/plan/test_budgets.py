"""Memory arithmetic: by hand on small numbers, and against what is really allocated."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gruppo.engine.cache import ATTENTION_NAME
from gruppo.engine.kv import KvPool
from gruppo.engine.runner import kv_shapes
from gruppo.plan import (
    LayerShape,
    ModelShape,
    Passes,
    RolloutPlan,
    UpdatePlan,
    batch_buckets,
    free_memory,
    plan_rollout,
    plan_update,
    training_bytes,
)
from gruppo.policy.inplace import attention_swaps, swapped
from tests.engine.models import BUILDERS, build

GIB = 2**30
LARGE = ModelShape(layers=28, hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128, vocabulary=151936)
# Chosen for round numbers: 16 bytes of keys and values a token, 1 MiB of activations in a pass over 8192 tokens.
SMALL = ModelShape(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10)


def small(**changes: Any) -> RolloutPlan:
    """A plan for 100 completions of 20 tokens of prompts with prefixes of 30 and 50, in 16-bit numbers on CUDA."""
    asked: dict[str, Any] = dict(prefix_lengths=[30, 50], completions=100, max_new_tokens=20, bytes_per_value=2)
    return plan_rollout(SMALL, **(asked | dict(free_bytes=GIB, device="cuda") | changes))


# ---- the shape of a model


def test_sizes_of_a_model_of_1_5_billion() -> None:
    assert LARGE.kv_bytes_per_token(2) == 2 * 28 * 2 * 128 * 2 == 28_672
    assert LARGE.logits_bytes(512, 2, filtered=False) == 512 * 151_936 * 2
    assert LARGE.logits_bytes(1, 2, filtered=True) == 151_936 * 26
    assert SMALL.kv_bytes_per_token(2) == 16
    assert SMALL.prefill_bytes(8192, 2) == 2**20


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (
            tf.LlamaConfig(
                vocab_size=100,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=8,
                num_key_value_heads=2,
            ),
            ModelShape(3, 64, 96, 8, 2, 8, 100),
        ),
        (tf.GPT2Config(vocab_size=100, n_embd=64, n_layer=3, n_head=8), ModelShape(3, 64, 256, 8, 8, 8, 100)),
        (
            tf.Gemma3TextConfig(
                vocab_size=100,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=32,
            ),
            ModelShape(3, 64, 96, 8, 2, 32, 100),
        ),
        (
            tf.Gemma3Config(text_config=dict(vocab_size=100, hidden_size=64, num_hidden_layers=3, head_dim=32)),
            ModelShape(3, 64, 9216, 8, 4, 32, 100),
        ),
        (
            tf.GPTBigCodeConfig(vocab_size=100, n_embd=64, n_layer=3, n_head=8, multi_query=True),
            ModelShape(3, 64, 256, 8, 1, 8, 100),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shapes_are_read_from_configs_of_all_dialects(config: Any, shape: ModelShape) -> None:
    assert ModelShape.from_config(config) == shape


def gemma4(**changes: Any) -> Any:
    """As published, but small: global layers with wider heads, the last layers with the keys and values of others."""
    kinds = ["sliding_attention", "full_attention"] * 2
    small = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, vocab_size=100)
    sizes: dict[str, Any] = small | dict(num_key_value_heads=2, head_dim=16, global_head_dim=32, layer_types=kinds)
    sizes |= dict(vocab_size_per_layer_input=100, hidden_size_per_layer_input=8, num_kv_shared_layers=2)
    return tf.Gemma4TextConfig(**(sizes | changes))


def gemma3n(**changes: Any) -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    small = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=100, num_key_value_heads=2)
    sizes: dict[str, Any] = small | dict(head_dim=16, layer_types=kinds, num_kv_shared_layers=2, laurel_rank=4)
    sizes |= dict(vocab_size_per_layer_input=100, hidden_size_per_layer_input=8, intermediate_size=[96, 96, 48, 48])
    return tf.Gemma3nTextConfig(**(sizes | dict(activation_sparsity_pattern=[0.0] * 4) | changes))


def test_layers_of_several_sizes() -> None:
    shape = ModelShape.from_config(gemma4(use_double_wide_mlp=True))
    sizes = [LayerShape(96, 4, 2, 16), LayerShape(96, 4, 2, 32), LayerShape(192, 4, 0, 16), LayerShape(192, 4, 0, 32)]
    assert shape == ModelShape(4, 64, 192, 4, 2, 32, 100, tuple(sizes))
    assert shape.kv_bytes_per_token(2) == 2 * (2 * 16 + 2 * 32) * 2
    attention = 2 * 64 * (2 * 4 * (16 + 32) + 2 * (16 + 32))
    assert shape.layer_weights == attention + 64 * 3 * (2 * 96 + 2 * 192)
    assert shape.forward_flops(1, 10, 0) == 2 * shape.layer_weights + 4 * 10 * (4 * 16 + 4 * 32) * 2
    passes = Passes(stream=4, product=4)
    equal = [replace(shape, unequal=(size,) * 4) for size in sizes]
    layers = [one.layer_bytes(passes) for one in equal]
    assert shape.layer_bytes(passes) == max(layers)
    assert shape.layer_bytes(passes, mean=True) == sum(layers) // 4
    assert shape.update_bytes(passes, checkpointing=False) == shape.backward_bytes(passes) + sum(layers)
    assert shape.backward_bytes(passes) == (3 * 192 + 2 * 64) * 4
    assert shape.prefill_bytes(1, 2) == max(one.prefill_bytes(1, 2) for one in equal)


def test_widths_of_the_mlp_as_a_list() -> None:
    shape = ModelShape.from_config(gemma3n())
    assert [size.intermediate for size in shape.per_layer] == [96, 96, 48, 48]
    assert [size.kv_heads for size in shape.per_layer] == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (tf.Mamba2Config(num_hidden_layers=1), "num_attention_heads"),
        (tf.MambaConfig(num_hidden_layers=1), "num_attention_heads"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_size_that_the_config_does_not_have_is_named(config: Any, missing: str) -> None:
    shape, reason = ModelShape.read(config)
    assert shape is None
    assert missing in reason
    assert type(config).__name__ in reason
    with pytest.raises(ValueError, match=missing):
        ModelShape.from_config(config)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_take_what_the_plan_says(name: str, dtype: torch.dtype) -> None:
    model, device = build(name).to(dtype), torch.device("cpu")
    with swapped(attention_swaps(model, ATTENTION_NAME)), torch.no_grad():
        shapes, found = kv_shapes(model, device)
    assert found is dtype
    pool = KvPool(shapes, 9, dtype=dtype, device=device)
    per_token = ModelShape.from_config(model.config).kv_bytes_per_token(dtype.itemsize)
    assert pool.bytes == (9 + 1) * per_token, "ten places, one of them for padding"


# ---- the plan


def test_the_worked_example() -> None:
    """32 prompts of 200 tokens × 16 completions of 512, with memory to spare."""
    plan = plan_rollout(
        LARGE,
        prefix_lengths=[199] * 32,
        completions=512,
        max_new_tokens=512,
        bytes_per_value=2,
        free_bytes=100 * GIB,
        device="cuda",
    )
    assert plan == RolloutPlan(kv_tokens=270_104, rows=512, prefill_tokens=32 * 199)


def test_with_room_everything_is_decoded_together() -> None:
    assert small() == RolloutPlan(kv_tokens=100 + 100 * 20, rows=100, prefill_tokens=80)
    assert small(completions=3000).rows == 1024
    assert small(completions=3000, device="cpu").rows == 256
    assert small(prefix_lengths=[9000, 9000]).prefill_tokens == 8192
    assert small(prefix_lengths=[9000, 9000], device="cpu").prefill_tokens == 2048
    assert small(prefix_lengths=[0]) == RolloutPlan(2000, 100, 16), "prompts of one token have no prefix"
    assert small(prefix_lengths=[], completions=0) == RolloutPlan(20, 1, 16)


def test_with_less_room_the_pool_takes_three_fifths_of_what_is_left() -> None:
    working = 2**20 + 100 * 10 * 2  # activations of a prefill, logits of a step
    assert small(free_bytes=working + 30_000) == RolloutPlan(kv_tokens=18_000 // 16, rows=100, prefill_tokens=80)
    # Filters work on float32 copies: 24 bytes more for every logit.
    assert small(free_bytes=working + 30_000, filtered=True).kv_tokens == (30_000 - 24_000) * 6 // 10 // 16


@pytest.mark.parametrize("free", [0, -GIB, 2**20])
def test_with_none_there_is_place_for_the_longest_completion(free: int) -> None:
    assert small(free_bytes=free).kv_tokens == 50 + 20


@settings(max_examples=200, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 500), max_size=6),
    completions=st.integers(0, 2000),
    new=st.integers(1, 300),
    free=st.integers(0, 2**23),
    filtered=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_a_plan_never_promises_more_than_there_is(
    prefixes: list[int], completions: int, new: int, free: int, filtered: bool, device: str
) -> None:
    def plan(free_bytes: int) -> RolloutPlan:
        return small(
            prefix_lengths=prefixes,
            completions=completions,
            max_new_tokens=new,
            free_bytes=free_bytes,
            filtered=filtered,
            device=device,
        )

    least = max(prefixes, default=0) + new
    tight, roomy = plan(free), plan(2 * free)
    assert tight.kv_tokens >= least
    assert tight.kv_tokens == least or 16 * tight.kv_tokens <= 0.6 * free
    assert (tight.rows, tight.prefill_tokens) == (roomy.rows, roomy.prefill_tokens)
    assert tight.kv_tokens <= roomy.kv_tokens
    assert roomy.kv_tokens <= max(least, int(1.25 * sum(prefixes)) + roomy.rows * new), "no more than is of use"
    assert 1 <= tight.rows <= max(completions, 1)


def test_a_plan_is_halved_down_to_one_row() -> None:
    plan = RolloutPlan(kv_tokens=1000, rows=12, prefill_tokens=100)
    sizes = [plan := plan.halved() for _ in range(4)]
    assert sizes == [RolloutPlan(500, 6, 50), RolloutPlan(250, 3, 25), RolloutPlan(125, 1, 16), RolloutPlan(62, 1, 16)]
    assert RolloutPlan(1, 1, 16).halved() == RolloutPlan(1, 1, 16)


def test_a_plan_covers_half_as_much_again() -> None:
    plan = RolloutPlan(kv_tokens=100, rows=10, prefill_tokens=16)
    assert plan.covers(RolloutPlan(150, 15, 9999))
    assert not plan.covers(RolloutPlan(151, 10, 16))
    assert not plan.covers(RolloutPlan(100, 16, 16))


def test_a_plan_is_widened_but_never_narrowed() -> None:
    plan = RolloutPlan(kv_tokens=100, rows=10, prefill_tokens=16)
    assert plan.widened(101) == RolloutPlan(101, 10, 16)
    assert plan.widened(99) == plan


def test_a_plan_survives_being_saved() -> None:
    plan = RolloutPlan(kv_tokens=100, rows=10, prefill_tokens=16)
    assert RolloutPlan(**json.loads(json.dumps(plan.to_dict()))) == plan


# ---- the plan of an update

_HEAD = 64 * 2**20 + 2 * 10 * 4 * 2  # on a CPU: blocks of logits, and the head's weight and gradient


PASSES = Passes(stream=2, product=2, device="cpu")
ON_GPU = Passes(stream=2, product=2)


def update(**changes: Any) -> UpdatePlan:
    """A plan for rows of up to 300 tokens in 16-bit numbers on a CPU."""
    asked: dict[str, Any] = dict(longest_row=300, free_bytes=GIB, passes=PASSES)
    return plan_update(SMALL, **(asked | changes))


def free_for(tokens: int, *, checkpointing: bool = False) -> int:
    """Bytes of which four fifths hold the head and the activations of so many tokens."""
    kept = SMALL.update_bytes(PASSES, checkpointing=checkpointing)
    return -(-5 * (_HEAD + tokens * kept) // 4)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all() -> None:
    for passes in (ON_GPU, replace(ON_GPU, fused=False)):
        working = LARGE.backward_bytes(passes)
        full, little = (LARGE.update_bytes(passes, checkpointing=c) - working for c in (False, True))
        assert full == 28 * LARGE.layer_bytes(passes)
        assert little == full // 28 + 28 * 1536 * 2
    assert LARGE.layer_bytes(ON_GPU) < LARGE.layer_bytes(passes), "fused layers keep less"


def test_with_room_an_update_is_cut_into_large_parts_without_checkpointing() -> None:
    assert update() == UpdatePlan(tokens=4096, group_tokens=8192, checkpointing=False)
    large = plan_update(LARGE, ON_GPU, longest_row=1000, free_bytes=100 * GIB, checkpointing=None)
    assert 8192 <= large.tokens <= 32768
    assert not large.checkpointing


def test_with_less_room_as_many_tokens_run_at_once_as_fit() -> None:
    assert update(free_bytes=free_for(1000)) == UpdatePlan(1000, 1000, checkpointing=False)
    assert update(free_bytes=free_for(1000), checkpointing=False).tokens == 1000
    assert update(free_bytes=free_for(1000, checkpointing=True), checkpointing=True) == UpdatePlan(1000, 1000, True)


def test_passes_that_compute_layers_twice_are_larger() -> None:
    once, twice = update(checkpointing=False), update(checkpointing=True)
    assert (twice.tokens, twice.group_tokens) == (2 * once.tokens, 2 * once.group_tokens)


def test_checkpointing_is_turned_on_when_the_longest_row_does_not_fit_without() -> None:
    assert update(free_bytes=free_for(300)) == UpdatePlan(300, 300, checkpointing=False)
    one_too_few = update(free_bytes=free_for(299))
    assert one_too_few.checkpointing
    assert one_too_few.tokens > 300, "with it there is room for more than that row"


@pytest.mark.parametrize("free", [-GIB, 0, GIB, 100 * GIB])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("passes", [PASSES, ON_GPU], ids=["cpu", "cuda"])
def test_checkpointing_that_was_asked_for_or_forbidden_stays_so(
    passes: Passes, checkpointing: bool, free: int
) -> None:
    plan = update(free_bytes=free, checkpointing=checkpointing, passes=passes)
    assert plan.checkpointing is checkpointing
    assert plan.tokens >= 300


@pytest.mark.parametrize("tokens", [1, 300, 5000, 10**6])
@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_budget_that_was_given_is_kept(checkpointing: bool | None, tokens: int) -> None:
    for free in (0, 100 * GIB):
        plan = update(free_bytes=free, checkpointing=checkpointing, tokens=tokens)
        assert plan == UpdatePlan(tokens, tokens, free == 0 if checkpointing is None else checkpointing)


@settings(max_examples=200, deadline=None)
@given(
    longest=st.integers(1, 10_000),
    free=st.integers(-(2**20), 2**28),
    checkpointing=st.sampled_from([None, False, True]),
    fused=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_an_update_is_never_cut_below_its_longest_row_nor_above_what_there_is(
    longest: int, free: int, checkpointing: bool | None, fused: bool, device: str
) -> None:
    passes = Passes(stream=2, product=2, fused=fused, device=device)
    options: dict[str, Any] = dict(longest_row=longest, checkpointing=checkpointing, passes=passes)
    tight, roomy = (update(free_bytes=size, **options) for size in (free, free + 2**26))
    assert tight.tokens >= longest
    kept = SMALL.update_bytes(passes, checkpointing=tight.checkpointing)
    assert tight.tokens == longest or tight.tokens * kept <= 0.8 * free
    assert roomy.checkpointing <= tight.checkpointing, "more memory never turns it on"
    if roomy.checkpointing == tight.checkpointing:
        assert roomy.tokens >= tight.tokens


def test_the_plan_of_an_update_is_halved_down_to_one_row_at_a_time() -> None:
    plan = UpdatePlan(tokens=9, group_tokens=18, checkpointing=True)
    assert [plan := plan.halved() for _ in range(4)] == [
        UpdatePlan(*sizes, True) for sizes in ((4, 9), (2, 4), (1, 2), (1, 1))
    ]


def test_the_plan_of_an_update_survives_being_saved() -> None:
    plan = UpdatePlan(tokens=100, group_tokens=150, checkpointing=True)
    assert UpdatePlan(**json.loads(json.dumps(plan.to_dict()))) == plan


# ---- batch sizes


def test_batch_sizes_worked_out() -> None:
    assert batch_buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert batch_buckets(1) == [1]
    assert batch_buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert batch_buckets(1500)[-4:] == [896, 1024, 1280, 1500]


@pytest.mark.parametrize("rows", [*range(1, 70), 1000, 1024, 1025, 5000])
def test_batch_sizes_grow_in_small_steps_to_the_last_row(rows: int) -> None:
    sizes = batch_buckets(rows)
    assert (sizes[0], sizes[-1]) == (1, rows)
    for smaller, larger in itertools.pairwise(sizes):
        assert smaller < larger
        assert larger <= (2 if smaller < 16 else 1.5) * smaller


# ---- what else needs memory


def test_gradients_and_moments_are_counted_until_they_are_there() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 2, bias=False).bfloat16())
    assert training_bytes(model.parameters()) == 3 * (15 * 4 + 10 * 2)
    model[0].requires_grad_(False)
    assert training_bytes(model.parameters()) == 3 * 10 * 2
    model[1].weight.grad = torch.zeros_like(model[1].weight)
    assert training_bytes(model.parameters()) == 0, "they are allocated, so free memory is less by them"
    assert training_bytes([]) == 0


def test_free_memory_of_this_machine() -> None:
    free = free_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50
