"""The engines that benchmarks/step.py compares, and how the steps of a trainer are timed."""

import atexit
import importlib.metadata as metadata
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from transformers import PrinterCallback, TrainerCallback

from benchmarks import step_cases
from benchmarks.rollout_engines import synchronize
from benchmarks.rollout_profile import Window, table
from benchmarks.step_cases import Case

Save = Callable[[dict[str, Any]], None]

# The logged metrics that describe the work of a step, kept in its record.
LOGGED = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "num_tokens")
LOGGED += ("record/seconds", "audit/seconds")
# The parts of a step whose medians are in the record.
SECONDS = ("step", "collect", "generation", "logps", "rewards", "update", "optimizer")
GIB = 2**30


class DeviceMemory:
    """Peak memory in use on the device by all processes, polled a hundred times per second.

    Torch's statistics do not include other allocators, such as vLLM's or that of a KV pool.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that is inside the driver when Python exits crashes the process

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            free, total = torch.cuda.mem_get_info()
            self.peak = max(self.peak, total - free)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


class Stopwatch(TrainerCallback):
    """Seconds and device memory of a trainer's steps, and of the phases inside them.

    A step lasts from the end of the previous step (the first: from the start of training) to its own end. Its phase
    `collect` samples completions and scores them; the rest of the step is the update. `generation`, `logps` (log-probs
    under the sampling weights or a reference) and `rewards` are parts of `collect`; `optimizer` is part of the update.
    The device is synchronized at the boundaries of phases; inside the update only around the optimizer.
    """

    def __init__(self, on_step: Callable[[dict[str, Any]], None]):
        self.on_step = on_step
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens = 0
        self.collecting = False
        self.peaks: dict[str, list[int]] = {}  # by part of the step: bytes allocated and reserved
        self.after_collect: Callable[[], None] = lambda: None
        self.device_memory: DeviceMemory | None = None
        self._start = self._optimizer_start = 0.0

    # ---- phases

    def watch(self, owner: Any, method: str, phase: str, tokens: Callable[[Any], int] = lambda _: 0) -> None:
        """Time every call of an object's method, and count the tokens that it returns."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if phase != "collect" and not self.collecting:
                return original(*args, **kwargs)  # in the update, a synchronization would slow it down
            with self._in_collect() if phase == "collect" else self._phase(phase):
                result = original(*args, **kwargs)
            self.tokens += tokens(result)
            return result

        setattr(owner, method, timed)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def _in_collect(self) -> Iterator[None]:
        self.note_peak("update")
        self.collecting = True
        with self._phase("collect"):
            yield
        self.collecting = False
        self.note_peak("collect")
        self.after_collect()

    def note_peak(self, part: str) -> None:
        """Include the peak memory since the last call in the peak of a part."""
        if not torch.cuda.is_initialized():
            return
        now = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        self.peaks[part] = [max(pair) for pair in zip(now, self.peaks.get(part, now), strict=True)]
        torch.cuda.reset_peak_memory_stats()

    # ---- steps

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.note_peak("construction")
        if torch.cuda.is_initialized():
            self.device_memory = DeviceMemory()
        synchronize()
        self._start = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self._optimizer_start = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        self.seconds["optimizer"] += time.perf_counter() - self._optimizer_start

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronize()
        now = time.perf_counter()
        if "collect" not in self.seconds:
            raise RuntimeError("A step ended without the phase that makes completions: nothing was timed.")
        seconds = {**self.seconds, "step": now - self._start}
        seconds["update"] = seconds["step"] - seconds["collect"]
        facts: dict[str, Any] = {name: round(value, 4) for name, value in seconds.items()}
        facts["tokens"] = self.tokens
        facts["tokens_per_second"] = round(self.tokens / max(seconds.get("generation", 0), 1e-9), 1)
        self.note_peak("update")
        self.seconds.clear()
        self.tokens = 0
        self.on_step(facts)
        synchronize()
        self._start = time.perf_counter()

    def memory(self) -> dict[str, Any]:
        """Peaks in GiB: of the run and of its parts, from torch's statistics; and of the device during training."""
        if self.device_memory is None:
            return {}
        return {
            "peak_allocated_gib": round(max(peak[0] for peak in self.peaks.values()) / GIB, 2),
            "peak_reserved_gib": round(max(peak[1] for peak in self.peaks.values()) / GIB, 2),
            "peak_allocated_gib_by_part": {part: round(peak[0] / GIB, 2) for part, peak in self.peaks.items()},
            "peak_device_gib": round(self.device_memory.peak / GIB, 2),
        }


@dataclass(frozen=True)
class Engine:
    """A library, further fields of its config, and how its phases are instrumented."""

    library: str
    watch: Callable[[Stopwatch, Any], None]
    fields: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # whose versions are in the result
    parts: Callable[[Any], dict[str, float]] = lambda trainer: {}  # further seconds of a step, from the library
    plans: Callable[[Any], dict[str, Any]] = lambda trainer: {}  # what it planned by itself


def watch_gruppo(clock: Stopwatch, trainer: Any) -> None:
    clock.watch(trainer, "collect", "collect")
    clock.watch(trainer.backend, "sample", "generation", lambda completions: sum(len(c.ids) for c in completions))
    clock.watch(trainer, "add_logps", "logps")
    clock.watch(trainer, "reward", "rewards")


def parts_of_gruppo(trainer: Any) -> dict[str, float]:
    """Seconds of the parts of the last rollout, from the built-in engine's counters."""
    counters = getattr(trainer.backend, "counters", {})
    parts = {"prefill": "prefill_seconds", "decode": "decode_seconds", "graph capture": "capture_seconds"}
    return {f"generation: {part}": round(counters[key], 4) for part, key in parts.items() if key in counters}


def plans_of_gruppo(trainer: Any) -> dict[str, Any]:
    """What was planned from the free memory, such as how many tokens a rollout and an update process at once."""
    planners = {"rollout": trainer.backend, "update": getattr(trainer, "planner", None)}
    return {what: planner.state_dict() for what, planner in planners.items() if hasattr(planner, "state_dict")}


def watch_trl(clock: Stopwatch, trainer: Any) -> None:
    clock.watch(trainer, "_generate_and_score_completions", "collect")
    clock.watch(trainer, "_generate_single_turn", "generation", lambda result: sum(map(len, result[0])))
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "logps")
    clock.watch(trainer, "_calculate_rewards", "rewards")
    if getattr(trainer, "vllm_generation", None) is not None:
        clock.watch(trainer.vllm_generation, "sync_weights", "generation: weight sync")
        clock.watch(trainer.vllm_generation, "generate", "generation: vLLM")


ENGINES = {
    "gruppo": Engine("gruppo", watch_gruppo, parts=parts_of_gruppo, plans=plans_of_gruppo),
    "trl": Engine("trl", watch_trl, packages=("trl",)),
    # By default TRL uses gradient checkpointing; here there is enough memory without it.
    "trl-kept": Engine("trl", watch_trl, {"gradient_checkpointing": False}, packages=("trl",)),
    "trl-liger": Engine("trl", watch_trl, {"use_liger_kernel": True}, packages=("trl", "liger-kernel")),
    "trl-vllm": Engine("trl", watch_trl, {"use_vllm": True, "vllm_mode": "colocate"}, packages=("trl", "vllm")),
}


def config_fields(name: str, case: Case, steps: int, further: dict[str, Any]) -> dict[str, Any]:
    """All fields of an engine's GRPOConfig except the output folder."""
    fields = step_cases.settings(case, steps) | ENGINES[name].fields
    if fields.get("use_vllm") and "generation_kwargs" in fields:
        fields["generation_kwargs"] = {"ignore_eos": True}  # vLLM's cheapest way to write to the limit
    return fields | further


def build(name: str, case: Case, folder: Path, out: str, fields: dict[str, Any], clock: Stopwatch) -> Any:
    """An engine's trainer, ready to train and instrumented."""
    library = __import__(ENGINES[name].library)
    trainer = library.GRPOTrainer(
        model=str(folder),
        reward_funcs=step_cases.reward_of(case),
        args=library.GRPOConfig(output_dir=out, **fields),
        train_dataset=Dataset.from_list(step_cases.training_rows(case, folder, fields["max_steps"])),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    ENGINES[name].watch(clock, trainer)
    return trainer


class Log(TrainerCallback):
    """Adds the logged metrics of a step, which the trainer logs after the step's end, to the step's record."""

    def __init__(self, steps: list[dict[str, Any]], save: Callable[[], None]):
        self.steps, self.save = steps, save

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        found = {name: _plain(value) for name, value in (logs or {}).items() if name in LOGGED}
        if found and self.steps and "logged" not in self.steps[-1]:
            self.steps[-1]["logged"] = found
            self.save()


def _plain(value: Any) -> float | None:
    """A logged value as a number; some trainers log numbers as text."""
    try:
        return round(float(value), 6)
    except (TypeError, ValueError):
        return None


def limit_memory(gib: float | None) -> None:
    """Limit the memory that this process can allocate on its device."""
    if gib is not None:
        torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)


def measure(
    name: str,
    case: Case,
    folder: Path,
    rounds: int,
    further: dict[str, Any],
    save: Save,
    profile: Path | None = None,
) -> None:
    """Train with an engine for `case.warm_up` + `rounds` steps; `save` is called with the record after each.

    With `profile` there is one more step, which is not in the record; the profile of its update is written to that
    file.
    """
    limit_memory(case.memory_gib)
    counted = case.warm_up + rounds
    fields = config_fields(name, case, counted + (profile is not None), further)
    record: dict[str, Any] = {"config": fields}
    save(record)
    record["versions"] = _versions(ENGINES[name].packages)
    steps: list[dict[str, Any]] = []

    def on_step(facts: dict[str, Any]) -> None:
        if len(steps) == counted:
            return  # the profiled step
        check_work(case, facts["tokens"])
        steps.append(facts | ENGINES[name].parts(trainer))
        keep()

    def keep() -> None:
        record.update(warm_up=steps[: case.warm_up], rounds=steps[case.warm_up :], **clock.memory())
        record["plans"] = ENGINES[name].plans(trainer)
        save(record | medians(record["rounds"]))

    clock = Stopwatch(on_step)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        trainer = build(name, case, folder, out, fields, clock)
        record["construct_seconds"] = round(time.perf_counter() - start, 2)
        trainer.add_callback(Log(steps, keep))
        if profile is not None:
            trainer.add_callback(UpdateProfile(clock, counted, profile))
        trainer.train()


class UpdateProfile(TrainerCallback):
    """Runs torch's profiler over the update that follows after `steps` steps, and writes the longest kernels."""

    def __init__(self, clock: Stopwatch, steps: int, path: Path):
        self.clock, self.steps, self.path = clock, steps, path
        self.window = Window(0, 1)
        if torch.cuda.is_available():  # only kernels: the operators of a whole update would be a million events
            self.window.profiler = torch_profile(activities=[ProfilerActivity.CUDA])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.steps:
            self.clock.after_collect = self.window.tick
        elif state.global_step == self.steps + 1:
            self.window.close()
            self.path.write_text(table(self.window), encoding="utf-8")
            print(f"profile: {self.path.name}")


def check_work(case: Case, tokens: int) -> None:
    """Raise if an engine did not sample the expected number of tokens, in cases with a fixed length."""
    wanted = case.prompts * case.completions * case.new_tokens
    if case.shape is not None and tokens != wanted:
        raise RuntimeError(f"{tokens} tokens were sampled in a step, not {wanted}.")


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each part over the timed steps."""
    if not rounds:
        return {}
    names = [name for name in (*SECONDS, "tokens_per_second") if name in rounds[0]]
    return {"median": {name: round(statistics.median(facts[name] for facts in rounds), 4) for name in names}}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {package: metadata.version(package) for package in packages}
