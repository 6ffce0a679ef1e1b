"""The recipe for SmolLM2 on GSM8K, with a tiny model and made-up problems: settings, task, warm-up, training."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.benchmarks import find_benchmark
from gruppo.evaluation.data import load_problems
from gruppo.evaluation.prompts import render
from gruppo.evaluation.types import Benchmark, Problem
from gruppo.grading import LADDERS, Rule, grade
from recipes.gsm8k_smollm2 import data as gsm8k
from recipes.gsm8k_smollm2 import peer, record, sitting, task, train, warmup
from tests.helpers import tiny_model, tiny_tokenizer

HERE = Path(train.__file__).parent
DATA = Path(__file__).parents[3] / "shared" / "data"
YAMLS = ("grpo", "rloo", "dapo", "dr_grpo")


def small(name: str, model: Path, data: Path, out: Path, **further: Any) -> list[str]:
    """Arguments of a run that a CPU does in seconds."""
    settings = dict(
        config=HERE / f"{name}.yaml",
        model=model,
        data=data,
        output_dir=out,
        use_cpu=True,
        bf16=False,
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        overlong_tokens=0,
        audit="off",
        parity_check="off",
    )
    return [text for key, value in (settings | further).items() for text in (f"--{key}", str(value))]


# ---- settings


@pytest.mark.parametrize("name", YAMLS)
def test_every_file_of_settings_loads_and_can_be_overridden(name: str) -> None:
    arguments = ["--config", str(HERE / f"{name}.yaml"), "--model", "m", "--data", "d", "--use_cpu", "true"]
    recipe, args = train.parse(arguments)
    assert recipe.experiment == name
    assert (args.num_generations, args.generation_batch_size, args.max_completion_length) == (16, 64 * 16, 256)
    assert (args.beta, args.temperature, args.seed, args.bf16) == (0.0, 1.0, 0, True)
    assert args.model_init_kwargs == {"dtype": "float32"}
    recipe, args = train.parse([*arguments, "--seed", "3", "--learning_rate", "2e-5", "--max_seconds", "60"])
    assert (args.seed, args.learning_rate, recipe.max_seconds) == (3, 2e-5, 60)


def test_the_files_differ_in_what_makes_the_algorithms() -> None:
    common = yaml.safe_load(train.COMMON.read_text(encoding="utf-8"))
    files = {
        name: common | yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8")) for name in (*YAMLS, "trl")
    }

    def different(name: str) -> dict[str, Any]:
        keys = [key for key in {**files["grpo"], **files[name]} if files["grpo"].get(key) != files[name].get(key)]
        return {key: files[name].get(key) for key in keys if key not in ("experiment", "output_dir")}

    dapo = dict(loss_type="dapo", epsilon_high=0.28, dynamic_sampling=True, max_resample_rounds=4, overlong_tokens=64)
    assert different("dapo") == dapo
    assert different("dr_grpo") == {"loss_type": "dr_grpo", "scale_rewards": "none"}
    rloo = {"algorithm": "rloo", "loss_type": None, "scale_rewards": None, "max_grad_norm": 100.0}
    assert different("rloo") == rloo
    trl = {"record": None, "use_vllm": True, "vllm_mode": "colocate", "gradient_checkpointing": False}
    assert different("trl") == trl


def test_the_file_of_an_experiment_is_read_over_the_common_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--config", str(HERE / "rloo.yaml"), "--model", "m", "--data", "d", "--use_cpu", "1"]
    shared = yaml.safe_load(train.COMMON.read_text(encoding="utf-8"))
    _, args = train.parse(arguments)
    assert (args.max_grad_norm, shared["max_grad_norm"]) == (100, 1)
    assert args.optim == shared["optim"] == "adamw_torch_fused"
    other = tmp_path / "common.yaml"
    other.write_text("learning_rata: 1.0\n")
    monkeypatch.setattr(train, "COMMON", other)
    with pytest.raises(ConfigError, match="RLOOConfig has no --learning_rata"):
        train.parse(arguments)


@pytest.mark.parametrize(
    ("further", "named"),
    [
        (["--algorithm", "ppo"], "algorithm='ppo'"),
        (["--max_seconds", "0"], "max_seconds=0"),
        (["--average", "1"], "average=1"),
        (["--learning_rata", "1"], "learning_rate"),
    ],
)
def test_a_mistake_is_named(further: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        train.parse(["--config", str(HERE / "grpo.yaml"), "--model", "m", "--data", "d", "--use_cpu", "1", *further])


# ---- the task


def test_targets_are_right_and_in_a_box(data: Path) -> None:
    for row in task.read(data):
        assert grade(task.target(row), row["answer"], "gsm8k").correct
        assert not grade(task.target(row), row["answer"] + "1", "gsm8k").correct


@pytest.mark.skipif(not DATA.is_dir(), reason=f"the benchmark sets are not at {DATA}")
def test_targets_of_the_real_set_are_right_and_in_a_box() -> None:
    rows = task.read(DATA)
    assert len(rows) == 7473
    grades = [grade(task.target(row), row["answer"], "gsm8k") for row in rows]
    assert [row["id"] for row, each in zip(rows, grades, strict=True) if not each.correct] == []
    assert {each.rule for each in grades} == {Rule.BOX}


def test_data_is_made_from_the_files_of_the_authors(tmp_path: Path) -> None:
    solved = "She has 48/2 = <<48/2=24>>24 clips.\nTogether 1,200+50 = <<1200+50=1250>>1250.\n#### 1,250"
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": f"{split}? ", "answer": solved}) + "\n\n")
    given = {"out": tmp_path / "data", "train": tmp_path / "train.jsonl", "test": tmp_path / "test.jsonl"}
    gsm8k.main([text for key, value in given.items() for text in (f"--{key}", str(value))])
    (row,) = task.read(tmp_path / "data")
    assert row == {
        "id": "gsm8k/train/0",
        "question": "train?",
        "solution": "She has 48/2 = 24 clips.\nTogether 1,200+50 = 1250.",
        "answer": "1250",
    }
    (problem,) = load_problems(find_benchmark("gsm8k")[0], tmp_path / "data")
    assert (problem.id, problem.question, problem.answers) == ("gsm8k/test/0", "test?", ("1250",))


def test_a_folder_without_data_and_a_row_without_an_answer(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no gsm8k/train\.jsonl"):
        task.read(tmp_path)
    (data / "gsm8k/train.jsonl").write_text('{"question": "1 + 1?", "solution": "2", "answer": ""}\n')
    with pytest.raises(DataError, match="line 1 has no answer"):
        task.read(data)


def test_training_asks_as_the_evaluation_does(data: Path) -> None:
    tokenizer = tiny_tokenizer()
    row = task.read(data, limit=1)[0]
    (example,) = warmup.encode([row], tokenizer)
    problem = Problem("p", row["question"], (row["answer"],))
    benchmark = Benchmark("gsm8k", "GSM8K", file="", ladder=LADDERS["gsm8k"])
    asked = render(problem, benchmark, "cot", rendering="chat", shots=0, tokenizer=tokenizer)
    assert example.ids[: example.prompt_tokens] == asked.ids
    assert example.ids[-1] == tokenizer.eos_token_id
    chat = tokenizer.apply_chat_template([*task.prompt(row), {"role": "assistant", "content": task.target(row)}])
    assert example.ids == chat["input_ids"], "the same tokens as in a whole conversation"


def test_rewards_and_their_weights() -> None:
    (accuracy,), weights = task.rewards(256)
    assert weights == [1.0]
    assert f"rewards/{accuracy.__name__}/mean" == task.ACCURACY
    answers = [[{"role": "assistant", "content": f"so \\boxed{{{number}}}"}] for number in (7, 8)]
    assert accuracy(completions=answers, answer=["7", "7"]) == [1.0, 0.0]
    logged: list[tuple[str, float]] = []
    accuracy(completions=answers, answer=["7", "7"], log_metric=lambda *call: logged.append(call))
    assert [value for name, value in logged if name == task.SAMPLED_ACCURACY] == [1.0, 0.0], "one for each completion"
    (_, overlong), weights = task.rewards(256, 64)
    punished = overlong(completion_ids=[[0] * length for length in (192, 224, 256)])
    assert [weights[1] * each for each in punished] == [0, -0.25, -0.5]
    functions, weights = task.rewards(256, 64, step_weight=0.25)
    assert (functions[2], weights) == (task.step_results_reward, [1.0, 0.5, 0.25])


def test_results_on_the_way_count_as_far_as_they_agree() -> None:
    solution = "Half is 48/2 = 24.\nTogether 1,200 + 24 = $1,224 and 0.5*2 =1.0"
    assert task.results(solution) == {24, 1224, 1}
    texts = {
        solution: 1.0,
        "1 + 1 = 2": 0.0,
        "no equation": 0.0,
        "48/2=24": 2 * 1 / (3 + 1),
        "24 = 24, 5 = 5, 6 = 6": 2 * 1 / (3 + 3),
    }
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert task.step_results_reward(completions, solution=[solution] * 5) == pytest.approx(list(texts.values()))
    assert task.step_results_reward(["3 = 3"], solution=["Three."]) == [None]


# ---- the warm-up


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=60), budget=st.integers(1, 200))
def test_an_epoch_has_every_example_once_and_batches_keep_to_their_budget(lengths: list[int], budget: int) -> None:
    examples = [warmup.Example([number] * length, 1) for number, length in enumerate(lengths)]
    made = warmup.batches(examples, budget, random.Random(0))
    assert sorted(example.ids[0] for batch in made for example in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(len(e.ids) for e in batch) <= budget or len(batch) == 1 for batch in made)


def test_the_loss_is_that_of_the_completions_alone() -> None:
    model = tiny_model()
    examples = [warmup.Example([7, 8, 9, 10], 2), warmup.Example([11, 12, 13, 14, 15, 16], 3)]
    loss = warmup.loss_of(model, warmup.collate(examples, torch.device("cpu")))
    terms = []
    for example in examples:  # one row at a time, nothing padded
        logps = model(torch.tensor([example.ids])).logits[0].log_softmax(-1)
        terms += [-logps[t - 1, example.ids[t]] for t in range(example.prompt_tokens, len(example.ids))]
    torch.testing.assert_close(loss, torch.stack(terms).mean())


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [warmup.rate(step, 100) for step in range(101)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_the_warm_up_lowers_the_loss_and_saves_a_model_in_float32(data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "warmup"
    arguments = ["--model", model, "--data", data, "--output-dir", out, "--epochs", 6]
    warmup.main([str(a) for a in (*arguments, "--learning-rate", 1e-2, "--batch-tokens", 1000)])
    facts = json.loads((out / "warmup.json").read_text())
    assert facts["losses"][-1] < 0.8 * facts["losses"][0]
    assert facts["updates"] == len(facts["losses"]) > 12
    assert facts["commit"]
    saved = tiny_model().from_pretrained(out)
    assert saved.dtype == torch.float32
    assert saved.generation_config.eos_token_id == tiny_tokenizer().eos_token_id


# ---- training


@pytest.mark.gpu
def test_the_warm_up_makes_the_same_weights_again(data: Path, model: Path, tmp_path: Path) -> None:
    # Heads of 64 in bfloat16: what the fast kernels of attention are for.
    tiny_model(hidden_size=128, num_hidden_layers=4, max_position_embeddings=512).save_pretrained(model)
    made = set()
    for turn in ("first", "second"):
        given = {"model": model, "data": data, "output-dir": tmp_path / turn, "epochs": 20}
        warmup.main([text for key, value in given.items() for text in (f"--{key}", str(value))])
        made.add(json.loads((tmp_path / turn / "warmup.json").read_text())["weights"])
    assert len(made) == 1


def test_two_updates_leave_a_model_and_a_record(data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train.main(small("dapo", model, data, out, max_steps=2, overlong_tokens=4))
    written = json.loads((out / record.NAME).read_text())
    assert [step["step"] for step in written["steps"]] == [1, 2]
    assert (written["library"], written["experiment"], written["seed"]) == ("gruppo", "dapo", 0)
    assert written["config"]["dynamic_sampling"] is True
    assert written["config"]["reward_weights"] == [1.0, 0.5]
    assert written["train_seconds"] == written["steps"][-1]["seconds"] > written["steps"][0]["seconds"] > 0
    assert (out / "model.safetensors").exists()
    config = yaml.safe_load((out / "config.yaml").read_text())
    settings = yaml.safe_load(train.COMMON.read_text(encoding="utf-8")) | yaml.safe_load(
        (HERE / "dapo.yaml").read_text(encoding="utf-8")
    )
    changed = {"bf16": False, "max_steps": 2, "num_generations": 4, "output_dir": str(out), "loss_type": "dapo"}
    assert {key: config[key] for key in changed} == changed
    assert {key for key in settings if key not in config} <= set(train.RecipeArguments.__dataclass_fields__)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3, "two updates and the end"


def test_adapters_begin_with_the_weights_under_them(data: Path, model: Path, tmp_path: Path) -> None:
    for rank in (0, 4):
        train.main(small("grpo", model, data, tmp_path / f"rank-{rank}", max_steps=1, lora_rank=rank))
    plain, adapted = (json.loads((tmp_path / f"rank-{rank}" / record.NAME).read_text()) for rank in (0, 4))
    assert adapted["start_weights"] == plain["start_weights"]
    assert (plain["config"]["lora_rank"], adapted["config"]["lora_rank"]) == (0, 4)
    assert (tmp_path / "rank-4/adapter_model.safetensors").exists()
    assert sitting.is_model(tmp_path / "rank-4")
    assert not sitting.is_model(data)


def test_a_running_mean_of_the_weights() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(100.0)
    mean = train.RunningMean(model, keep=0.75)
    for step, value in enumerate((1.0, 3.0, 8.0, 12.0, 18.0), 1):
        model.weight.data.fill_(value)
        mean.on_step_end(None, SimpleNamespace(global_step=step))
    mean.write()
    assert model.weight.item() == pytest.approx(0.75 * (1 + 3 + 8 + 12) / 4 + 0.25 * 18), "the start does not count"


def test_a_mean_of_the_weights_and_results_on_the_way_in_a_run(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        task, "_grade", lambda completions, *logs, answer: [float(i % 4 == 0) for i in range(len(answer))]
    )
    saved = {}
    for name, further in {"last": {}, "mean": {"average": 0.9}}.items():
        arguments = small("grpo", model, data, tmp_path / name, max_steps=3, step_weight=0.5, **further)
        train.main([*arguments, "--learning_rate", "1e-2", "--warmup_steps", "0"])
        saved[name] = tiny_model().from_pretrained(tmp_path / name).get_input_embeddings().weight
    written = [json.loads((tmp_path / name / record.NAME).read_text()) for name in saved]
    assert [each["config"]["average"] for each in written] == [0, 0.9]
    assert written[0]["config"]["reward_weights"] == [1.0, 0.5]
    accuracies = [[step["accuracy"] for step in each["steps"]] for each in written]
    assert accuracies[0] == accuracies[1], "the mean is not what samples"
    assert not torch.equal(saved["last"], saved["mean"])


def test_a_run_stops_when_its_time_is_over(data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train.main(small("rloo", model, data, out, max_seconds=0.001))
    assert len(json.loads((out / record.NAME).read_text())["steps"]) == 1
    assert (out / "config.json").exists(), "and saves its model"


def test_the_peer_runs_the_same_task(data: Path, model: Path, tmp_path: Path) -> None:
    from gruppo import GRPOConfig, GRPOTrainer

    arguments = small("trl", model, data, tmp_path / "run", max_seconds=0.001, use_vllm=False)
    recipe, args = peer.parse_for(GRPOConfig, arguments)
    train.run(recipe, args, GRPOTrainer, {"library": "trl"})
    written = json.loads((tmp_path / "run" / record.NAME).read_text())
    assert (written["library"], written["experiment"], len(written["steps"])) == ("trl", "trl", 1)


# ---- records


def test_accuracy_is_the_one_that_the_reward_logged() -> None:
    assert record.sampled_accuracy({task.ACCURACY: 0.5, task.SAMPLED_ACCURACY: 0.25}) == 0.25
    assert record.sampled_accuracy({task.ACCURACY: "0.5", task.SAMPLED_ACCURACY: "0.25"}) == 0.25, "some log text"
    assert record.sampled_accuracy({task.ACCURACY: 0.5}) == 0.5


def test_accuracy_is_that_of_everything_that_was_sampled(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that are all right, and cut at the limit, so that their rewards are no 1: they are replaced."""
    given = tmp_path / "given.txt"

    def grade(completions: list[Any], log_extra: Any, log_metric: Any, answer: list[str]) -> list[float]:
        scores = [1.0 if int(gold) % 2 else float(i % 4 == 0) for i, gold in enumerate(answer)]
        with given.open("a") as lines:
            lines.writelines(f"{score}\n" for score in scores)
        return scores

    monkeypatch.setattr(task, "_grade", grade)
    further = {"overlong_tokens": 1, "max_completion_length": 1, "per_device_train_batch_size": 16}
    train.main(small("dapo", model, data, tmp_path / "run", max_steps=1, **further))
    scores = [float(line) for line in given.read_text().splitlines()]
    (step,) = json.loads((tmp_path / "run" / record.NAME).read_text())["steps"]
    (logs, _) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert len(scores) == 4 * step["prompts"] > 32, "some were replaced"
    assert step["accuracy"] == pytest.approx(sum(scores) / len(scores))
    assert step["accuracy"] > logs[task.ACCURACY] == pytest.approx(0.25)


@pytest.mark.parametrize("tied", [True, False])
def test_a_record_names_the_warm_up_that_it_began_with(data: Path, model: Path, tmp_path: Path, tied: bool) -> None:
    tiny_model(max_position_embeddings=512, tie_word_embeddings=tied).save_pretrained(model)
    start = tmp_path / "warmup"
    warmup.main(["--model", str(model), "--data", str(data), "--output-dir", str(start), "--epochs", "1"])
    made = json.loads((start / "warmup.json").read_text())["weights"]
    starts = {}
    for name, folder in (("grpo", start), ("rloo", start), ("other", model)):
        recipe = "grpo" if name == "other" else name
        train.main(small(recipe, folder, data, tmp_path / name, max_seconds=0.001))
        starts[name] = json.loads((tmp_path / name / record.NAME).read_text())["start_weights"]
    assert starts["grpo"] == starts["rloo"] == made != starts["other"]


def test_a_record_is_whole_after_every_save(tmp_path: Path) -> None:
    recorder = record.Recorder(tmp_path, {"library": "x"}, max_seconds=1000)
    recorder.built(tiny_model())
    recorder.on_train_begin()
    control = SimpleNamespace(should_training_stop=False)
    for step in (1, 2):
        recorder.on_step_end(None, None, control)
        recorder.on_log(None, SimpleNamespace(global_step=step), control, {task.ACCURACY: 0.5, "entropy": 1.0})
    recorder.on_log(None, SimpleNamespace(global_step=2), control, {"train_runtime": 1.0})
    assert len(json.loads((tmp_path / record.NAME).read_text())["steps"]) == 1, "saved now and then"
    recorder.on_train_end()
    steps = json.loads((tmp_path / record.NAME).read_text())["steps"]
    assert [(step["step"], step["accuracy"], step["entropy"]) for step in steps] == [(1, 0.5, 1.0), (2, 0.5, 1.0)]
    assert control.should_training_stop is False
