"""Live progress of the demo: a table in a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gruppo.trainer.display.progress import duration

__all__ = ["ProgressCallback", "StepRow", "plain_line", "render"]

ROWS_SHOWN = 10
NARROWEST = 9  # minimum width of a column, in characters


@dataclass(frozen=True)
class StepRow:
    """The values of one optimizer step that are shown and kept."""

    step: int
    reward: float
    held_out: float | None
    tokens_per_second: float
    seconds_left: float

    def cells(self) -> tuple[str, str, str, str, str]:
        """The row as text: step, reward, held-out accuracy, tokens/s, time left."""
        held_out = "" if self.held_out is None else f"{self.held_out:.2f}"
        speed = f"{self.tokens_per_second:,.0f}"
        return str(self.step), f"{self.reward:.3f}", held_out, speed, duration(self.seconds_left)


def held_out_title(problems: int) -> str:
    """The label of the accuracy on a part of the held-out problems, so that it is not mistaken for that on all."""
    return f"held-out ({problems})"


def plain_line(row: StepRow, total: int, problems: int) -> str:
    """One step as a line of text."""
    step, reward, held_out, speed, left = row.cells()
    accuracy = f"{held_out_title(problems)} {held_out or '-':>4}"
    return f"step {step:>3}/{total}  reward {reward}  {accuracy}  {speed:>6} tokens/s  left {left}"


def render(rows: list[StepRow], total: int, problems: int) -> RenderableType:
    """The latest steps as a table above a progress bar."""
    table = Table(title="GRPO on arithmetic word problems", title_justify="left")
    names = ("step", "reward", held_out_title(problems), "tokens/s", "time left")
    for name in names:
        table.add_column(name, justify="right", min_width=NARROWEST)
    for row in rows[-ROWS_SHOWN:]:
        table.add_row(*row.cells())
    width = 1 + sum(max(NARROWEST, len(name)) + 3 for name in names)  # the width of the table, including its borders
    return Group(table, ProgressBar(total=total, completed=rows[-1].step if rows else 0, width=width))


class ProgressCallback(TrainerCallback):
    """Shows each step as it ends and keeps all of them in `rows`."""

    def __init__(self, console: Console, evaluate: Callable[[Any], float], every: int, *, problems: int) -> None:
        """`evaluate(model)`, the accuracy on `problems` problems, is called every `every` steps and after the last."""
        self.console = console
        self.evaluate = evaluate
        self.every = every
        self.problems = problems
        self.rows: list[StepRow] = []
        self._live: Live | None = None
        self._started = self._resumed = 0.0
        self._tokens = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock and, in a terminal that can move its cursor, the live table."""
        self._started = self._resumed = time.perf_counter()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(render([], state.max_steps, self.problems), console=self.console, refresh_per_second=4)
            self._live.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Turn one step's metrics into a row and show it."""
        if not logs or "reward" not in logs:  # the summary at the end of training is logged too
            return
        # The time since the previous log: rollout, reward and update, but not this callback's own evaluation.
        seconds = time.perf_counter() - self._resumed
        tokens, self._tokens = logs["num_tokens"] - self._tokens, logs["num_tokens"]
        due = state.global_step % self.every == 0 or state.global_step == state.max_steps
        held_out = self.evaluate(kwargs["model"]) if due else None
        self._resumed = time.perf_counter()
        left = (self._resumed - self._started) / state.global_step * (state.max_steps - state.global_step)
        self.rows.append(StepRow(state.global_step, logs["reward"], held_out, tokens / seconds, left))
        if self._live is None:
            self.console.print(
                plain_line(self.rows[-1], state.max_steps, self.problems), highlight=False, soft_wrap=True
            )
        else:
            self._live.update(render(self.rows, state.max_steps, self.problems))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the finished table on the screen."""
        self.close()

    def close(self) -> None:
        """Stop the live table, also after an error, so that the terminal is left as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def history(self) -> list[dict[str, Any]]:
        """The rows as plain dicts."""
        return [asdict(row) for row in self.rows]
