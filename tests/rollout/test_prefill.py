"""Continuing from a prompt that was read before: when it can be done, and when it must not be."""

import pytest
from transformers import GenerationConfig

from gruppo.rollout.hf import TransformersBackend, can_continue_from_cache
from gruppo.types import SampleRequest
from tests.helpers import tiny_model
from tests.policy.families import family


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


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "lfm3", "minimax", "mamba2", "deepseek_v32"])
def test_layers_that_keep_more_than_keys_and_values_rule_it_out(name: str) -> None:
    """There is no method, or another cache, to copy the state of convolutions and of linear attention."""
    model = family(name)
    assert not can_continue_from_cache(model)
    requests = [SampleRequest([5, 6, 7, 8], 2), SampleRequest([5, 8], 2)]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    first, twin, *_ = TransformersBackend(lambda: model, config, stop_ids=(1,)).sample(requests)
    assert first.ids == twin.ids


def test_chunks_of_keys_and_values_can_be_copied() -> None:
    assert can_continue_from_cache(family("llama4"))
