"""The step benchmark, with a tiny model: what it measures and writes, and what becomes of an engine that fails."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import prepare_smollm2, readme, step, step_cases, step_runs
from benchmarks.step_cases import CASES, last_number, spread, tiny, word_prompts
from gruppo.demo import model_path

SCRIPT = Path(step.__file__)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two engines, of which the second cannot be built."""
    out = tmp_path_factory.mktemp("step") / "step.json"
    arguments = ["--tiny", "--case", "qwen2-1.5b", "--engines", "gruppo,trl", "--trl", "no_such_field=1"]
    arguments += ["--gruppo", "seed=7,generation_kwargs={min_new_tokens: 8}", "--rounds", "2", "--threads", "1"]
    command = [sys.executable, str(SCRIPT), *arguments, "--profile", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert out.exists(), run.stderr[-3000:]
    return json.loads(out.read_text()) | {"code": run.returncode, "profile": out.with_suffix(".profile.txt")}


@pytest.mark.slow
def test_a_result_says_what_was_measured(result: dict[str, Any]) -> None:
    assert result["commit"]
    assert result["command"].startswith("python step.py --tiny")
    assert (result["prompts"], result["completions"], result["prompt_tokens"], result["new_tokens"]) == (2, 4, 12, 8)
    record = result["engines"]["gruppo"]
    assert record["config"]["seed"] == 7, "--gruppo reaches the config"
    assert record["config"]["gradient_accumulation_steps"] == 2
    assert len(record["warm_up"]) == 1
    assert len(record["rounds"]) == 2, "the step of the profile is not counted"
    assert record["construct_seconds"] > 0
    assert record["plans"]["rollout"]["plan"]["kv_tokens"] > 0


@pytest.mark.slow
def test_the_parts_of_a_step_fit_into_it(result: dict[str, Any]) -> None:
    record = result["engines"]["gruppo"]
    for facts in [*record["warm_up"], *record["rounds"]]:
        assert all(facts[name] >= 0 for name in step_runs.SECONDS)
        assert facts["tokens"] == 2 * 4 * 8, "every completion runs to its limit"
        assert 0 < facts["generation"] <= facts["collect"] <= facts["step"]
        assert facts["generation: prefill"] + facts["generation: decode"] <= facts["generation"] + 0.001
        assert 0 < facts["optimizer"] < facts["update"]
        assert facts["update"] + facts["generation"] <= facts["step"]
        assert facts["update"] + facts["collect"] == pytest.approx(facts["step"], abs=0.001)
        assert facts["logged"]["frac_reward_zero_std"] == 0, "no row without an advantage"
    steps = [facts["step"] for facts in record["rounds"]]
    assert min(steps) <= record["median"]["step"] <= max(steps)


@pytest.mark.slow
def test_an_engine_that_fails_is_named_and_loses_no_other(result: dict[str, Any]) -> None:
    assert result["failed"] == ["trl"]
    assert result["code"] == 1
    assert result["engines"]["trl"]["exit_code"] == 1
    assert result["engines"]["trl"]["error"]
    assert result["engines"]["gruppo"]["median"]["step"] > 0
    assert result["times_gruppo"] == {}


@pytest.mark.slow
def test_the_profile_lists_what_an_update_runs(result: dict[str, Any]) -> None:
    first, *_, last = result["profile"].read_text().splitlines()
    assert first.startswith("1 steps in ")
    assert "Backward" in result["profile"].read_text()
    assert len(last.split()) >= 4


def _record(seconds: float, generation: float, memory: float | None = None) -> dict[str, Any]:
    median = {"step": seconds, "generation": generation, "update": seconds - generation}
    return {"rounds": [median], "median": median} | ({} if memory is None else {"peak_device_gib": memory})


def test_ratios_are_the_peers_numbers_over_ours() -> None:
    records = {"gruppo": _record(10, 2, 20), "trl": _record(45, 34, 30), "trl-liger": _record(40, 34)}
    assert step.ratios(records | {"trl-vllm": {"error": "no"}}) == {
        "trl": {"step": 4.5, "generation": 17, "update": 1.375, "memory": 1.5},
        "trl-liger": {"step": 4.0, "generation": 17, "update": 0.75},
    }
    assert step.ratios({"trl": records["trl"]}) == {}, "nothing to compare with"


def test_config_fields_from_the_command_line_are_yaml() -> None:
    assert step.fields("a=1,b=true,c=null,d=[2, 3],e=x") == {"a": 1, "b": True, "c": None, "d": [2, 3], "e": "x"}
    for wrong in ("=1", "a=1,b", "a=[1"):
        with pytest.raises(argparse.ArgumentTypeError):
            step.fields(wrong)


class Owner:
    """Has a phase inside another, and one that the update calls as well."""

    def collect(self) -> None:
        time.sleep(0.01)
        self.sample()
        self.score()

    def sample(self) -> list[int]:
        time.sleep(0.02)
        return [1, 2, 3]

    def score(self) -> None:
        time.sleep(0.01)


def test_a_stopwatch_tells_phases_apart() -> None:
    steps: list[dict[str, Any]] = []
    clock, owner = step_runs.Stopwatch(steps.append), Owner()
    clock.watch(owner, "collect", "collect")
    clock.watch(owner, "sample", "generation", tokens=len)
    clock.watch(owner, "score", "logps")
    clock.on_train_begin()
    for _ in range(2):
        owner.collect()
        owner.score()  # part of the update
        clock.on_step_end()
    for facts in steps:
        assert facts["tokens"] == 3
        assert facts["collect"] >= 0.04
        assert 0.01 <= facts["logps"] < facts["generation"] < facts["collect"]
        assert facts["update"] == pytest.approx(facts["step"] - facts["collect"], abs=0.001)
        assert facts["update"] >= 0.01
    with pytest.raises(RuntimeError, match="nothing was timed"):
        clock.on_step_end()


def test_vllm_is_asked_in_its_own_words_and_others_in_transformers() -> None:
    case = tiny(CASES["qwen2-1.5b"])
    assert step_runs.config_fields("trl", case, 2, {})["generation_kwargs"] == {"min_new_tokens": 8}
    assert step_runs.config_fields("trl-vllm", case, 2, {})["generation_kwargs"] == {"ignore_eos": True}
    assert "generation_kwargs" not in step_runs.config_fields("trl-vllm", CASES["smollm2"], 2, {})
    with pytest.raises(RuntimeError, match="63 tokens"):
        step_runs.check_work(case, 63)


def test_the_cases_are_one_optimizer_step_of_whole_groups() -> None:
    for case in CASES.values():
        fields = step_cases.settings(case, 1)
        rows = fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"]
        assert rows == case.prompts * case.completions
        assert rows % fields["num_generations"] == 0


def test_prompts_are_different_texts_of_one_length() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    prompts = [row["prompt"] for row in word_prompts(tokenizer, 6, 20)]
    assert len(set(prompts)) == 6
    assert [len(tokenizer(prompt)["input_ids"]) for prompt in prompts] == [20] * 6
    assert prompts == [row["prompt"] for row in word_prompts(tokenizer, 6, 20)]


def test_rewards() -> None:
    texts = ["9 and 12", "it is 1,012.", "none", [{"role": "assistant", "content": "so \\boxed{12.0}"}]]
    assert last_number(texts, ["12", "1012", "3", "12"]) == [1.0, 1.0, 0.0, 1.0]
    assert last_number(["12", "-3"], ["9", "-3"]) == [0.0, 1.0]
    rewards = spread([[1, 2], [3, 5], [1000, 10]])
    assert rewards == [3 / 1009, 8 / 1009, 1 / 1009]


def test_prompts_are_packed_with_their_answers(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?", "answer": "4"}\n')
    prepare_smollm2.write_prompts(questions, tmp_path / "prompts.jsonl", 2)
    rows = step_cases.training_rows(replace(CASES["smollm2"], prompts=1), tmp_path, steps=2)
    assert [row["answer"] for row in rows] == ["2", "4"]
    assert rows[0]["prompt"][0]["content"].startswith("1+1?\nPlease reason")
    with pytest.raises(SystemExit, match="3 steps need 3"):
        step_cases.training_rows(replace(CASES["smollm2"], prompts=1), tmp_path, steps=3)


def test_the_readme_gets_a_table_of_steps_once_there_are_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "before\n\nEach file names commit, device, versions and the command that made it.\n"
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.fill_steps(text) == text
    records = {"trl": _record(45, 34, 30), "gruppo": _record(10, 2, 20), "trl-vllm": {"error": "no"}}
    (results / "step_qwen2-1.5b.json").write_text(json.dumps({"engines": records}))
    filled = readme.fill_steps(text)
    rows = [line for line in filled.splitlines() if line.startswith("|")]
    assert "step_qwen2-1.5b.json" in rows[2]
    assert rows[2].endswith("| gruppo | 10.0 | 2.0 | – | 8.0 | 20.0 GiB |")
    assert rows[3] == "|  | TRL 1.16 | 45.0 (4.5 ×) | 34.0 | – | 11.0 | 30.0 GiB |"
    assert len(rows) == 4
    assert readme.fill_steps(filled) == filled
