"""Padded, batched scores against one unpadded row at a time, in float64."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from gruppo.policy.inplace import finite_masks
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.support import batch_of
from gruppo.policy.unwrap import forward_arguments, position_ids
from tests.engine.models import BUILDERS
from tests.helpers import sharp, tiny_gpt2, tiny_model

PROMPTS = [[9, 10, 11, 12, 13], [20], [30, 31, 32], [40, 41]]
COMPLETIONS = [[50, 51], [52, 53, 54, 55], [56, 57, 1], []]
WIDTH = 4


def lora() -> Any:
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model


class Hidden(nn.Module):
    """A model behind a wrapper, as DDP or FSDP put one around it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Bare(nn.Module):
    """A model whose forward takes ids and mask only, and always gives every logit."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = False) -> Any:
        positions = position_ids(attention_mask)
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions)


MODELS = {
    "llama": tiny_model,
    "gpt2": tiny_gpt2,
    "lora": lora,
    "wrapped-gpt2": lambda: Hidden(tiny_gpt2()),
    "bare-llama": lambda: Bare(tiny_model()),
}


def padded() -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, completions on the right, each with one column more than needed."""
    left = max(map(len, PROMPTS)) + 1
    ids = [[0] * (left - len(p)) + p + c + [0] * (WIDTH - len(c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    mask = [
        [0] * (left - len(p)) + [1] * len(p + c) + [0] * (WIDTH - len(c))
        for p, c in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def alone(model: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of every completion, from one unpadded forward each; 0 where there is no token."""
    logps, entropies = [], []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        row = torch.tensor([prompt + completion])
        logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, len(prompt) - 1 : -1]
        every = (logits / temperature).log_softmax(-1)
        fill = torch.zeros(WIDTH - len(completion), dtype=every.dtype)
        chosen = every[torch.arange(len(completion)), torch.tensor(completion, dtype=torch.long)]
        logps.append(torch.cat([chosen, fill]))
        entropies.append(torch.cat([-(every.exp() * every).sum(-1), fill]))
    return torch.stack(logps), torch.stack(entropies)


def test_positions_do_not_count_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 1, 2, 2]]


@pytest.mark.parametrize("batch_size", [None, 1, 3, 9])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_each_row_alone(name, batch_size):
    model = sharp(MODELS[name]())
    with torch.no_grad():
        logps, entropies, _ = score_tokens(model, *padded(), WIDTH, batch_size=batch_size, entropy=True)
        expected_logps, expected_entropies = alone(model)
    torch.testing.assert_close(logps, expected_logps, rtol=0, atol=1e-10)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-10)
    assert logps.std() > 0.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_scores_are_tempered(temperature):
    model = sharp(tiny_gpt2())
    with torch.no_grad():
        logps, entropies, _ = score_tokens(model, *padded(), WIDTH, temperature=temperature, entropy=True)
        expected_logps, expected_entropies = alone(model, temperature)
    torch.testing.assert_close(logps, expected_logps, rtol=0, atol=1e-10)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-10)


def test_positions_matter_to_gpt2():
    # What the first test would miss if both sides were wrong in the same way.
    model, (ids, mask) = sharp(tiny_gpt2()), padded()
    with torch.no_grad():
        counted = model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None]).logits
        right = model(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask)).logits
    assert (counted - right)[1, -WIDTH:].abs().max() > 1e-2


def test_what_is_masked_is_exactly_zero_whatever_stands_there():
    model, (ids, mask) = sharp(tiny_model()), padded()
    with torch.no_grad():
        first = score_tokens(model, ids, mask, WIDTH, entropy=True)
        second = score_tokens(model, torch.where(mask.bool(), ids, 77), mask, WIDTH, entropy=True)
    off = ~mask[:, -WIDTH:].bool()
    for scores in (*first[:2], *second[:2]):
        assert (scores[off] == 0).all()
        assert off.sum() == 7
    torch.testing.assert_close(first.logps_BT, second.logps_BT, rtol=0, atol=1e-12)


def test_tokens_behind_a_hole_in_the_mask_are_scored():
    model, (ids, mask) = sharp(tiny_model()), padded()
    mask[:, -WIDTH] = 0
    with torch.no_grad():
        found = score_tokens(model, ids, mask, WIDTH).logps_BT
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position_ids(mask)).logits
    expected = logits[:, -WIDTH - 1 : -1].log_softmax(-1).gather(2, ids[:, -WIDTH:, None]).squeeze(2)
    torch.testing.assert_close(found, expected * mask[:, -WIDTH:], rtol=0, atol=1e-10)


def test_the_gradient_is_that_of_each_row_alone_and_masked_tokens_have_none():
    model, (ids, mask) = sharp(tiny_model()), padded()
    weights = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)

    def gradients(logps: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((weights * logps).sum(), list(model.parameters())))

    together = gradients(score_tokens(model, ids, mask, WIDTH, batch_size=3).logps_BT)
    for found, expected in zip(together, gradients(alone(model)[0]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("wanted", [True, False])
def test_entropies_have_a_gradient_only_when_asked(wanted):
    model = sharp(tiny_model())
    scores = score_tokens(model, *padded(), WIDTH, entropy=True, entropy_gradient=wanted)
    assert scores.entropy_BT.requires_grad is wanted
    assert scores.logps_BT.requires_grad
    if wanted:
        (found,) = torch.autograd.grad(scores.entropy_BT.sum(), [model.lm_head.weight])
        (expected,) = torch.autograd.grad(alone(model)[1].sum(), [model.lm_head.weight])
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_entropies_are_left_out_unless_asked_for():
    with torch.no_grad():
        assert score_tokens(tiny_model(), *padded(), WIDTH).entropy_BT is None


def test_only_the_logits_that_are_needed_are_made():
    model, shapes = tiny_model(), []
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    score_tokens(model, *padded(), WIDTH, batch_size=3)
    assert sum(rows for rows, _, _ in shapes) == 4
    assert max(rows for rows, _, _ in shapes) <= 3
    assert max(width for _, width, _ in shapes) == WIDTH + 1


def test_a_wrapper_does_not_hide_what_the_model_accepts():
    bare = forward_arguments(tiny_gpt2())
    assert {"position_ids", "logits_to_keep"} <= bare
    assert forward_arguments(Hidden(Hidden(tiny_gpt2()))) == bare
    assert (
        forward_arguments(get_peft_model(tiny_gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)))
        == bare
    )
    assert "position_ids" not in forward_arguments(Bare(tiny_gpt2()))


def test_compiling_does_not_hide_what_the_model_accepts():
    assert forward_arguments(torch.compile(tiny_gpt2(), backend="eager")) == forward_arguments(tiny_gpt2())


def test_a_model_may_return_logits_of_half_precision():
    ids, mask = padded()
    table = torch.randn(101, 101, generator=torch.Generator().manual_seed(0)).bfloat16()

    class Bigram(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
            return SimpleNamespace(logits=table[input_ids])

    scores = score_tokens(Bigram(), ids, mask, WIDTH)
    expected = table[ids[:, -WIDTH - 1 : -1]].float().log_softmax(-1).gather(2, ids[:, -WIDTH:, None]).squeeze(2)
    torch.testing.assert_close(scores.logps_BT.float(), expected * mask[:, -WIDTH:], rtol=0, atol=0.05)


# ---- eager attention of queries that see no key: padding on the left, or on the right beyond a sliding window

SIZE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
OTHERS = {
    "cohere2": lambda: tf.Cohere2ForCausalLM(tf.Cohere2Config(**SIZE, sliding_window=5)),
    "llama4": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**SIZE, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=48)
    ),
}
ROWS = [(14, 3), (1, 9), (5, 1), (9, 4)]  # lengths of prompts and completions; sliding windows have five tokens


def rows_scored_together_and_alone(model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randint(3, 64, (n,), generator=generator).tolist() for n in row] for row in ROWS]
    batch = batch_of([(prompt, completion) for prompt, completion in pairs], torch.device("cpu"))
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    together = score_tokens(model, ids, mask, batch.completion_ids.shape[1]).logps_BT
    for scores, (prompt, completion) in zip(together, pairs, strict=True):
        row = torch.tensor([prompt + completion])
        alone = score_tokens(model, row, torch.ones_like(row), len(completion)).logps_BT[0]
        yield scores[: len(completion)], alone


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "gpt2"] + ["cohere2", "llama4"])
def test_padding_that_sees_nothing_does_not_reach_the_tokens(name: str) -> None:
    model = (BUILDERS[name]() if name in BUILDERS else OTHERS[name]()).eval().double()
    model.set_attn_implementation("eager")
    if name in ("gpt-oss", "llama4"):
        model.set_experts_implementation("eager")
    for together, alone in rows_scored_together_and_alone(model):
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    sum(together.sum() for together, _ in rows_scored_together_and_alone(model)).backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


def test_padding_whose_scores_are_very_negative_in_float16() -> None:
    """The smallest number of float16 plus a score below -16 is -inf."""
    model = BUILDERS["qwen2"]().eval()
    for layer in model.model.layers:  # Qwen2's biases of keys are large
        for projection, value in ((layer.self_attn.q_proj, 20.0), (layer.self_attn.k_proj, -20.0)):
            projection.bias.data[3::4] = value  # slow rotations
    model = model.half()
    model.set_attn_implementation("eager")
    for together, alone in rows_scored_together_and_alone(model):
        torch.testing.assert_close(together, alone, rtol=0.01, atol=0.01)


def test_masks_are_those_of_transformers_outside() -> None:
    before = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    with finite_masks(), finite_masks():
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is not before
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is before
    model = tiny_model(attn_implementation="eager")
    ids = torch.tensor([[0, 5, 6, 7]])
    plain = model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]])).logits[0, 1:]
    with finite_masks():
        torch.testing.assert_close(
            model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]])).logits[0, 1:], plain, rtol=0, atol=0
        )
