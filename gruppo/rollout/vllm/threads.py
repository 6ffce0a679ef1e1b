"""Daemon threads, which do not keep the program from exiting: what they wait for may never come."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["all_at_once", "started"]


def started(function: Callable[[], Any]) -> "Future[Any]":
    """Run `function` in a new thread; the future holds its result or exception."""
    future: Future[Any] = Future()
    threading.Thread(target=lambda: _settle(future, function), daemon=True).start()
    return future


def all_at_once(function: Callable[[Any], Any], items: Sequence[Any], most: int) -> "list[Future[Any]]":
    """Call `function` on each item, in at most `most` threads; futures cancelled before they start are skipped.

    Example:
        [future.result() for future in all_at_once(ask, bodies, 256)]
    """
    waiting: SimpleQueue[tuple[Future[Any], Any]] = SimpleQueue()
    futures: list[Future[Any]] = [Future() for _ in items]
    for pair in zip(futures, items, strict=True):
        waiting.put(pair)

    def work() -> None:
        while True:
            try:
                future, item = waiting.get_nowait()
            except Empty:
                return
            if future.set_running_or_notify_cancel():
                _settle(future, lambda item=item: function(item))  # type: ignore[misc]

    for _ in range(min(len(items), most)):
        threading.Thread(target=work, daemon=True).start()
    return futures


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # of any kind: whoever waits for the future handles it
        future.set_exception(error)
