"""`gruppo plan`: from files and from options, as tables and as numbers, and what it says to mistakes."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gruppo import GRPOConfig, cli
from gruppo.cli.plan import forecast_here, forecast_on
from gruppo.cli.plan_job import Asked
from gruppo.cli.recipe import RunFile
from gruppo.demo import model_path
from gruppo.plan import DEVICES

RECIPES = Path(__file__).parents[2] / "recipes"
LARGE = ["--model", "qwen2-1.5b", "--device", "H200", "--num-generations", "16", "--max-completion-length", "512"]
LARGE += ["--per-device-train-batch-size", "8", "--gradient-accumulation-steps", "64", "--prompt-tokens", "200"]


def numbers(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def recipe(folder: Path, **changes: Any) -> str:
    run = dict(model=str(model_path()), dataset="rows.jsonl", rewards=["r.py:f"], output_dir=str(folder / "run"))
    run |= dict(per_device_train_batch_size=16, num_generations=8, max_completion_length=64)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run | changes))
    return str(path)


def test_the_numbers_of_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = numbers(capsys, *LARGE, "--dtype", "bfloat16")
    assert found["fits"]
    assert found["limiting_phase"] == "update"
    assert found["rollout_plan"] == {"kv_tokens": 270_104, "rows": 512, "prefill_tokens": 6368}
    assert found["update_plan"] == {"tokens": 8548, "group_tokens": 17096, "checkpointing": False}
    assert found["peak_bytes"] == found["phases"]["update"]["bytes"]
    resident = [term["bytes"] for term in found["phases"]["update"]["terms"][:3]]  # program, weights, optimizer
    assert found["resident_bytes"] == sum(resident)
    assert found["warnings"] == []
    assert found["step_seconds"] == pytest.approx(8.7, rel=0.25), "step_qwen2-1.5b.json"
    assert {one["setting"] for one in found["largest"]} == {"generation batch", "max_completion_length", "model"}


def test_the_tables_show_the_arithmetic(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["plan", *LARGE, "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    for said in (
        *(
            "update (the peak)",
            "8,376 tokens × 28 layers × 55,296 B",
            "270,104 slots × 28,672 B",
            "512 steps of 512 rows",
        ),
        *("of 139.8 (H200): fits; largest phase: update", "max_completion_length", "qwen2-14b"),
    ):
        assert said in text
    assert "(H200): fits" in text.splitlines()[0], "the verdict comes first"
    for name in ("program ", "weights ", "state of adamw_torch_fused "):
        assert sum(line.strip().startswith(name) for line in text.splitlines()) == 1, "what stays is told once"
    assert len(text.splitlines()) < 45


def test_the_row_of_the_gaps_leads_from_the_peak_to_the_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["plan", *LARGE, "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    size = {name: float(re.search(rf"^ *{re.escape(name)} +([\d.]+) ", text, re.MULTILINE)[1]) for name in (  # type: ignore[index]
        "update (the peak)", "allocator gaps", "peak on the device",
    )}  # fmt: skip
    assert size["allocator gaps"] > 1
    assert sum(size.values()) == pytest.approx(2 * size["peak on the device"], abs=0.02)
    assert text.startswith(f"peak memory {size['peak on the device']:.1f} GiB")


def test_a_batch_that_is_not_decoded_at_once_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    recipe_of_1024 = [str(RECIPES / "grpo.yaml"), "--model", "qwen2-1.5b", "--device", "H100"]
    (batch,) = [one for one in numbers(capsys, *recipe_of_1024)["largest"] if one["setting"] == "generation batch"]
    assert batch["value"] < 1024
    assert "this run's 1,024 fit too, but some of them wait for KV-cache slots" in batch["means"]
    (batch,) = [one for one in numbers(capsys, *LARGE)["largest"] if one["setting"] == "generation batch"]
    assert "wait" not in batch["means"], "512 are decoded at once"


def test_a_missing_device_is_told_before_anything_large_is_loaded() -> None:
    program = (
        "import sys; from gruppo.cli import main; import torch; torch.cuda.is_available = lambda: False\n"
        f"code = main(['plan', {str(RECIPES / 'grpo.yaml')!r}])\n"
        "print(code, 'gruppo.config.grpo' in sys.modules, 'datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "name the one to plan for with --device" in done.stderr


def test_fields_of_the_config_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plain = numbers(capsys, *LARGE)
    assert "reference" in str(numbers(capsys, *LARGE, "--beta", "0.04")["phases"]["update"])
    assert "reference" not in str(plain["phases"])
    recomputed = numbers(capsys, *LARGE, "--gradient-checkpointing", "true")
    assert recomputed["update_plan"]["checkpointing"]
    assert recomputed["peak_bytes"] < plain["peak_bytes"]
    eight = numbers(capsys, *LARGE, "--optim", "adamw_8bit")
    assert eight["peak_bytes"] == plain["peak_bytes"] - (8 - 2) * plain["weights"]
    lora = numbers(capsys, *LARGE, "--lora-r", "16", "--dtype", "bfloat16", "--load-in-4bit")
    assert lora["peak_bytes"] < plain["peak_bytes"] / 2
    two = numbers(capsys, *LARGE, "--num_iterations=2")
    assert "old log-probs" in [part["name"] for part in two["parts"]]


def test_processes_share_a_batch_and_with_fsdp2_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--model", "qwen2-7b", "--device", "H100", "--num-generations", "16", "--per-device-train-batch-size", "2"]
    alone = numbers(capsys, *one, "--gradient-accumulation-steps", "8", code=1)
    assert not alone["fits"]
    eight = numbers(capsys, *one, "--gpus", "8", "--launch", "fsdp2")
    assert eight["fits"]
    (weights,) = [term for term in eight["phases"]["update"]["terms"] if term["name"] == "weights"]
    assert weights["formula"].endswith("/ 8 processes")
    assert eight["rollout_plan"]["rows"] == 2, "a group of 16 over eight processes"


def test_a_file_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, peft={"r": 4, "target_modules": ["q_proj"]}, model_init_kwargs={"dtype": "bfloat16"})
    found = numbers(capsys, path, "--device", "L4")
    assert found["model"] == str(model_path())
    assert found["rollout_plan"]["rows"] == 16
    names = [term["name"] for term in found["phases"]["update"]["terms"]]
    assert "adapter" in names
    (weights,) = [term for term in found["phases"]["loading"]["terms"] if term["name"] == "weights"]
    assert weights["bytes"] == 2 * found["weights"]
    assert found["warnings"] == ["prompts of 256 tokens are assumed: set their length with --prompt-tokens"]
    assert numbers(capsys, path, "--device", "L4", "--model", "qwen2-0.5b")["model"] == "qwen2-0.5b"
    on_cpu = numbers(capsys, recipe(tmp_path, use_cpu=True, bf16=False), "--threads", "2")
    assert on_cpu["device"]["kind"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Name what to plan"),
        (["--model", "qwen2-1.6b", "--device", "H200"], "Did you mean"),
        (["--model", "qwen2-1.5b", "--device", "H299"], "--tflops, --bandwidth (TB/s) and --memory (GiB)"),
        (["--model", "qwen2-1.5b", "--device", "H200", "--num-generation", "8"], "num_generations"),
        (["--model", "qwen2-1.5b", "--device", "H200", "--devise", "8"], "device"),
        (["--model", "qwen2-1.5b", "--device", "H200", "--load-in-4bit"], "--lora-r"),
        (["--model", "qwen2-1.5b", "--device", "H200", "--lora-r", "4", "--lora-targets", "q_prj"], "q_proj"),
        (["--model", "qwen2-1.5b", "--device", "H200", "--num-generations", "7"], "7"),
        (["--model", "qwen2-1.5b", "--device", "H200", "--gpus", "0"], "--gpus 0 must be positive"),
        (
            ["--model", "qwen2-1.5b", "--device", "H200", "--prompt-tokens", "-3"],
            "--prompt-tokens -3 must be positive",
        ),
        (["nowhere.yaml", "--device", "H200"], "nowhere.yaml"),
        ([*LARGE, "--lora-targets", "q_proj"], "--lora-targets needs an adapter: set its rank with --lora-r"),
        ([*LARGE, "--mean-completion-length", "513"], "513 is more than max_completion_length, 512"),
        ([*LARGE, "--gradient_checkpointing", "maybe"], "got maybe"),
        ([*LARGE, "--beta", "[1"], "invalid float value: '[1'"),
        ([*LARGE, "--prompt_token", "3"], "Did you mean `--prompt_tokens`?"),
        ([*LARGE, "--max_new_tokens", "3"], "Use `max_completion_length`"),
        ([*LARGE, "more.yaml"], "the file must be the first argument"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--device", "H299", "--tflops", "1000", "--bandwidth", "5", "--memory", "200"]
    found = numbers(capsys, *LARGE, *own)
    assert (found["device"]["halves"], found["device"]["memory"]) == (1000, 200)
    # What is said wins over the table.
    assert not numbers(capsys, *LARGE, "--memory", "10", code=1)["fits"]


def test_the_help_has_examples_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--help"])
    assert stop.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  gruppo plan")]
    assert len(lines) == 4
    for line in lines:
        if "run.yaml" not in line and "folder" not in line:
            assert cli.main(shlex.split(line.strip())[1:]) == 0


def test_dashes_and_underscores_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Of fields and of the command's own options; and a list is a list, a number a number."""
    dashes = ["--prompt-tokens", "300", "--lora-r", "4", "--per-device-train-batch-size=16", "--reward-weights", "1"]
    underscores = [f"--{one[2:].replace('-', '_')}" if one.startswith("--") else one for one in dashes]
    found = [numbers(capsys, *LARGE[:4], *spelled) for spelled in (dashes, underscores)]
    assert found[0] == found[1]
    assert found[0]["rollout_plan"]["rows"] == 16
    assert found[0]["warnings"] == []
    numbers(capsys, *LARGE[:4], "--learning-rate", "1e-6", "--reward_weights", "1", "2", "--trainer", "grpo")
    numbers(capsys, "--model_name_or_path", *LARGE[1:4], "--rewards", "a.py:b", "--dataset-name", "rows.jsonl")


def test_a_number_of_processes_that_nobody_says_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "set the number with --gpus" in numbers(capsys, *LARGE, "--launch", "fsdp2")["warnings"][0]
    assert numbers(capsys, *LARGE, "--launch", "fsdp2", "--gpus", "1")["warnings"] == []
    assert numbers(capsys, *LARGE, "--launch", "ddp")["warnings"] == []


def test_options_over_the_adapter_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path, peft={"r": 4, "target_modules": ["q_proj"]})

    def adapter(*options: str) -> int:
        terms = numbers(capsys, path, "--device", "L4", *options)["phases"]["update"]["terms"]
        (size,) = [term["bytes"] for term in terms if term["name"] == "adapter"]
        return int(size)

    assert adapter("--lora-r", "8") == 2 * adapter()
    assert adapter("--lora-targets", "q_proj", "o_proj") == 2 * adapter()


def test_a_few_lines_for_a_check(tmp_path: Path) -> None:
    run = RunFile.of_another_machine([recipe(tmp_path)])
    forecast = forecast_on(DEVICES["L4"], run, prompt_tokens=40)
    lines, weights = forecast.lines(), forecast.job.model.weights
    assert 0 < weights < 1e9
    assert f"({weights / 1e6:.1f}M weights), 16 completions per generation and device, prompts of 40" in lines[0]
    assert "GiB of 22.0 (L4): fits; largest phase: " in lines[1]
    assert "s for a generation and its updates" in lines[-1]
    assert len(lines) == 5
    nothing = forecast_on(replace(DEVICES["L4"], memory=0.5), run).lines()
    assert "does not fit" in nothing[1]
    assert len(nothing) == 4, "nor does it take any time"
    strange = RunFile.of_another_machine([recipe(tmp_path, optim="galore_adamw", optim_target_modules=["attn"])])
    assert "is unknown" in forecast_on(DEVICES["L4"], strange).lines()[-1]
    here = forecast_here(RunFile.of_another_machine([recipe(tmp_path, use_cpu=True)]))
    assert here is not None
    assert here.job.on_cpu
    assert torch.cuda.is_available() or forecast_here(run) is None


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_every_recipe_has_a_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a shape in the place of its model, which is not here."""
    asked = [str(RECIPES / name), "--model", "qwen2-1.5b", "--device", "H200", "--prompt-tokens", "300", "--json"]
    assert cli.main(["plan", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    terms = str(found["phases"]["update"]["terms"])
    assert ("adapter" in terms) is (name == "lora_24gb.yaml")
    assert ("/ 16 processes" in terms) is (name == "multi_node.yaml")


def test_a_config_that_is_made_is_planned_as_a_file_of_its_fields(tmp_path: Path) -> None:
    fields = dict(num_generations=4, per_device_train_batch_size=8, max_completion_length=64, beta=0.1)
    made = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=True, model_init_kwargs={"dtype": "bfloat16"}, **fields
    )
    path = recipe(tmp_path, model="qwen2-0.5b", bf16=True, dtype="bfloat16", **fields)
    said = Asked.of_run(RunFile.of_another_machine([path]))
    assert Asked.of_config("qwen2-0.5b", made).job(DEVICES["L4"]) == said.job(DEVICES["L4"])
