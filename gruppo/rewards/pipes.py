"""Messages over pipes, with deadlines. A message is its length in eight bytes, then the bytes.

Reward workers import this, so it needs the standard library only.
"""

import os
import select
import time
from collections.abc import Callable

HEADER = 8
CHUNK = 1 << 20
LARGEST_REPLY = 256 << 20  # bytes; a larger reply could exhaust the memory of the training process
CHECK_SECONDS = 0.25  # interval between checks that the other process is alive


def send(pipe: int, message: bytes, deadline: float | None = None, alive: Callable[[], bool] | None = None) -> None:
    """Write a message. With a deadline, the pipe must be non-blocking; TimeoutError if the deadline passes."""
    for part in (len(message).to_bytes(HEADER, "big"), message):
        rest = memoryview(part)
        while rest:
            if deadline is not None:
                _wait(pipe, select.POLLOUT, deadline, alive)
            rest = rest[os.write(pipe, rest) :]


def receive(
    pipe: int, deadline: float | None = None, alive: Callable[[], bool] | None = None, largest: int | None = None
) -> bytes:
    """Read a message; EOFError if the other side is gone, ValueError if it has more than `largest` bytes."""
    length = int.from_bytes(_read(pipe, HEADER, deadline, alive), "big")
    if largest is not None and length > largest:
        raise ValueError(f"it has {length} bytes, but at most {largest} are allowed")
    return _read(pipe, length, deadline, alive)


def _read(pipe: int, length: int, deadline: float | None, alive: Callable[[], bool] | None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if deadline is not None:
            _wait(pipe, select.POLLIN, deadline, alive)
        chunk = os.read(pipe, min(CHUNK, length - len(data)))
        if not chunk:
            raise EOFError("the other end of the pipe is closed")
        data += chunk
    return bytes(data)


def _wait(pipe: int, event: int, deadline: float, alive: Callable[[], bool] | None) -> None:
    """Wait until the pipe is ready. Also detects a dead process whose children still hold the pipe open."""
    poll = select.poll()
    poll.register(pipe, event)
    while True:
        was_alive = alive is None or alive()
        left = deadline - time.monotonic()
        if poll.poll(1000 * max(0.0, min(left, CHECK_SECONDS if was_alive else 0.0))):
            return
        if not was_alive:
            raise EOFError("the process has ended")
        if left <= 0:
            raise TimeoutError
