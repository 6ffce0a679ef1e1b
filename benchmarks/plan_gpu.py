"""Peak memory and seconds of runs on a GPU, phase by phase, compared with the predictions of `gruppo plan`.

    python benchmarks/plan_gpu.py --out benchmarks/results/plan_gpu.json
    python benchmarks/plan_gpu.py --tiny --out runs/plan_tiny.json      (on a CPU, to try it)

Each run has a separate process, random weights and a few updates. `peak_bytes` is what torch allocated in a phase; in
sampling it includes the KV pool, which is not in torch's statistics. Runs for which no time is left are listed in
`left_out`.
"""

import argparse
import json
import os
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from benchmarks.plan_compare import case_job, cpu_device
from benchmarks.plan_runs import GIB, Case, apart, work
from benchmarks.rollout_cases import QWEN2_1_5B, TINY
from gruppo.plan import Device, find_device
from gruppo.plan.memory import Memory
from gruppo.plan.seconds import Seconds

QWEN2_0_5B = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
QWEN2_0_5B |= dict(num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True)
_LARGE = Case(QWEN2_1_5B, prompts=8, completions=8, prompt_tokens=200, new_tokens=128, weights="bfloat16", updates=2)
_SMALL = replace(_LARGE, shape=QWEN2_0_5B)
_LORA = {"r": 16, "target_modules": "all-linear"}
CASES = {
    "1.5B bf16": _LARGE,
    "1.5B float32, autocast": replace(_LARGE, weights="float32"),
    "1.5B bf16, LoRA": replace(_LARGE, lora=_LORA),
    "1.5B bf16, checkpointing": replace(_LARGE, fields={"gradient_checkpointing": True}),
    "0.5B bf16, reference": replace(_SMALL, fields={"beta": 0.04}),
    "0.5B bf16, long prompts": replace(_SMALL, prompts=4, prompt_tokens=2000),
    "0.5B float32, LoRA": replace(_SMALL, weights="float32", lora=_LORA),
    "0.5B bf16, padded rows": replace(_SMALL, prompts=2, fields={"packed_update": False}),
    "0.5B bf16, large batch": replace(_SMALL, prompts=32, completions=16, new_tokens=256),
}


def tiny(case: Case) -> Case:
    """The same case small enough for a CPU."""
    return replace(
        case, shape=TINY, prompts=2, completions=4, prompt_tokens=min(case.prompt_tokens, 24), new_tokens=8, updates=2
    )


def predicted(case: Case, device: Device) -> dict[str, Any]:
    """The prediction: bytes of each phase without the program, plans, and seconds."""
    job = case_job(asdict(case), device)
    memory = Memory(job)
    names = {"parity check": "parity"}
    phases = {names.get(p.name, p.name): p.bytes - memory.program.bytes for p in memory.phases}
    phases["update"] = max(phases["update"], phases.pop("optimizer step"))
    return {
        "peak_bytes": phases,
        "device_bytes": memory.device_bytes,
        "plans": {"rollout": memory.rollout_plan.to_dict(), "update": memory.update_plan.to_dict()},
        "step_seconds": round(Seconds(job, memory).step, 4),
    }


def report(name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{name}: {found['failed']}", flush=True)
        return
    pairs = [(phase, peak, expected["peak_bytes"].get(phase)) for phase, peak in found["peak_bytes"].items()]
    said = [f"{phase} {peak / GIB:.2f} ({own / GIB:.2f})" for phase, peak, own in pairs if own is not None]
    last = found["steps"][-1]["step"]
    print(f"{name}: {', '.join(said)} GiB; {last:.2f} ({expected['step_seconds']:.2f}) s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try this script")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a run (default: %(default)s)")
    parser.add_argument("--total", type=float, default=200, help="and for all of them (default: %(default)s)")
    for hidden in ("--case-file", "--answer"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.case_file:
        work(options.case_file, options.answer, on_cpu=bool(options.cpu), loads=False)
        return
    device = cpu_device() if options.tiny else find_device(torch.cuda.get_device_name())
    if device is None:
        raise SystemExit(f"{torch.cuda.get_device_name()} is not in the table of gruppo/plan/devices.py")
    end, runs, left_out = time.monotonic() + options.total, {}, []
    for name in options.cases:
        case, left = tiny(CASES[name]) if options.tiny else CASES[name], end - time.monotonic()
        if left < 10:
            left_out.append(name)
            continue
        found = apart(case, on_cpu=options.tiny, limit=min(options.limit, left), script=__file__)
        expected = predicted(case, device)
        runs[name] = {"case": asdict(case), **found, "predicted": expected}
        report(name, found, expected)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            result = {**provenance(), "tiny": options.tiny, "runs": runs, "left_out": left_out}
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if left_out:
        print(f"no time was left for: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
