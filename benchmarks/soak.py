"""Many updates under faults: rewards and tools that fail, hang and crash, and a trainer that is killed.

    python benchmarks/soak.py                        (CPU only; 2,000 updates, five kills)
    python benchmarks/soak.py --updates 60 --kills 2

A tiny model is trained in a chain of processes: each but the last is killed with SIGKILL at a random moment, and the
next one resumes. Which rewards and tools fail depends only on the text that the model wrote, so a reward that is
computed again for the same completion fails again. Afterwards these are checked:

    memory      growth of each process's resident memory between the first tenth of its updates and its end
    leaks       growth of open files, threads and child processes between the same two points; processes that outlive
                their trainer; shared memory and temporary files that are left
    books       every update is in metrics.jsonl once, the rollouts have no gap and no repetition, and every epoch
                samples every prompt exactly once
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

PROMPTS, PROMPTS_PER_UPDATE, GROUP = 80, 2, 4
MOST_GROWTH = 0.05
MOST_MORE = 3  # tolerated growth of files, threads or children, which come and go
SECONDS_TO_END = 15.0  # time limit for the processes of a killed trainer to exit
MOST_SECONDS_WITHOUT_NEWS = 180.0

# ---- faults


def lot(text: str, kind: str) -> int:
    """A pseudo-random number below 10,000 that depends only on the text and the kind."""
    return crc32(f"{kind}/{text}".encode()) % 10_000


def texts(completions: list[Any]) -> list[str]:
    return ["".join(message["content"] or "" for message in completion) for completion in completions]


def unsteady(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward, run in a worker: of 10,000 completions 5 hang, 10 end the process, 20 are slow and 50 raise."""
    scores = []
    for text in texts(completions):
        drawn = lot(text, "reward")
        if drawn < 5:
            time.sleep(3600)
        elif drawn < 15:
            os._exit(3)
        elif drawn < 35:
            time.sleep(0.1)
        elif drawn < 85:
            raise ValueError(f"no score for {text!r}")
        scores.append(sum(character.isalpha() for character in text) / 10)
    return scores


def look_up(word: str) -> str:
    """A tool: of 10,000 calls 20 take longer than they may, and 500 raise.

    Args:
        word: what to look up
    """
    drawn = lot(word, "tool")
    if drawn < 20:
        time.sleep(1.0)
    elif drawn < 520:
        raise ValueError(f"{word!r} is unknown")
    return str(drawn % 100)


# ---- one process of the chain


def make_trainer(folder: Path, updates: int, seed: int) -> Any:
    """A trainer for a random model in which everything the model writes is parsed as one call of the tool."""
    from gruppo import GRPOConfig, GRPOTrainer
    from tests.helpers import base_args, tiny_model
    from tests.tools.scripted import ENDS, questions, tool_tokenizer

    model = tiny_model(max_position_embeddings=1024)
    model.generation_config.eos_token_id = ENDS
    settings = base_args(
        folder / "run",
        max_steps=updates,
        num_generations=GROUP,
        per_device_train_batch_size=PROMPTS_PER_UPDATE * GROUP,
        max_completion_length=80,
        max_tool_calling_iterations=1,
        tool_timeout=0.3,
        reward_timeout=2.0,
        reward_sample_timeout=0.5,
        reward_workers=2,
        learning_rate=1e-6,  # so small that the model stays random and the rate of faults stays the same
        lr_scheduler_type="constant",
        parity_check="off",
        save_strategy="steps",
        save_steps=20,
        save_total_limit=2,
        seed=seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=unsteady,
        args=GRPOConfig(**settings),
        train_dataset=questions(*(f"q{i}" for i in range(PROMPTS))),
        processing_class=tool_tokenizer(),
        tools=[look_up],
    )
    read = trainer.tool_loop.parse

    def parse(episode: Any) -> Any:
        said = read(episode)
        word = str(said.get("content"))
        return {
            **said,
            "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}],
        }

    trainer.tool_loop.parse = parse
    return trainer


def usage() -> dict[str, int]:
    """The resources of this process: resident memory in KiB, open files, threads, children."""
    own = Path("/proc/self")
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    children = sum(len(path.read_text().split()) for path in own.glob("task/*/children"))
    return {
        "memory": int(status["VmRSS"].split()[0]),
        "files": len(list((own / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "children": children,
    }


def train(folder: Path, updates: int, seed: int) -> None:
    """Start or resume training, and record the resources of this process after every update."""
    import torch
    from transformers import PrinterCallback, TrainerCallback

    torch.set_num_threads(1)
    trainer = make_trainer(folder, updates, seed)
    trainer.remove_callback(PrinterCallback)
    samples = (folder / "usage.jsonl").open("a", buffering=1)

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            samples.write(json.dumps({"process": os.getpid(), "update": state.global_step, **usage()}) + "\n")

    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=True if any((folder / "run").glob("checkpoint-*")) else None)


# ---- the chain


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON Lines file; an incomplete last line is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def processes_of(session: int) -> list[int]:
    """The processes of a trainer's session that are still running, including the trainer itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(session: int) -> int:
    """Give the remaining processes of a trainer time to exit, kill the others, and return the number killed."""
    deadline = time.monotonic() + SECONDS_TO_END
    while (left := processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return len(left)


def run_until(folder: Path, updates: int, seed: int, kill_at: int | None, delay: float) -> tuple[int, int]:
    """Run one process of the chain, killed `delay` seconds after `kill_at`; return its exit code and its survivors."""
    command = [sys.executable, __file__, "--updates", str(updates), "--seed", str(seed), "--inside", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    with (folder / "log.txt").open("a") as log:
        trainer = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    news, heard = -1, time.monotonic()
    while trainer.poll() is None:
        time.sleep(0.02)
        path = folder / "usage.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != news:
            news, heard = size, time.monotonic()
            reached = max((line["update"] for line in lines(path)[-1:] if line["process"] == trainer.pid), default=0)
            if kill_at is not None and reached >= kill_at:
                time.sleep(delay)
                trainer.kill()
        elif time.monotonic() - heard > MOST_SECONDS_WITHOUT_NEWS:
            trainer.kill()
            raise RuntimeError(f"no update for {MOST_SECONDS_WITHOUT_NEWS:.0f} s; see {folder / 'log.txt'}")
    return trainer.wait(), wait_for(trainer.pid)


def chain(folder: Path, updates: int, kills: int, seed: int) -> dict[str, Any]:
    """Train to the end, with kills and resumes on the way."""
    draw = random.Random(seed)
    places = sorted(draw.sample(range(updates // 20, updates - 1), kills))
    outlived, killed = 0, []
    for place in [*places, None]:
        delay = draw.uniform(0.0, 0.3)
        code, left = run_until(folder, updates, seed, place, delay)
        outlived += left
        expected = 0 if place is None else -signal.SIGKILL
        if code != expected:
            tail = (folder / "log.txt").read_text()[-4000:]
            raise RuntimeError(f"exit code {code} instead of {expected}:\n{tail}")
        if place is not None:
            killed.append({"after_update": place, "seconds_later": round(delay, 3)})
    return {"killed": killed, "outlived": outlived}


# ---- checks afterwards


def growth(samples: Sequence[dict[str, int]]) -> dict[str, Any]:
    """The resources of one process after a tenth of its updates, and at its end."""
    window = max(len(samples) // 10, 5)
    early, late = samples[window : 2 * window], samples[-window:]
    held = {
        name: [statistics.median(sample[name] for sample in part) for part in (early, late)]
        for name in ("memory", "files", "threads", "children")
    }
    before, after = held["memory"]
    return {
        "updates": len(samples),
        "memory_mib": [round(value / 1024, 1) for value in held.pop("memory")],
        "memory_growth": round(after / before - 1, 4),
        **held,
    }


def by_process(samples: Sequence[dict[str, int]]) -> Iterator[list[dict[str, int]]]:
    for process in dict.fromkeys(sample["process"] for sample in samples):
        yield [sample for sample in samples if sample["process"] == process]


def books(run: Path, updates: int) -> list[str]:
    """The inconsistencies in the record of the run."""
    import pyarrow.parquet as pq

    problems = []
    trained = [line["update"] for line in lines(run / "metrics.jsonl") if line["kind"] == "train" and "loss" in line]
    if trained != list(range(1, updates + 1)):
        counts = Counter(trained)
        missing = [update for update in range(1, updates + 1) if update not in counts]
        twice = [update for update, count in counts.items() if count > 1]
        problems.append(f"metrics.jsonl: updates {missing[:10]} are missing, {twice[:10]} are there more than once")
    files = sorted((run / "rollouts").glob("*.parquet"))
    numbers = [int(path.name.partition("-")[0]) for path in files]
    if numbers != list(range(updates)):
        problems.append(f"rollouts: {len(numbers)} files, not {updates} without a gap")
    columns = ["update", "prompt_index"]
    asked = [pq.read_table(path, columns=columns).to_pydict() for path in files]
    sampled_at = [sorted(set(rows["update"])) for rows in asked]
    if sampled_at != [[number] for number in numbers]:
        problems.append("rollouts: some were sampled in other updates than their number says")
    per_epoch = PROMPTS // PROMPTS_PER_UPDATE
    for epoch in range(len(asked) // per_epoch):
        part = asked[epoch * per_epoch : (epoch + 1) * per_epoch]
        counts = Counter(index for rows in part for index in rows["prompt_index"])
        if counts != dict.fromkeys(range(PROMPTS), GROUP):
            problems.append(f"epoch {epoch}: not every prompt was asked {GROUP} times")
    return problems


def leaks(pieces: Sequence[dict[str, Any]], left: dict[str, int]) -> list[str]:
    """The resources that grew, and those that were left behind."""
    problems = [f"{count} {name} left" for name, count in left.items() if count > 0]
    for piece in pieces:
        if piece["updates"] >= 100 and piece["memory_growth"] > MOST_GROWTH:
            problems.append(f"memory grew from {piece['memory_mib'][0]} to {piece['memory_mib'][1]} MiB")
        for name in ("files", "threads", "children"):
            before, after = piece[name]
            if after > before + MOST_MORE:
                problems.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return problems


def soak(folder: Path, updates: int, kills: int, seed: int) -> dict[str, Any]:
    """Run the chain and check what it leaves behind."""
    (folder / "tmp").mkdir()
    shared = set(os.listdir("/dev/shm"))
    start = time.perf_counter()
    chained = chain(folder, updates, kills, seed)
    seconds = time.perf_counter() - start
    pieces = [growth(samples) for samples in by_process(lines(folder / "usage.jsonl"))]
    left = {
        "processes that outlived their trainer": chained.pop("outlived"),
        "entries of /dev/shm": len(set(os.listdir("/dev/shm")) - shared),
        "temporary files": len(os.listdir(folder / "tmp")),
    }
    metrics = lines(folder / "run" / "metrics.jsonl")
    faults = {
        name: round(sum(line.get(f"rewards/unsteady/{name}") or 0 for line in metrics))
        for name in ("failures", "timeouts")
    }
    calls = statistics.mean(line["tools/failure_frequency"] for line in metrics if "tools/failure_frequency" in line)
    return {
        "updates": updates,
        "seconds": round(seconds, 1),
        **chained,
        "reward_faults": faults,
        "share_of_tool_calls_that_failed": round(calls, 4),
        "processes": pieces,
        "left": left,
        "problems": leaks(pieces, left) + books(folder / "run", updates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the result goes as JSON")
    parser.add_argument("--keep", type=Path, help="an empty folder for the run, which is kept")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # a process of the chain
    options = parser.parse_args()
    if options.inside is not None:
        train(options.inside, options.updates, options.seed)
        return
    from benchmarks.common import provenance

    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        result = {**provenance("gruppo"), **soak(place, options.updates, options.kills, options.seed)}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
