"""Adapters: what is trained, what the reference is, and what a checkpoint holds."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from gruppo import GRPOTrainer, RLOOTrainer
from tests.helpers import length_reward, prompts, tiny_model
from tests.trainer.runs import RecordedGRPO, RecordedRLOO, SaveAt, logs, make, run, slow_scores

peft = pytest.importorskip("peft")

BOTH = pytest.mark.parametrize("trainer_class", [RecordedGRPO, RecordedRLOO])


def lora(**kwargs: Any) -> Any:
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(settings | kwargs))


def adapted(seed: int = 1, name: str = "default", **kwargs: Any) -> Any:
    """A tiny model whose adapter is not neutral, as one has it after some earlier training."""
    model = peft.get_peft_model(tiny_model(), lora(**kwargs), adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "lora_" in weight_name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    return model


def weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def adapter(model: Any, name: str = "default") -> dict[str, Tensor]:
    return {key.replace(f".{name}.", "."): w for key, w in weights(model).items() if f".{name}." in key}


def policy_of(kind: str) -> dict[str, Any]:
    return {"peft_config": lora()} if kind == "config" else {"model": adapted()}


@BOTH
@pytest.mark.parametrize("kind", ["config", "model"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_only_the_adapter_is_trained(trainer_class: Any, kind: str, checkpointing: bool, tmp_path: Path) -> None:
    trainer = make(
        tmp_path, trainer_class, **policy_of(kind), beta=0.1, gradient_checkpointing=checkpointing, max_steps=2
    )
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".default." in name}
    assert all(log["grad_norm"] > 0 for log in logs(trainer))
    assert trainer.ref_model is None
    assert trainer.model.active_adapter == "default"


def test_checkpointing_does_not_change_the_update(tmp_path: Path) -> None:
    settings = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 1, "max_grad_norm": 0.0}
    plain = run(tmp_path, model=adapted(), **settings)
    saved = run(tmp_path, model=adapted(), gradient_checkpointing=True, **settings)
    for name, weight in adapter(plain.model).items():
        assert torch.allclose(weight, adapter(saved.model)[name], atol=1e-7)
        assert not torch.equal(weight, adapter(adapted())[name])


def reference_logps(trainer: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, completion and reference log-probs of each row of a generation."""
    batch = trainer.collect(list(trainer.rows_of(0)))
    rows = []
    for i in range(len(batch)):
        ids = batch.completion_ids[i][batch.completion_mask[i].bool()].tolist()
        prompt = batch.prompt_ids[i][batch.prompt_mask[i].bool()].tolist()
        rows.append((prompt, ids, batch.ref_per_token_logps[i][: len(ids)].tolist()))
    return rows


def test_the_reference_of_a_new_adapter_is_the_base_model(tmp_path: Path) -> None:
    trainer = run(tmp_path, peft_config=lora(), beta=0.1, max_steps=3, learning_rate=0.1)
    for prompt, ids, logps in reference_logps(trainer):
        expected, _ = slow_scores(tiny_model().eval(), prompt, ids)
        assert logps == pytest.approx(expected, abs=1e-5)
        moved, _ = slow_scores(trainer.model.eval(), prompt, ids)
        assert moved != pytest.approx(expected, abs=1e-3)


def test_the_reference_of_a_passed_adapter_is_its_frozen_copy(tmp_path: Path) -> None:
    trainer = run(tmp_path, model=adapted(), beta=0.1, max_steps=3, learning_rate=0.1)
    start, base = adapted().eval(), tiny_model().eval()
    for prompt, ids, logps in reference_logps(trainer):
        expected, _ = slow_scores(start, prompt, ids)
        assert logps == pytest.approx(expected, abs=1e-5)
        assert logps != pytest.approx(slow_scores(base, prompt, ids)[0], abs=1e-3)


@BOTH
def test_kl_begins_at_zero_and_grows(trainer_class: Any, tmp_path: Path) -> None:
    for kind in ("config", "model"):
        trainer = run(tmp_path, trainer_class, **policy_of(kind), beta=0.1, max_steps=3, learning_rate=0.1)
        first, second, third = (abs(log["kl"]) for log in logs(trainer))
        assert first < 1e-6
        assert min(second, third) > 1e-6


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, RLOOTrainer])
def test_without_kl_there_is_no_copy(trainer_class: Any, tmp_path: Path) -> None:
    trainer = make(tmp_path, trainer_class, model=adapted(), beta=0.0, max_completion_length=3, max_steps=1)
    assert list(trainer.model.peft_config) == ["default"]
    trainer.train()
    assert logs(trainer)[0]["grad_norm"] >= 0


@BOTH
@pytest.mark.parametrize("kind", ["config", "model"])
def test_plain_peft_loads_a_checkpoint(trainer_class: Any, kind: str, tmp_path: Path) -> None:
    trainer = run(
        tmp_path, trainer_class, **policy_of(kind), beta=0.1, max_steps=1, callbacks=[SaveAt(1)], learning_rate=0.1
    )
    trained = adapter(trainer.model)
    for folder in (tmp_path / "checkpoint-1", tmp_path / "final"):
        if folder.name == "final":
            trainer.save_model(str(folder))
        assert not (folder / "model.safetensors").exists()
        loaded = peft.PeftModel.from_pretrained(tiny_model(), folder)
        assert {n: w.tolist() for n, w in adapter(loaded).items()} == {n: w.tolist() for n, w in trained.items()}


@pytest.mark.parametrize(("kind", "beta"), [("config", 0.1), ("model", 0.0), ("model", 0.1)])
def test_a_resumed_run_goes_on_with_the_trained_adapter(kind: str, beta: float, tmp_path: Path) -> None:
    settings = {"beta": beta, "learning_rate": 0.1, "max_steps": 3, "optim": "sgd"}
    straight = run(tmp_path, **policy_of(kind), callbacks=[SaveAt(2)], **settings)
    resumed = make(tmp_path / "resumed", **policy_of(kind), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in adapter(straight.model).items():
        assert torch.allclose(adapter(resumed.model)[name], weight, atol=1e-6), name
    if "ref" in straight.model.peft_config:
        for name, weight in adapter(straight.model, "ref").items():
            assert torch.equal(adapter(resumed.model, "ref")[name], weight), name
        assert not any(w.requires_grad for n, w in resumed.model.named_parameters() if ".ref." in n)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("active", ["default", "second"])
def test_a_resumed_run_with_several_adapters(active: str, beta: float, tmp_path: Path) -> None:
    """The active one is trained; the others are saved and loaded as they are."""

    def both() -> Any:
        model = adapted()
        torch.manual_seed(5)
        model.add_adapter("second", lora(init_lora_weights=False))
        model.set_adapter(active)
        return model

    settings = {"beta": beta, "learning_rate": 0.1, "max_steps": 3}
    straight = run(tmp_path, model=both(), callbacks=[SaveAt(2)], **settings)
    resumed = make(tmp_path / "resumed", model=both(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name in ("default", "second"):
        found, expected, before = (adapter(m, name) for m in (resumed.model, straight.model, both()))
        assert all(torch.equal(found[key], weight) for key, weight in expected.items()), name
        assert all(torch.equal(before[key], weight) for key, weight in expected.items()) == (name != active)
    assert resumed.model.active_adapter == active


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_in_half_precision_stays_in_it(beta: float, tmp_path: Path) -> None:
    settings = {"learning_rate": 0.1, "max_steps": 3, "beta": beta}
    straight = run(tmp_path, model=adapted().bfloat16(), callbacks=[SaveAt(2)], **settings)
    resumed = make(tmp_path / "resumed", model=adapted().bfloat16(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in adapter(straight.model).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(adapter(resumed.model)[name], weight), name
    if beta:
        assert logs(straight)[0]["kl"] == 0.0
        copies = (adapter(trainer.model, "ref") for trainer in (straight, resumed))
        for (name, weight), again in zip(next(copies).items(), next(copies).values(), strict=True):
            assert torch.equal(weight, adapter(adapted().bfloat16())[name]), name
            assert torch.equal(weight, again)


@pytest.mark.parametrize("kind", ["config", "model"])
def test_the_best_adapter_is_loaded_at_the_end(kind: str, tmp_path: Path) -> None:
    adapters: dict[int, dict[str, Tensor]] = {}

    class Snapshots(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            adapters[state.global_step] = adapter(model)

    def staged(completions: Sequence[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        in_evaluation = len(completions) == 2
        return [float(trainer_state.global_step == 2)] * 2 if in_evaluation else length_reward(list(completions))

    trainer = run(
        tmp_path,
        **policy_of(kind),
        rewards=staged,
        callbacks=[Snapshots()],
        beta=0.1,
        eval_dataset=prompts(1),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        per_device_eval_batch_size=2,
        max_steps=3,
        learning_rate=0.1,
    )
    final = adapter(trainer.model)
    assert all(torch.equal(final[name], weight) for name, weight in adapters[2].items())
    assert not all(torch.equal(final[name], weight) for name, weight in adapters[3].items())


def test_modules_that_are_trained_in_full_are_part_of_the_reference(tmp_path: Path) -> None:
    model = adapted(modules_to_save=["lm_head"])
    start = copy.deepcopy(model).eval()
    trainer = run(tmp_path, model=model, beta=0.1, max_steps=2, learning_rate=0.1)
    for prompt, ids, logps in reference_logps(trainer):
        assert logps == pytest.approx(slow_scores(start, prompt, ids)[0], abs=1e-5)


def test_an_adapter_of_another_name(tmp_path: Path) -> None:
    trainer = run(tmp_path, model=adapted(name="policy"), beta=0.1, max_steps=2, learning_rate=0.1)
    assert logs(trainer)[1]["kl"] > 1e-6
    assert trainer.model.active_adapter == "policy"


def test_a_second_trainer_takes_the_adapter_as_it_is_then(tmp_path: Path) -> None:
    model = adapted()
    run(tmp_path, model=model, beta=0.1, max_steps=2, learning_rate=0.1)
    again = run(tmp_path, model=model, beta=0.1, max_steps=1)
    assert abs(logs(again)[0]["kl"]) < 1e-6


def test_dropout_of_the_adapter_is_off_while_sampling_and_scoring(tmp_path: Path) -> None:
    trainer = make(tmp_path, peft_config=lora(lora_dropout=0.9), num_iterations=2, max_steps=2, learning_rate=0.1)
    trainer.train()
    trainer.generations.clear()
    batch = trainer.collect(list(trainer.rows_of(0)))
    assert trainer.model.training
    policy = copy.deepcopy(trainer.model).eval()
    for i in range(len(batch)):
        ids = batch.completion_ids[i][batch.completion_mask[i].bool()].tolist()
        prompt = batch.prompt_ids[i][batch.prompt_mask[i].bool()].tolist()
        expected, _ = slow_scores(policy, prompt, ids)
        assert batch.old_per_token_logps[i][: len(ids)].tolist() == pytest.approx(expected, abs=1e-5)


def test_an_adapter_samples_with_its_own_weights(tmp_path: Path) -> None:
    """Greedy completions of the wrapped model are those of the merged one, and not those of its base."""
    trainer = make(
        tmp_path,
        GRPOTrainer,
        model=adapted(target_modules="all-linear"),
        dataset=prompts(4),
        generation_kwargs={"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
        max_completion_length=8,
    )
    prompt = trainer.processing_class("p0:")["input_ids"]
    (ids, *_), _ = trainer._generate_single_turn([prompt, prompt])

    def greedy(model: Any) -> list[int]:
        sequence = list(prompt)
        for _ in range(len(ids)):
            with torch.no_grad():
                sequence.append(int(model(input_ids=torch.tensor([sequence])).logits[0, -1].argmax()))
        return sequence[len(prompt) :]

    assert ids == greedy(adapted(target_modules="all-linear").merge_and_unload().eval())
    assert ids != greedy(tiny_model().eval())
