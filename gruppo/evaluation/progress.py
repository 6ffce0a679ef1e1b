"""A progress bar that shows the accuracy so far."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from gruppo.evaluation.types import GradedAttempt

__all__ = ["Progress"]

Advance = Callable[[Sequence[GradedAttempt]], None]


class Progress:
    """Progress bars of the passes over benchmarks; nothing is shown unless `show`.

    Example:
        with Progress(show=True) as bar, bar.over("GSM8K greedy", problems=1319, samples=1) as advance:
            advance(scored)
    """

    def __init__(self, *, show: bool):
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=not show,
        )

    def __enter__(self) -> "Progress":
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    @contextmanager
    def over(self, title: str, problems: int, samples: int) -> Iterator[Advance]:
        """The bar of one pass; yields a function to call with each batch of graded attempts."""
        task = self.bars.add_task(title, total=problems * samples, accuracy="")
        attempts = right = 0

        def advance(scored: Sequence[GradedAttempt]) -> None:
            nonlocal attempts, right
            attempts += len(scored)
            right += sum(each.correct for each in scored)
            accuracy = f"{100 * right / attempts:.1f} % right" if attempts else ""
            self.bars.update(task, advance=len(scored), accuracy=accuracy)

        yield advance
