"""Benchmarks during training: what they say, when they run, and that the run does not notice."""

import json
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.config.evaluation import BENCHMARK_SETTINGS
from gruppo.demo import exact_match, greedy, load_task, model_path
from gruppo.demo.task import Problem, extract_answer, problems
from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.settings import TrainingSettings
from gruppo.evaluation.training import METRICS, TrainingBenchmarks
from gruppo.runs.read import Run
from gruppo.trainer.construct import benchmarks
from gruppo.types import Completion
from tests.evaluation.demo import tokenizer
from tests.helpers import timeless
from tests.processes import run_together
from tests.tools.scripted import random_caller
from tests.trainer.test_metrics import documented_keys

PROBLEMS = 12
BENCH = """
from gruppo.evaluation.types import Benchmark
from gruppo.grading import LADDERS

DEMO = Benchmark("demo", "Demo", file="demo.jsonl", ladder=LADDERS["gsm8k"])
AGAIN = Benchmark("demo", "Demo, too", file="demo.jsonl", ladder=LADDERS["gsm8k"])
OTHER = Benchmark("other", "Other", file="demo.jsonl", ladder=LADDERS["gsm8k"])
SYMBOLIC = Benchmark("symbolic", "Symbolic", file="demo.jsonl", ladder=LADDERS["math"])
LOST = Benchmark("lost", "Lost", file="lost.jsonl", ladder=LADDERS["gsm8k"])
"""


def asked() -> list[Problem]:
    """Problems that the demo model gets right and wrong."""
    return problems("held_out", PROBLEMS, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmark(tmp_path_factory.mktemp("benchmarks"))


def write_benchmark(folder: Path) -> Path:
    (folder / "bench.py").write_text(BENCH)
    rows = [{"question": problem.question, "answer": problem.answer} for problem in asked()]
    (folder / "demo.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def make(
    output: Path,
    data: Path | None = None,
    names: Sequence[str] = ("DEMO",),
    trainer_class: Any = GRPOTrainer,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A small run of the demo; with `data`, one that has benchmarks."""
    benchmarks: dict[str, Any] = {}
    if data is not None:
        benchmarks = {
            "eval_benchmarks": [f"{data / 'bench.py'}:{name}" for name in names],
            "eval_benchmarks_dir": str(data),
            "eval_benchmarks_settings": {"max_new_tokens": 40},
            "eval_strategy": "steps",
            "eval_steps": 1,
        }
    sizes = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 24}
    quiet = {"bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "parity_check": "off"}
    rest = {"learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": False}
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    return trainer_class(
        model=model_path(),
        reward_funcs=exact_match,
        args=config(str(output), **{**sizes, **quiet, **rest, **benchmarks, **settings}),
        train_dataset=load_task(32, 1)[0],
        processing_class=tokenizer(),
        **(arguments or {}),
    )


def evaluations(trainer: Any, key: str = "eval_demo_accuracy") -> list[dict[str, Any]]:
    return [record for record in trainer.state.log_history if key in record]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- what they say


def test_the_numbers_are_those_of_the_model(tmp_path: Path, folder: Path) -> None:
    """Against transformers' own greedy decoding, and the demo's own reading of an answer."""
    trainer = make(tmp_path, folder, eval_strategy="no")
    found = trainer.evaluate()
    texts = greedy(trainer.model, tokenizer(), [problem.prompt for problem in asked()])
    right = [extract_answer(text) == str(problem.answer) for text, problem in zip(texts, asked(), strict=True)]
    lengths = [len(ids) + 1 for ids in tokenizer()(texts)["input_ids"]]  # and the end
    assert 0 < sum(right) < PROBLEMS, "some are right and some are wrong"
    assert found["eval_demo_accuracy"] == sum(right) / PROBLEMS
    assert found["eval_demo_mean_length"] == sum(lengths) / PROBLEMS
    assert found["eval_demo_truncated_ratio"] == 0.0
    assert found["eval_demo_boxed_rate"] == 0.0, "the demo writes no boxes"
    assert 0 < found["eval_demo_runtime"] < 60


def test_completions_that_do_not_end_are_counted(tmp_path: Path, folder: Path) -> None:
    trainer = make(tmp_path, folder, eval_benchmarks_settings={"max_new_tokens": 2}, eval_strategy="no")
    found = trainer.evaluate()
    assert (found["eval_demo_truncated_ratio"], found["eval_demo_mean_length"]) == (1.0, 2.0)


@pytest.mark.medium
def test_formulas_are_graded_in_worker_processes(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("math_verify")
    found = make(tmp_path, folder, ["DEMO", "SYMBOLIC"], eval_strategy="no").evaluate()
    assert found["eval_symbolic_accuracy"] == found["eval_demo_accuracy"] > 0


def test_every_metric_has_a_row_in_the_documentation() -> None:
    rows = [key for key in documented_keys() if key.startswith("eval_<benchmark>_")]
    assert [key.removeprefix("eval_<benchmark>_") for key in rows] == list(METRICS)


def test_the_config_knows_the_settings() -> None:
    assert list(BENCHMARK_SETTINGS) == [field.name for field in fields(TrainingSettings)]


# ---- when they run


class Heard(TrainerCallback):
    """The metrics of each evaluation, as callbacks hear of them."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, Any]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.metrics.append(dict(metrics))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Any:
    """A run without an evaluation set, with an evaluation before it and after each update; and what was heard."""
    heard = Heard()
    output = tmp_path_factory.mktemp("trained")
    trainer = make(output, folder, ["DEMO", "OTHER"], arguments={"callbacks": [heard]}, eval_on_start=True)
    trainer.train()
    trainer.heard = heard
    return trainer


def test_they_run_at_each_evaluation_without_a_dataset(trained: Any) -> None:
    assert trained.eval_dataset is None
    records = evaluations(trained)
    assert [record["step"] for record in records] == [0, 1, 2]
    names = {f"eval_{name}_{metric}" for name in ("demo", "other") for metric in METRICS}
    assert set(records[0]) == names | {"epoch", "step"}
    assert [record["eval_other_accuracy"] for record in records] == [r["eval_demo_accuracy"] for r in records]
    assert [{**metrics, "step": i} for i, metrics in enumerate(trained.heard.metrics)] == records


def test_the_record_of_the_run_has_them(trained: Any) -> None:
    lines = Run(trained.args.output_dir).metrics("eval")
    known = [(line["update"], line["eval_demo_accuracy"]) for line in lines]
    assert known == [(record["step"], record["eval_demo_accuracy"]) for record in evaluations(trained)]


def test_evaluate_takes_a_prefix(trained: Any) -> None:
    found = trained.evaluate(metric_key_prefix="final")
    assert found["final_demo_accuracy"] == evaluations(trained)[-1]["eval_demo_accuracy"], "the same weights"
    assert not any(name.startswith("eval_") for name in found)
    assert trained.state.log_history[-1]["final_demo_accuracy"] == found["final_demo_accuracy"]


def test_an_evaluation_set_and_benchmarks_make_one_set_of_metrics(tmp_path: Path, folder: Path) -> None:
    heard = Heard()
    arguments = {"eval_dataset": load_task(1, 2)[1], "callbacks": [heard]}
    trainer = make(tmp_path, folder, arguments=arguments, per_device_eval_batch_size=8, max_steps=1)
    trainer.train()
    (record,) = evaluations(trainer)
    assert {"eval_reward", "eval_loss", "eval_runtime", "eval_demo_accuracy"} <= record.keys()
    assert len(evaluations(trainer, "eval_reward")) == len(heard.metrics) == 1
    found = trainer.evaluate(metric_key_prefix="x")
    assert {"x_reward", "x_loss", "x_demo_accuracy"} <= found.keys()
    assert not any(name.startswith("eval_") for name in found)


def test_beside_several_sets_they_run_once(tmp_path: Path, folder: Path) -> None:
    task = load_task(1, 2)[1]
    sets = {"eval_dataset": {"a": task, "b": task}}
    trainer = make(tmp_path, folder, arguments=sets, per_device_eval_batch_size=8, max_steps=1)
    trainer.train()
    assert [line["kind"] for line in Run(str(tmp_path)).metrics()] == ["train", "eval_a", "eval_b", "eval", "end"]
    found = trainer.evaluate()
    assert {"eval_a_reward", "eval_b_reward", "eval_demo_accuracy"} <= found.keys()
    assert not any(name.startswith(("eval_a_demo", "eval_b_demo")) for name in found)
    assert len(evaluations(trainer)) == 2
    trainer.predict(task)
    assert len(evaluations(trainer)) == 2, "predictions are no evaluation"


def test_the_best_model_by_a_benchmark(tmp_path: Path, folder: Path) -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=5)
    trainer = make(
        tmp_path,
        folder,
        arguments={"callbacks": [stopping]},
        metric_for_best_model="demo_accuracy",
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=1,
        learning_rate=3e-3,
    )
    trainer.train()
    scores = [record["eval_demo_accuracy"] for record in evaluations(trainer)]
    assert trainer.state.best_metric == max(scores)
    assert trainer.state.best_global_step == 1 + scores.index(max(scores))
    assert trainer.evaluate()["eval_demo_accuracy"] == max(scores), "its weights were loaded"


def test_rloo_has_them_too(tmp_path: Path, folder: Path) -> None:
    trainer = make(tmp_path, folder, trainer_class=RLOOTrainer, max_steps=1, beta=0.0)
    trainer.train()
    assert len(evaluations(trainer)) == 1


# ---- the run does not notice

SAMPLED = {"samples": 2, "temperature": 1.0, "max_new_tokens": 30}
WAYS: dict[str, dict[str, Any]] = {
    "builtin": {"rollout_backend": "builtin"},
    "transformers": {"rollout_backend": "transformers"},
    "continuous batching": {"use_transformers_continuous_batching": True},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way", ["builtin", "transformers", pytest.param("continuous batching", marks=pytest.mark.medium)]
)
@pytest.mark.parametrize("asked", [{"max_new_tokens": 40}, SAMPLED], ids=["greedy", "sampled"])
def test_the_weights_are_the_same_bit_for_bit(way: str, asked: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    plain = make(tmp_path / "plain", **WAYS[way])
    plain.train()
    watched = make(tmp_path / "watched", folder, eval_on_start=True, eval_benchmarks_settings=asked, **WAYS[way])
    watched.train()
    assert len(evaluations(watched)) == 3
    assert same(weights(plain), weights(watched))
    assert not same(weights(plain), weights(make(tmp_path / "start"))), "training changed something"
    logs = [[timeless(record) for record in t.state.log_history if "loss" in record] for t in (plain, watched)]
    assert logs[0] == logs[1]


def generators() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("way", ["builtin", "transformers"])
def test_generators_settings_and_budgets_are_left_alone(way: str, trained: Any, tmp_path: Path, folder: Path) -> None:
    trainer = make(tmp_path, folder, eval_benchmarks_settings=SAMPLED, max_steps=1, **WAYS[way])
    for moment in ("before", "after"):  # the first rollout of training makes the budgets
        seen = generators(), trainer.backend.config, str(trainer.backend.config), trainer.backend.state_dict()
        trainer.evaluate()
        now = generators(), trainer.backend.config, str(trainer.backend.config), trainer.backend.state_dict()
        assert now == seen, moment
        if moment == "before":
            trainer.train()
    assert trainer.model.config._attn_implementation != "paged|sdpa"


def test_a_benchmark_that_fails_leaves_everything_alone_too(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, folder)
    seen = generators(), trainer.backend.config, trainer.backend.state_dict()

    def fail(*args: Any, **kwargs: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(3)
        raise KeyboardInterrupt

    sample = trainer.backend.sample
    monkeypatch.setattr(trainer.backend, "sample", lambda requests: (sample(requests), fail()))
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert (generators(), trainer.backend.config, trainer.backend.state_dict()) == seen
    assert trainer.mode == "train"


def test_sampled_attempts_are_the_same_at_each_evaluation(tmp_path: Path, folder: Path) -> None:
    trainer = make(tmp_path, folder, eval_benchmarks_settings=SAMPLED, eval_strategy="no")
    first = trainer.evaluate()
    torch.rand(7)
    trainer.temperature = 0.3  # of training
    assert timeless(trainer.evaluate()) == timeless(first)


def test_rollout_functions_and_tools_take_no_part(tmp_path: Path, folder: Path) -> None:
    def never(prompts: list[str], trainer: Any) -> dict[str, Any]:
        raise AssertionError("benchmarks are not rollouts of the run")

    trainer = make(tmp_path, folder, arguments={"rollout_func": never}, eval_strategy="no")
    assert trainer.evaluate()["eval_demo_accuracy"] > 0


def test_a_run_with_tools_is_asked_without_them(tmp_path: Path, folder: Path) -> None:
    def lookup(word: str) -> str:
        """Look a word up.

        Args:
            word: what to look up
        """
        return word

    trainer = random_caller(
        tmp_path,
        "lookup",
        {"word": "a"},
        arguments={"tools": [lookup]},
        eval_benchmarks=[f"{folder / 'bench.py'}:DEMO:2"],
        eval_benchmarks_dir=str(folder),
        eval_benchmarks_settings={"max_new_tokens": 5},
    )
    asked_for: list[Any] = []
    sample = trainer.backend.sample

    def listening(requests: Sequence[Any]) -> list[Completion]:
        asked_for.extend(requests)
        return list(sample(requests))

    trainer.backend.sample = listening
    found = trainer.evaluate()
    assert len(asked_for) == 2, "one turn for each problem"
    prompts = [trainer.processing_class.decode(request.prompt_ids) for request in asked_for]
    assert not any("[lookup]" in prompt for prompt in prompts)
    assert found["eval_demo_mean_length"] <= 5


# ---- what cannot work is known at once


def test_the_trainer_loads_nothing_without_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gruppo.evaluation.training", None)  # type: ignore[arg-type]
    assert make(tmp_path).benchmarks is None
    assert not hasattr(benchmarks, "TrainingBenchmarks")
    with pytest.raises(ImportError):
        make(tmp_path, eval_benchmarks=["gsm8k"])


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such file": ({"names": ["LOST"]}, ConfigError, r"lost\.jsonl.*data_dir is `eval_benchmarks_dir`"),
    "no such benchmark": ({"eval_benchmarks": ["gsm9k"]}, ConfigError, "Did you mean 'gsm8k'"),
    "a name twice": ({"names": ["DEMO", "AGAIN"]}, ConfigError, r"named twice \(demo, demo\)"),
    "greedy samples": (
        {"eval_benchmarks_settings": {"samples": 4, "temperature": 0}},
        ConfigError,
        "temperature=0 makes all samples the same",
    ),
    "no exemplars": ({"eval_benchmarks_settings": {"shots": 2}}, ConfigError, "demo has no few-shot prompt"),
    "strings that end a completion": (
        {"eval_benchmarks_settings": {"shots": 2}, "use_transformers_continuous_batching": True},
        ConfigError,
        "shots=2 and mode='cot'.*set use_transformers_continuous_batching=False",
    ),
    "negative shots": (
        {"eval_benchmarks_settings": {"shots": -1}},
        ConfigError,
        "shots=-1 and samples=0 must not be negative",
    ),
    "no such mode": ({"eval_benchmarks_settings": {"mode": "code"}}, ConfigError, "mode='code'"),
    "no such rendering": ({"eval_benchmarks_settings": {"rendering": "xml"}}, ConfigError, "rendering='xml'"),
    "rounds without programs": ({"eval_benchmarks_settings": {"rounds": 2}}, ConfigError, "they need mode='tir'"),
    "loss of no set": (
        {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 1},
        ConfigError,
        "metric_for_best_model='loss' is not among the metrics of eval_benchmarks.*eval_demo_accuracy",
    ),
    "a metric that is near": (
        {"metric_for_best_model": "eval_demo_acuracy"},
        ConfigError,
        "Did you mean `eval_demo_accuracy`",
    ),
    "groups of a set": (
        {"arguments": {"eval_dataset": load_task(1, 2)[1]}, "per_device_eval_batch_size": 6},
        ConfigError,
        "must be divisible by the evaluation group size 4",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_at_construction(mistake: str, tmp_path: Path, folder: Path) -> None:
    given, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        make(tmp_path, folder, **given)


def test_a_damaged_row_is_found_at_construction(tmp_path: Path) -> None:
    write_benchmark(tmp_path)
    with (tmp_path / "demo.jsonl").open("a") as file:
        file.write('{"question": "how many?"}\n')
    with pytest.raises(DataError, match=rf"demo\.jsonl:{PROBLEMS + 1}: there is no `answer`"):
        make(tmp_path / "run", tmp_path)


def test_benchmarks_that_never_run_are_warned_about(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=benchmarks.__name__):
        make(tmp_path, folder, eval_strategy="no")
        assert "they run only when evaluate() is called" in caplog.text
        caplog.clear()
        make(tmp_path, folder)
        assert not caplog.text


# ---- several processes


def test_the_shares_of_processes_add_up(tmp_path: Path, folder: Path) -> None:
    """Five processes, one after the other, and what each would gather."""
    trainer = make(tmp_path, folder, eval_strategy="no")
    benchmarks = TrainingBenchmarks(
        [f"{folder / 'bench.py'}:DEMO"], data_dir=str(folder), settings={"samples": 2, "temperature": 1.0}
    )
    benchmarks.bind(trainer.backend, trainer.processing_class)
    shares: list[Any] = []

    def gather(own: list[Any]) -> list[Any]:
        shares.extend(own)
        return list(reversed(shares))  # whatever order they come in

    for process in range(5):
        together = benchmarks.run(trainer.backend, process, 5, gather)
    assert sum(len(rows) for rows, _ in shares) == 2 * PROBLEMS
    assert {len(rows) for rows, _ in shares} == {4, 6}
    alone = benchmarks.run(trainer.backend)
    assert timeless({k: v for k, v in together.items() if "runtime" not in k}) == {
        k: v for k, v in alone.items() if "runtime" not in k
    }
    assert together["demo_runtime"] == max(seconds for _, seconds in shares)


def main(output: Path) -> None:
    """One of two processes."""
    trainer = make(output / "run", output, eval_on_start=True, per_device_train_batch_size=4, max_steps=1)
    trainer.train()
    seen = {"evaluations": evaluations(trainer), "weight": weights(trainer)["lm_head.weight"].double().sum().item()}
    (output / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))


@pytest.mark.medium
def test_two_processes_see_the_same_numbers(tmp_path: Path, trained: Any) -> None:
    write_benchmark(tmp_path)
    run_together(2, "tests.trainer.test_benchmarks", tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero == one
    assert [record["step"] for record in zero["evaluations"]] == [0, 1]
    start, now = evaluations(trained)[0], zero["evaluations"][0]
    shared = [f"eval_demo_{metric}" for metric in METRICS if metric != "runtime"]
    assert [now[name] for name in shared] == [start[name] for name in shared], "and as one process does"
