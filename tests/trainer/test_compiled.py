"""Compiled models: sampled from, trained, saved under their own names, resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from gruppo import GRPOTrainer
from gruppo.engine.support import trial
from gruppo.errors import ConfigError
from gruppo.policy.inplace import compiled_modules
from gruppo.policy.loading import compiled_in_place
from gruppo.policy.packed import PackedPolicy
from tests.engine.models import build
from tests.helpers import tiny_model
from tests.policy.twins import assert_same, in_double, run_packed, run_slowly
from tests.trainer.runs import RecordedGRPO, SaveAt, logs, make

IDS = torch.tensor([[9, 10, 11, 12]])
SETTINGS: dict[str, Any] = {"learning_rate": 0.05, "max_steps": 3, "beta": 0.1}


class Counting:
    """A backend that compiles nothing and counts the graphs it was asked for and the runs of them."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def layers_compiled(backend: Any) -> Any:
    model = tiny_model()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


def layers_wrapped(backend: Any) -> Any:
    model = tiny_model()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend=backend)
    return model


def in_place(backend: Any) -> Any:
    model = tiny_model()
    model.compile(backend=backend)
    return model


TIERED = [
    "torch.compile",
    *(
        pytest.param(way, marks=pytest.mark.medium)
        for way in ("model.compile", "layer.compile", "torch.compile(layer)")
    ),
]
WAYS: dict[str, Callable[[Any], Any]] = {
    "torch.compile": lambda backend: torch.compile(tiny_model(), backend=backend),
    "model.compile": in_place,
    "layer.compile": layers_compiled,
    "torch.compile(layer)": layers_wrapped,
}


def weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", TIERED)
def test_a_compiled_model_is_trained_as_a_plain_one(way: str, tmp_path: Path) -> None:
    backend = Counting()
    trainer = make(tmp_path / "a", RecordedGRPO, model=WAYS[way](backend), **SETTINGS)
    assert trainer.packed is None
    assert trainer.backend.name == "builtin"
    before = backend.runs
    trainer.train()
    assert backend.runs > before, "nothing compiled was run"
    plain = make(tmp_path / "b", RecordedGRPO, packed_update=False, **SETTINGS)
    plain.train()
    for name, weight in weights(plain.model).items():
        assert torch.allclose(weights(trainer.model)[name], weight, atol=1e-5), name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", TIERED)
def test_it_is_saved_under_its_own_names_and_resumed(way: str, tmp_path: Path) -> None:
    first = make(tmp_path, GRPOTrainer, model=WAYS[way]("eager"), callbacks=[SaveAt(2)], **SETTINGS)
    first.train()
    first.save_model(str(tmp_path / "final"))
    names = set(tiny_model().state_dict())
    for folder in (tmp_path / "checkpoint-2", tmp_path / "final"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert set(file.keys()) == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    first.model.eval()
    with torch.no_grad():
        assert (loaded(input_ids=IDS).logits - first.model(input_ids=IDS).logits).abs().max() < 1e-5
    again = make(tmp_path / "again", GRPOTrainer, model=WAYS[way]("eager"), **SETTINGS)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in weights(first.model).items():
        assert torch.equal(weights(again.model)[name], weight), name


@pytest.mark.sampled(2)
@pytest.mark.medium
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_setting(backend: str, tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": backend, **SETTINGS}
    first = make(tmp_path, GRPOTrainer, callbacks=[SaveAt(2)], **settings)
    assert first.packed is None
    assert first.backend.name == "builtin"
    first.train()
    assert hasattr(first.model_wrapped, "_orig_mod")
    assert all(log["grad_norm"] > 0 for log in logs(first))
    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tiny_model().state_dict())
    again = make(tmp_path / "again", GRPOTrainer, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in weights(first.model).items():
        assert torch.equal(weights(again.model)[name], weight), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compiled", ["whole", pytest.param("layers", marks=pytest.mark.medium)])
def test_engine_and_packed_rows_leave_compiled_code_aside(compiled: str) -> None:
    backend, model = Counting(), build("llama")
    for module in [model] if compiled == "whole" else model.model.layers:
        module.compile(backend=backend)
    assert trial(model) is None
    with in_double():
        model = model.double().train()
        slow = run_slowly(model)
        before = backend.runs
        assert before > 0
        assert_same(run_packed(model, PackedPolicy()), slow, 1e-9)
    assert backend.runs == before
    assert len(compiled_modules(model)) == (1 if compiled == "whole" else 3), "it comes back"


@pytest.mark.medium
def test_a_compiled_model_with_adapters(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"compiled without an adapter.*torch_compile=True"):
        make(tmp_path, model=torch.compile(tiny_model(), backend="eager"), peft_config=config)
    model = torch.compile(peft.get_peft_model(tiny_model(), config), backend="eager")
    trainer = make(tmp_path, GRPOTrainer, model=model, **SETTINGS)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "final").eval()
    trainer.model.eval()
    with torch.no_grad():
        assert (loaded(input_ids=IDS).logits - trainer.model(input_ids=IDS).logits).abs().max() < 1e-5


def test_what_is_not_compiled_stays_what_it_is() -> None:
    model = tiny_model()
    assert compiled_in_place(model) is model
    assert compiled_modules(model) == []
