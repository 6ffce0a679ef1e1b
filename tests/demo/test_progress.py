"""Progress: plain lines without a terminal, a table in one, rows kept either way."""

import io
from types import SimpleNamespace

from rich.console import Console

from gruppo.demo.progress import ProgressCallback, StepRow, plain_line, render


def drive(console, steps=3, every=2):
    """Run the callback through the events of a short training."""
    callback = ProgressCallback(console, evaluate=lambda model: 0.5, every=every, problems=100)
    state = SimpleNamespace(global_step=0, max_steps=steps)
    callback.on_train_begin(None, state, None)
    for step in range(1, steps + 1):
        state.global_step = step
        callback.on_log(None, state, None, logs={"reward": step / 10, "num_tokens": 100.0 * step}, model=None)
    callback.on_log(None, state, None, logs={"train_runtime": 1.0}, model=None)
    callback.on_train_end(None, state, None)
    return callback


def test_plain_lines():
    out = io.StringIO()
    callback = drive(Console(file=out))
    lines = out.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step   1/3", "step   2/3", "step   3/3"]
    assert "reward 0.200" in lines[1]
    assert "held-out (100) 0.50" in lines[1]
    assert "\x1b" not in out.getvalue()
    assert [row.held_out for row in callback.rows] == [None, 0.5, 0.5]
    assert callback.rows[-1].seconds_left == 0
    assert callback.history()[0]["step"] == 1


def test_terminal_shows_a_table():
    out = io.StringIO()
    drive(Console(file=out, force_terminal=True, width=100))
    assert "time left" in out.getvalue()
    assert "tokens/s" in out.getvalue()
    assert "held-out (100)" in out.getvalue()


def test_plain_lines_in_a_terminal_that_cannot_move_its_cursor(monkeypatch):
    """As that of an editor: there rich would show nothing until the end."""
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    drive(Console(file=out, force_terminal=True, color_system=None))
    assert [line[:10] for line in out.getvalue().splitlines()] == ["step   1/3", "step   2/3", "step   3/3"]


def test_plain_line_is_exact():
    row = StepRow(step=7, reward=0.25, held_out=None, tokens_per_second=1234.5, seconds_left=75.2)
    assert plain_line(row, 40, 100) == "step   7/40  reward 0.250  held-out (100)    -   1,234 tokens/s  left 1:15"


def test_table_keeps_the_latest_rows_only():
    rows = [StepRow(step, 0.0, None, 1.0, 1.0) for step in range(1, 31)]
    console = Console(file=io.StringIO(), width=80)
    console.print(render(rows, 40, 100))
    text = console.file.getvalue()
    assert " 30 " in text
    assert " 20 " not in text


def test_close_is_safe_twice():
    callback = ProgressCallback(Console(file=io.StringIO()), evaluate=lambda model: 0.0, every=1, problems=100)
    callback.close()
    callback.close()
