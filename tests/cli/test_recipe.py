"""What a file and a line may say about a run, and what they mean."""

from pathlib import Path
from typing import Any

import pytest

from gruppo.cli.recipe import RunFile, accelerate_options, take_help
from gruppo.errors import ConfigError

LEAST = ["--model", "m", "--dataset", "d", "--reward", "accuracy_reward", "--use_cpu", "true"]


def test_the_short_names_are_those_of_trl(recipe: Any, home: Path) -> None:
    short = RunFile.read(recipe())
    line = RunFile.read(
        [*("--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a", "b"), "--use_cpu"]
    )
    assert short.model == str(home / "model")
    assert short.script.dataset_name == str(home / "rows.jsonl")
    assert short.rewards == [f"{home / 'own.py'}:brevity"]
    assert (line.model, line.script.dataset_name, line.rewards) == ("m", "d", ["a", "b"])


def test_a_file_of_trl_runs_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "of_trl.yaml"
    path.write_text(
        """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dtype: bfloat16
attn_implementation: sdpa
dataset_name: trl-lib/DeepMath-103K
dataset_train_split: train[:100]
reward_funcs: [accuracy_reward, think_format_reward]
reward_model_name_or_path: some/reward-model
learning_rate: 1e-6
use_peft: true
lora_target_modules: [q_proj, v_proj]
num_generations: 8
use_cpu: true
eval_strategy: no
num_processes: 2
mixed_precision: bf16
multi_gpu: true
env: {GRUPPO_TEST_OF_TRL: 1}
"""
    )
    run = RunFile.read(["--config", str(path), "--beta", "0.04"], "grpo")
    assert run.trainer == "grpo"
    assert run.rewards == ["some/reward-model", "accuracy_reward", "think_format_reward"], "the model comes first"
    assert (run.config.learning_rate, run.config.beta, run.config.num_generations) == (1e-6, 0.04, 8)
    assert run.config.model_init_kwargs == {"dtype": "bfloat16", "attn_implementation": "sdpa"}
    assert run.model_args.lora_target_modules == ["q_proj", "v_proj"]
    assert run.accelerate == ("--num_processes", "2", "--mixed_precision", "bf16", "--multi_gpu")
    assert run.processes == 2


def test_the_line_wins_over_the_file(recipe: Any) -> None:
    run = RunFile.read([str(recipe(beta=0.1, learning_rate=1e-5)), "--beta", "0.2", "--model", "other"])
    assert (run.config.beta, run.config.learning_rate, run.model) == (0.2, 1e-5, "other")


@pytest.mark.parametrize(
    ("argv", "command", "message"),
    [
        (["--modle", "m"], "grpo", "Unknown argument `modle`. Did you mean `model`"),
        ([*LEAST, "--max_new_tokens", "3"], "grpo", "Use `max_completion_length`"),
        ([*LEAST, "--num_procesess", "3"], "grpo", "Unknown argument `num_procesess`"),
        ([*LEAST, "--loss_type", "grpo"], "rloo", "Unknown argument `loss_type`"),
        ([*LEAST, "--learning", "3"], "grpo", "Unknown argument `learning`"),  # no abbreviations
        ([*LEAST, "--max_steps", "many"], "grpo", "--max-steps: invalid int value: 'many'"),
        ([*LEAST, "--beta", "0", "stray"], "grpo", "Unexpected argument 'stray'; the file must be the first argument"),
        (LEAST[2:], "grpo", "The run has no model"),
        ([*LEAST[:2], *LEAST[4:]], "grpo", "The run has no dataset"),
        ([*LEAST[:4], *LEAST[6:]], "grpo", "The run has no reward"),
        ([*LEAST, "--trainer", "ppo"], "train", "trainer='ppo' is not one of grpo, rloo"),
        (
            [*LEAST, "--trainer", "rloo"],
            "grpo",
            "The command line sets --trainer rloo, which does .*Use `gruppo train`",
        ),
        ([*LEAST, "--trainer"], "train", "--trainer needs one of grpo, rloo"),
        ([*LEAST, "--trainer", "--beta", "0"], "train", "--trainer needs one of grpo, rloo"),
        ([*LEAST, "--qwrtzuiop", "1"], "grpo", "Unknown argument `qwrtzuiop`.$"),
        ([*LEAST, "--warmup_ratio", "0.1"], "grpo", "Use `warmup_steps`, which takes a number of steps or, below 1"),
        ([*LEAST, "--torch_dtype", "auto"], "grpo", "Unknown argument `torch_dtype`. Use `dtype`"),
        ([*LEAST, "--no_cuda"], "grpo", "Unknown argument `no_cuda`. Use `use_cpu`"),
        ([*LEAST, "--logging_dir", "x"], "grpo", "Unknown argument `logging_dir`. Leave it out"),
        ([*LEAST, "--group_by_length"], "grpo", "Unknown argument `group_by_length`. Leave it out"),
        ([*LEAST, "--overwrite_output_dir"], "grpo", "Unknown argument `overwrite_output_dir`. Leave it out"),
        ([*LEAST, "--report_to", "nonsense"], "grpo", "report_to='nonsense' is not one of none, all, "),
        ([*LEAST, "--rollout_func", "a:b"], "rloo", "rollout_func works with GRPO only"),
        ([*LEAST, "--save_strategy", "steps", "--load_best_model_at_end"], "grpo", "load_best_model_at_end"),
        (["none.yaml"], "train", "^none.yaml: there is no such file"),
        (["a.yaml", "--config", "b.yaml"], "train", "Two files are given"),
        ([*LEAST, "--reward", "other"], "grpo", "--rewards is given more than once: give it once, with all values"),
    ],
)
def test_what_cannot_be_meant(argv: list[str], command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunFile.read(argv, command)


def test_two_names_of_one_setting(recipe: Any) -> None:
    with pytest.raises(ConfigError, match="`model_name_or_path` and `model` are two names"):
        RunFile.read(recipe(model_name_or_path="m"))


def test_an_unknown_key_names_the_file_and_the_nearest(recipe: Any) -> None:
    path = recipe(learning_rat=1e-5)
    with pytest.raises(
        ConfigError, match=rf"{path.name}: Unknown argument `learning_rat`. Did you mean `learning_rate`"
    ):
        RunFile.read(path)


def test_a_wrong_value_names_the_field_and_the_file(recipe: Any) -> None:
    path = recipe(reward_weights=["a"])
    with pytest.raises(ConfigError, match=rf"{path.name}: reward_weights=\['a'\]: could not convert string to float"):
        RunFile.read(path)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("model: Modèle".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml is not UTF-8 text"):
        RunFile.read(path)


def test_the_algorithm_is_the_commands_or_the_files(recipe: Any) -> None:
    assert type(RunFile.read(recipe(trainer="rloo")).config).__name__ == "RLOOConfig"
    assert type(RunFile.read(recipe()).config).__name__ == "GRPOConfig"
    assert type(RunFile.read(LEAST, "rloo").config).__name__ == "RLOOConfig"


def test_a_dataset_that_is_more_than_a_name_is_a_mixture(recipe: Any) -> None:
    one = RunFile.read(recipe(dataset={"path": "a", "name": "main", "fraction": 1.0}))
    assert one.script.dataset_name is None
    assert [(each.path, each.name) for each in one.mixture.datasets] == [("a", "main")]
    several = RunFile.read(recipe(dataset=[{"path": "a"}, {"path": "b", "split": "x"}], test_split_size=0.5))
    assert [each.path for each in several.mixture.datasets] == ["a", "b"]
    assert several.mixture.test_split_size == 0.5


def test_datasets_beat_a_name(recipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFile.read(recipe(datasets=[{"path": "a"}]))
    assert [each.path for each in run.mixture.datasets] == ["a"]
    assert "is not used" in caplog.text


def test_adapter_settings_without_an_adapter_are_named(recipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    RunFile.read(recipe(lora_r=8))
    assert "lora_r: no effect without use_peft" in caplog.text


def test_loading_by_keywords_wins_as_in_trl(recipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFile.read(recipe(dtype="bfloat16", model_init_kwargs={"dtype": "auto", "revision": "x"}))
    assert run.config.model_init_kwargs == {"dtype": "auto", "revision": "x"}
    assert "model_init_kwargs sets dtype='auto', so dtype='bfloat16' is not used" in caplog.text


def test_the_config_of_one_process_among_several() -> None:
    small = [*LEAST, "--per_device_train_batch_size", "1", "--num_generations", "8"]
    with pytest.raises(ConfigError, match="must be divisible by num_generations"):
        RunFile.read(small)
    assert RunFile.read(small, processes=8).config.generation_batch_size == 8
    assert RunFile.read(small, build=False).config.num_generations == 8, "not built, so not refused"


def test_a_run_is_read_where_it_does_not_run() -> None:
    run = RunFile.of_another_machine([*LEAST[:-2], "--bf16", "true", "--num-processes=4", "--num_generations", "8"])
    assert run.accelerate == ("--num_processes", "4")
    assert (run.config.world_size, run.config.generation_batch_size) == (4, 32)
    assert run.config.bf16
    assert not run.config.use_cpu


def test_accelerates_options_are_known() -> None:
    known = accelerate_options()
    assert known["num_processes"] is False
    assert known["multi_gpu"] is True
    assert "config_file" not in known, "--accelerate_config is the name for it"


# ---- help


@pytest.mark.parametrize(
    "argv",
    [
        *(["-h"], ["run.yaml", "-h"], ["--help"], ["--use_cpu", "-h"], ["--resume", "-h"], ["--run_name", "--help"]),
        *(["--run_name=a", "-h"], ["--max_steps", "3", "-h"], ["--run_name", "-h", "-h"], ["--unknown", "-h"]),
    ],
    ids=" ".join,
)
def test_who_asks_for_help(argv: list[str]) -> None:
    assert take_help(argv, "train")[0]


@pytest.mark.parametrize(
    ("argv", "strings"),
    [
        (["--run_name", "-h"], ["--run_name=-h"]),
        (["--run-name", "-h", "--beta", "0"], ["--run-name=-h", "--beta", "0"]),
        (["a.yaml", "--rewards", "-h"], ["a.yaml", "--rewards=-h"]),
        (["--config", "-h"], ["--config=-h"]),
        (["--loss_type", "-h", "--trainer", "-h"], ["--loss_type=-h", "--trainer=-h"]),
        (["--run_name=-h"], ["--run_name=-h"]),
        ([], []),
    ],
    ids=str,
)
def test_who_does_not(argv: list[str], strings: list[str]) -> None:
    assert take_help(argv, "train") == (False, strings)
