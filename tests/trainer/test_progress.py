"""The line of progress: what it says, live in a terminal and plain elsewhere."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.utils import logging as hf_logging

from gruppo import GRPOConfig, GRPOTrainer, LiveProgressCallback
from gruppo.trainer.display.progress import duration, metrics_line
from tests.helpers import base_args, length_reward, prompts, tiny_model, tiny_tokenizer

LOGS = {
    "reward": 0.5,
    "reward_std": 0.25,
    "completions/mean_length": 22.4,
    "completions/clipped_ratio": 0.1,
    "kl": 0.0123,
    "entropy": 0.5,
    "step_time": 2.0,
    "rollout/seconds": 1.5,
    "update/seconds": 0.4,
}


def test_what_a_line_says() -> None:
    assert metrics_line(LOGS) == (
        "reward 0.500 ± 0.250  length 22 (10% cut)  kl 0.0123  entropy 0.500  "
        "2.00 s/update (sampling 1.50, update 0.40)"
    )
    assert metrics_line({"reward": 1.0, "kl": None}) == "reward 1.000"
    assert (duration(75.2), duration(3725), duration(0)) == ("1:15", "1:02:05", "0:00")
    assert (duration(9.9), duration(60), duration(754)) == ("0:09", "1:00", "12:34")


def state(step: int = 0, main: bool = True) -> TrainerState:
    return TrainerState(global_step=step, max_steps=40, is_world_process_zero=main)


def shown(callback: LiveProgressCallback, *, main: bool = True) -> None:
    """A run of ten updates, with an evaluation."""
    callback.on_train_begin(None, state(main=main), None)
    for step in range(1, 11):
        callback.on_step_end(None, state(step, main), None)
    callback.on_log(None, state(10, main), None, logs=LOGS)
    callback.on_log(None, state(10, main), None, logs={"train_runtime": 3.0})
    metrics = {"eval_reward": 0.25, "eval_gsm8k_accuracy": 0.5, "eval_runtime": 3.0}
    callback.on_evaluate(None, state(10, main), None, metrics=metrics)
    callback.on_train_end(None, state(10, main), None)


def test_plain_lines_in_a_pipe() -> None:
    file = io.StringIO()
    shown(LiveProgressCallback(Console(file=file, width=60)))
    first, second = file.getvalue().splitlines()
    assert first == f"update 10/40  {metrics_line(LOGS)}  0:00 left", "on one line however narrow"
    assert second == "evaluation after update 10: eval_reward 0.250  eval_gsm8k_accuracy 0.500"
    assert "\x1b" not in file.getvalue()


def test_plain_lines_in_a_terminal_that_cannot_move_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    shown(LiveProgressCallback(Console(file=file, force_terminal=True, color_system=None)))
    assert len(file.getvalue().splitlines()) == 2


def test_a_locale_that_lacks_a_character_ends_no_run() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    shown(LiveProgressCallback(Console(file=file, force_terminal=False)))
    file.flush()
    assert b"reward 0.500 \\xb1 0.250" in file.buffer.getvalue()


def test_an_update_that_samples_nothing_keeps_what_is_known() -> None:
    file = io.StringIO()
    callback = LiveProgressCallback(Console(file=file))
    callback.on_train_begin(None, state(), None)
    callback.on_log(None, state(1), None, logs=LOGS)
    callback.on_log(None, state(2), None, logs={"step_time": 0.5, "update/seconds": 0.4, "entropy": 0.4, "kl": None})
    line = file.getvalue().splitlines()[1]
    assert "reward 0.500 ± 0.250" in line
    assert "kl 0.0123  entropy 0.400  0.50 s/update (update 0.40)" in line, "no seconds of sampling"


def test_plain_lines_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_jupyter=True)
    assert not console.is_terminal
    callback = LiveProgressCallback(console)
    callback.on_train_begin(None, state(), None)
    assert callback._live is None


def test_a_live_panel_in_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, color_system=None, record=True)
    callback = LiveProgressCallback(console)
    callback.watch(lambda: ("sampling", 3.2))
    callback.on_train_begin(None, state(), None)
    callback.on_step_end(None, state(10), None)
    callback.on_log(None, state(10), None, logs=LOGS)
    with console.capture() as capture:
        console.print(callback.render())
    panel = capture.get()
    assert re.search(r"update 10/40 .*0:00 left  sampling 3 s", panel), panel
    assert "reward 0.500 ± 0.250  length 22 (10% cut)" in panel
    callback.on_train_end(None, state(10), None)
    assert callback._live is None
    assert file.getvalue().endswith("\x1b[?25h"), "the cursor is back"
    last = file.getvalue().rpartition("update 10/40")[2]
    assert "sampling 3 s" not in last, "at the end nothing is done any more"


def test_the_panel_is_closed_after_an_error(tmp_path: Path) -> None:
    class Stop(LiveProgressCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    file = io.StringIO()
    callback = Stop(Console(file=file, force_terminal=True))
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, [callback]).train()
    assert callback._live is None
    assert file.getvalue().endswith("\x1b[?25h")


def test_one_process_of_several_shows_it() -> None:
    file = io.StringIO()
    shown(LiveProgressCallback(Console(file=file, force_terminal=True)), main=False)
    assert file.getvalue() == ""


def test_the_time_left_counts_from_where_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("gruppo.trainer.display.progress.time.monotonic", lambda: now.seconds)
    callback = LiveProgressCallback(Console(file=io.StringIO()))
    callback.on_train_begin(None, state(20), None)
    assert callback.seconds_left == 0.0
    now.seconds = 110.0
    callback.on_step_end(None, state(25), None)
    assert callback.seconds_left == pytest.approx(30.0), "15 updates at 2 s"


def trainer(tmp_path: Path, callbacks: list[Any] | None, **changes: Any) -> GRPOTrainer:
    args = GRPOConfig(**base_args(tmp_path, **changes))
    return GRPOTrainer(
        tiny_model(),
        reward_funcs=length_reward,
        args=args,
        train_dataset=prompts(8),
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_it_stands_in_for_the_display_of_transformers(disable_tqdm: bool, tmp_path: Path) -> None:
    def kinds(of: GRPOTrainer) -> set[str]:
        return {type(callback).__name__ for callback in of.callback_handler.callbacks}

    theirs = PrinterCallback if disable_tqdm else ProgressCallback
    plain = trainer(tmp_path, None, disable_tqdm=disable_tqdm)
    assert theirs.__name__ in kinds(plain), "without it nothing changes"
    plain.add_callback(LiveProgressCallback())
    given = trainer(tmp_path, [LiveProgressCallback()], disable_tqdm=disable_tqdm)
    for of in (plain, given):
        assert kinds(of).isdisjoint({"PrinterCallback", "ProgressCallback"})
        assert "LiveProgressCallback" in kinds(of)


def test_a_run_tells_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    class Watched(LiveProgressCallback):
        def watch(self, phase: Any) -> None:
            self.phase = phase

    file = io.StringIO()
    callback = Watched(Console(file=file))

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.add(callback.phase()[0])
        return [float(len(c)) for c in completions]

    args = GRPOConfig(**base_args(tmp_path))
    GRPOTrainer(
        tiny_model(),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(8),
        processing_class=tiny_tokenizer(),
        callbacks=[callback],
    ).train()
    assert seen == {"asking the rewards"}
    lines = file.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["update 1/2", "update 2/2"]
    assert all("s/update (sampling " in line for line in lines)


def test_the_panel_has_two_lines_in_a_narrow_terminal() -> None:
    for width, ending in ((80, "entropy 0.500  2.00 s"), (60, "…")):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        page = Console(file=io.StringIO(), width=width)
        callback = LiveProgressCallback(console)
        callback.watch(lambda: ("asking the rewards", 12.0))
        callback.on_train_begin(None, TrainerState(global_step=0, max_steps=100_000), None)
        callback.on_log(None, TrainerState(global_step=10, max_steps=100_000), None, logs=LOGS)
        page.print(callback.render())
        callback.close()
        lines = page.file.getvalue().splitlines()
        assert len(lines) == 2, lines
        assert max(map(len, lines)) <= width
        assert lines[1].rstrip().endswith(ending)


def test_bars_of_files_do_not_break_into_the_panel() -> None:
    hf_logging.enable_progress_bar()
    callback = LiveProgressCallback(Console(file=io.StringIO(), force_terminal=True))
    for before in (True, False):
        callback.on_train_begin(None, state(), None)
        assert not hf_logging.is_progress_bar_enabled()
        callback.close()
        assert hf_logging.is_progress_bar_enabled() is before
        hf_logging.disable_progress_bar()
    hf_logging.enable_progress_bar()
