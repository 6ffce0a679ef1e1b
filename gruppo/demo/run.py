"""`gruppo demo`: GRPO on a tiny model that ships with the package, on two CPU cores, in under three minutes."""

import argparse
import importlib.util
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.demo import model_path
from gruppo.demo.task import exact_match, load_task
from gruppo.errors import install_line

if TYPE_CHECKING:
    from gruppo import GRPOConfig
    from gruppo.demo.progress import ProgressCallback
    from gruppo.demo.report import Score

__all__ = ["config", "main", "run", "settings"]

STEPS = 40
EVALUATE_EVERY = 5
# Enough to see the trend during training; the accuracies before and after use the whole held-out set.
SMALL_SAMPLE = 100
SAMPLES_SHOWN = 3


def settings(output_dir: Path, steps: int, seed: int) -> dict[str, Any]:
    """The demo's training settings: 16 prompts × 8 completions an update, float32 on the CPU."""
    return dict(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=32,
        learning_rate=2e-4,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def config(output_dir: Path, steps: int, seed: int) -> "GRPOConfig":
    """The settings as a config."""
    from gruppo import GRPOConfig

    return GRPOConfig(**settings(output_dir, steps, seed))


def run(output_dir: Path, steps: int = STEPS, seed: int = 0) -> tuple["Score", "Score"]:
    """Train, show the progress, write the run folder with the trained model, and return the held-out scores."""
    from rich.console import Console

    started = time.perf_counter()
    console = Console()
    console.print("loading ...")  # before the imports below, which take seconds
    output_dir.mkdir(parents=True, exist_ok=True)

    from transformers.utils.logging import disable_progress_bar

    from gruppo import GRPOTrainer
    from gruppo.demo import evaluate, report
    from gruppo.demo.progress import ProgressCallback

    disable_progress_bar()
    train, held_out = load_task()
    prompts, answers = list(held_out["prompt"]), list(held_out["answer"])
    trainer = GRPOTrainer(
        model=model_path(),
        reward_funcs=exact_match,
        args=config(output_dir, steps, seed),
        train_dataset=train,
    )
    tokenizer = trainer.processing_class
    small = held_out.select(range(SMALL_SAMPLE))
    progress = ProgressCallback(
        console, lambda model: evaluate.accuracy(model, tokenizer, small), EVALUATE_EVERY, problems=len(small)
    )

    first = evaluate.greedy(trainer.model, tokenizer, prompts)
    before = report.score(first, answers)
    console.print(
        f"held-out accuracy before training: {before.accuracy:.3f} ({len(prompts)} problems; {len(small)} of them "
        "during training)",
        highlight=False,
        soft_wrap=True,
    )
    _train(trainer, progress)
    trainer.save_model()  # the model and its tokenizer, for `gruppo eval`
    last = evaluate.greedy(trainer.model, tokenizer, prompts)
    after = report.score(last, answers)

    samples = list(zip(prompts, answers, first, last, strict=True))[:SAMPLES_SHOWN]
    report.show(console, before, after, samples, len(prompts))
    facts = {"seed": seed, "seconds": round(time.perf_counter() - started, 1), "problems": len(prompts)}
    report.write_metrics(output_dir / "metrics.json", before, after, progress.rows, **facts)
    drawn = report.curve(output_dir / "learning_curve.png", before, after, progress.rows)
    note = "" if drawn else " (no learning curve: matplotlib is not installed)"
    console.print(f"run folder: {output_dir}{note}, {facts['seconds']} s", highlight=False, soft_wrap=True)
    return before, after


def _train(trainer: Any, progress: "ProgressCallback") -> None:
    """Train with the demo's progress display in place of the metrics dictionaries that the trainer prints."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(progress)
    try:
        trainer.train()
    finally:
        progress.close()


def positive_integer(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run the demo from the command line."""
    from gruppo.cli.options import CommandParser

    parser = CommandParser(
        prog="gruppo demo",
        description="Train a tiny model with GRPO on arithmetic word problems. No network, no GPU.",
        epilog="examples:\n  gruppo demo\n  gruppo demo --steps 10 --seed 1 --output-dir runs/short",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="run folder (default: %(default)s)")
    parser.add_argument("--steps", type=positive_integer, default=STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and shuffling (default: %(default)s)")
    options = parser.parse_args(argv)
    before, after = run(options.output_dir, options.steps, options.seed)
    print(f"held-out accuracy: {before.accuracy:.3f} -> {after.accuracy:.3f}", flush=True)
    print(how_to_view(options.output_dir), file=sys.stderr, flush=True)  # stdout ends with the result, for programs
    return 0


def how_to_view(folder: Path) -> str:
    """The command that opens the run's page, as it can be typed here, and what it needs that is not installed."""
    started = Path(sys.argv[0])
    known = shutil.which("gruppo")
    if started.name == "gruppo" and not (known and started.exists() and Path(known).samefile(started)):
        program = shlex.quote(str(started))  # of an environment that is not active
    else:
        program = "gruppo" if known else f"{shlex.quote(sys.executable)} -m gruppo"
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    first = f" (first: {install_line('view')})" if missing else ""
    return f"look at every completion: {program} view {shlex.quote(str(folder))}{first}"
