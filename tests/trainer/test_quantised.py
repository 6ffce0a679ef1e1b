"""Quantised models with an adapter on top: a stand-in, and bitsandbytes itself as far as it trains on a CPU."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.engine.support import trial
from gruppo.errors import ConfigError
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.quantised import is_quantised, narrow_adapters, with_quantisation
from gruppo.policy.support import why_not_packed
from gruppo.types import SampleRequest
from tests.engine.models import build
from tests.engine.test_models import generate, greedy, prompts
from tests.helpers import base_args, length_reward, tiny_model, tiny_tokenizer
from tests.helpers import prompts as rows
from tests.policy.methods import METHODS, shake
from tests.policy.packed_weights import PackedLinear, TinyInt8Config, packed
from tests.policy.twins import assert_same, in_double, run_packed, run_slowly
from tests.trainer.runs import SaveAt, logs, make

IDS = torch.tensor([[9, 10, 11, 12]])
SETTINGS: dict[str, Any] = {"max_steps": 3, "learning_rate": 0.05, "beta": 0.1, "rollout_backend": "builtin"}


@pytest.fixture
def base(tmp_path: Path) -> str:
    folder = str(tmp_path / "base")
    tiny_model(hidden_size=32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trainer_of(
    model: Any, folder: Path, trainer_class: Any = GRPOTrainer, *, peft_config: Any = None, **more: Any
) -> Any:
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    given = {key: more.pop(key) for key in ("quantization_config", "callbacks") if key in more}
    return trainer_class(
        model=model,
        reward_funcs=length_reward,
        args=config(**base_args(folder, **(SETTINGS | more))),
        train_dataset=rows(8),
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
        **given,
    )


def adapted(method: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = peft.get_peft_model(packed(build("llama")), METHODS[method]())
        shake(model)
    return model.eval()


def trained_weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


# ---- engine and packed rows


@pytest.mark.parametrize("method", ["lora", "dora", "modules_to_save"])
def test_the_engine_runs_packed_weights_as_they_are(method: str) -> None:
    model = adapted(method)
    assert trial(model) is None
    expected = [generate(model, ids) for ids in prompts()]
    assert [list(c.ids) for c in greedy(model, [SampleRequest(ids, 1) for ids in prompts()])] == expected
    assert trial(model, autocast_dtype=torch.bfloat16) is None


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_packed_gradients_are_those_of_single_rows(reentrant: bool | None) -> None:
    assert why_not_packed(adapted("lora"), PackedPolicy()) == []
    with in_double():
        model = adapted("lora").double().train()
        slow = run_slowly(model)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        assert_same(run_packed(model, PackedPolicy()), slow, 1e-9)


def test_packed_mlps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gruppo.policy.fusion import fused_swaps

    swaps = fused_swaps(adapted("lora"), {torch.float32}, everything=True)
    assert not any(type(swap.owner).__name__ == "LlamaMLP" for swap in swaps)
    assert any(
        type(swap.owner).__name__ == "LlamaMLP"
        for swap in fused_swaps(build("llama"), {torch.float32}, everything=True)
    )


# ---- runs


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "argument": lambda: {"quantization_config": TinyInt8Config()},
    "model_init_kwargs": lambda: {"model_init_kwargs": {"quantization_config": TinyInt8Config()}},
    "a dict": lambda: {"model_init_kwargs": {"quantization_config": {"quant_method": "tiny_int8"}}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_a_run(trainer_class: Any, way: str, base: str, tmp_path: Path) -> None:
    def made(folder: str, **more: Any) -> Any:
        return trainer_of(base, tmp_path / folder, trainer_class, peft_config=METHODS["lora"](), **WAYS[way](), **more)

    first = made("run", callbacks=[SaveAt(2)])
    assert is_quantised(first.model)
    assert type(first.model.get_base_model().model.layers[0].mlp.up_proj) is PackedLinear
    assert {weight.dtype for weight in trained_weights(first.model).values()} == {torch.bfloat16}
    assert first.packed is not None
    assert first.backend.name == "builtin"
    assert first.ref_model is None
    before = {name: weight.clone() for name, weight in first.model.named_parameters()}
    first.train()
    straight = trained_weights(first.model)
    changed = {name for name, weight in first.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == set(straight)
    assert abs(logs(first)[0]["kl"]) < 1e-5 < abs(logs(first)[2]["kl"])
    again = made("again")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, weight in trained_weights(again.model).items():
        assert torch.equal(straight[name], weight), name
    assert not (tmp_path / "run" / "checkpoint-2" / "model.safetensors").exists()
    first.save_model(str(tmp_path / "final"))
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=TinyInt8Config())
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "final").eval()
    kept = dict(loaded.named_parameters())  # in float32, as peft has it
    assert all(torch.equal(kept[name], weight.float()) for name, weight in straight.items())
    first.model.eval()
    with torch.no_grad():
        assert (loaded(input_ids=IDS).logits - first.model(input_ids=IDS).logits).abs().max() < 5e-3


def test_a_passed_model(tmp_path: Path) -> None:
    """Its adapter has a past: the reference is a copy of it."""
    model = peft.get_peft_model(packed(tiny_model(hidden_size=32)), METHODS["dora"]())
    shake(model)
    trainer = make(tmp_path, GRPOTrainer, model=model, **SETTINGS)
    kinds = {"magnitude" in name: weight.dtype for name, weight in trained_weights(trainer.model).items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    trainer.train()
    assert logs(trainer)[0]["kl"] == 0.0
    assert logs(trainer)[2]["kl"] > 1e-5


@pytest.mark.parametrize("bits", [4, 8, None])
def test_trained_weights_are_narrow_in_4_and_8_bits_only(bits: int | None) -> None:
    model = peft.get_peft_model(tiny_model(), METHODS["lora"]())
    if bits is not None:
        setattr(model.get_base_model(), f"is_loaded_in_{bits}bit", True)
    narrow_adapters(model)
    kinds = {weight.dtype for weight in trained_weights(model).values()}
    assert kinds == {torch.float32 if bits is None else torch.bfloat16}
    assert model.get_base_model().lm_head.weight.dtype == torch.float32


TYPES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "rank 1": (lambda: peft.LoraConfig(r=1, target_modules=["q_proj", "embed_tokens"]), set()),
    "a bias of LoRA": (lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True), set()),
    "DoRA of rank 1": (lambda: peft.LoraConfig(r=1, target_modules=["q_proj"], use_dora=True), {"magnitude"}),
    "(IA)3": (lambda: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]), {""}),
    "a norm": (lambda: peft.LoraConfig(r=1, target_modules=["q_proj"], modules_to_save=["norm"]), {"norm"}),
    "a head": (lambda: peft.LoraConfig(r=1, target_modules=["q_proj"], modules_to_save=["lm_head"]), {"lm_head"}),
}


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_are_narrow_and_vectors_are_not(kind: str) -> None:
    """At rank 1 a matrix of LoRA has the shape of a scale of (IA)³."""
    config, wide = TYPES[kind]
    model = peft.get_peft_model(tiny_model(), config())
    model.get_base_model().is_loaded_in_8bit = True
    model.gate = torch.nn.Parameter(torch.tensor(1.0))  # a vector of no dimensions
    narrow_adapters(model)
    kinds = {name: weight.dtype for name, weight in trained_weights(model).items()}
    assert kinds.pop("gate") is torch.float32
    expected = {n: torch.float32 if any(part in n for part in wide) else torch.bfloat16 for n in kinds}
    assert kinds == expected


SMALL_STEPS: dict[str, Callable[[], Any]] = {
    "(IA)3": lambda: peft.IA3Config(target_modules=["q_proj", "v_proj"], feedforward_modules=[]),
    "a norm": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]),
}


@pytest.mark.parametrize("kind", SMALL_STEPS)
def test_weights_near_one_take_small_steps(kind: str, base: str, tmp_path: Path) -> None:
    """In bfloat16 they would be rounded away, and nothing be trained."""
    adapter = {"peft_config": SMALL_STEPS[kind](), "quantization_config": bits("8-bit"), "use_cpu": True}
    trainer = trainer_of(base, tmp_path / "run", learning_rate=1e-5, max_steps=2, **adapter)
    before = {name: weight for name, weight in trained_weights(trainer.model).items() if "lora" not in name}
    trainer.train()
    after = trained_weights(trainer.model)
    assert before
    assert [name for name, weight in before.items() if torch.equal(after[name], weight)] == []


@pytest.mark.parametrize("feedforward", [[], ["down_proj"]])
def test_scales_on_eight_bits_in_bfloat16(feedforward: list[str], base: str, tmp_path: Path) -> None:
    """peft returns float32 from them, whatever goes in: attention would have keys of another type than queries."""
    adapter = peft.IA3Config(target_modules=["q_proj", *feedforward], feedforward_modules=feedforward)
    settings: dict[str, Any] = {"model_init_kwargs": {"dtype": "bfloat16"}, "max_steps": 1, "use_cpu": True}
    trainer = trainer_of(base, tmp_path, peft_config=adapter, quantization_config=bits("8-bit"), **settings)
    before = trained_weights(trainer.model)
    assert trainer.packed is not None
    trainer.train()
    after = trained_weights(trainer.model)
    assert [name for name, weight in before.items() if torch.equal(after[name], weight)] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens", "lm_head"]])
def test_modules_trained_in_full_beside_eight_bits(modules: list[str], dtype: str, base: str, tmp_path: Path) -> None:
    """They have the dtype of those that they replace; everything that is fast stays so."""
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=modules)
    settings: dict[str, Any] = {"model_init_kwargs": {"dtype": dtype}, "bf16": True, "max_steps": 2, "use_cpu": True}
    trainer = trainer_of(base, tmp_path, peft_config=adapter, quantization_config=bits("8-bit"), **settings)
    before = {name: weight for name, weight in trained_weights(trainer.model).items() if "lora" not in name}
    assert len(before) == len(modules)
    assert {weight.dtype for weight in before.values()} == {getattr(torch, dtype)}
    assert (trainer.backend.name, trainer.packed is not None) == ("builtin", True)
    trainer.train()
    after = trained_weights(trainer.model)
    assert [name for name, weight in before.items() if torch.equal(after[name], weight)] == []


# ---- mistakes


def test_full_training_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is quantised.*Pass a peft_config"):
        trainer_of(base, tmp_path / "run", quantization_config=TinyInt8Config())


def test_two_places(base: str, tmp_path: Path) -> None:
    settings = {"quantization_config": TinyInt8Config(), **WAYS["model_init_kwargs"]()}
    with pytest.raises(ConfigError, match=r"quantization_config was given .* and in model_init_kwargs"):
        trainer_of(base, tmp_path / "run", peft_config=METHODS["lora"](), **settings)
    assert with_quantisation({"a": 1}, None) == {"a": 1}
    assert with_quantisation({"quantization_config": None}, 5) == {"quantization_config": 5}


def test_an_object_is_taken_as_it_is(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=TinyInt8Config())
    with caplog.at_level(logging.WARNING):
        trainer_of(model, tmp_path, peft_config=METHODS["lora"](), quantization_config=TinyInt8Config())
    assert "quantization_config is ignored: the model was passed as an object" in caplog.text


def test_an_object_that_is_not_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the LlamaForCausalLM was passed as an object, which is not quantised"):
        trainer_of(tiny_model(hidden_size=32), tmp_path, quantization_config=TinyInt8Config())


def test_compiled_and_quantised(tmp_path: Path) -> None:
    model = packed(tiny_model(hidden_size=32))
    model.is_quantized = True
    with pytest.raises(ConfigError, match=r"quantised model was compiled.*without torch.compile"):
        make(tmp_path, model=torch.compile(model, backend="eager"), peft_config=METHODS["lora"]())


# ---- bitsandbytes


def bits(kind: str) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "8-bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    nested = kind == "nested 4-bit"
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=nested,
    )


BITS = ["4-bit", "nested 4-bit", "8-bit"]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bitsandbytes(checkpointing: bool, tmp_path: Path) -> None:
    run_with_bitsandbytes("cpu", "8-bit", "lora", checkpointing, tmp_path)


@pytest.mark.parametrize("kind", ["4-bit", "nested 4-bit"])
def test_four_bits_on_a_cpu_are_refused(kind: str, base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4-bit weights on a CPU"):
        trainer_of(base, tmp_path, peft_config=METHODS["lora"](), quantization_config=bits(kind), bf16=True)


def test_dora_on_eight_bits_on_a_cpu_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DoRA on 8-bit weights does not work on a CPU"):
        trainer_of(base, tmp_path, peft_config=METHODS["dora"](), quantization_config=bits("8-bit"), bf16=True)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("kind", BITS)
def test_bitsandbytes_on_a_gpu(kind: str, method: str, checkpointing: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    run_with_bitsandbytes("cuda", kind, method, checkpointing, tmp_path)


def packed_bits(model: Any) -> dict[str, torch.Tensor]:
    """All that bitsandbytes keeps of the base's weights."""
    found = {}
    for name, weight in model.named_parameters():
        if (state := getattr(weight, "quant_state", None)) is not None:
            parts = {"packed": weight.data, **state.as_dict()}
        elif weight.dtype is torch.int8:
            parts = {"packed": weight.data}  # its scales move elsewhere when it is first used
        else:
            continue
        values = {part: value for part, value in parts.items() if not isinstance(value, str | tuple)}
        found |= {f"{name}.{part}": torch.as_tensor(value) for part, value in values.items()}
    return found


def repeats_itself(model: Any, device: str) -> bool:
    """Whether the same tokens have the same logits each time, few of them and many."""
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        for ids in (IDS[:1, :1].to(device), IDS.to(device), IDS.repeat(16, 1).to(device)):
            logits = model(input_ids=ids).logits
            if not all(torch.equal(model(input_ids=ids).logits, logits) for _ in range(50)):
                return False
    return True


def run_with_bitsandbytes(device: str, kind: str, method: str, checkpointing: bool, tmp_path: Path) -> None:
    """The real thing: engine, packed rows, parity check, reference, resume, saved adapter."""
    folder = str(tmp_path / "base")
    size = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
    tiny_model(**size).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)

    def made(name: str, **more: Any) -> Any:
        settings = {"use_cpu": device == "cpu", "bf16": True, "gradient_checkpointing": checkpointing}
        settings |= {"rollout_backend": "auto"}
        config = METHODS[method]()
        return trainer_of(
            folder, tmp_path / name, peft_config=config, quantization_config=bits(kind), **settings, **more
        )

    first = made("run", callbacks=[SaveAt(2)])
    kinds = {"magnitude" in name: weight.dtype for name, weight in trained_weights(first.model).items()}
    assert kinds[False] is torch.bfloat16
    assert kinds.get(True, torch.float32) is torch.float32
    assert first.packed is not None
    assert first.backend.name == "builtin"
    first.train()
    straight = trained_weights(first.model)
    assert all(log["grad_norm"] > 0 for log in logs(first))
    again = made("again")
    packed, packed_again = packed_bits(first.model), packed_bits(again.model)
    assert packed
    assert [name for name, bits in packed_again.items() if not torch.equal(packed[name], bits)] == []
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    texts = [list(each.completion_logs["train"].columns["completion"])[-4:] for each in (first, again)]
    assert texts[0] == texts[1], "what was sampled after the checkpoint"
    differ = [name for name, weight in trained_weights(again.model).items() if not torch.equal(straight[name], weight)]
    assert differ == [], f"bitsandbytes' products repeat their own bits: {repeats_itself(first.model, device)}"
    first.save_model(str(tmp_path / "final"))
    plain = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits(kind), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "final").eval()
    first.model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        ours, theirs = (model(input_ids=IDS.to(device)).logits for model in (first.model, loaded))
    assert (ours - theirs).abs().max() < 1e-2
