"""Runs whose memory and time are compared with `gruppo plan`: their settings, and how their phases are measured.

Every case runs in a separate process (see `apart`): random weights of a given shape, prompts of equal length,
completions that are all written up to the limit, and a reward that differs within every group.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Qwen2Config, TrainerCallback

from benchmarks.step_cases import spread, word_prompts
from gruppo.demo import model_path

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A run: a model, the groups of an update, and further fields of GRPOConfig."""

    shape: dict[str, Any]  # of Qwen2Config
    prompts: int
    completions: int  # per prompt
    prompt_tokens: int
    new_tokens: int
    weights: str = "float32"
    lora: dict[str, Any] | None = None  # of peft.LoraConfig
    fields: dict[str, Any] = field(default_factory=dict)
    updates: int = 3

    def settings(self, folder: str, *, on_cpu: bool) -> dict[str, Any]:
        """The fields of GRPOConfig."""
        return {
            "output_dir": folder,
            "max_steps": self.updates,
            "learning_rate": 1e-6,
            "num_generations": self.completions,
            "per_device_train_batch_size": self.prompts * self.completions,
            "max_completion_length": self.new_tokens,
            "generation_kwargs": {"min_new_tokens": self.new_tokens},
            "model_init_kwargs": {"dtype": self.weights},
            "shuffle_dataset": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **({"use_cpu": True, "bf16": False} if on_cpu else {}),
            **self.fields,
        }


class Probe:
    """Peak memory since the last reset: of the process on a CPU, of torch and the KV pool on a GPU."""

    def __init__(self, *, on_cpu: bool):
        self.on_cpu = on_cpu
        self.peaks: dict[str, int] = {}
        self.reserved = 0

    def reset(self) -> None:
        if self.on_cpu:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident set size
        else:
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> int:
        if self.on_cpu:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        return torch.cuda.max_memory_allocated()

    @contextmanager
    def phase(self, name: str, outside: str, more: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Attribute the peak inside the block to `name`, plus `more()`, and the peak before it to `outside`."""
        self.note(outside)
        yield
        self.note(name, more())

    def note(self, name: str, more: int = 0) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0), self.read() + more)
        self.reset()


class Clock(TrainerCallback):
    """Seconds of every update and of the phases inside it; on a CPU, processor seconds.

    Other work on the machine hardly affects processor seconds. The first update includes kernel compilation and CUDA
    graph capture.
    """

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.steps: list[dict[str, float]] = []
        self.inside: dict[str, float] = {}
        self._start = 0.0

    def now(self) -> float:
        if self.on_cpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.inside[name] = self.inside.get(name, 0.0) + self.now() - start

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = self._start or self.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = self.now()
        self.steps.append({"step": round(now - self._start, 4), **{k: round(v, 4) for k, v in self.inside.items()}})
        self.inside, self._start = {}, now


def watch(trainer: Any, probe: Probe, clock: Clock) -> None:
    """Measure the phases of a trainer's steps: sampling, the parity check, scoring; the rest is the update."""

    def pool_bytes() -> int:
        runner = getattr(getattr(trainer.backend, "engine", None), "_runner", None)
        lent = runner is not None and runner.pool._memory is not None
        return runner.pool.bytes if lent else 0  # memory lent to the pool is not in torch's statistics

    def wrap(owner: Any, method: str, name: str, more: Callable[[], int] = lambda: 0) -> None:
        original = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with probe.phase(name, "update", more), clock.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, watched)

    wrap(trainer.backend, "sample", "sampling", pool_bytes)
    wrap(trainer.parity, "check", "parity")
    wrap(trainer, "add_logps", "scoring")


def random_model(case: Case, device: str) -> Any:
    """A model of the case's shape with random weights, without tokens that end a completion."""
    none = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            Qwen2Config(**case.shape, **none, max_position_embeddings=32768), dtype=getattr(torch, case.weights)
        )


def make_model(case: Case, folder: Path) -> None:
    """Write the model to a folder, with the demo's tokenizer."""
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(folder)
    random_model(case, "cpu").save_pretrained(folder)


def measure(case: Case, folder: Path | None, *, on_cpu: bool) -> dict[str, Any]:
    """Train the model of a folder, or one created on the device, and return the memory and seconds of each phase."""
    from gruppo import GRPOConfig, GRPOTrainer

    probe, clock = Probe(on_cpu=on_cpu), Clock(on_cpu)
    probe.reset()
    baseline = probe.read()
    peft_config = None
    if case.lora is not None:
        from peft import LoraConfig

        peft_config = LoraConfig(task_type="CAUSAL_LM", **case.lora)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    rows = word_prompts(tokenizer, case.prompts * case.updates, case.prompt_tokens)
    settings = case.settings("", on_cpu=on_cpu)
    if folder is None:
        del settings["model_init_kwargs"]
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=random_model(case, "cpu" if on_cpu else "cuda") if folder is None else str(folder),
            processing_class=tokenizer,
            reward_funcs=spread,
            args=GRPOConfig(**settings | {"output_dir": out}),
            train_dataset=Dataset.from_list(rows),
            peft_config=peft_config,
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        probe.note("loading")
        watch(trainer, probe, clock)
        trainer.train()
        probe.note("update")
    return {
        "baseline_bytes": baseline,
        "peak_bytes": probe.peaks,
        "reserved_bytes": probe.reserved,
        "device_bytes": None if on_cpu else device_bytes(),
        "plans": {"rollout": trainer.backend.state_dict(), "update": trainer.planner.state_dict()},
        "steps": clock.steps,
        "weights": sum(p.numel() for p in trainer.model.parameters()),
        "trained": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }


def device_bytes() -> int:
    """Memory in use on the device outside of torch, such as the CUDA context of the process."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def apart(case: Case, *, on_cpu: bool, limit: float, script: str, threads: int = 1) -> dict[str, Any]:
    """Run the case in a separate process, which starts with an empty device."""
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place) / "case.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(asdict(case)), encoding="utf-8")
        command = [
            sys.executable,
            script,
            "--case-file",
            str(asked),
            "--answer",
            str(answer),
            "--cpu",
            str(int(on_cpu)),
        ]
        variables = dict(os.environ)
        if on_cpu:
            variables |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        start = time.monotonic()
        try:
            done = subprocess.run(command, timeout=limit, env=variables, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"failed": f"no end after {limit:.0f} s"}
        if not answer.exists():
            return {"failed": f"exit code {done.returncode}: {done.stderr[-1500:]}"}
        return json.loads(answer.read_text(encoding="utf-8")) | {"seconds": round(time.monotonic() - start, 1)}


def work(asked: Path, answer: Path, *, on_cpu: bool, loads: bool) -> None:
    """The child process of `apart`. With `loads` the model is read from a folder, else it is created on the device."""
    case = Case(**json.loads(asked.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        if loads:
            build = [sys.executable, __file__, str(asked), folder]
            subprocess.run(build, check=True)  # in another process, so that its memory does not count
        found = measure(case, Path(folder) if loads else None, on_cpu=on_cpu)
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    make_model(Case(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), Path(sys.argv[2]))
