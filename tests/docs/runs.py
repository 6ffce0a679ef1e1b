"""Runs in the docs, as files and as commands: both are read by the code of the command line; nothing is trained."""

import tempfile
from pathlib import Path

import yaml

from gruppo.cli.check import _take_template
from gruppo.cli.loading import load_reward
from gruppo.cli.recipe import RunFile
from tests.docs.blocks import ROOT

# Required fields that a page with an incomplete run may leave out: any of the names counts, the first is filled in.
NEEDED = {
    ("model", "model_name_or_path"): "some/model",
    ("dataset", "dataset_name", "datasets"): "prompts.jsonl",
    ("reward", "rewards", "reward_funcs", "reward_model_name_or_path", "environment_factory"): "accuracy_reward",
}


def whole(values: dict[str, object]) -> dict[str, object]:
    """A run with missing required fields filled in."""
    missing = {names[0]: value for names, value in NEEDED.items() if not set(names) & set(values)}
    return {"output_dir": "run", **missing, **values}


def check_run(text: str) -> None:
    """Check that the fields of a run file exist and fit together, and that rewards of the library are found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(whole(yaml.safe_load(text))), encoding="utf-8")
        for entry in RunFile.read(path).rewards:
            if ".py:" not in str(entry) and "/" not in str(entry):  # neither a reader's own function nor a model
                load_reward(entry, Path(folder))


def check_command(command: str, words: list[str]) -> None:
    """Check that the flags of a training command exist; a stand-in replaces files that are not in the repository."""
    if set(words) & {"--help", "--help-all"}:
        return
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder) / "run.yaml"
        stand_in.write_text(yaml.safe_dump(whole({})), encoding="utf-8")

        def file(word: str) -> str:
            named = ROOT / word
            return str(named if named.is_file() else stand_in) if word.endswith(".yaml") else word

        rest, _ = _take_template(words) if command == "check" else (words, None)
        RunFile.read(list(map(file, rest)), "train" if command == "check" else command, build=False)
