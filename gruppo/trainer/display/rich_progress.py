"""A callback with rich progress bars and the latest metrics, to be added by hand; `gruppo train` uses progress.py."""

import math
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import has_length

from gruppo.trainer.display.console import printing


class RichProgressCallback(TrainerCallback):
    """Show progress bars for training and evaluation, and the latest metrics in a table, with rich."""

    def __init__(self) -> None:
        self.console = printing(Console())
        self._live: Live | None = None
        self._progress = self._new_progress()
        self._tasks: dict[str, Any] = {}
        self._metrics: dict[str, str] = {}

    @staticmethod
    def _new_progress() -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._stop()
        self._progress, self._tasks, self._metrics = self._new_progress(), {}, {}
        self._advance("train", state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._advance("train", state.max_steps, state.global_step)

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        loader: Any = kwargs.get("eval_dataloader")
        if state.is_world_process_zero and has_length(loader):
            self._advance("eval", len(loader))

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._end_eval()

    def on_predict(self, args: Any, state: TrainerState, control: Any, metrics: Any, **kwargs: Any) -> None:
        self._end_eval()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self._live is None:
            return
        for name, value in (kwargs.get("logs") or {}).items():
            if name != "total_flos":
                self._metrics[name] = f"{value:.4g}" if isinstance(value, float) else str(value)
        self._live.update(self.render())

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._stop()

    def render(self) -> Group:
        """The display: the bars, and the metrics in two pairs of columns."""
        table = Table("metric", "value", "metric", "value", box=None)
        items = list(self._metrics.items())
        half = math.ceil(len(items) / 2)
        for i in range(half):
            right = items[half + i] if half + i < len(items) else ("", "")
            table.add_row(*items[i], *right)
        return Group(self._progress, table) if items else Group(self._progress)

    def _advance(self, name: str, total: int, completed: int | None = None) -> None:
        """Show the bar `name`, set to `completed` or advanced by one."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        if completed is None:
            self._progress.advance(self._tasks[name])
        else:
            self._progress.update(self._tasks[name], completed=completed, total=total)
        if self._live is None:
            self._live = Live(self.render(), console=self.console, refresh_per_second=4)
            self._live.start()

    def _end_eval(self) -> None:
        if "eval" in self._tasks:
            self._progress.remove_task(self._tasks.pop("eval"))
        if "train" not in self._tasks:  # evaluation alone: nothing else will close the display
            self._stop()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.update(self.render())
            self._live.stop()
            self._live = None
            if not self.console.is_terminal:
                self.console.line()  # rich ends the line on a terminal only
