"""The walk over the policy's weights: names and values of a saved checkpoint, and a policy that stays as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from gruppo.errors import ConfigError
from gruppo.policy.sharding import is_sharded
from gruppo.policy.weights import named_weights
from tests.helpers import tiny_gpt2, tiny_model
from tests.processes import run_together


def lora(model: Any = None, **settings: Any) -> Any:
    """With an adapter that changes what the model says."""
    config = LoraConfig(r=4, init_lora_weights=False, **({"target_modules": ["q_proj", "down_proj"]} | settings))
    return get_peft_model(tiny_model() if model is None else model, config)


def mixtral() -> Any:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
        )
    )


@pytest.mark.parametrize(
    "make",
    [
        tiny_model,
        lambda: tiny_model(tie_word_embeddings=True),
        tiny_gpt2,
        mixtral,  # its experts are saved one by one, and held fused
        lambda: torch.compile(tiny_model(), backend="eager"),
        lambda: nn.parallel.DataParallel(tiny_model()),
    ],
    ids=["llama", "tied", "gpt2", "mixtral", "compiled", "wrapped"],
)
def test_names_and_values_are_those_of_a_saved_checkpoint(make: Any, tmp_path: Path) -> None:
    model = make()
    bare = getattr(model, "_orig_mod", getattr(model, "module", model))
    bare.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    walked = list(named_weights(model))
    assert len(walked) == len(saved), "each weight once"
    assert {name: tensor.tolist() for name, tensor in walked} == {n: t.tolist() for n, t in saved.items()}


def test_wrappers_inside_leave_no_trace_in_names() -> None:
    model = tiny_model()
    names = {name for name, _ in named_weights(model)}
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    assert {name for name, _ in named_weights(model)} == names


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rank-stabilised": {"use_rslora": True, "target_modules": "all-linear"},
    "modules-to-save": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "head": {"target_modules": ["lm_head"]},
}


@pytest.mark.parametrize("settings", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_are_merged_and_the_policy_keeps_every_bit(settings: dict[str, Any]) -> None:
    policy = lora(**settings)
    if "modules_to_save" in settings:
        policy.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(3)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    places = {name: weight.data_ptr() for name, weight in policy.named_parameters()}
    ids = torch.arange(6, 18)[None]
    said = policy.eval()(input_ids=ids).logits

    walked = dict(named_weights(policy))  # tensors stay as they are while the walk goes on

    assert {name: weight.data_ptr() for name, weight in policy.named_parameters()} == places
    after = policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(policy(input_ids=ids).logits, said)
    plain = tiny_model(seed=7).eval()
    plain.load_state_dict(walked)
    torch.testing.assert_close(plain(input_ids=ids).logits, said, rtol=1e-5, atol=1e-5)


def test_a_walk_that_is_given_up_leaves_the_policy_as_it_was() -> None:
    policy = lora(use_dora=True)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    walk = named_weights(policy)
    for name, _ in walk:
        if "q_proj" in name:
            break
    walk.close()
    after = policy.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(getattr(module, "merged_adapters", None) for module in policy.modules())


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["lora", "modules-to-save"])
def test_switched_off_adapters_are_not_merged(saved: list[str] | None) -> None:
    policy = lora(modules_to_save=saved)
    if saved is not None:
        policy.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(3)
    with policy.disable_adapter():
        walked = dict(named_weights(policy))
    plain = tiny_model().state_dict()
    assert all(torch.equal(walked[name], plain[name]) for name in plain)


def test_a_module_that_the_active_adapter_does_not_save_is_the_original() -> None:
    policy = lora(modules_to_save=["lm_head"])
    policy.base_model.model.lm_head.modules_to_save["default"].weight.data.mul_(3)
    policy.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    policy.set_adapter("other")
    assert torch.equal(dict(named_weights(policy))["lm_head.weight"], tiny_model().lm_head.weight)


def test_adapters_that_somebody_merged_stay_merged() -> None:
    policy = lora().eval()
    policy.merge_adapter()
    ids = torch.arange(6, 18)[None]
    said = policy(input_ids=ids).logits
    plain = tiny_model(seed=7).eval()
    plain.load_state_dict(dict(named_weights(policy)))
    assert torch.equal(policy(input_ids=ids).logits, said), "and count once"
    torch.testing.assert_close(plain(input_ids=ids).logits, said, rtol=1e-5, atol=1e-5)


def test_a_bias_of_an_adapter_that_is_not_active_is_in_nobodys_way() -> None:
    policy = lora(target_modules=["q_proj"])
    policy.add_adapter("biased", LoraConfig(r=2, lora_bias=True, target_modules=["q_proj"]))
    assert dict(named_weights(policy)).keys() == tiny_model().state_dict().keys()
    policy.set_adapter("biased")
    with pytest.raises(ConfigError, match="has no bias"):
        list(named_weights(policy))


def test_tied_weights_under_adapters_come_once() -> None:
    policy = lora(tiny_model(tie_word_embeddings=True))
    names = [name for name, _ in named_weights(policy)]
    assert len(names) == len(set(names))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


class FullyShardedDataParallel(nn.Module):
    """Called as FSDP version 1 is."""

    def __init__(self, module: Any):
        super().__init__()
        self.inner = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


def quantised() -> Any:
    model = tiny_model()
    model.is_quantized = True
    return model


def prompt_tuned() -> Any:
    return get_peft_model(tiny_model(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lora(lora_bias=True, target_modules=["q_proj"]), r"q_proj has no bias.*lora_bias=False"),
        (lambda: FullyShardedDataParallel(tiny_model()), "FSDP version 1.*Set fsdp_version: 2"),
        (quantised, "quantised.*rollout_backend='transformers'"),
        (prompt_tuned, "PROMPT_TUNING.*virtual"),
        (lambda: lora(trainable_token_indices=[3]), "trainable_token_indices"),
        (lambda: lora(tiny_model(tie_word_embeddings=True), target_modules=["lm_head"]), "tie_word_embeddings=True"),
        (
            lambda: lora(tiny_model(tie_word_embeddings=True), modules_to_save=["lm_head"]),
            "Leave embed_tokens and lm_head out of",
        ),
    ],
    ids=["bias", "fsdp1", "quantised", "prompt-tuning", "token-indices", "tied-adapter", "tied-saved"],
)
def test_what_cannot_be_copied_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(named_weights(make()))


@pytest.mark.medium
def test_weights_of_fsdp2_are_put_together_by_all_processes(tmp_path: Path) -> None:
    run_together(2, "tests.policy.test_weights", tmp_path)


def main(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny_model()
    whole = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert is_sharded(model)
    walked = dict(named_weights(model))
    assert walked.keys() == whole.keys()
    assert all(torch.equal(walked[name], whole[name]) for name in whole)
