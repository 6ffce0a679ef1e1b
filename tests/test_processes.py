"""The processes that tests start: what they are forked from."""

import os
from pathlib import Path

from tests.processes import context


def write_threads_of_the_server(path: Path) -> None:
    tasks = Path(f"/proc/{os.getppid()}/task")
    path.write_text(" ".join((task / "comm").read_text().strip() for task in tasks.iterdir()))


def test_they_are_forked_from_a_process_with_one_thread(tmp_path: Path) -> None:
    """What a thread holds when its process forks nobody lets go of in the new one."""
    process = context().Process(target=write_threads_of_the_server, args=(tmp_path / "threads",))
    process.start()
    process.join()
    assert len((tmp_path / "threads").read_text().split()) == 1
