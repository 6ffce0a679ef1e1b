"""Links in the folder of a run: those in the way of what it writes are refused, others are a user's own business."""

from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import DataError
from tests.hub import Hub
from tests.trainer.runs import make

# name, what it is a link to, and settings with which nothing is written there
HABITS: dict[str, tuple[str, dict[str, Any]]] = {
    "train.log": ("/dev/null", {}),
    "run.yaml": ("/none/run.yaml", {}),
    "train.py": ("../train.py", {}),
    "data": ("/none/data", {}),
    "data.json": ("/none/data.json", {}),
    "runs": ("../scratch", {}),
    "tokenizer": ("../scratch", {"record": "metrics"}),
    "rollouts": ("../scratch", {"record": "metrics"}),
    "metrics.jsonl": ("/none/metrics", {"record": "off"}),
    "completions": ("../scratch", {}),
}


@pytest.mark.parametrize("name", HABITS)
def test_links_at_names_that_the_run_does_not_write_are_no_reason(name: str, tmp_path: Path) -> None:
    target, settings = HABITS[name]
    (tmp_path / "run").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    make(tmp_path / "run", max_steps=1, **settings).train()
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.txt", "all_results.json.tmp", "model.safetensors"])
@pytest.mark.parametrize("record", ["off", "metrics", "all"])
def test_links_at_names_of_the_model_are(name: str, record: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/none/there")
    with pytest.raises(DataError, match="is a link"):
        make(tmp_path, record=record)


def test_what_a_link_leads_to_is_not_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    (tmp_path / "secret").write_text("my secret")
    run = tmp_path / "run"
    run.mkdir()
    (run / "train [1].log").symlink_to(tmp_path / "secret")
    (run / "notes").write_text("mine")
    trainer = make(run, max_steps=1, push_to_hub=True, hub_model_id="me/m", hub_token="t")
    trainer.train()
    trainer.push_to_hub()
    assert hub.files["me/m/notes"] == b"mine"
    assert [name for name, content in hub.files.items() if b"my secret" in content] == []
