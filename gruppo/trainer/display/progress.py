"""The progress of a run: a live display in a terminal, a line per log elsewhere."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging as hf_logging

from gruppo.trainer.display.console import printing

__all__ = ["LiveProgressCallback", "duration", "metrics_line"]

BAR_WIDTH = 24
# The metrics that are shown, as (key, title, format); those that a run does not log are left out.
SHOWN = (("kl", "kl", ".4f"), ("entropy", "entropy", ".3f"))
PHASES = (("rollout/seconds", "sampling"), ("update/seconds", "update"))
REPLACED = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")  # of transformers
MOST_OF_AN_EVALUATION = 6  # metrics


def duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    Example:
        duration(75.2) == "1:15", duration(3725) == "1:02:05"
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def metrics_line(logs: Mapping[str, Any], *, short: bool = False) -> str:
    """The logged metrics that best show whether a run is healthy; `short` is for narrow terminals.

    Example:
        metrics_line({"reward": 0.5, "reward_std": 0.3, "completions/mean_length": 22.0, "step_time": 0.31})
        -> "reward 0.500 ± 0.300  length 22  0.31 s/update"
    """
    parts = []
    if (reward := logs.get("reward")) is not None:
        spread = logs.get("reward_std")
        parts.append(f"reward {reward:.3f}" + ("" if spread is None else f" ± {spread:.3f}"))
    if (length := logs.get("completions/mean_length")) is not None:
        cut = logs.get("completions/clipped_ratio") or 0.0
        parts.append(f"length {length:.0f}" + (f" ({cut:.0%} cut)" if cut else ""))
    parts += [f"{title} {logs[key]:{form}}" for key, title, form in SHOWN if logs.get(key) is not None]
    if (seconds := logs.get("step_time")) is not None:
        spent = ", ".join(f"{title} {logs[key]:.2f}" for key, title in PHASES if logs.get(key) is not None)
        parts.append(f"{seconds:.2f} s" if short else f"{seconds:.2f} s/update" + (f" ({spent})" if spent else ""))
    return "  ".join(parts)


class LiveProgressCallback(TrainerCallback):
    """Show updates, reward with its spread, length, KL, entropy, seconds by phase and the time left.

    In a terminal it is a live panel of two lines, which also shows the current phase. In a pipe or a notebook it is a
    line per log. It replaces the progress bar and the printed dictionaries of transformers, which a trainer with this
    callback removes. With several processes only the main one shows it. `gruppo train` uses it.

    Example:
        trainer = GRPOTrainer(model, reward_funcs=reward, train_dataset=rows, callbacks=[LiveProgressCallback()])
        trainer.train()
        update  10/40  reward 0.412 ± 0.301  length 24  0.31 s/update (sampling 0.11, update 0.17)  0:09 left
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._live: Live | None = None
        self._phase: Callable[[], tuple[str, float]] = lambda: ("", 0.0)
        self._update = self._total = self._first = 0
        self._started = 0.0
        self._logs: dict[str, Any] = {}
        self._metrics = ""
        self._bars = False  # whether transformers' progress bars were enabled before the panel

    @property
    def made(self) -> int:
        """The number of updates since the run was started or resumed."""
        return self._update - self._first

    @property
    def console(self) -> Console:
        """The console that was passed, or the one that `rich.print` writes to."""
        import rich

        return printing(self._console or rich.get_console())

    def watch(self, phase: Callable[[], tuple[str, float]]) -> None:
        """Set the function that returns the current phase and its seconds; a trainer with this callback calls this."""
        self._phase = phase

    # ---- what happens

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()
        if not state.is_world_process_zero:
            return
        self._update = self._first = state.global_step
        self._total, self._metrics, self._started = state.max_steps, "", time.monotonic()
        self._logs = {}
        console = self.console
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4)
            self._live.start()
            self._bars = hf_logging.is_progress_bar_enabled()
            hf_logging.disable_progress_bar()  # bars for files being written would disrupt the panel

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._update = state.global_step

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, Any] = kwargs.get("logs") or {}
        if not state.is_world_process_zero or "step_time" not in logs:  # an evaluation, or the summary at the end
            return
        # An update that reuses earlier completions logs no rewards: those of their generation stay visible.
        kept = {key: value for key, value in self._logs.items() if key not in dict(PHASES)}
        self._logs = kept | {key: value for key, value in logs.items() if value is not None}
        self._update, self._metrics = state.global_step, metrics_line(self._logs)
        if self._live is None:
            self._print(f"{self._count()}  {self._metrics}  {duration(self.seconds_left)} left")

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        metrics: Mapping[str, Any] = kwargs.get("metrics") or {}
        if not state.is_world_process_zero:
            return
        wanted = ("reward", "accuracy", "mean_length")
        found = [f"{name} {value:.3f}" for name, value in metrics.items() if name.endswith(wanted)]
        self._print(f"evaluation after update {state.global_step}: {'  '.join(found[:MOST_OF_AN_EVALUATION])}")

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last state on screen and restore the terminal; a trainer also calls this after an error."""
        live, self._live = self._live, None
        if live is not None:
            live.update(self.render())
            live.stop()
            if self._bars:
                hf_logging.enable_progress_bar()

    # ---- what is shown

    @property
    def seconds_left(self) -> float:
        """An estimate from the mean time per update so far, including everything between updates."""
        spent = time.monotonic() - self._started
        return spent / self.made * (self._total - self._update) if self.made else 0.0

    def render(self) -> RenderableType:
        """The panel: progress, the current phase, and the latest metrics."""
        phase, seconds = self._phase()
        doing = f"{phase} {seconds:.0f} s" if phase and self._live is not None else ""
        left = f"{duration(self.seconds_left)} left" if self._update > self._first else ""
        first = Table.grid(padding=(0, 2))
        for _ in range(4):
            first.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=max(self._total, 1), completed=self._update, width=BAR_WIDTH)
        first.add_row(Text(self._count()), bar, Text(left), Text(doing, style="dim"))
        if not self._metrics:
            return Group(first)
        fits = len(self._metrics) <= self.console.width
        metrics = self._metrics if fits else metrics_line(self._logs, short=True)
        return Group(first, Text(metrics, no_wrap=True, overflow="ellipsis"))

    def _count(self) -> str:
        return f"update {self._update:>{len(str(self._total))}}/{self._total}"

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def take_over(trainer: Any) -> None:
    """If a trainer has our callback, remove other progress displays and give it access to the current phase."""
    callbacks = list(trainer.callback_handler.callbacks)
    own = [each for each in callbacks if isinstance(each, LiveProgressCallback)]
    for callback in callbacks if own else ():
        if type(callback).__name__ in REPLACED and type(callback).__module__.startswith("transformers."):
            trainer.remove_callback(callback)
    for callback in own:
        callback.watch(lambda: ("", 0.0) if not hasattr(trainer, "presence") else trainer.presence.phase)
