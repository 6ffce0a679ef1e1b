"""What docs/logging.md says of the hub: which files leave the machine, to whom, and what is in them."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.demo import model_path
from gruppo.errors import ConfigError
from gruppo.runs.earlier import PARTS
from tests.hub import Hub

SECRET = "hf_" + "a" * 34
SMALL: dict[str, Any] = {
    "max_steps": 2, "save_steps": 1, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True,
    "bf16": False, "max_completion_length": 8, "disable_tqdm": True, "num_completions_to_print": 0,
}  # fmt: skip
MODEL = {"model.safetensors", "config.json", "generation_config.json", "README.md", "tokenizer.json"}
RECORD = {*PARTS, "completions"}


def trained(folder: Path, rloo: bool = False, **settings: Any) -> Any:
    """A trainer after two updates, whose run wrote all that a run can write."""
    config, trainer_class = (RLOOConfig, RLOOTrainer) if rloo else (GRPOConfig, GRPOTrainer)
    args = config(str(folder), **{**SMALL, "log_completions": True, **settings})
    rows = Dataset.from_list([{"prompt": f"Q: {n}\nA:"} for n in range(8)])
    trainer = trainer_class(model=model_path(), reward_funcs=_length, args=args, train_dataset=rows)
    trainer.train()
    return trainer


def pushed(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Hub:
    """What a run pushes."""
    hub = Hub(monkeypatch)
    trained(folder, push_to_hub=True, **settings).push_to_hub()
    return hub


def _length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("rloo", [False, True])
@pytest.mark.parametrize("strategy", ["every_save", "end"])
def test_a_push_uploads_the_model_alone(
    rloo: bool, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    (folder / "earlier" / "0001").mkdir(parents=True)
    (folder / "earlier" / "0001" / "metrics.jsonl").write_text("{}\n")
    (folder / "bad_updates").mkdir()
    (folder / "bad_updates" / "update-1.safetensors").write_bytes(b"rows")
    (folder / "notes.txt").write_text("of the user\n")
    hub = pushed(folder, monkeypatch, rloo=rloo, hub_strategy=strategy)
    assert {path.name for path in folder.iterdir()} > RECORD, "there was a record to push"
    assert hub.top("me/mine") >= MODEL | {"training_args.bin", "notes.txt"}
    assert not hub.top("me/mine") & {*RECORD, "bad_updates", "earlier", "lock"}
    assert not [name for name in hub.files if "checkpoint" in name or "saving" in name]


def test_a_save_is_pushed_while_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    trainer = trained(tmp_path / "mine", push_to_hub=True)
    assert hub.top("me/mine") >= MODEL | {"training_args.bin"}
    assert not hub.top("me/mine") & {*RECORD, "optimizer.pt", "run_state-00000.json", "trainer_state.json"}
    saved = (tmp_path / "mine" / "checkpoint-2" / "model.safetensors").read_bytes()
    assert hub.files["me/mine/model.safetensors"] == saved
    assert trainer.push_in_progress.is_done()


@pytest.mark.parametrize("record", [False, True])
def test_metrics_in_files_of_transformers_are_part_of_the_record(
    record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch)
    trainer = trained(tmp_path / "mine", push_to_hub=True, hub_record=record)
    trainer.save_state()
    for split in ("train", "eval"):
        trainer.save_metrics(split, {f"{split}_reward": 0.5})
    written = {"trainer_state.json", "train_results.json", "eval_results.json", "all_results.json"}
    assert {path.name for path in (tmp_path / "mine").iterdir()} > written
    trainer.push_to_hub()
    assert hub.top("me/mine") & written == (written if record else set())


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("checkpoint", {"last-checkpoint"}), ("all_checkpoints", {"checkpoint-1", "checkpoint-2"})],
)
def test_checkpoints_are_pushed_if_the_strategy_says_so(
    strategy: str, folders: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pushed(tmp_path / "mine", monkeypatch, hub_strategy=strategy, hub_token=SECRET)
    assert {name for name in hub.top("me/mine") if "checkpoint" in name} == folders
    assert not hub.top("me/mine") & RECORD
    for folder in folders:
        assert f"me/mine/{folder}/optimizer.pt" in hub.files
    assert not [name for name, content in hub.files.items() if SECRET.encode() in content]


@pytest.mark.parametrize("rloo", [False, True])
def test_a_setting_asks_for_the_record(rloo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    (folder / "earlier" / "0001").mkdir(parents=True)
    (folder / "earlier" / "0001" / "metrics.jsonl").write_text("{}\n")
    hub = pushed(folder, monkeypatch, rloo=rloo, hub_record=True)
    assert hub.top("me/mine") >= MODEL | RECORD
    assert not hub.top("me/mine") & {"earlier", "lock", "checkpoint-1", "checkpoint-2"}
    hub = pushed(tmp_path / "less", monkeypatch, rloo=rloo, hub_record=True, record="metrics", log_completions=False)
    assert "metrics.jsonl" in hub.top("me/less")
    assert not hub.top("me/less") & {"rollouts", "updates", "completions"}


def test_without_a_record_none_can_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hub_record=True has no effect: record='off'"):
        trained(tmp_path, hub_record=True, record="off")


@pytest.mark.parametrize("private", [None, True, False])
def test_who_may_see_a_push(private: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"hub_private_repo": private, "hub_token": SECRET, "log_completions_hub_repo": "me/tables"}
    hub = pushed(tmp_path / "mine", monkeypatch, **settings)
    assert hub.private == {"me/mine": private, "me/tables": private}
    assert hub.tokens == {SECRET}


def test_the_tables_alone_go_where_the_user_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    trainer = trained(tmp_path, log_completions_hub_repo="me/tables", hub_private_repo=True, hub_token=SECRET)
    trainer._hub_uploads.push_to_hub()
    assert hub.private == {"me/tables": True}
    assert hub.tokens == {SECRET}
    assert {name.rpartition("/")[2] for name in hub.files} == {"README.md", "completions_00002.parquet"}
    assert str(Path(model_path()).parent).encode() not in hub.files["me/tables/README.md"]


@pytest.mark.parametrize("settings", [{"push_to_hub": True}, {"log_completions_hub_repo": "me/tables"}])
def test_nothing_private_goes_to_a_repository_that_is_public_already(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, public=("me/mine", "me/tables"))
    with pytest.raises(ConfigError, match=r"hub_private_repo=True, but 'me/(mine|tables)' exists and is public"):
        trained(tmp_path / "mine", hub_private_repo=True, **settings)
    assert hub.files == {}


def test_a_push_by_hand_may_be_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    trained(tmp_path / "mine").push_to_hub(private=True, token=SECRET, commit_message="mine")
    assert hub.private == {"me/mine": True}
    assert hub.tokens == {SECRET}
    assert not hub.top("me/mine") & RECORD


def test_no_secret_and_no_folder_of_the_model_leaves_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pushed(
        tmp_path / "mine", monkeypatch, hub_token=SECRET, hub_record=True,
        log_completions_hub_repo="me/tables", hub_strategy="all_checkpoints",
    )  # fmt: skip
    assert not [name for name, content in hub.files.items() if SECRET.encode() in content]
    for name in ("me/mine/README.md", "me/mine/checkpoint-1/README.md", "me/tables/README.md"):
        assert model_path().encode() not in hub.files[name]
        assert str(tmp_path).encode() not in hub.files[name]


def test_the_settings_beside_the_weights_have_no_secrets(tmp_path: Path) -> None:
    trainer = trained(tmp_path, hub_token=SECRET, chat_template_kwargs={"api_key": "mine", "depth": 2})
    trainer.save_model()
    for file in (tmp_path / "training_args.bin", tmp_path / "checkpoint-1" / "training_args.bin"):
        stored = torch.load(file, weights_only=False)
        assert isinstance(stored, GRPOConfig)
        assert stored.hub_token is None
        assert stored.chat_template_kwargs == {"api_key": "<hidden>", "depth": 2}
        assert stored.learning_rate == trainer.args.learning_rate
        assert SECRET.encode() not in pickle.dumps(stored)
    assert trainer.args.hub_token == SECRET
    assert trainer.args.chat_template_kwargs["api_key"] == "mine"


def test_trackers_get_settings_without_secrets(tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path), **SMALL, hub_token=SECRET, model_init_kwargs={"token": "my-other-key", "revision": "main"}
    )
    for sent in (args.to_dict(), args.to_sanitized_dict(), args.to_json_string()):
        assert SECRET not in str(sent)
        assert "my-other-key" not in str(sent)
        assert "revision" in str(sent)
    assert args.model_init_kwargs == {"token": "my-other-key", "revision": "main"}
