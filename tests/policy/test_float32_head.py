"""A head in float32: in training, as a reference, while sampling; tied or not, under autocast or in half precision."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gruppo import GRPOTrainer
from gruppo.engine.engine import Engine
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.support import trial
from gruppo.errors import ConfigError
from gruppo.policy.float32_head import Float32Head, cast_head
from gruppo.policy.head import ModelHead
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.policy.support import why_not_packed
from gruppo.types import SampleRequest
from tests.engine.models import build
from tests.helpers import tiny_model
from tests.policy.twins import RAGGED, altered, assert_same, in_double, run_packed, run_slowly
from tests.trainer.runs import SaveAt, logs, make

IDS = torch.tensor([[9, 10, 11, 12, 13, 14]])
TIED = [False, True]


def half(tied: bool, dtype: torch.dtype = torch.bfloat16) -> Any:
    return altered("llama", tie_word_embeddings=tied).to(dtype)


def hidden_states(model: Any) -> Tensor:
    with torch.no_grad():
        return model.model(input_ids=IDS).last_hidden_state


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tied", TIED)
def test_logits_are_products_in_float32(tied: bool, autocast: bool) -> None:
    model = half(tied, torch.float32 if autocast else torch.bfloat16)
    cast_head(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=IDS).logits
        hidden = hidden_states(model)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, hidden.float() @ model.lm_head.weight.T)
    rounded = (hidden.bfloat16() @ model.lm_head.weight.bfloat16().T).float()
    assert (logits - rounded).abs().max() > 1e-4


def test_what_tied_embeddings_return_stays_narrow() -> None:
    plain, model = half(True), half(True)
    cast_head(model)
    embedding = model.get_input_embeddings()
    assert embedding.weight is model.lm_head.weight
    assert embedding.weight.dtype == torch.float32
    assert embedding(IDS).dtype == torch.bfloat16
    assert torch.equal(hidden_states(model), hidden_states(plain))
    wide = copy.deepcopy(model).float()  # as the parity check makes one
    assert wide.get_input_embeddings()(IDS).dtype == torch.float32
    assert wide(input_ids=IDS).logits.dtype == torch.float32
    assert type(embedding).__name__ == "Embedding"
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}


def test_casting_twice_is_casting_once() -> None:
    model = half(True)
    cast_head(model)
    before = model(input_ids=IDS).logits
    cast_head(model)
    assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["plain", "tied", "bias"])
def test_packed_rows_run_the_same_head(kind: str, fused: bool) -> None:
    """In float64 it is the head as ever; in half precision no further off than the rows themselves."""
    model = {"plain": lambda: build("llama"), "tied": lambda: half(True).float(), "bias": lambda: build("gpt-neox")}[
        kind
    ]()
    cast_head(model)
    assert ModelHead.of(model).linear is not None
    with in_double():
        model = model.double().train()
        assert_same(run_packed(model, PackedPolicy(fused_head=fused)), run_slowly(model), 1e-9)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("autocast", [False, True])
def test_packed_rows_leave_mixed_precision_too(autocast: bool, tied: bool, fused: bool) -> None:
    model = half(tied, torch.float32 if autocast else torch.bfloat16)
    cast_head(model)
    policy = PackedPolicy(fused_head=fused, autocast_dtype=torch.bfloat16 if autocast else None)
    assert why_not_packed(model, policy) == []
    (pack,) = Packer(RAGGED.batch).packs(range(len(RAGGED.batch)), 10**6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        head = ModelHead.of(model)
        states = torch.randn(5, 32).bfloat16()
        targets = torch.arange(5)
        options: dict[str, Any] = dict(temperature=1.0, entropy=False, entropy_gradient=False)
        found = head.scores(states, targets, head.module.forward, fused=fused, dtype=policy.autocast_dtype, **options)
        with policy.active(model):
            assert policy.score(model, pack).logps.dtype == torch.float32
    expected = (states.float() @ model.lm_head.weight.float().T).log_softmax(-1)[targets, targets]
    assert (found.logps - expected).abs().max() < 1e-5


# ---- the engine


def drift(model: Any) -> float:
    """Mean |difference| between the log-probs that were sampled with and those of a forward pass of whole rows."""
    settings = SamplingSettings(max_new_tokens=24)
    prompts = [[5, 6, 7], [20, 21], [40] * 9]
    completions = Engine(lambda: model).sample(
        [SampleRequest(ids, 8, noise_key=i) for i, ids in enumerate(prompts)], settings
    )
    total, count = 0.0, 0
    for i, completion in enumerate(completions):
        ids = torch.tensor([prompts[i // 8] + list(completion.ids)])
        with torch.no_grad():
            logps = score_tokens(model, ids, torch.ones_like(ids), len(completion.ids)).logps_BT[0]
        total += (logps - torch.tensor(completion.logps)).abs().sum().item()
        count += len(completion.ids)
    return total / count


@pytest.mark.parametrize("tied", TIED)
def test_sampler_and_trainer_agree_better_than_in_half_precision(tied: bool) -> None:
    plain, wide = half(tied), half(tied)
    cast_head(wide)
    assert trial(wide) is None
    assert drift(wide) < drift(plain)


@pytest.mark.parametrize("tied", TIED)
def test_under_autocast_the_engine_keeps_no_narrow_copy_of_the_head(tied: bool) -> None:
    model = half(tied, torch.float32)
    cast_head(model)
    engine = Engine(lambda: model, autocast_dtype=torch.bfloat16)
    (completion,) = engine.sample([SampleRequest([5, 6, 7], 1)], SamplingSettings(max_new_tokens=4, greedy=True))
    assert engine._shadow is not None
    assert model.lm_head not in engine._shadow.linears
    ids = torch.tensor([[5, 6, 7, *completion.ids]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logps = score_tokens(model, ids, torch.ones_like(ids), 4).logps_BT[0]
    assert logps.tolist() == pytest.approx(list(completion.logps), abs=0.05)
    assert trial(model, autocast_dtype=torch.bfloat16) is None


# ---- adapters and the trainer


def test_a_head_that_is_trained_in_full_is_cast_with_its_copies() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(half(False), config)
    cast_head(model)
    head = model.get_base_model().get_output_embeddings()
    assert [type(part) for part in (head.original_module, head.modules_to_save["default"])] == [Float32Head] * 2
    assert model(input_ids=IDS).logits.dtype == torch.float32
    assert ModelHead.of(model).linear is not None


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"cast_lm_head_to_fp32=True needs .* Linear from peft.*target_modules"):
        make(tmp_path, peft_config=config, cast_lm_head_to_fp32=True)


@pytest.mark.parametrize("precision", ["bf16", "bfloat16"])
@pytest.mark.parametrize("tied", TIED)
def test_a_run(tied: bool, precision: str, tmp_path: Path) -> None:
    """Under autocast and in pure bfloat16: trained, sampled, with a reference, resumed to the same weights."""
    dtype = torch.float32 if precision == "bf16" else torch.bfloat16

    def trainer(folder: Path, **more: Any) -> Any:
        model = tiny_model(tie_word_embeddings=tied).to(dtype)
        settings = {"bf16": precision == "bf16", "beta": 0.1, "max_steps": 3, "learning_rate": 0.01}
        return make(folder, GRPOTrainer, model=model, cast_lm_head_to_fp32=True, **settings, **more)

    first = trainer(tmp_path, callbacks=[SaveAt(2)])
    assert first.backend.name == "builtin"
    assert first.packed is not None
    heads = [first.model.lm_head, first.ref_model.lm_head]
    assert all(type(head) is Float32Head and head.weight.dtype == torch.float32 for head in heads)
    first.train()
    assert all(log["grad_norm"] > 0 for log in logs(first))
    assert logs(first)[0]["sampling/sampling_logp_difference/mean"] < 0.02
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, weight), other in zip(first.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
    first.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, first.model.lm_head.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tied", TIED)
def test_on_cuda(tied: bool, autocast: bool, tmp_path: Path) -> None:
    """Sampler and trainer agree better than with a head in bfloat16."""
    drifts = []
    for wide in (True, False):
        model = tiny_model(tie_word_embeddings=tied).to(torch.float32 if autocast else torch.bfloat16)
        settings = {"use_cpu": False, "bf16": autocast, "max_steps": 2, "max_completion_length": 32}
        trainer = make(tmp_path / str(wide), GRPOTrainer, model=model, cast_lm_head_to_fp32=wide, **settings)
        assert trainer.backend.name == "builtin"
        assert trainer.packed is not None
        trainer.train()
        assert all(log["grad_norm"] > 0 for log in logs(trainer))
        drifts.append(logs(trainer)[0]["sampling/sampling_logp_difference/mean"])
    assert drifts[0] < drifts[1]
