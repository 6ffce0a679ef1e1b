"""A checkpoint of a stranger cannot run code: what is no plain state is refused."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo import BEMACallback
from tests.security.strangers import WAYS, bare_pickle, torch_archive
from tests.trainer.runs import make

PICKLES = {
    "optimizer.pt": "state of the optimizer",
    "scheduler.pt": "state of the schedule",
    "rng_state.pth": "random generators",
    "bema.pt": "averaged weights",
    "pytorch_model.bin": "weights",
}
NEVER_READ = {"training_args.bin"}  # transformers writes it for people


def run(folder: Path) -> Any:
    """Two updates, with a checkpoint after each."""
    return make(folder, callbacks=[BEMACallback(update_freq=1)], save_strategy="steps", save_steps=1, max_steps=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one update, with everything that can be in one."""
    folder = tmp_path_factory.mktemp("run")
    run(folder).train()
    return folder / "checkpoint-1"


def as_found(saved: Path, folder: Path) -> Path:
    """A copy of the checkpoint in a run folder of its own."""
    checkpoint = folder / "out" / saved.name
    shutil.copytree(saved, checkpoint)
    return checkpoint


def adopt(checkpoint: Path) -> None:
    """Make the manifest fit the files: a stranger would have done that too."""
    from gruppo.runs import manifests

    if (old := manifests.manifest(checkpoint)) is not None:
        manifests.write(checkpoint, manifests.describe(checkpoint, old.about))


def resume(checkpoint: Path) -> None:
    run(checkpoint.parent).train(resume_from_checkpoint=str(checkpoint))


def test_the_checkpoint_can_be_resumed_from(saved: Path, tmp_path: Path) -> None:
    checkpoint = as_found(saved, tmp_path)
    adopt(checkpoint)
    resume(checkpoint)
    assert json.loads((checkpoint.parent / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2


def test_every_pickle_in_a_checkpoint_is_tried_here(saved: Path) -> None:
    found = {path.name for path in saved.rglob("*") if path.suffix in (".pt", ".pth", ".bin", ".pkl", ".pickle")}
    assert found <= {*PICKLES, *NEVER_READ}
    assert found >= {*PICKLES, *NEVER_READ} - {"pytorch_model.bin", "rng_state.pth"}


@pytest.mark.parametrize("way", WAYS)
def test_the_attack_would_work(way: str, tmp_path: Path) -> None:
    WAYS[way](tmp_path / "file.pt", tmp_path / "mark")
    if way == "pickle":
        pickle.loads((tmp_path / "file.pt").read_bytes())
    else:
        torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "mark").exists()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_refused(name: str, way: str, saved: Path, tmp_path: Path) -> None:
    checkpoint, mark = as_found(saved, tmp_path), tmp_path / "mark"
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    WAYS[way](checkpoint / name, mark)
    adopt(checkpoint)
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickl|unsupported"):
        resume(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("name", sorted(NEVER_READ))
def test_what_is_not_needed_is_not_opened(name: str, saved: Path, tmp_path: Path) -> None:
    checkpoint, mark = as_found(saved, tmp_path), tmp_path / "mark"
    bare_pickle(checkpoint / name, mark)
    adopt(checkpoint)
    resume(checkpoint)
    assert not mark.exists()


@pytest.mark.parametrize("way", [torch_archive, bare_pickle])
def test_an_adapter_in_a_pickle_is_refused(way: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return make(tmp_path / "run", peft_config=lora, save_strategy="steps", save_steps=1, max_steps=2)

    adapted().train()
    checkpoint, mark = tmp_path / "run" / "checkpoint-1", tmp_path / "mark"
    (checkpoint / "adapter_model.safetensors").unlink()
    way(checkpoint / "adapter_model.bin", mark)
    adopt(checkpoint)
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickl|unsupported"):
        adapted().train(resume_from_checkpoint=str(checkpoint))
    assert not mark.exists()
