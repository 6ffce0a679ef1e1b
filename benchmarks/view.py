"""How long `gruppo view` takes with a hundred thousand completions, in a real browser.

    python benchmarks/view.py                    (CPU only; needs chromium and playwright)

A run folder of 196 generations × 64 prompts × 8 completions of about 190 tokens is made by the recorder, and the
viewer is started on it as a person would. Measured are, in milliseconds:

    index         all files read, before the viewer can filter; it happens while the page is shown
    first_paint   from the request of the page, on a viewer that was just started, until the first content is painted
    curves        … until all curves are drawn
    groups        opening the page of groups, until its table is there
    <filter>      from a click on a filter over all updates, or a key in the search field, until the new table is there
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from gruppo.runs import RolloutRow, RunRecorder, prompt_id
from gruppo.view.folders import find_folders
from gruppo.view.queries import Desk, Question

RESULTS = Path(__file__).parent / "results" / "view.json"
BOUNDS = {"first_paint": 1500, "filter": 300}  # milliseconds
FILTERS = ("zero_spread", "truncated", "tool_failures", "disagreement")
WORDS = "we know that the sum of two and three is five so add them carry one then check again answer".split()


def make_run(folder: Path, generations: int = 196, prompts: int = 64, group: int = 8, seed: int = 0) -> int:
    """A run folder as training leaves it, of so many completions; returns how many."""
    rng = np.random.default_rng(seed)
    recorder = RunRecorder(folder)
    recorder.begin(config={"learning_rate": 1e-6, "num_generations": group}, environment={})
    questions = [f"Question {i}: what is {i} plus {i % 97}?" for i in range(prompts * 40)]
    names = [prompt_id(question) for question in questions]
    for update in range(generations):
        progress = update / max(generations - 1, 1)
        rows = []
        for place in range(prompts):
            asked = (update * prompts + place) % len(questions)
            for sample in range(group):
                right = float(rng.random() < 0.1 + 0.7 * progress)
                length = int(rng.integers(60, 320))
                words = rng.integers(0, len(WORDS), length)
                rows.append(
                    RolloutRow(
                        update=update,
                        split="train",
                        row=place * group + sample,
                        group=place,
                        prompt_id=names[asked],
                        prompt=questions[asked],
                        prompt_tokens=np.arange(20),
                        completion=" ".join([WORDS[word] for word in words]),
                        completion_tokens=words,
                        logps=-rng.random(length, dtype=np.float32),
                        entropies=rng.random(length, dtype=np.float32),
                        rewards={"right": right, "short": 1 - length / 320},
                        reward_kinds={"right": "score", "short": "score"},
                        reward=right,
                        advantage=right - 0.5,
                        stop="eos" if length < 310 else "length",
                        truncated=length >= 310,
                    )
                )
        recorder.rollouts(rows)
        values = {"reward": 0.1 + 0.7 * progress, "loss": float(rng.normal()), "grad_norm": 1.0, "entropy": 1 - progress}
        recorder.metrics(update + 1, values)
    recorder.event("finished", update=generations)
    recorder.close()
    return generations * prompts * group


def index_times(folder: Path) -> dict[str, float]:
    """Without a browser: reading all files, then each question over all updates, in milliseconds."""
    desk = Desk(find_folders([folder]))
    times = {"index": _timed(desk.refresh)}
    for name in FILTERS:
        asked = {"order": ["spread"], "descending": ["1"], "filter": [name]}
        times[name] = _timed(lambda asked=asked: desk.answer("groups", Question(asked)))  # type: ignore[misc]
    times["first_search"] = _timed(lambda: desk.answer("groups", Question({"search": ["carry one then"]})))
    times["search"] = _timed(lambda: desk.answer("groups", Question({"search": ["Check AGAIN answer"]})))
    return times


def _timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return round(1000 * (time.perf_counter() - start), 1)
