"""Encoding shared prompts once: when it is done, and when it must not be."""

from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from gruppo.policy.logprobs import score_tokens
from gruppo.policy.prefix import SharedPrompts, can_continue_from_cache
from tests.helpers import in_double, tiny_model


def batch(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of three and five tokens, left-padded, with ragged completions of up to four."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(6, 100, (rows, 9), generator=generator)
    mask = torch.ones_like(ids)
    half = rows // 2
    ids[:half, :5], ids[half:, :5] = ids[0, :5], ids[half, :5]
    mask[:half, :2] = 0
    mask[0, 7:] = 0
    mask[-1, 6:] = 0
    return ids, mask


def gradients(model: Any, shortcuts: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logps = score_tokens(model, *batch(), 4, shortcuts=shortcuts).logps_BT
    (logps * torch.arange(24).view(6, 4)).sum().backward()
    return logps.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def test_gradients_flow_through_the_shared_prompt() -> None:
    model = in_double(tiny_model(seed=3)).train()
    shared, full = gradients(model, True), gradients(model, False)
    torch.testing.assert_close(shared[0], full[0], rtol=0, atol=1e-12)
    for name, expected in full[1].items():
        torch.testing.assert_close(shared[1][name], expected, rtol=1e-9, atol=1e-12)
    assert full[1]["model.layers.0.self_attn.k_proj.weight"].abs().max() > 1e-3


def test_each_prompt_is_run_once() -> None:
    model, seen = tiny_model(), []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    score_tokens(model, *batch(), 4)
    assert seen[0] == (2, 4)  # two prompts, all but their last token
    assert sum(rows for rows, _ in seen[1:]) == 6
    assert max(width for _, width in seen[1:]) == 5  # the last token of the prompt, and the completion


def test_prompts_are_run_no_more_at_a_time_than_rows() -> None:
    """`batch_size` bounds memory; it must hold for the prompts as well."""
    model, seen = tiny_model(), []
    whole = score_tokens(model, *batch(), 4).logps_BT
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    pieces = score_tokens(model, *batch(), 4, batch_size=1).logps_BT
    assert max(rows for rows, _ in seen) == 1
    assert seen[:2] == [(1, 4), (1, 4)]
    torch.testing.assert_close(pieces, whole)


def test_a_window_is_seen_before_any_work_is_done() -> None:
    config = MistralConfig(
        vocab_size=101, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    model, seen = MistralForCausalLM(config), []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape)))
    score_tokens(model, *batch(), 4)
    assert sum(rows for rows, _ in seen) == 6, "each row once, and no prompt by itself"


def test_prompts_that_are_all_different_are_not_shared() -> None:
    ids, mask = batch()
    assert SharedPrompts.encode(tiny_model(), ids[:, :5], mask[:, :5]) is not None
    ids[:, 0] = torch.arange(6, 12)
    mask[:] = 1
    assert SharedPrompts.encode(tiny_model(), ids[:, :5], mask[:, :5]) is None


def test_noise_is_never_shared() -> None:
    assert can_continue_from_cache(tiny_model().train())
    noisy = tiny_model(attention_dropout=0.1)
    assert not can_continue_from_cache(noisy.train())
    assert can_continue_from_cache(noisy.eval())
    neftune = tiny_model().train()
    neftune.get_input_embeddings().neftune_noise_alpha = 5.0
    assert not can_continue_from_cache(neftune)


def test_checkpointed_training_recomputes_instead() -> None:
    model = tiny_model().train()
    model.gradient_checkpointing_enable()
    assert not can_continue_from_cache(model)
    assert can_continue_from_cache(model.eval())


def test_virtual_prompt_tokens_rule_it_out() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert not can_continue_from_cache(peft.get_peft_model(tiny_model(), config))
    assert can_continue_from_cache(peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"])))


def test_dropout_of_an_adapter_rules_it_out_in_training() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(tiny_model(), config)
    assert not can_continue_from_cache(model.train())
    assert can_continue_from_cache(model.eval())
