"""What must not change while attempts are added to a folder; every setting reaches the sampler and the grader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import ConfigError
from gruppo.evaluation import run
from gruppo.evaluation.benchmarks import BENCHMARKS
from gruppo.evaluation.sampling import Evaluator
from gruppo.evaluation.store import EvaluationFolder
from gruppo.evaluation.types import Decoding, FewShot, Problem
from gruppo.grading import LADDERS
from tests.evaluation.demo import COUNT, DEMO, evaluate, model, texts, tokenizer
from tests.evaluation.test_tir import TOKENIZER, text_of
from tests.evaluation.whole_text import WholeText

GSM8K, MATH = BENCHMARKS["gsm8k"], BENCHMARKS["math"]
FEW = replace(DEMO, file="few.jsonl")


def another_template() -> Any:
    own = tokenizer()
    own.chat_template += "A: "
    return own


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "the limit": ({"max_new_tokens": 30}, "max_new_tokens: 40, now 30"),
    "rendering": ({"rendering": "plain"}, "rendering: 'chat', now 'plain'"),
    "the chat template": ({"tokenizer": another_template()}, "prompt: "),
    "the sampler": ({"backend": "transformers"}, "backend: 'builtin', now 'transformers'"),
    "the paper's grading": ({"paper": True}, "paper: False, now True"),
    "our grading": ({"benchmark": replace(FEW, ladder=replace(FEW.ladder, tolerance=0.5))}, "grading: "),
    "shots": ({"benchmark": replace(FEW, few_shot=GSM8K.few_shot), "shots": 1}, "shots: 0, now 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_are_not_mixed(demo: Any, data: Path, tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    evaluate(demo, data, FEW, output_dir=tmp_path)
    with pytest.raises(ConfigError, match=message):
        evaluate(demo, data, **{"benchmark": FEW, "output_dir": tmp_path, **change})


def test_samples_of_another_seed_are_not_mixed(demo: Any, data: Path, tmp_path: Path) -> None:
    evaluate(demo, data, FEW, output_dir=tmp_path, samples=2)
    with pytest.raises(ConfigError, match="seed: 0, now 1"):
        evaluate(demo, data, FEW, output_dir=tmp_path, samples=2, seed=1)


def test_restart_forgets_what_was_asked_in_another_way(demo: Any, data: Path, tmp_path: Path) -> None:
    evaluate(demo, data, FEW, output_dir=tmp_path, samples=2)
    again = evaluate(demo, data, FEW, output_dir=tmp_path, restart=True, max_new_tokens=30)
    assert len(EvaluationFolder(tmp_path).attempts("demo", "greedy")) == len(again.scored["demo"]["greedy"]) == 8
    assert set(again.summary["benchmarks"]["demo"]) == {"title", "greedy"}


def test_a_folder_takes_further_benchmarks_and_passes(demo: Any, data: Path, tmp_path: Path) -> None:
    first = evaluate(demo, data, FEW, output_dir=tmp_path)
    evaluate(demo, data, replace(FEW, name="other"), output_dir=tmp_path)
    last = evaluate(demo, data, FEW, output_dir=tmp_path, greedy=False, samples=2)
    written = EvaluationFolder(tmp_path).results()
    assert written is not None
    assert {name: set(each) - {"title"} for name, each in written["benchmarks"].items()} == {
        "demo": {"greedy", "sampled"},
        "other": {"greedy"},
    }
    assert last.accuracy("demo") == first.accuracy("demo")
    temperatures = {
        key: written["benchmarks"]["demo"][key]["settings"]["temperature"] for key in ("greedy", "sampled")
    }
    assert temperatures == {"greedy": 0.0, "sampled": 0.7}


HABITS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "banned tokens": {"suppress_tokens": list(range(20, 40))},
    "a penalty": {"repetition_penalty": 1.9},
    "no repeats": {"no_repeat_ngram_size": 2},
    "filters": {"typical_p": 0.2, "top_k": 1, "min_p": 0.9, "top_p": 0.1, "do_sample": True},
    "several": {"num_return_sequences": 2},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["auto", "transformers"])
@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_a_model_do_not_decide(data: Path, demo: Any, habit: str, backend: str) -> None:
    """A generation config that comes with a model is not how benchmarks are asked."""
    settings: dict[str, Any] = dict(samples=2, temperature=1.0, backend=backend)
    subject = model()
    for name, value in HABITS[habit].items():
        setattr(subject.generation_config, name, value)
    before = subject.generation_config
    found, clean = (evaluate(each, data, FEW, **settings) for each in (subject, demo))
    assert found.summary["backend"] == clean.summary["backend"]
    for decoding in ("greedy", "sampled"):
        assert texts(found, decoding) == texts(clean, decoding)
    assert subject.generation_config is before


def test_top_p_reaches_the_sampler(demo: Any, data: Path) -> None:
    settings: dict[str, Any] = dict(samples=4, greedy=False, temperature=1.5)
    wide, narrow = (evaluate(demo, data, FEW, **settings, top_p=top_p) for top_p in (1.0, 0.01))
    assert texts(wide, "sampled") != texts(narrow, "sampled")
    assert texts(narrow, "sampled")[::4] == texts(evaluate(demo, data, FEW)), "next to nothing is as good as greedy"


def test_few_shot_completions_end_where_the_model_asks_itself(tmp_path: Path) -> None:
    """And the paper's column is filled, by its rules for such completions."""
    solved = {"question": "1 + 1", "cot": "It is 2.", "tir": "It is 2."}
    (tmp_path / "solved.jsonl").write_text(json.dumps(solved) + "\n")
    layout = FewShot(str(tmp_path / "solved.jsonl"), 1, "Q: {}", "A: {}", "\n\n", ("\nQ:",))
    backend = WholeText(lambda whole, sample: ["It is 7.", "\nQ: 5 + 5\nA: It is 10.", "<eos>"])
    backend.blocks = 1
    evaluator = Evaluator(backend, TOKENIZER, shots=1, paper=True)
    (scored,) = evaluator.attempts(replace(DEMO, few_shot=layout), [Problem("p/0", "3 + 4", ("7",))], Decoding())
    assert scored[0].attempt.text == "It is 7."
    assert scored[0].correct
    assert scored[0].paper is True
    assert evaluator.rendering == "plain"
    assert text_of(backend.asked[0][0].prompt_ids) == "Q: 1 + 1\nA: It is 2.\n\nQ: 3 + 4\nA:"


def test_formulas_are_compared_in_workers(monkeypatch: pytest.MonkeyPatch, demo: Any, data: Path) -> None:
    given: list[Any] = []
    attempts = Evaluator.attempts

    def watched(self: Evaluator, *arguments: Any) -> Any:
        given.append(self.graders)
        return attempts(self, *arguments)

    monkeypatch.setattr(Evaluator, "attempts", watched)
    for changes in ({}, {"benchmark": replace(FEW, ladder=LADDERS["math"])}, {"paper": True}):
        evaluate(demo, data, **{"benchmark": FEW, **changes})
    assert [graders is not None for graders in given] == [False, True, True]


def test_all_prompts_are_rendered_before_the_first_is_sampled(
    demo: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was sampled")

    monkeypatch.setattr(Evaluator, "_sample", never)
    few = [replace(each, name=f"my_{each.name}", file="few.jsonl", rows=None) for each in (GSM8K, MATH)]
    with pytest.raises(ConfigError, match="math"):
        evaluate(demo, data, few, shots=8)


def test_prompts_that_are_too_long_are_told(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "context_length", lambda model: 50)
    evaluate(model(), data)
    assert f"demo: {COUNT} of {COUNT} prompts with 40 new tokens are longer than the 50 positions" in caplog.text
