"""Which weights are evaluated, and with what sampler."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.errors import ConfigError
from gruppo.evaluation.models import decoding_config, load_subject, make_backend, weights_fingerprint
from gruppo.types import SampleRequest
from tests.evaluation.demo import model, save_model, tokenizer
from tests.rollout.vllm_doubles import saved_model
from tests.rollout.vllm_package import FakeLLM, fake_vllm


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_model(tmp_path / "base")
    adapted = peft.get_peft_model(
        load_subject(base).model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    subject = load_subject(tmp_path / "adapter")
    assert not hasattr(subject.model, "peft_config")
    assert len(subject.tokenizer) == len(tokenizer()), "that of the base"
    torch.testing.assert_close(subject.model(ids).logits, adapted.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    assert weights_fingerprint(subject.model) != weights_fingerprint(load_subject(base).model)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None], ids=["an empty folder", "nothing"])
def test_what_is_no_model_is_told(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "thing")
    with pytest.raises(ConfigError, match=r"holds neither a model|could not be loaded by name"):
        load_subject(str(tmp_path / "thing"))


def test_the_precision(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    assert load_subject(folder).dtype == "float32", "on a CPU"
    assert load_subject(folder, dtype="bfloat16").dtype == "bfloat16"
    for wrong in ("half-ish", "int8"):
        with pytest.raises(ConfigError, match=f"dtype='{wrong}'"):
            load_subject(folder, dtype=wrong)


def test_the_fingerprint_sees_every_tensor() -> None:
    changed = model()
    seen = {weights_fingerprint(changed)}
    tensors = changed.state_dict()
    for place, tensor in enumerate(tensors.values()):
        tensor.view(-1)[-1 - place % len(tensor)] += 1e-4
        seen.add(weights_fingerprint(changed))
    assert len(seen) == 1 + len(tensors)


def test_the_fingerprint_sees_where_a_value_stands() -> None:
    changed = model()
    before = weights_fingerprint(changed)
    weight = changed.get_input_embeddings().weight.data
    weight[[3, 4]] = weight[[4, 3]]
    assert weights_fingerprint(changed) != before
    weight[[3, 4]] = weight[[4, 3]]
    assert weights_fingerprint(changed) == before


def test_the_fingerprint_sees_adapters_and_how_they_are_used() -> None:
    peft = pytest.importorskip("peft")
    plain = weights_fingerprint(model())
    assert plain == "7f80d093708a2437", "records and folders of earlier versions have it"
    adapted = peft.get_peft_model(model(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    seen = [weights_fingerprint(adapted)]
    changed = [tensor for name, tensor in adapted.state_dict().items() if "lora_" in name]
    for tensor in changed:
        tensor.view(-1)[-1] += 1e-3
        seen.append(weights_fingerprint(adapted))
    layer = next(each for each in adapted.modules() if hasattr(each, "lora_A"))
    layer.scaling["default"] *= 2
    seen.append(weights_fingerprint(adapted))
    with adapted.disable_adapter():
        seen.append(weights_fingerprint(adapted))
    assert len({plain, *seen}) == 1 + len(seen) > 4
    assert weights_fingerprint(adapted, adapters=False) == plain, "what training began with"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"cut"),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "config.json").write_text('{"model_type": "no_such_model"}'),
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    ],
    ids=["cut weights", "no JSON", "an unknown kind", "no tokenizer"],
)
def test_a_broken_folder_is_told(tmp_path: Path, spoil: Any) -> None:
    spoil(save_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match="model' could not be loaded: "):
        load_subject(tmp_path / "model")


def test_the_size_in_words() -> None:
    subject = load_subject(model(), tokenizer())
    count = sum(parameter.numel() for parameter in subject.model.parameters())
    assert subject.size == f"{count / 1e6:.0f}M"


def test_the_callers_tokenizer_is_left_alone() -> None:
    own = tokenizer()
    own.pad_token = None
    assert load_subject(model(), own).tokenizer.pad_token == own.eos_token
    assert own.pad_token is None


def test_auto_falls_back_and_builtin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gruppo.rollout.builtin.why_not", lambda *_: ["it has layers of its own"])
    subject = load_subject(model(), tokenizer())
    assert make_backend(subject).name == "transformers"
    with pytest.raises(ConfigError, match="cannot sample from this model: it has layers of its own"):
        make_backend(subject, "builtin")


def test_a_tokenizer_must_fit(tmp_path: Path) -> None:
    large = tokenizer()
    large.add_tokens([f"<extra{i}>" for i in range(5000)])
    with pytest.raises(ConfigError, match="tokens but the model embeds only"):
        load_subject(model(), large)


def test_vllm_samples_with_the_weights_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_vllm().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeLLM, "made", [])
    subject = load_subject(str(saved_model(tmp_path / "model", seed=3)), dtype="float32", device="cpu")
    backend = make_backend(subject, "vllm")
    backend.config = decoding_config(subject.tokenizer, [1], max_new_tokens=4)
    first, second = backend.sample([SampleRequest([9, 10], 2)])
    expected = subject.model.generate(torch.tensor([[9, 10]]), max_new_tokens=4, do_sample=False)[0, 2:].tolist()
    assert first.ids == second.ids == expected
    assert first.logps is None
    (engine,) = FakeLLM.made
    assert (engine.arguments["dtype"], engine.arguments["gpu_memory_utilization"]) == ("float32", 0.5)
