"""Seconds and tokens per second of sampling groups: gruppo's rollout backends and vLLM 0.24, one after another.

    python benchmarks/rollout.py --case demo-cpu
    python benchmarks/rollout.py --case qwen2-1.5b --rounds-transformers 1 --vllm-site SITE --tokenizer FOLDER
    python benchmarks/rollout.py --case smollm2 --model FOLDER     (see benchmarks/prepare_smollm2.py)

On a GPU each engine runs in a separate process, so that it starts with an empty device; on a CPU the engines take
turns in one process. An engine is built, called once (`first_call`, which includes compilation and CUDA graph capture;
transformers, which has neither, writes only a few tokens), and then timed for some rounds. Each round has new prompts,
the same for all engines. Seconds include the prefill. vLLM is timed without the copy of the policy's weights that
training would need before every call.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks import rollout_vllm
from benchmarks.common import provenance
from benchmarks.rollout_cases import CASES, Case, Workload, tiny
from benchmarks.rollout_engines import ENGINES, builtin, measure
from benchmarks.rollout_profile import write_profile

RESULTS = Path(__file__).parent / "results"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help="timed calls of each engine")
    parser.add_argument("--rounds-transformers", type=int, help="the same for transformers' generate, which is slow")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one engine (default: %(default)s)")
    parser.add_argument("--total", type=float, default=570, help="and for all that run apart (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder of the real model of a case that has one")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer for vLLM beside random weights: TRL's vLLM has one")
    parser.add_argument("--vllm-site", type=Path, help="folder that vLLM is installed in, if not this environment")
    parser.add_argument("--profile", action="store_true", help="write where the built-in engine's time goes")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try this script")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/rollout_CASE.json)")
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)  # measure in this process, write there
    options = parser.parse_args()
    options.settings = tiny(CASES[options.case]) if options.tiny else CASES[options.case]
    options.names = (options.engines or ",".join(options.settings.engines)).split(",")
    if unknown := set(options.names) - set(ENGINES):
        parser.error(f"--engines {', '.join(sorted(unknown))}: choose from {', '.join(ENGINES)}")
    if options.settings.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--case {options.case} needs a CUDA device; --tiny tries the script without one")
    if options.case == "smollm2" and options.model is None and not options.tiny:
        parser.error("--case smollm2 needs --model; benchmarks/prepare_smollm2.py makes it")
    if options.out is None:
        options.out = (Path("runs/tiny") if options.tiny else RESULTS) / f"rollout_{options.case}.json"
    return options


def rounds_of(name: str, case: Case, options: argparse.Namespace) -> int:
    slow = options.rounds_transformers if name.startswith("transformers") else None
    return slow or options.rounds or case.rounds


def work(options: argparse.Namespace, out: Path) -> None:
    """Measure engines in this process and write their records after every call."""
    case: Case = options.settings
    names: list[str] = options.names
    unfinished = out.with_suffix(".new")

    def save(records: dict[str, Any]) -> None:
        unfinished.write_text(json.dumps(records))
        unfinished.replace(out)

    if case.device == "cpu":
        torch.set_num_threads(options.threads)
    folder = options.model if case.shape is None else None
    workload = Workload(case, folder, options.tokenizer)
    rounds = {name: rounds_of(name, case, options) for name in names}
    engines = measure(names, workload, rounds, save)
    if options.profile and "builtin" in names:
        policy = engines["builtin"].policy
        engines.clear()
        write_profile(workload, builtin, policy, options.out.with_suffix(".profile.txt"))


def environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """The environment variables of an engine's process; only vLLM engines see vLLM's packages."""
    if not name.startswith("vllm"):
        return dict(os.environ)
    paths = [str(options.vllm_site or ""), os.environ.get("PYTHONPATH", "")]
    return {**rollout_vllm.ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def apart(name: str, options: argparse.Namespace, out: Path, limit: float) -> dict[str, Any]:
    """Measure one engine in a separate process. Calls that it measured count even if it fails or times out later."""
    command = [sys.executable, __file__, *sys.argv[1:], "--engines", name, "--records", str(out)]
    process = subprocess.Popen(command, env=environment(name, options))
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    records: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if code != 0:
        print(f"{name}: ended with {code}", file=sys.stderr)
        records.setdefault(name, {})["exit_code"] = code  # -9: timed out
    return records


def report(case: Case, records: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The contents of the result file: provenance, the case, and each engine's record."""
    done = {name: record for name, record in records.items() if record.get("rounds")}
    ours = done.get("builtin", {}).get("median_tokens_per_second")
    result = {**provenance(), "case": options.case, "tiny": options.tiny, **case.describe(), "engines": records}
    result["failed"] = [name for name in options.names if name not in done]
    if ours:
        ratios = {name: round(ours / record["median_tokens_per_second"], 3) for name, record in done.items()}
        result["builtin_times_faster_than"] = {name: ratio for name, ratio in ratios.items() if name != "builtin"}
    for name, record in done.items():
        memory = f", {record['peak_memory_gib']} GiB" if "peak_memory_gib" in record else ""
        print(
            f"{name:20} {record['median_seconds']:9.3f} s  {record['median_tokens_per_second']:10.0f} tokens/s"
            f"  (first call {record['first_call']['seconds']:.1f} s{memory})"
        )
    return result


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")
    case: Case = options.settings
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.records:
        work(options, options.records)
        return
    records: dict[str, Any] = {}
    end = time.monotonic() + options.total
    with tempfile.TemporaryDirectory() as folder:
        if case.together:
            work(options, Path(folder) / "records.json")
            records = json.loads((Path(folder) / "records.json").read_text())
        for name in [] if case.together else options.names:
            left = max(0.0, min(options.limit, end - time.monotonic()))
            records |= apart(name, options, Path(folder) / f"{name}.json", left)
    result = report(case, records, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if result["failed"]:
        sys.exit(f"no timed call of: {', '.join(result['failed'])}")


if __name__ == "__main__":
    main()
