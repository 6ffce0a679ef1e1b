"""recipes/*.yaml: each says what it reproduces, can be read, and would run; some do run."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import AutoProcessor

from gruppo import cli
from gruppo.cli.check import check
from gruppo.cli.recipe import RunFile
from gruppo.data.templates import HERMES_TEMPLATE
from gruppo.demo import load_task, model_path
from tests.helpers import tiny_model, tiny_tokenizer
from tests.vision.families import FAMILIES, picture

RECIPES = {path.stem: path for path in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))}
# The cells of the table in docs/algorithm.md that make each what it is.
MADE_BY: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group", "beta": 0.04, "importance_sampling_level": "token"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "dynamic_sampling": True},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.0},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "beta": 0.0},
    "rloo": {"beta": 0.05, "normalize_advantages": False, "num_generations": 4},
    "lora_24gb": {"loss_type": "grpo", "model_init_kwargs": {"dtype": "bfloat16"}},
    "tools": {"max_tool_calling_iterations": 1, "num_generations": 16},
    "vlm": {"beta": 0.04, "num_generations": 8},
    "vllm_server": {"use_vllm": True, "vllm_mode": "server"},
    "multi_node": {"beta": 0.001, "epsilon": 10.0, "generation_batch_size": 512},
}


def test_there_is_one_for_each() -> None:
    assert RECIPES.keys() == MADE_BY.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_it_says_what_it_reproduces_and_what_is_different(name: str) -> None:
    text = RECIPES[name].read_text(encoding="utf-8")
    comment = text[: re.search(r"^[^#]", text, re.MULTILINE).start()]  # type: ignore[union-attr]
    assert re.search(r"arXiv:\d{4}\.\d{5}", comment)
    assert "Not as in" in comment or "It reproduces no table" in comment
    assert re.search(rf"^# .*gruppo train recipes/{name}\.yaml", comment, re.MULTILINE), "how to run it"


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_the_recipe_of_the_table(name: str) -> None:
    processes = RunFile.read(RECIPES[name], build=False).processes
    run = RunFile.read([str(RECIPES[name]), "--use_cpu"], processes=processes)
    assert {field: getattr(run.config, field) for field in MADE_BY[name]} == MADE_BY[name]
    assert run.trainer == ("rloo" if name == "rloo" else "grpo")
    assert yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))["output_dir"] == f"runs/{name}"


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models and datasets in place of those on the hub, with their columns."""
    folder = tmp_path_factory.mktemp("stand_ins")
    tiny_model(max_position_embeddings=8192).save_pretrained(folder / "text")
    tiny_tokenizer(chat_template=HERMES_TEMPLATE).save_pretrained(folder / "text")
    chats = [{"prompt": [{"role": "user", "content": f"{i}+1?"}], "solution": f"${i + 1}$"} for i in range(256)]
    Dataset.from_list(chats).to_json(folder / "text.jsonl")
    FAMILIES["qwen2_5_vl"].make()[0].save_pretrained(folder / "vlm")
    questions = [{"problem": f"what{'?' * i}", "solution": f"${i}$", "image": picture(i)} for i in range(8)]
    Dataset.from_list(questions).to_parquet(folder / "vlm.parquet")
    train, _ = load_task(train_size=64, held_out_size=1)
    train.rename_column("answer", "solution").to_json(folder / "demo.jsonl")
    return folder


@pytest.fixture
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading one from disk needs torchvision, which is not there."""
    real = AutoProcessor.from_pretrained

    def load(name: str, **settings: Any) -> Any:
        return FAMILIES["qwen2_5_vl"].make()[1] if str(name).endswith("/vlm") else real(name, **settings)

    monkeypatch.setattr("gruppo.policy.loading.AutoProcessor.from_pretrained", load)


@pytest.mark.usefixtures("_processor")
@pytest.mark.parametrize("name", RECIPES)
def test_it_would_run(name: str, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "grpo":  # a worker process for each reward takes a second
        monkeypatch.setattr("gruppo.cli.check_parts.reward_scores", lambda parts, findings: None)
    kind, suffix = ("vlm", "parquet") if name == "vlm" else ("text", "jsonl")
    flags = ["--model", str(stand_ins / kind), "--dataset", str(stand_ins / f"{kind}.{suffix}")]
    findings = check([str(RECIPES[name]), *flags, "--output_dir", str(tmp_path)])
    assert findings.errors == []
    looked_at = {finding.what for finding in findings.found if finding.level == "ok"}
    assert looked_at >= {"fields", "dataset", "model", "template", "lengths", "parity", "folder"}
    assert ("tools" in looked_at) == (name == "tools")


@pytest.mark.medium
@pytest.mark.usefixtures("_processor")
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "rloo", "lora_24gb", "vlm"])
def test_two_updates_of_it(name: str, stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = RECIPES[name].read_text(encoding="utf-8").count("steps_per_generation:")
    size = ["--per_device_train_batch_size", "8", "--num_generations", "4", "--gradient_accumulation_steps", "1"]
    size += ["--steps_per_generation", "2"] * several + ["--max_completion_length", "16", "--max_steps", "2"]
    quiet = ["--logging_steps", "1", "--save_strategy", "no", "--report_to", "none", "--record", "metrics"]
    about = ["--model", model_path(), "--dataset", str(stand_ins / "demo.jsonl"), "--output_dir", str(tmp_path)]
    if name == "vlm":
        about[1::2] = [str(stand_ins / "vlm"), str(stand_ins / "vlm.parquet"), str(tmp_path)]
    assert cli.main(["train", str(RECIPES[name]), *about, *size, *quiet, "--use_cpu", "--bf16", "false"]) == 0
    out = capsys.readouterr().out
    assert "update 2/2  reward " in out
    assert "Finished 2 updates" in out
