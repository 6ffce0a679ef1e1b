"""The private parts of transformers.Trainer that are overridden or read here: what to look at for a new release.

A release that renames one, or calls it with other arguments, fails here by name instead of somewhere in a run.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer

import gruppo
from gruppo import GRPOTrainer

# Methods, and the parameters that are relied on.
METHODS: dict[str, tuple[str, ...]] = {
    "_build_accelerator_args": ("kwargs",),
    "_evaluate": ("trial", "ignore_keys_for_eval", "skip_scheduler"),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_finish_current_push": (),
    "_get_eval_sampler": ("eval_dataset",),
    "_get_grad_norm": ("model", "grad_norm"),
    "_get_learning_rate": (),
    "_get_output_dir": ("trial",),
    "_get_train_sampler": ("train_dataset",),
    "_init_training_state": (
        *("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial"),
    ),
    "_inner_training_loop": ("batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "_load_best_model": (),
    "_load_from_checkpoint": ("resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_load_rng_state": ("checkpoint",),
    "_maybe_log_save_evaluate": (
        *("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate"),
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_prepare_input": ("data",),
    "_prepare_inputs": ("inputs",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_run_epoch": ("model", "epoch", "train_dataloader", "steps_in_epoch", "resume_from_checkpoint"),
    "_save": ("output_dir", "state_dict"),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_save_rng_state": ("output_dir",),
    "_save_scaler": ("output_dir",),
    "_track_num_input_tokens": ("inputs",),
}
ATTRIBUTES = ("_globalstep_last_logged", "_total_loss_scalar", "_tr_loss")

SOURCE = inspect.getsource(Trainer)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_as_it_was(name: str) -> None:
    parameters = inspect.signature(getattr(Trainer, name)).parameters
    assert [each for each in METHODS[name] if each not in parameters] == []


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_still_there(name: str) -> None:
    assert re.search(rf"self\.{name} [-+]?= ", SOURCE)


def test_the_table_has_all_of_them() -> None:
    theirs = set(re.findall(r"self\.(_[a-z]\w*)", SOURCE)) | {name for name in dir(Trainer) if name[:2] != "__"}
    layers = GRPOTrainer.__mro__[: GRPOTrainer.__mro__.index(Trainer)]
    used = {name for layer in layers for name in vars(layer)}
    for path in (Path(gruppo.__file__).parent / "trainer").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = {name for name in used & theirs if name.startswith("_")}
    assert private - {*METHODS, *ATTRIBUTES} == set()
