"""Training with vLLM in both modes: seconds, rewards, and how far its log-probs are from the trainer's.

    python benchmarks/vllm_modes.py --model FOLDER --vllm-site SITE     (FOLDER: see benchmarks/prepare_smollm2.py)
    python benchmarks/vllm_modes.py --tiny                              (on a CPU against stand-ins, to try it)
    python benchmarks/vllm_modes.py --tiny --vllm-site SITE             (on a CPU; SITE has vLLM's build for CPUs)

All modes use the same model, prompts, seed and settings, and run in one process after another:

    builtin          the built-in engine
    colocate         vLLM in the trainer's process
    sleep            the same; vLLM frees its memory between generations
    server           a stock server on the same GPU that gets its weights by CUDA IPC
    server-async     the same; it samples the next generation while updates run
    server-unseeded  the same; completions have no seeds of their own
    colocate-regex   as colocate, with structured outputs: completions must match an expression
    server-regex     the same of a server
    colocate-ddp     two trainer processes (DDP, a GPU each), each with an engine of its own
    colocate-tp      the same, with one engine that both share by tensor parallelism
    server-ddp       the same, with one server; the main process sends the weights
    server-nccl      the server gets its weights by NCCL. Because NCCL refuses two ranks on one GPU of a host, the two
                     processes pose as two hosts: this exercises the code, but its speed is not meaningful

This script starts and stops the server with the flags of `gruppo vllm-serve`; consecutive server modes with the same
weight transfer share one server. With IPC the trainer does not see vLLM's packages. The result is written after each
mode, with logs beside it. A mode that fails or times out is listed in `failed`, with the ends of its logs; the results
of the others still count.
"""

import argparse
import faulthandler
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from datasets import Dataset

from benchmarks import vllm_without_cuda
from benchmarks.common import provenance
from benchmarks.vllm_processes import Runner, vllm_version

RESULTS = Path(__file__).parent / "results"
MODES = (
    *("builtin", "colocate", "sleep", "server", "server-async", "server-unseeded", "server-nccl"),
    *("colocate-regex", "server-regex"),
    *("colocate-ddp", "colocate-tp", "server-ddp"),
)
REGEX = "[a-f]{2,4}"
FIELDS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "num_generations": 16,
    "max_completion_length": 256,
    "learning_rate": 2e-6,
}
TINY: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "beta": 1e-3,  # so that the KL divergence is logged, which shows how far the weights have moved
    "use_cpu": True,
    "bf16": False,
}
KEPT = (
    "step_time",
    "reward",
    "entropy",
    "kl",
    "completions/mean_length",
    "rollout/seconds",
    "rollout/sync_seconds",
    "rollout/wait_seconds",
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model, with prompts.jsonl beside it")
    parser.add_argument("--modes", default="builtin,colocate,server", help=f"comma-separated, of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=8, help="updates of each mode (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="prompts of an update (default: %(default)s)")
    parser.add_argument("--vllm-site", type=Path, help="folder that vLLM is installed in, if not this environment")
    parser.add_argument("--port", type=int, default=8000, help="of the server (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one mode (default: %(default)s)")
    parser.add_argument(
        "--server-start", type=float, default=150, help="seconds for the server's start (default: %(default)s)"
    )
    parser.add_argument("--total", type=float, default=540, help="seconds for all modes (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a small model and stand-ins, on the CPU")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/vllm_modes.json)")
    parser.add_argument(
        "--add", action="store_true", help="to the modes that the result file has, of the same settings"
    )
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # train in this process, write there
    return parser


# ---- one mode


def config_fields(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """The config fields that are specific to a mode."""
    if mode == "builtin":
        return {"rollout_backend": "builtin"}
    fields: dict[str, Any] = {"use_vllm": True, "vllm_seed_requests": mode != "server-unseeded"}
    fields |= {"vllm_structured_outputs_regex": REGEX} if mode.endswith("-regex") else {}
    if mode.startswith("server"):
        ahead = {"async_rollouts": 1} if mode == "server-async" else {}
        fields |= {"vllm_mode": "server", "vllm_server_port": options.port}
        # The server is already up. Anything that takes longer than this has failed and should raise before the limit.
        return fields | {"vllm_server_timeout": 20.0, "vllm_request_timeout": 60.0} | ahead
    fields |= {"vllm_tensor_parallel_size": 2} if mode == "colocate-tp" else {}
    return fields | {"vllm_enable_sleep_mode": mode == "sleep"}


def train(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; return the logged metrics and the seconds of the phases."""
    from gruppo import GRPOConfig, GRPOTrainer

    rows, reward = tiny_task() if options.tiny else task(options.model)
    matches: list[bool] = []

    def noting(completions: list[Any], **columns: Any) -> Any:
        matches.extend(bool(re.fullmatch(REGEX, text_of(completion))) for completion in completions)
        return reward(completions=completions, **columns)

    fields = (TINY if options.tiny else FIELDS) | config_fields(mode, options)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    fields["gradient_accumulation_steps"] = micro_batches(options.groups, fields, processes)
    start = time.perf_counter()
    args = GRPOConfig(
        output_dir=str(options.record.with_suffix(".run")),
        max_steps=options.steps,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        record="off",
        audit="warn",
        seed=0,
        **fields,
    )
    trainer = GRPOTrainer(str(options.model), noting, args, rows)
    made = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - made
    updates = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "fields": fields,
        "seconds_until_ready": round(made - start, 2),
        "seconds_of_training": round(seconds, 2),
        "phases": {name: round(value, 3) for name, value in trainer.timings.seconds.items()},
        "matching": sum(matches) / len(matches) if mode.endswith("-regex") else None,
        "updates": [kept(log) for log in updates],
        **summary(updates),
    }


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def micro_batches(groups: int, fields: Mapping[str, Any], processes: int) -> int:
    rows, size = groups * fields["num_generations"], fields["per_device_train_batch_size"] * processes
    if rows % size:
        raise ValueError(f"--groups {groups}: {rows} completions are no multiple of {size}")
    return rows // size


def kept(log: Mapping[str, Any]) -> dict[str, float]:
    """The entries of one update's log that this benchmark reports."""
    wanted = {name: value for name, value in log.items() if name in KEPT or name.startswith(("sampling/", "audit/"))}
    return {name: round(value, 6) for name, value in wanted.items() if isinstance(value, int | float)}


def summary(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of seconds over all updates but the first, which includes compilation; drift and ratios over all."""

    def values(name: str, first: int = 0) -> list[float]:
        return [log[name] for log in updates[first:] if isinstance(log.get(name), int | float)]

    def mean(name: str, first: int = 1) -> float | None:
        found = values(name, first) or values(name)
        return round(sum(found) / len(found), 6) if found else None

    drift, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    return {
        "step_seconds": mean("step_time"),
        "rollout_seconds": mean("rollout/seconds"),
        "sync_seconds": mean("rollout/sync_seconds"),
        "wait_seconds": mean("rollout/wait_seconds"),
        "staleness": mean("sampling/staleness"),
        "reward_first": mean_of(values("reward")[:5]),
        "reward_last": mean_of(values("reward")[-5:]),
        "kl_last": next(iter(values("kl")[::-1]), None),
        "drift_mean": mean(f"{drift}/mean", 0),
        "drift_max": max(values(f"{drift}/max"), default=None),
        "ratio_min": min(values(f"{ratio}/min"), default=None),
        "ratio_mean": mean(f"{ratio}/mean", 0),
        "ratio_max": max(values(f"{ratio}/max"), default=None),
        "dropped_share": mean("sampling/dropped_share", 0),
        "findings": sorted(
            {name for log in updates for name in log if name.startswith("audit/") and name != "audit/seconds"}
        ),
    }


def mean_of(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def task(model: Path) -> tuple[Dataset, Any]:
    """The prompts in the model's folder, and the reward of the recipe."""
    from recipes.gsm8k_smollm2.task import math_answer_reward

    lines = (model / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([json.loads(line) for line in lines]), math_answer_reward


def tiny_task() -> tuple[Dataset, Any]:
    from tests.helpers import length_reward, prompts

    return prompts(64), length_reward


def work(options: argparse.Namespace) -> None:
    """Train in this process; shortly before the time limit, the process dumps its traceback."""
    (mode,) = options.modes.split(",")
    faulthandler.dump_traceback_later(max(options.limit - 5, 1))
    if options.tiny:
        torch.set_num_threads(1)
        do_without_cuda(options)
    record = train(mode, options)
    if os.environ.get("RANK", "0") == "0":
        options.record.write_text(json.dumps(record))


def do_without_cuda(options: argparse.Namespace) -> None:
    """Send bytes instead of handles to a GPU's memory; without a vLLM, use the tests' stand-ins for it."""
    from gruppo.rollout.vllm import transfer
    from tests.rollout import vllm_doubles, vllm_package

    if options.vllm_site is None:
        transfer.share = vllm_doubles.share_bytes
        vllm_package.install_fake_vllm()
    else:
        transfer.share = vllm_without_cuda.share_bytes


# ---- all modes


def measure(options: argparse.Namespace, result: dict[str, Any], folder: Path) -> None:
    """Run the modes and write the result to disk after each."""
    records, failed = result["modes"], result["failed"]
    with Runner(options, folder) as runner:
        for mode in options.modes.split(","):
            begun = time.monotonic()
            try:
                records[mode] = runner.run(mode)
                said = {name: value for name, value in records[mode].items() if name != "updates"}
            except Exception as error:  # whatever the error, the other modes still run
                failed[mode] = said = runner.report(mode, error)
            print(f"{mode}, {time.monotonic() - begun:.0f} s:", said, flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


def begun(options: argparse.Namespace) -> dict[str, Any]:
    """The result before the modes run: a new one or, with `--add`, the existing one."""
    result: dict[str, Any] = {**provenance(), "steps": options.steps, "groups": options.groups}
    result["versions"]["vllm"] = "a stand-in" if options.tiny and not options.vllm_site else vllm_version(options)
    result |= {"modes": {}, "failed": {}}
    if not options.add:
        return result
    before = json.loads(options.out.read_text())
    changed = [key for key in ("commit", "device", "versions", "steps", "groups") if before[key] != result[key]]
    if changed:
        raise SystemExit(f"--add: {options.out} was measured with another {', '.join(changed)}.")
    result["command"] = "; ".join([before["command"], result["command"]])
    result["modes"] = before["modes"]
    result["failed"] = {mode: why for mode, why in before["failed"].items() if mode not in options.modes.split(",")}
    return result


def main() -> None:
    options = parser().parse_args()
    if unknown := set(options.modes.split(",")) - set(MODES):
        parser().error(f"--modes {', '.join(sorted(unknown))}: choose from {', '.join(MODES)}")
    if options.tiny and "server-nccl" in options.modes.split(","):
        parser().error("--modes server-nccl: stand-ins on the CPU have no NCCL")
    if options.record is not None:
        work(options)
        return
    options.out = options.out or (Path("runs/tiny") if options.tiny else RESULTS) / "vllm_modes.json"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.tiny and options.model is None:
            from tests.rollout.vllm_doubles import saved_model

            wide = {} if options.vllm_site is None else {"hidden_size": 128}  # vLLM has no heads of less than 32
            options.model = saved_model(folder / "model", **wide)
        if options.model is None:
            parser().error("--model is missing; benchmarks/prepare_smollm2.py makes one")
        measure(options, begun(options), folder)


if __name__ == "__main__":
    main()
