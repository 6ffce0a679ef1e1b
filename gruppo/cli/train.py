"""`gruppo train`, `gruppo grpo` and `gruppo rloo`: train a run given by a file, by flags, or by both."""

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gruppo.cli.launching import check_launch, has_words, keep_words, last_words, launch
from gruppo.cli.loading import make_trainer
from gruppo.cli.recipe import RunFile, is_launched, make_parser, take_help, trainer_of
from gruppo.errors import ConfigError, GruppoError
from gruppo.trainer.processes.stopping import STOPPED, STOPPED_UNSAVED

__all__ = ["main"]

INTERRUPTED, TERMINATED = 130, 143
RESUMES = ("__resume", "__resume_from_checkpoint")  # flags with every - replaced by _
OUTPUT = "trainer_output"  # the default output_dir of transformers

HELP = {
    "train": """\
usage: gruppo train RECIPE.yaml [--key value …]

Train as a file describes. Keys of the file and flags have the same names and
the same meaning, and flags win: those of TRL's command line, all fields of
GRPOConfig (or, with `trainer: rloo`, RLOOConfig), and those below.

examples:
  gruppo train recipes/grpo.yaml
  gruppo train recipes/grpo.yaml --model ./my-model --learning_rate 2e-6
  gruppo train recipes/grpo.yaml --resume
  gruppo train recipes/grpo.yaml --launch fsdp2 --nproc 8
""",
    "grpo": """\
usage: gruppo grpo [FILE.yaml] --model M --dataset D --reward R [--key value …]

Train with GRPO. Flags and keys of the file are those of `trl grpo`: all fields
of GRPOConfig and ModelConfig, dataset_name, reward_funcs …, and those below.

examples:
  gruppo grpo --model Qwen/Qwen2.5-0.5B-Instruct --reward accuracy_reward \\
      --dataset trl-lib/DeepMath-103K --output_dir run --learning_rate 1e-6
  gruppo grpo --model ./m --dataset 'data/*.jsonl' --reward my_rewards.py:score
  gruppo grpo --config of_trl.yaml --num_processes 8
""",
    "rloo": """\
usage: gruppo rloo [FILE.yaml] --model M --dataset D --reward R [--key value …]

Train with RLOO. Flags and keys of the file are those of `trl rloo`: all fields
of RLOOConfig and ModelConfig, dataset_name, reward_funcs …, and those below.

examples:
  gruppo rloo --model Qwen/Qwen2.5-0.5B-Instruct --reward accuracy_reward \\
      --dataset trl-lib/DeepMath-103K --output_dir run --beta 0.05
  gruppo rloo recipes/rloo.yaml --model ./my-model
""",
}
COMMON_HELP = """
  --model NAME             name on the hub, or folder (model_name_or_path)
  --dataset NAME           hub id, JSONL, parquet or CSV file, glob, or folder
                           (dataset_name); docs/cli.md has mixtures
  --reward NAME [NAME …]   shipped reward, module:name, file.py:name, or reward
                           model (reward_funcs); --tools takes such names too
  --eval_dataset NAME      with --eval_strategy steps
  --dataset_map NAME       a function that returns columns to add to a row
  --environment_factory NAME, --rollout_func NAME
  --config FILE            the file, as for TRL's command line
  --launch HOW             several processes: ddp, fsdp2, zero1, zero2, zero3
  --nproc N                how many (default: the GPUs here); accelerate's own
                           options, such as --num_machines, go to its launcher
  --resume                 resume from the newest good checkpoint in output_dir
  --help-all               every field with its meaning and default

`gruppo check` finds what is wrong with a file before you pay for a GPU.
"""


def main(argv: Sequence[str] | None = None, command: str = "train") -> int:
    """Run the command and return its exit status."""
    asks_for_help, argv = take_help(sys.argv[1:] if argv is None else argv, command)
    if not argv or asks_for_help:
        print(HELP[command] + COMMON_HELP, end="")
        return 0 if argv else 2
    if "--help-all" in argv:
        trainer = trainer_of([string for string in argv if string != "--help-all"], command)
        print(make_parser(trainer, command).format_help(), end="")
        return 0
    asked = RunFile.read(argv, command, build=False)
    if not is_launched() and asks_for_processes(asked):
        with last_words() as path:
            code = launch(asked, command, argv)
            words = path.read_text(encoding="utf-8") if path.exists() else ""
        if code:  # the launcher's exit code says nothing about those of its processes
            newest = _newest(Path(asked.config.output_dir or OUTPUT))
            _say(command, ended(code, words, newest, f"gruppo {command} {shlex.join(argv)}"))
        return code
    return train(argv, command)


def asks_for_processes(run: RunFile) -> bool:
    """Whether to launch other processes; raises if the launch options are inconsistent."""
    check_launch(run)
    return bool(run.launching.launch or run.launching.accelerate_config or run.accelerate)


def train(argv: Sequence[str], command: str) -> int:
    """Train in this process; the last line of output says how the run ended and how to continue it."""
    begun = time.monotonic()
    again = f"gruppo {command} {shlex.join(argv)}"
    trainer: Any = None
    progress: Any = None
    try:
        with terminable():
            run = RunFile.read(argv, command)
            progress = _progress()
            trainer = _made(run, progress)
        wanted = True if run.launching.resume else run.config.resume_from_checkpoint
        trainer.train(resume_from_checkpoint=wanted or None)
        _finish(trainer)
    except Terminated:
        if not has_words():  # otherwise the launcher ends this process because another one failed
            _say(command, f"Stopped while loading; nothing was trained. To start again: {again}")
        return TERMINATED
    except SystemExit as end:
        if trainer is None or end.code not in (STOPPED, STOPPED_UNSAVED):
            raise
        if trainer.is_world_process_zero():
            _say(command, stopped(trainer, end.code, again))
        return int(end.code)
    except KeyboardInterrupt:
        _say(command, interrupted(trainer, again))
        return INTERRUPTED
    except GruppoError as error:  # its message says what is wrong and what to do: no traceback
        keep_words(named(error))
        _say(command, failed(trainer, error, again))
        return 2 if trainer is None else 1
    except Exception as error:  # top level: print the traceback, then what to do
        traceback.print_exc()
        keep_words(named(error))
        _say(command, failed(trainer, error, again))
        return 1
    if trainer.is_world_process_zero():
        print(finished(trainer, time.monotonic() - begun, progress.made), flush=True)
    return 0


class Terminated(BaseException):
    """SIGTERM before there was anything to save. A BaseException, so that no error recovery catches it."""


@contextmanager
def terminable() -> Iterator[None]:
    """In this block SIGTERM raises `Terminated`; later the trainer handles it."""

    def stop(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: it was set in C


def _progress() -> Any:
    from gruppo import LiveProgressCallback

    return LiveProgressCallback()


def _made(run: RunFile, progress: Any) -> Any:
    from gruppo.runs.checkpoints import newest_of_run
    from gruppo.runs.identity import recorded_run

    if not sys.stderr.isatty():
        quiet_bars()
    output, goes_on = Path(run.config.output_dir), run.launching.resume or run.config.resume_from_checkpoint
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output_dir={run.config.output_dir!r} is a file; name a folder.")
    if run.launching.resume and (choice := newest_of_run(output, thorough=False)).path is None:
        why = "".join(f" {path.name}: {' '.join(reasons)}." for path, reasons in choice.rejected)
        raise ConfigError(f"There is no checkpoint in {output} to resume from: leave out --resume.{why}")
    if run.config.process_index == 0:
        print(f"{run.trainer.upper()} of {run.model}, output in {output} …", flush=True)
    earlier = not goes_on and recorded_run(output) is not None
    trainer = make_trainer(run, callbacks=[progress])  # may find that the run cannot be
    if earlier and run.config.process_index == 0:
        print(f"The record of an earlier run in {output} moves to {output / 'earlier'}.", flush=True)
    return trainer


def quiet_bars() -> None:
    """Disable the progress bars of `datasets` and `transformers`, which are useful only on a terminal."""
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    disable_progress_bars()


def _finish(trainer: Any) -> None:
    """Save and publish the model, as TRL's scripts do after training."""
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if hasattr(trainer, "end"):  # from transformers 5.18
        trainer.end()


# ---- final messages


def finished(trainer: Any, seconds: float, made: int) -> str:
    """The message for a finished run; `made` counts the updates since it was started or resumed."""
    from gruppo.trainer.display.progress import duration

    folder, step = trainer.args.output_dir, trainer.state.global_step
    recorded = "" if trainer.args.record == "off" else f" Look at it: gruppo view {shlex.quote(folder)}"
    done = f"Finished {step} updates in {duration(seconds)}."
    if not made:
        done = f"Nothing was left to do: the run had already made its {step} updates."
    return f"{done} Model and record: {folder}.{recorded}"


def stopped(trainer: Any, code: Any, again: str) -> str:
    step, resume = trainer.state.global_step, with_resume(again)
    if code == STOPPED:
        return f"Stopped after update {step}, which is saved. Resume with: {resume}"
    newest = _newest_of(trainer)
    left = "There is no checkpoint." if newest is None else f"Resume from {newest} with: {resume}"
    return f"Stopped after update {step}, which could NOT be saved. {left}"


def interrupted(trainer: Any, again: str) -> str:
    if trainer is None:
        return f"Interrupted while loading; nothing was trained. To start again: {again}"
    step, newest = trainer.state.global_step, _newest_of(trainer)
    if newest is None:
        return f"Interrupted after update {step}; there is no checkpoint. To start again: {again}"
    return f"Interrupted after update {step}. Resume from {newest} with: {with_resume(again)}"


def ended(code: int, words: str, newest: Path | None, again: str) -> str:
    """The message for launched processes that ended, with the error message of the first that failed."""
    why = f": {words}\n" if words else "; the output of its processes says why. "
    left = "There is no checkpoint." if newest is None else f"Resume with: {with_resume(again)}"
    return f"The launcher ended with code {code}{why}{left}"


def named(error: BaseException) -> str:
    """The message of an error, with the name of its type unless the message was written for the user."""
    words = str(error).strip() or type(error).__name__
    return words if isinstance(error, GruppoError) else f"{type(error).__name__}: {words}"


def failed(trainer: Any, error: BaseException, again: str) -> str:
    """The message for a failed run: the error, and the checkpoint to continue from."""
    if trainer is None:
        return named(error)
    newest = _newest_of(trainer)
    if newest is None:
        return f"{named(error)}\nFailed after update {trainer.state.global_step}; there is no checkpoint."
    how = f"Resume from {newest} with: {with_resume(again)}"
    return f"{named(error)}\nFailed after update {trainer.state.global_step}. {how}"


def with_resume(command: str) -> str:
    """The command that resumes from the newest checkpoint, with any other resume flag removed.

    Example:
        with_resume("gruppo train run.yaml") == "gruppo train run.yaml --resume"
        with_resume("gruppo train run.yaml --resume_from_checkpoint c") == "gruppo train run.yaml --resume"
    """
    kept: list[str] = []
    strings = shlex.split(command)
    for place, string in enumerate(strings):
        flag = string.partition("=")[0].replace("-", "_")
        # A resume flag may be followed by a value; even `--resume` may be: `true`.
        is_value = place > 0 and strings[place - 1].replace("-", "_") in RESUMES and not string.startswith("--")
        if flag not in RESUMES and not is_value:
            kept.append(string)
    return shlex.join([*kept, "--resume"])


def _newest_of(trainer: Any) -> Path | None:
    """The newest checkpoint, unless the folder's are all of an earlier run."""
    return _newest(Path(trainer.args.output_dir)) if trainer.has_checkpoint else None


def _newest(output: Path) -> Path | None:
    """The checkpoint that --resume would take, as far as can be seen without reading it whole."""
    from gruppo.runs.checkpoints import newest_of_run

    return newest_of_run(output, thorough=False).path


def _say(command: str, text: str) -> None:
    """Print a message to stderr, which the user sees even if stdout goes elsewhere; with the rank if it is not 0."""
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f"process {rank}: "
    print(f"gruppo {command}: {process}{text}", file=sys.stderr, flush=True)
