"""Every way to adapt a model: sampled from, differentiated, frozen as a reference and saved like plain LoRA."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from gruppo.engine.support import trial, unsupported_model
from gruppo.errors import ConfigError
from gruppo.policy.adapters import add_adapter, add_reference_adapter, prepare_adapters, reference_policy
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.support import why_not_packed
from gruppo.trainer.construct.preparing import reject_frozen
from gruppo.types import SampleRequest
from tests.engine.models import build
from tests.engine.test_models import generate, greedy, prompts
from tests.policy.experts import experts
from tests.policy.methods import METHODS, VIRTUAL, adalora, adapted, shake
from tests.policy.twins import assert_same, in_double, run_packed, run_slowly

IDS = torch.tensor([[9, 10, 11, 12]])
FAST = ["dora", "loha", "ia3", "vera", "on embeddings", "modules_to_save", "target_parameters"]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-3)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("method", [m if m in FAST else pytest.param(m, marks=pytest.mark.medium) for m in METHODS])
def test_the_engine_samples_what_transformers_would(method: str) -> None:
    model = adapted(method)
    assert unsupported_model(model) == []
    assert trial(model) is None
    expected = [generate(model, ids) for ids in prompts()]
    assert [list(c.ids) for c in greedy(model, [SampleRequest(ids, 1) for ids in prompts()])] == expected
    assert expected != [generate(build("llama"), ids) for ids in prompts()]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
@pytest.mark.parametrize("method", [m if m in FAST else pytest.param(m, marks=pytest.mark.medium) for m in METHODS])
def test_packed_gradients_are_those_of_single_rows(method: str, checkpointing: bool | None) -> None:
    assert why_not_packed(adapted(method), PackedPolicy()) == []
    with in_double():
        model = adapted(method).double().train()
        slow = run_slowly(model)
        assert set(slow.gradients) == {name for name, weight in model.named_parameters() if weight.requires_grad}
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        assert_same(run_packed(model, PackedPolicy()), slow, 1e-9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_the_reference_is_the_adapter_as_it_was(method: str) -> None:
    model = adapted(method)
    before = logits(model)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    add_reference_adapter(model)
    assert torch.equal(logits(model), before)
    shake(model, 1.0)
    after = logits(model)
    assert differ(after, before)
    with reference_policy(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == trained


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_of_a_new_adapter_is_the_model_it_began_as(method: str) -> None:
    base = logits(build("llama"))
    torch.manual_seed(0)
    model: Any = add_adapter(build("llama"), METHODS[method]()).eval()
    start = logits(model)
    prepare_adapters(model, is_new=True, has_reference=True)
    shake(model, 1.0)
    assert differ(logits(model), start)
    with reference_policy(model):
        kept = logits(model)
    takes_from_the_base = method in ("pissa", "olora")
    assert ("ref" in model.peft_config) == takes_from_the_base
    assert torch.equal(kept, start if takes_from_the_base else base)
    assert (kept - base).abs().max() < 1e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", METHODS)
def test_plain_peft_loads_what_was_saved(method: str, tmp_path: Path) -> None:
    model = adapted(method)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build("llama"), tmp_path).eval()
    assert (logits(loaded) - logits(model)).abs().max() < 1e-5
    assert differ(logits(loaded), logits(build("llama")))


# ---- what is refused


@pytest.mark.parametrize("kind", VIRTUAL)
def test_virtual_tokens_are_refused_by_name(kind: str) -> None:
    config = VIRTUAL[kind]()
    with pytest.raises(ConfigError, match=f"{type(config).__name__} learns virtual tokens .* Use LoRA"):
        add_adapter(build("llama"), config)
    model = peft.get_peft_model(build("llama"), VIRTUAL[kind]())
    with pytest.raises(ConfigError, match="learns virtual tokens"):
        prepare_adapters(model, is_new=False, has_reference=False)


def test_ranks_that_move_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"AdaLoraConfig moves rank between layers .* Use LoraConfig"):
        add_adapter(build("llama"), adalora())
    model = peft.get_peft_model(build("llama"), adalora())
    with pytest.raises(ConfigError, match="AdaLoraConfig moves rank"):
        prepare_adapters(model, is_new=False, has_reference=False)


@pytest.mark.parametrize("is_new", [True, False])
def test_weights_of_the_base_that_are_trained_leave_no_reference(is_new: bool) -> None:
    """peft's `bias` trains the base model's own biases, which switching an adapter off does not bring back."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("qwen2"), config)
    prepare_adapters(model, is_new=is_new, has_reference=False)
    with pytest.raises(ConfigError, match=r"weights of the base model are trained .*bias.*Set beta=0, or freeze"):
        prepare_adapters(model, is_new=is_new, has_reference=True)


def test_an_adapter_that_was_loaded_to_be_used_only(tmp_path: Path) -> None:
    adapted("lora").save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"No weight of the model is trainable.*is_trainable=True"):
        reject_frozen(model)
    prepare_adapters(
        peft.PeftModel.from_pretrained(build("llama"), tmp_path, is_trainable=True), is_new=False, has_reference=True
    )


def test_several_active_adapters_are_refused() -> None:
    model = adapted("lora")
    model.add_adapter("second", METHODS["lora"]())
    model.base_model.set_adapter(["default", "second"])
    model.active_adapter = ["default", "second"]
    with pytest.raises(ConfigError, match=r"several active adapters .*default.*second.* activate the one to train"):
        prepare_adapters(model, is_new=False, has_reference=True)


def test_of_several_adapters_the_active_one_is_copied() -> None:
    model = adapted("lora")
    model.add_adapter("second", METHODS["lora"]())
    model.set_adapter("second")
    shake(model, 0.5)
    second = logits(model)
    prepare_adapters(model, is_new=False, has_reference=True)
    shake(model, 1.0)
    with reference_policy(model):
        assert torch.equal(logits(model), second)
    model.set_adapter("default")
    assert differ(logits(model), second)


def test_a_copy_that_is_not_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("lora")
    monkeypatch.setattr(peft, "set_peft_model_state_dict", lambda *args: None)
    with pytest.raises(ConfigError, match=r"No exact copy of the adapter .* LoraConfig .* Set beta=0"):
        add_reference_adapter(model)


# ---- the experts of a mixture


def on_experts(implementation: str) -> Any:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = experts("mixtral")
        model.set_experts_implementation(implementation)
        model = peft.get_peft_model(model, config)
        shake(model, 0.1)
    return model.eval()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_an_adapter_on_experts(implementation: str) -> None:
    model, questions = on_experts(implementation), [[5], [5, 6], [9, 8, 7], list(range(30, 42))]
    assert trial(model) is None
    assert why_not_packed(model, PackedPolicy()) == []
    expected = [generate(model, ids) for ids in questions]
    assert [list(c.ids) for c in greedy(model, [SampleRequest(ids, 1) for ids in questions])] == expected
    assert expected != [generate(experts("mixtral"), ids) for ids in questions]
    before = logits(model)
    add_reference_adapter(model)
    shake(model, 1.0)
    assert differ(logits(model), before)
    with reference_policy(model):
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
def test_packed_gradients_of_an_adapter_on_experts(checkpointing: bool | None) -> None:
    with in_double():
        model = on_experts("eager").double().train()
        slow = run_slowly(model)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        assert_same(run_packed(model, PackedPolicy()), slow, 1e-9)
