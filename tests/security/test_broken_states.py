"""The states in a checkpoint of a stranger: whatever is in them, a run resumes correctly or says what is wrong."""

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gruppo import BEMACallback, GRPOTrainer
from gruppo.errors import CheckpointError
from gruppo.runs import manifests
from gruppo.trainer.resume.forms import GENERATION, POSITION, RUN_STATE, TRAINER_STATE, check
from tests.helpers import prompts
from tests.security.test_checkpoints import adopt
from tests.trainer.runs import make
from tests.trainer.test_batching import stream

Values = Any
STATE, TENSORS = "run_state-00000.json", "run_state-00000.safetensors"


def trainer(folder: Path, **settings: Any) -> Any:
    """A run that is saved inside of a generation, with metrics that wait for a log."""
    usual = dict(steps_per_generation=4, logging_steps=3, dynamic_sampling=True, audit="warn")
    saving = dict(save_strategy="steps", save_steps=1, max_steps=2, callbacks=[BEMACallback(update_freq=1)])
    return make(folder, GRPOTrainer, **usual | saving | settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder


@pytest.fixture
def found(saved: Path, tmp_path: Path) -> Path:
    """A copy of the first checkpoint, in a folder of its own."""
    return shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1")


def resumes(checkpoint: Path, **settings: Any) -> bool:
    """Whether a run goes on from it to its end; False if it says what is wrong. Nothing else may happen."""
    adopt(checkpoint)
    run = trainer(checkpoint.parent, **settings)
    try:
        run.train(resume_from_checkpoint=str(checkpoint))
    except CheckpointError:
        return False
    assert run.state.global_step == 2
    assert all(weight.isfinite().all() for weight in run.model.parameters())
    return True


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps(change(values) or values))


def edit_tensors(path: Path, change: Callable[[Any], Any]) -> None:
    values = torch.load(path, weights_only=False)
    torch.save(change(values) or values, path)


# ---- every value of the JSON

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
MISSING = object()
WRONG = (None, "text", -1, 0.5, 10**12, 2**70, math.nan, math.inf, True, [], {}, [7], {"a": 7}, DEEP, MISSING)


LOOKED_AT = {  # of mappings with many names of one kind
    ("loop", "generation"): {*GENERATION, "num_beams", "pad_token_id"},
    ("parts", "metrics"): {"num_tokens", "reward", "prompts/seen", "dynamic_sampling/rounds"},
}


def places(value: Values, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value, mappings and lists included; of long lists only the first and the last."""
    yield at
    if isinstance(value, dict):
        for name, item in value.items():
            if name in LOOKED_AT.get(at, value):
                yield from places(item, (*at, name))
    elif isinstance(value, list) and value:
        for i in sorted({0, len(value) - 1}):
            yield from places(value[i], (*at, i))


def mutated(values: Values, at: tuple[Any, ...], wrong: Any) -> Values:
    if not at:
        return None if wrong is MISSING else wrong
    values = copy.deepcopy(values)
    inner = values
    for step in at[:-1]:
        inner = inner[step]
    if wrong is MISSING:
        del inner[at[-1]]
    else:
        inner[at[-1]] = wrong
    return values


def passing(values: Values, form: Any) -> list[Values]:
    """Mutations that have the form. Each is different from the original."""
    found = []
    for at in places(values):
        for wrong in WRONG:
            broken = mutated(values, at, wrong)
            try:
                check(broken, form, "file")
            except CheckpointError:
                continue
            if json.dumps(broken) != json.dumps(values):
                found.append(broken)
    return found


def test_the_checkpoint_can_be_resumed_from(found: Path) -> None:
    assert resumes(found)


@pytest.mark.medium
@pytest.mark.timeout(600)
def test_every_broken_value_of_a_state_is_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    """A form refuses most of them; with what it lets through a run goes on."""
    original = json.loads((saved / "checkpoint-1" / STATE).read_text())
    assert original["queue"], "the state is one from inside a generation"
    passed = passing(original, RUN_STATE)
    for number, broken in enumerate(passed[:: max(1, len(passed) // 60)]):
        checkpoint = shutil.copytree(saved / "checkpoint-1", tmp_path / f"{number}" / "checkpoint-1")
        (checkpoint / STATE).write_text(json.dumps(broken))
        resumes(checkpoint)
        shutil.rmtree(checkpoint.parent)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "", "7", "null", "\x80", '{"processes": 1}'])
@pytest.mark.parametrize("name", [STATE, "trainer_state.json"])
def test_what_is_no_state_is_refused(found: Path, name: str, content: str) -> None:
    (found / name).write_text(content, encoding="utf-8")
    assert not resumes(found)


def test_only_what_a_callback_may_change_comes_back(found: Path) -> None:
    def change(values: Any) -> None:
        values["loop"]["changed"] = {"temperature": 0.5}
        values["loop"]["generation"] |= {"num_beams": 7, "cache_implementation": "mine", "top_k": 3, "added": 1}

    edit(found / STATE, change)
    adopt(found)
    run = trainer(found.parent)
    run.train(resume_from_checkpoint=str(found))
    assert (run.temperature, run.backend.config.top_k) == (0.5, 3)
    assert not hasattr(run.backend.config, "added")
    assert run.backend.config.num_beams != 7
    assert run.backend.config.cache_implementation is None


@pytest.mark.parametrize("name", ["hub_model_id", "model", "args", "_queue", "train"])
def test_no_other_attribute_of_the_trainer_can_be_set(found: Path, name: str) -> None:
    edit(found / STATE, lambda values: values["loop"]["changed"].update({name: 1.0}))
    assert not resumes(found)


def test_a_weight_of_a_kl_that_the_run_has_no_reference_for_is_refused(found: Path) -> None:
    edit(found / STATE, lambda values: values["loop"]["changed"].update(beta=0.1))
    assert not resumes(found)


def test_a_plan_beyond_all_memory_is_made_anew(found: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(found / STATE, lambda values: values["parts"]["rollout"]["plan"].update(kv_tokens=10**12))
    assert resumes(found)
    assert "a new one is made" in caplog.text


@pytest.mark.parametrize("form", [TRAINER_STATE, POSITION])
def test_every_broken_value_of_the_other_files_is_refused_or_harmless(saved: Path, tmp_path: Path, form: Any) -> None:
    first = saved / "checkpoint-1"
    state = json.loads((first / "trainer_state.json").read_text())
    position = json.loads((first / "manifest.json").read_text())["about"]["position"]
    original = state if form is TRAINER_STATE else position
    passed = passing(original, form)
    for number, broken in enumerate(passed[:: max(1, len(passed) // 12)]):
        checkpoint = shutil.copytree(first, tmp_path / f"{number}" / "checkpoint-1")
        if form is TRAINER_STATE:
            (checkpoint / "trainer_state.json").write_text(json.dumps(broken))
        else:
            adopt(checkpoint)
            content = manifests.manifest(checkpoint)
            assert content is not None
            manifests.write(checkpoint, manifests.Manifest({**content.about, "position": broken}, content.files))
        resumes(checkpoint)


# ---- numbers that let a run go on without end, or not at all

FAR: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "position": (STATE, ("parts", "prompts", "consumed"), 10**12),
    "began after its end": (STATE, ("parts", "prompts", "generation_began_at"), 10**6),
    "position of the course": (STATE, ("course", "cursor", "consumed"), 10**12),
    "no prompts in an epoch": (STATE, ("course", "per_epoch"), 0),
    "more prompts in an epoch than there are": (STATE, ("course", "per_epoch"), 10**9),
    "other updates": (STATE, ("course", "updates"), 10**9),
    "no updates": (STATE, ("course", "updates"), 0),
    "updates of the state": ("trainer_state.json", ("global_step",), 10**12),
    "temperature": (STATE, ("loop", "changed"), {"temperature": 0}),
    "control": ("trainer_state.json", ("stateful_callbacks", "TrainerControl"), 7),
    "arguments of the control": ("trainer_state.json", ("stateful_callbacks", "TrainerControl", "args"), {"x": True}),
    "attributes of the control": (
        "trainer_state.json",
        ("stateful_callbacks", "TrainerControl", "attributes"),
        {"should_save": [1]},
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", FAR)
def test_numbers_that_no_run_can_have_are_refused(case: str, found: Path) -> None:
    name, at, wrong = FAR[case]
    edit(found / name, lambda values: mutated(values, at, wrong))
    assert not resumes(found, restore_callback_states_from_checkpoint=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [10**10, 7])
def test_prompts_of_a_stream_that_no_run_can_have_taken_are_refused(number: int, tmp_path: Path) -> None:
    settings = {"dynamic_sampling": False, "dataset": stream(8)}
    trainer(tmp_path, **settings).train()
    checkpoint = tmp_path / "checkpoint-1"
    edit(checkpoint / STATE, lambda values: mutated(values, ("course", "spot", "taken"), number))
    assert resumes(checkpoint, **settings) == (number == 7)


@pytest.mark.parametrize("name", ["logging_steps", "save_steps", "eval_steps"])
@pytest.mark.parametrize("wrong", [0, -1, None])
def test_an_interval_that_is_none_is_that_of_the_settings(name: str, wrong: Any, found: Path) -> None:
    edit(found / "trainer_state.json", lambda values: mutated(values, (name,), wrong))
    assert resumes(found, eval_strategy="steps", eval_steps=1, eval_dataset=prompts(4))


def test_completions_do_not_become_longer_than_the_settings_say(found: Path) -> None:
    edit(found / STATE, lambda values: mutated(values, ("loop", "generation", "max_new_tokens"), 2**20))
    adopt(found)
    run = trainer(found.parent)
    run.train(resume_from_checkpoint=str(found))
    assert run.backend.config.max_new_tokens == run.args.max_completion_length


# ---- tensors


def shaped(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor with other shapes and kinds of values."""
    doubled = torch.cat([tensor.reshape(-1), tensor.reshape(-1)])
    odd = tensor.float() if not tensor.is_floating_point() else tensor.long()
    return [tensor.new_zeros(0), tensor.reshape(-1)[:1].clone(), doubled, tensor[None].clone(), odd]


@pytest.mark.medium
@pytest.mark.timeout(600)
def test_tensors_of_another_shape_are_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "checkpoint-1" / TENSORS)
    names = [name for name in tensors if not name.startswith(("queue/1", "queue/2"))]
    cases = [(name, other) for name in names for other in (*shaped(tensors[name]), None)]
    for number, (name, other) in enumerate(cases[::3]):
        checkpoint = shutil.copytree(saved / "checkpoint-1", tmp_path / f"{number}" / "checkpoint-1")
        kept = tensors | {name: other} if other is not None else {k: v for k, v in tensors.items() if k != name}
        save_file(kept, checkpoint / TENSORS)
        resumes(checkpoint)
        shutil.rmtree(checkpoint.parent)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_that_do_not_exist_are_refused(found: Path, token: int) -> None:
    tensors = load_file(found / TENSORS)
    tensors["queue/0/completion_ids"][0, 0] = token
    save_file(tensors, found / TENSORS)
    assert not resumes(found)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "short": lambda s: [m.update(exp_avg=torch.zeros(1)) for m in s["state"].values()],
    "empty": lambda s: [m.update(exp_avg_sq=torch.zeros(0)) for m in s["state"].values()],
    "turned": lambda s: [m.update(exp_avg=m["exp_avg"].reshape(-1)) for m in s["state"].values()],
    "one value": lambda s: [m.update(exp_avg=torch.zeros(1).expand(m["exp_avg"].shape)) for m in s["state"].values()],
    "sparse": lambda s: [m.update(exp_avg=m["exp_avg"].to_sparse()) for m in s["state"].values()],
    "no moment": lambda s: [m.pop("exp_avg") for m in s["state"].values()],
    "text": lambda s: [m.update(exp_avg="zeros") for m in s["state"].values()],
    "step": lambda s: [m.update(step="one") for m in s["state"].values()],
    "step of many": lambda s: [m.update(step=torch.zeros(7)) for m in s["state"].values()],
    "rate": lambda s: s["param_groups"][0].update(lr="fast"),
    "nan": lambda s: s["param_groups"][0].update(lr=math.nan),
    "betas": lambda s: s["param_groups"][0].update(betas=0.9),
    "one beta": lambda s: s["param_groups"][0].update(betas=(0.9,)),
    "fewer weights": lambda s: s["param_groups"][0].update(params=[0]),
    "no groups": lambda s: s.update(param_groups=[]),
    "no state": lambda s: {"other": 1},
    "list": lambda s: [1, 2],
}


@pytest.mark.parametrize("way", OPTIMIZERS)
def test_moments_that_are_not_those_of_the_weights_are_refused(found: Path, way: str) -> None:
    """A fused step would read beyond them, and end the process with a segmentation fault."""

    def change(state: Any) -> Any:
        changed = OPTIMIZERS[way](state)
        return changed if way in ("no state", "list") else state

    edit_tensors(found / "optimizer.pt", change)
    assert not resumes(found)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "added": lambda s: s.update(step=5),
    "method": lambda s: s.update(get_lr=5),
    "optimizer": lambda s: s.update(optimizer=None),
    "text": lambda s: s.update(last_epoch="one"),
    "nan": lambda s: s.update(_last_lr=[math.nan]),
    "rates": lambda s: s.update(base_lrs=[]),
    "lambdas": lambda s: s.update(lr_lambdas=5),
    "list": lambda s: [1],
}


@pytest.mark.parametrize("way", SCHEDULES)
def test_a_schedule_that_is_none_is_refused(found: Path, way: str) -> None:
    def change(state: Any) -> Any:
        changed = SCHEDULES[way](state)
        return changed if way == "list" else state

    edit_tensors(found / "scheduler.pt", change)
    assert not resumes(found)


@pytest.mark.parametrize("name", ["python", "numpy", "cpu"])
@pytest.mark.parametrize("value", [None, 7, [], torch.zeros(3), "text"])
def test_random_states_that_are_none_are_refused(found: Path, name: str, value: Any) -> None:
    edit_tensors(found / "rng_state.pth", lambda state: state.update({name: value}))
    assert not resumes(found)


@pytest.mark.parametrize("part", ["origin", "average", "running"])
def test_averages_that_are_not_those_of_the_weights_are_refused(found: Path, part: str) -> None:
    edit_tensors(found / "bema.pt", lambda state: state.update({part: {n: t[:0] for n, t in state[part].items()}}))
    assert not resumes(found)
