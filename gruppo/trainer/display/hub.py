"""What is uploaded to the Hugging Face hub: the model; tables of completions and the record only if a setting asks.

left_out            what a push of the run folder leaves out
push_folder         upload the run folder
push_checkpoint     upload what a checkpoint holds, while training continues
table_uploads       a dataset repository that receives the tables of completions
require_private     nothing private goes to a repository that is public already
write_settings      training_args.bin without secrets
"""

import copy
import glob
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gruppo.config.folder import GIVEN, as_given
from gruppo.errors import ConfigError
from gruppo.runs.checkpoints import DELETING, SAVING
from gruppo.runs.earlier import PARTS
from gruppo.runs.links import leading_out
from gruppo.runs.plain import WEIGHTS
from gruppo.runs.secrets import HIDDEN, without_secrets

SETTINGS = "training_args.bin"
# What a run writes about its prompts, completions and settings, and what is never of use to others. The state and the
# results are written by `save_state` and `save_metrics`: the metrics of every log, and a path of this machine.
RECORD = (*PARTS, "completions", "bad_updates", "trainer_state.json", "*_results.json")
LOCAL = ("_*", "checkpoint-*", f"{SAVING}*", f"{DELETING}*", "earlier/*", "lock")
# What a checkpoint holds of the model itself; the rest is for resuming.
OF_THE_MODEL = (
    *WEIGHTS,
    *("*.index.json", "config.json", "generation_config.json", "adapter_config.json", "README.md", SETTINGS),
)


def left_out(with_record: bool) -> list[str]:
    """Patterns of the files of a run folder that a push leaves out."""
    record = [] if with_record else [pattern for name in RECORD for pattern in (name, f"{name}/*")]
    return [*LOCAL, *record]


def push_folder(
    args: Any, repo_id: str, *, message: str | None, token: str | None, revision: str | None, wait: bool
) -> Any:
    """Upload the run folder; returns the commit, or a future without `wait`."""
    from huggingface_hub import HfApi

    return HfApi(token=token).upload_folder(
        repo_id=repo_id,
        folder_path=args.output_dir,
        commit_message=message,
        revision=revision,
        run_as_future=not wait,
        ignore_patterns=[*left_out(args.hub_record), *map(glob.escape, leading_out(Path(args.output_dir)))],
    )


def push_checkpoint(args: Any, repo_id: str, folder: Path, processing_class: Any, message: str) -> list[Any]:
    """Upload the model of a checkpoint, and the checkpoint itself if `hub_strategy` says so; returns the futures."""
    from huggingface_hub import HfApi

    # The upload reads a copy: the checkpoint may be removed before it ends.
    for pattern in OF_THE_MODEL:
        for file in folder.glob(pattern):
            shutil.copy(file, args.output_dir)
    processing_class.save_pretrained(args.output_dir)
    common = {"message": message, "token": args.hub_token, "revision": args.hub_revision}
    jobs = [push_folder(args, repo_id, wait=False, **common)]
    places = {"checkpoint": "last-checkpoint", "all_checkpoints": folder.name}
    if place := places.get(args.hub_strategy):
        upload = HfApi(token=args.hub_token).upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            path_in_repo=place,
            commit_message=f"{message}, checkpoint",
            revision=args.hub_revision,
            run_as_future=True,
        )
        jobs.append(upload)
    return jobs


def table_uploads(args: Any, folder: Path, base_model: str | None) -> Callable[[], Any]:
    """Create a dataset repository with a card.

    The function that is returned begins to upload the parquet files of `folder` to it, every two minutes.
    """
    from huggingface_hub import CommitScheduler, HfApi

    api, wanted, kind = HfApi(token=args.hub_token), args.log_completions_hub_repo, "dataset"
    repo_id = api.create_repo(wanted, repo_type=kind, private=args.hub_private_repo, exist_ok=True).repo_id
    if args.hub_private_repo:
        require_private(repo_id, kind, args.hub_token, "log_completions_hub_repo")
    card = (
        "---\ntags: [gruppo, completions]\n---\n\n# Completions\n\nPrompts, completions and rewards of a gruppo run"
        f"{f' of `{base_model}`' if base_model else ''}, one file per log.\n"
    )
    api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo_id, repo_type=kind)
    return partial(
        CommitScheduler,
        repo_id=repo_id,
        repo_type=kind,
        folder_path=folder,
        every=2,
        private=args.hub_private_repo,
        token=args.hub_token,
        allow_patterns=["*.parquet"],
    )


def require_private(repo_id: str, kind: str, token: str | None, field: str) -> None:
    """Raise if a repository is public: creating it as a private one does not change one that exists."""
    from huggingface_hub import HfApi

    if not HfApi(token=token).repo_info(repo_id, repo_type=kind).private:
        raise ConfigError(
            f"hub_private_repo=True, but {repo_id!r} exists and is public. Make it private in its settings there, "
            f"choose another {field}, or leave hub_private_repo out."
        )


def write_settings(args: Any, folder: Path) -> None:
    """Write training_args.bin, which is uploaded, without secrets, and with output_dir as the user wrote it."""
    stored = copy.copy(args)
    stored.output_dir = as_given(args)
    vars(stored).pop(GIVEN, None)
    for name, value in vars(stored).copy().items():
        shown = without_secrets({name: value})[name]
        if shown != value:
            setattr(stored, name, None if shown == HIDDEN else shown)
    torch.save(stored, folder / SETTINGS)
