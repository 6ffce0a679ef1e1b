"""`evaluate` on the demo's model: what it says, what it keeps, and how it goes on."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.demo import evaluate as demo_evaluate
from gruppo.demo.task import problems
from gruppo.errors import ConfigError, RunLockedError
from gruppo.evaluation.run import PROBE
from gruppo.evaluation.sampling import Evaluator
from gruppo.evaluation.store import EvaluationFolder
from gruppo.evaluation.summary import summarise
from gruppo.evaluation.tasks import load_tasks
from gruppo.evaluation.tir import TirSettings
from gruppo.evaluation.types import Benchmark, Decoding, GradedAttempt, Problem
from gruppo.grading import LADDERS, Grade, Rung
from gruppo.rollout.builtin import BuiltinBackend
from gruppo.rollout.hf import TransformersBackend
from gruppo.runs.lock import RunLock
from gruppo.sandbox import Sandbox
from gruppo.types import Completion, SampleRequest, StopReason
from tests.evaluation.demo import COUNT, DEMO, evaluate, model, save_model, texts, tokenizer
from tests.evaluation.test_tir import TOKENIZER
from tests.evaluation.whole_text import WholeText


def test_top_1_is_what_a_slow_loop_finds(demo: Any, data: Path) -> None:
    asked = problems("held_out", COUNT, seed=3)
    right = demo_evaluate.accuracy(
        demo, tokenizer(), {"prompt": [p.prompt for p in asked], "answer": [p.answer for p in asked]}
    )
    results = evaluate(demo, data)
    assert 0 < right < 1, "the model gets some right and some wrong"
    assert results.accuracy("demo") == right
    summary = results.summary["benchmarks"]["demo"]["greedy"]
    assert summary["problems"] == COUNT
    assert summary["complete"] is True
    assert summary["interval"][0] < right < summary["interval"][1]
    assert sum(each["problems"] for each in summary["by"]["level"].values()) == COUNT
    assert "Demo" in results.markdown()


def test_both_samplers_agree(demo: Any, data: Path) -> None:
    builtin = evaluate(demo, data, backend="builtin")
    plain = evaluate(demo, data, backend="transformers", batch_size=5)
    assert texts(builtin) == texts(plain)
    assert (builtin.summary["backend"], plain.summary["backend"]) == ("builtin", "transformers")


@pytest.mark.parametrize("backend", ["builtin", "transformers"])
def test_samples_can_be_drawn_again(demo: Any, data: Path, backend: str) -> None:
    settings = dict(samples=4, greedy=False, temperature=1.0, backend=backend)
    state = torch.get_rng_state()
    first, second = evaluate(demo, data, **settings), evaluate(demo, data, **settings)
    other = evaluate(demo, data, **settings, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    assert texts(first, "sampled") == texts(second, "sampled")
    assert texts(first, "sampled") != texts(other, "sampled")
    assert len(set(texts(first, "sampled"))) > COUNT, "the samples of a problem differ"
    sampled = first.summary["benchmarks"]["demo"]["sampled"]
    assert sampled["pass"]["1"] == pytest.approx(sampled["accuracy"])
    assert sampled["pass"]["4"] > sampled["pass"]["1"]


def test_samples_do_not_depend_on_what_else_is_asked(demo: Any, data: Path) -> None:
    settings = dict(samples=2, greedy=False, temperature=1.0)
    whole = evaluate(demo, data, **settings, batch_size=64)
    pieces = evaluate(demo, data, **settings, batch_size=6)
    assert texts(whole, "sampled") == texts(pieces, "sampled")


@pytest.mark.parametrize("backend", ["builtin", "transformers"])
def test_a_batch_is_never_larger_than_was_said(
    demo: Any, data: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    kind = {"builtin": BuiltinBackend, "transformers": TransformersBackend}[backend]
    settings = dict(samples=5, greedy=False, temperature=1.0, backend=backend, max_new_tokens=8)
    whole = evaluate(demo, data / "few.jsonl", **settings)
    rows: list[int] = []
    sample = kind.sample

    def watched(self: Any, requests: Sequence[SampleRequest]) -> list[Completion]:
        rows.append(sum(request.count for request in requests))
        return sample(self, requests)

    monkeypatch.setattr(kind, "sample", watched)
    split = evaluate(demo, data / "few.jsonl", **settings, batch_size=2)
    assert rows == [2, 2, 1] * 8
    assert [(each.attempt.problem, each.attempt.sample) for each in split.scored["demo"]["sampled"]] == [
        (each.attempt.problem, each.attempt.sample) for each in whole.scored["demo"]["sampled"]
    ]
    if backend == "builtin":
        assert texts(split, "sampled") == texts(whole, "sampled")
    else:
        assert len(set(texts(split, "sampled")[:4])) > 2, "a call does not draw what the one before it drew"


def test_everything_is_kept(demo: Any, data: Path, tmp_path: Path) -> None:
    results = evaluate(demo, data, samples=2, output_dir=tmp_path)
    assert results.folder == tmp_path
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.summary))
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == results.markdown()
    assert (tmp_path / "results.tex").read_text(encoding="utf-8") == results.latex()
    folder = EvaluationFolder(tmp_path)
    assert list(folder.passes()) == [("demo", "greedy"), ("demo", "sampled")]
    assert folder.attempts("demo", "sampled") == results.scored["demo"]["sampled"]
    assert {len(each) for each in folder.scores("demo", "sampled").values()} == {2}
    settings = results.summary["settings"]
    assert (settings["samples"], settings["rendering"], results.summary["dtype"]) == (2, "chat", "float32")
    assert set(results.summary["seconds"]) == {"load", "sampler", "after_load"}
    assert not (tmp_path / "lock").exists()


def test_an_interrupted_evaluation_goes_on(
    demo: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    sample = Evaluator._sample

    def watched(self: Evaluator, prompts: Any, chunk: Any, decoding: Decoding) -> Any:
        asked.append(len(chunk))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return sample(self, prompts, chunk, decoding)

    monkeypatch.setattr(Evaluator, "_sample", watched)
    with pytest.raises(KeyboardInterrupt):
        evaluate(demo, data, output_dir=tmp_path, batch_size=5)
    assert len(EvaluationFolder(tmp_path).attempts("demo", "greedy")) == 10
    asked[:] = [0] * 3
    results = evaluate(demo, data, output_dir=tmp_path, batch_size=5)
    assert asked[3:] == [5, 5, 4], "what was there is not asked again"
    monkeypatch.undo()
    straight = evaluate(demo, data)
    assert texts(results) == texts(straight)
    numbers = [each.summary["benchmarks"]["demo"]["greedy"] for each in (results, straight)]
    assert {**numbers[0], "seconds": 0} == {**numbers[1], "seconds": 0}


def test_a_part_is_gone_on_with_to_the_whole(demo: Any, data: Path, tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("from tests.evaluation.demo import DEMO\n")
    part = evaluate(demo, data, f"{tmp_path}/bench.py:DEMO:6", output_dir=tmp_path / "out")
    assert part.summary["benchmarks"]["demo"]["greedy"]["problems"] == 6
    assert part.summary["benchmarks"]["demo"]["greedy"]["whole_set"] is False
    assert "6 of 24 problems" in part.markdown()
    whole = evaluate(demo, data, output_dir=tmp_path / "out")
    assert len(whole.scored["demo"]["greedy"]) == COUNT
    assert len(EvaluationFolder(tmp_path / "out").attempts("demo", "greedy")) == COUNT


def test_the_rows_of_the_data_are_counted_and_another_number_than_the_usual_is_told(
    demo: Any, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = replace(DEMO, rows=1319)
    (task,) = load_tasks([usual], data)
    assert (len(task.problems), task.rows) == (COUNT, COUNT)
    assert f"the data has {COUNT} problems, but Demo has 1319" in caplog.text
    results = evaluate(demo, data / "few.jsonl", usual)
    summary = results.summary["benchmarks"]["demo"]["greedy"]
    assert (summary["problems"], summary["rows"], summary["usual_rows"]) == (8, 8, 1319)
    assert (summary["complete"], summary["whole_set"]) == (True, False)
    assert "8 of 8 problems in the data; the set has 1319" in results.markdown()
    caplog.clear()
    load_tasks([replace(DEMO, rows=COUNT)], data)
    load_tasks([DEMO], data)
    assert caplog.text == ""


def test_the_page_explains_every_key_of_a_results_file(demo: Any, data: Path, tmp_path: Path) -> None:
    evaluate(demo, data / "few.jsonl", samples=2, paper=True, output_dir=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    section = page.partition("## The numbers\n")[2].partition("\n## ")[0]
    tables = [
        {
            key: line
            for line in re.findall(r"^\| `.*", part, re.M)
            for key in re.findall(r"`(\w+)`", line.split(" | ")[0])
        }
        for part in section.split("In each pass:")
    ]
    tools = summarise(DEMO, [PROBE], [], Decoding(), "tir")
    passes = results["benchmarks"]["demo"]
    assert set(passes) - {"greedy", "sampled"} == {"title"}
    known = {**tools, **passes["greedy"], **passes["sampled"]}
    assert set(tables[0]) == set(results)
    assert set(tables[1]) == set(known)
    for table, values in ((tables[0], results), (tables[1], known)):
        for key in set(values) - {"settings", "by", "benchmarks", "avg", "pass", "maj"}:
            inner = values[key] if isinstance(values[key], dict) else {}
            assert [name for name in inner if f"`{name}`" not in table[key]] == [], key
    inside = {name for values in known["by"].values() for group in values.values() for name in group}
    assert [name for name in inside if f"`{name}`" not in tables[1]["by"]] == []


def test_other_weights_are_not_mixed(data: Path, tmp_path: Path) -> None:
    changed = model()
    evaluate(changed, data, output_dir=tmp_path)
    with torch.no_grad():
        changed.get_input_embeddings().weight.view(-1)[1234] += 1e-3
    with pytest.raises(ConfigError, match="weights: "):
        evaluate(changed, data, output_dir=tmp_path)


def test_two_ways_of_asking_in_one_table_are_told(demo: Any, data: Path, tmp_path: Path) -> None:
    evaluate(demo, data, output_dir=tmp_path, max_new_tokens=8)
    few = replace(DEMO, name="few", title="Few", file="few.jsonl")
    table = evaluate(demo, data, few, output_dir=tmp_path, rendering="plain").markdown()
    assert r"Asked with rendering=plain, max\_new\_tokens=40." in table
    assert r"Asked with rendering=chat, max\_new\_tokens=8." in table
    assert "Asked" not in evaluate(demo, data, few, output_dir=tmp_path / "alone").markdown()


def test_other_ends_of_a_completion_are_not_mixed(data: Path, tmp_path: Path) -> None:
    changed = model()
    evaluate(changed, data, output_dir=tmp_path)
    ends = changed.generation_config.eos_token_id
    changed.generation_config.eos_token_id = [ends, 7]
    with pytest.raises(ConfigError, match=rf"stop_ids: \[{ends}\], now \[.*7"):
        evaluate(changed, data, output_dir=tmp_path)


def test_other_wanted_answers_are_not_mixed(demo: Any, tmp_path: Path) -> None:
    for mode, refused in (("all", False), ("any", True)):
        row = {"question": "Leo has 14 pens. Leo sells 5.", "answers": ["9", "28"], "answers_mode": mode}
        (tmp_path / "demo.jsonl").write_text(json.dumps(row))
        with pytest.raises(ConfigError, match="another answers_mode for demo/demo/0") if refused else nullcontext():
            evaluate(demo, tmp_path, output_dir=tmp_path / "out", max_new_tokens=8)


def test_another_grader_grades_what_was_kept(
    demo: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = evaluate(demo, data, output_dir=tmp_path)
    assert 0 < before.accuracy("demo") < 1
    monkeypatch.setattr("gruppo.evaluation.run.grader_version", lambda *_: "gruppo 9, which calls nothing right")
    monkeypatch.setattr(Evaluator, "_sample", lambda *_: pytest.fail("something was sampled"))
    wrong = lambda self, _, problems, attempts: [  # noqa: E731
        GradedAttempt(each, Grade(False, Rung.NUMBER, gold="1", answer=None)) for each in attempts
    ]
    monkeypatch.setattr(Evaluator, "grade", wrong)
    after = evaluate(demo, data, output_dir=tmp_path)
    assert texts(after) == texts(before)
    assert after.accuracy("demo") == 0
    assert not any(map(any, EvaluationFolder(tmp_path).scores("demo", "greedy").values()))


def test_other_adapters_are_not_mixed(data: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model(), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    evaluate(adapted, data, output_dir=tmp_path)
    with torch.no_grad():
        next(value for name, value in adapted.named_parameters() if "lora_B" in name).fill_(1.0)
    with pytest.raises(ConfigError, match="weights: "):
        evaluate(adapted, data, output_dir=tmp_path)


def test_two_at_once_are_refused(demo: Any, data: Path, tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(RunLockedError):
        evaluate(demo, data, output_dir=tmp_path)


def test_a_completion_at_its_limit_is_cut_off_and_wrong_without_an_answer(demo: Any, data: Path) -> None:
    results = evaluate(demo, data, max_new_tokens=1)
    assert {each.attempt.stop for each in results.scored["demo"]["greedy"]} == {StopReason.LENGTH}
    summary = results.summary["benchmarks"]["demo"]["greedy"]
    assert (summary["truncation_rate"], summary["mean_tokens"]) == (1.0, 1.0)


def test_the_backend_gets_its_settings_back(demo: Any, data: Path) -> None:
    from gruppo.evaluation.data import load_problems
    from gruppo.evaluation.models import load_subject, make_backend

    backend = make_backend(load_subject(demo, tokenizer()))
    before = backend.config
    evaluator = Evaluator(backend, tokenizer())
    chunks: Iterator[list[GradedAttempt]] = evaluator.attempts(
        DEMO, load_problems(DEMO, data, 2), Decoding(max_new_tokens=4)
    )
    assert sum(len(chunk) for chunk in chunks) == 2
    assert backend.config is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampels": 4}, "no setting 'sampels'. Did you mean 'samples'"),
        ({"greedy": False}, "nothing to do"),
        ({"samples": -1}, "must not be negative"),
        ({"samples": 2, "ks": (4,)}, "between 1 and samples=2"),
        ({"ks": (1,)}, "between 1 and samples=0"),
        ({"samples": 2, "temperature": 0.0}, "makes all samples the same"),
        ({"samples": 1, "temperature": 0.0}, "makes all samples the same"),
        ({"temperature": 0.5}, "settings for samples"),
        ({"top_p": 0.5}, "settings for samples"),
        ({"seed": 1}, "settings for samples"),
        ({"allow_unconfined": ["network"]}, "needs mode='tir'"),
        ({"restart": True}, "set output_dir"),
        ({"dtype": "bfloat16"}, "leave them out for an object"),
        ({"device": "cpu"}, "leave them out for an object"),
        ({"trust_remote_code": True}, "leave them out for an object"),
        ({"samples": 2, "top_p": 7.0}, "at most 1"),
        ({"rounds": 2}, "they need mode='tir'"),
        ({"max_total_tokens": 9}, "they need mode='tir'"),
        ({"mode": "tir", "rounds": 0}, "at least 1"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"mode": "chain"}, "'cot' or 'tir'"),
        ({"rendering": "chat", "shots": 2}, "few-shot|Few-shot"),
        ({"backend": "vlm"}, "'auto', 'builtin', 'transformers' or 'vllm'"),
        ({"backend": "vllm"}, "vLLM was requested but cannot be imported"),
        ({"batch_size": 0}, "at least 1"),
        ({"tokenizer": None}, "needs its tokenizer"),
        ({"benchmark": []}, "at least one"),
        ({"benchmark": [DEMO, DEMO]}, "named twice"),
        ({"benchmark": "gsm9k"}, "Did you mean 'gsm8k'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_are_told_before_anything_is_sampled(
    demo: Any, data: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was sampled")

    monkeypatch.setattr(Evaluator, "_sample", never)
    with pytest.raises(ConfigError, match=message):
        evaluate(demo, data, **arguments)


def test_one_file_is_data_of_one_benchmark(demo: Any, data: Path) -> None:
    other = Benchmark("other", "Other", file="demo.jsonl", ladder=LADDERS["gsm8k"])
    assert evaluate(demo, data / "demo.jsonl").summary["benchmarks"]["demo"]["greedy"]["problems"] == COUNT
    with pytest.raises(ConfigError, match="is one file, but there are 2 benchmarks"):
        evaluate(demo, data / "demo.jsonl", [DEMO, other])


@pytest.mark.medium
def test_a_model_from_a_folder(data: Path, tmp_path: Path, demo: Any) -> None:
    results = evaluate(save_model(tmp_path / "saved"), data, tokenizer=None)
    assert texts(results) == texts(evaluate(demo, data))
    assert results.summary["model"] == "saved"


def test_programs_count_and_invented_outputs_do_not(tmp_path: Path) -> None:
    """A scripted model: one problem solved by a program, one where it would make the output up."""
    said = {
        "User: 6 times 7": ["```python\nprint(6 * 7)\n```\n", "```output", "\n41\n```\nSo \\boxed{41}."],
        "42\n```\n": ["So \\boxed{42}.", "<eos>"],
        "User: 2 plus 2": ["Let me see.\n", "```output", "\n4\n```\nSo \\boxed{4}.", "<eos>"],
        "there is no program to run\n```\n": ["I give up.", "<eos>"],
    }

    def script(so_far: str, sample: int) -> list[str]:
        ends = [key for key in said if so_far.endswith(key)]
        return said[ends[0] if ends else next(key for key in said if key in so_far)]

    rows = [Problem("p/0", "6 times 7", ("42",)), Problem("p/1", "2 plus 2", ("4",))]
    backend = WholeText(script)
    evaluator = Evaluator(
        backend,
        TOKENIZER,
        rendering="plain",
        tir=TirSettings(allow_unconfined=Sandbox.capabilities().missing),
    )
    (scored,) = evaluator.attempts(DEMO, rows, Decoding())
    assert [each.correct for each in scored] == [True, False]
    assert scored[0].program is True
    assert scored[1].program is None
    tools = [each.attempt.tools for each in scored]
    assert [(use.rounds, use.executions, use.errors) for use in tools if use] == [(2, 1, 0), (2, 0, 0)]
    assert "41" not in scored[0].attempt.text
    assert "\\boxed{4}" not in scored[1].attempt.text
    assert [kind for kind, _ in scored[0].attempt.segments] == ["model", "output", "model"]
