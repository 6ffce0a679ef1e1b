"""Seconds and memory of whole training steps: gruppo, and TRL 1.16 alone, with liger-kernel and with vLLM 0.24.

    python benchmarks/step.py --case qwen2-1.5b --tokenizer FOLDER --vllm-site SITE
    python benchmarks/step.py --case smollm2 --model FOLDER --vllm-site SITE     (see benchmarks/prepare_smollm2.py)
    python benchmarks/step.py --case qwen2-1.5b --tiny --engines gruppo     (on a CPU, to try it)

Each engine runs in a separate process, one after another, so that each starts with an empty device. All get the same
model folder, prompts, reward and settings; differences are in the engine's record under `config`. A step is a
generation, its scoring and one optimizer step. `update` is the step minus the phase that samples and scores
completions (`collect`): forward and backward passes of all micro-batches, the optimizer, and whatever the trainer does
in between. The first step of each engine is not counted. An engine that fails or times out is listed in `failed`; the
results of the others still count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import yaml

from benchmarks import rollout_vllm
from benchmarks.common import provenance
from benchmarks.step_cases import CASES, Case, default_model, make_model, tiny
from benchmarks.step_runs import ENGINES, measure
from gruppo.demo import model_path

RESULTS = Path(__file__).parent / "results"
# The parts of a step whose seconds are compared as ratios; memory is compared as well.
COMPARED = ("step", "generation", "update")


def fields(text: str) -> dict[str, Any]:
    """Config fields from the command line: a=1,b=[2,3] → {"a": 1, "b": [2, 3]}; values are YAML."""
    try:
        parsed = yaml.safe_load("{" + text.replace("=", ": ") + "}")
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value,key=value") from error
    if text.count("=") < len(parsed):
        raise argparse.ArgumentTypeError(f"{text!r} names a field without a value")
    return dict(parsed)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, help="timed steps of gruppo")
    parser.add_argument("--rounds-peers", type=int, help="timed steps of each other engine")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one engine (default: %(default)s)")
    parser.add_argument("--total", type=float, default=570, help="and for all of them (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="folder of a real model; random weights are made there and kept")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer beside random weights")
    parser.add_argument("--vllm-site", type=Path, help="folder that vLLM is installed in, if not this environment")
    parser.add_argument("--gruppo", type=fields, default={}, help="further fields of gruppo's config: a=1,b=[2,3]")
    parser.add_argument("--trl", type=fields, default={}, help="the same for TRL, with all of its engines")
    parser.add_argument("--profile", action="store_true", help="write where an update of gruppo goes")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try this script")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/step_CASE.json)")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # measure in this process, write there
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)  # write the random model
    return parser


def parse() -> argparse.Namespace:
    options = parser().parse_args()
    case = options.settings = tiny(CASES[options.case]) if options.tiny else CASES[options.case]
    options.names = (options.engines or ",".join(case.engines)).split(",")
    if unknown := set(options.names) - set(ENGINES):
        parser().error(f"--engines {', '.join(sorted(unknown))}: choose from {', '.join(ENGINES)}")
    if case.device == "cuda" and not torch.cuda.is_available():
        parser().error(f"--case {options.case} needs a CUDA device; --tiny tries the script without one")
    options.model = options.model or default_model(case)
    if case.shape is None and options.model is None:
        parser().error(f"--case {options.case} needs --model; benchmarks/prepare_smollm2.py makes it")
    if options.tokenizer is None and options.tiny:
        options.tokenizer = Path(model_path())
    if case.shape is not None and options.tokenizer is None and not _is_model(options.model):
        parser().error(f"--case {options.case} needs --tokenizer, or a --model that has one")
    if options.out is None:
        options.out = (Path("runs/tiny") if options.tiny else RESULTS) / f"step_{options.case}.json"
    return options


def _is_model(folder: Path | None) -> bool:
    return folder is not None and (folder / "config.json").exists()


def work(options: argparse.Namespace) -> None:
    """Measure the one requested engine and write its record after every step."""
    (name,) = options.names
    case: Case = options.settings
    saved: dict[str, Any] = {}
    unfinished = options.record.with_suffix(".new")

    def save(record: dict[str, Any]) -> None:
        saved.update(record)
        unfinished.write_text(json.dumps(saved))
        unfinished.replace(options.record)

    if case.device == "cpu":
        torch.set_num_threads(options.threads)
    ours = name == "gruppo"
    rounds = (options.rounds or case.rounds) if ours else (options.rounds_peers or case.rounds_peers)
    profile = options.out.with_suffix(".profile.txt") if options.profile and ours else None
    try:
        measure(name, case, options.model, rounds, options.gruppo if ours else options.trl, save, profile)
    except BaseException as error:
        save({"error": "".join(traceback.format_exception_only(error)).strip()[-2000:]})
        raise


def command(*further: str) -> list[str]:
    return [sys.executable, __file__, *sys.argv[1:], *further]


def environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """The environment variables of an engine's process; only the engine with vLLM sees vLLM's packages."""
    variables = {"TRL_EXPERIMENTAL_SILENCE": "1", **os.environ}
    if name != "trl-vllm":
        return variables
    paths = [str(options.vllm_site or ""), os.environ.get("PYTHONPATH", "")]
    return {**rollout_vllm.ENVIRONMENT, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def apart(name: str, options: argparse.Namespace, out: Path, limit: float) -> dict[str, Any]:
    """Measure one engine in a separate process. Steps that it measured count even if it fails or times out later."""
    start = time.monotonic()
    further = ["--engines", name, "--record", str(out), "--model", str(options.model)]
    process = subprocess.Popen(command(*further), env=environment(name, options))
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    record["process_seconds"] = round(time.monotonic() - start, 1)
    if code != 0:
        print(f"{name}: ended with {code}", file=sys.stderr)
        record["exit_code"] = code  # -9: timed out
    return record


def ratios(records: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds and memory of each peer, as multiples of gruppo's."""
    done = {name: record for name, record in records.items() if record.get("rounds")}
    ours = done.pop("gruppo", None)
    if ours is None:
        return {}
    result: dict[str, dict[str, float]] = {}
    for name, record in done.items():
        pairs = {part: (record["median"].get(part), ours["median"].get(part)) for part in COMPARED}
        pairs["memory"] = (record.get("peak_device_gib"), ours.get("peak_device_gib"))
        result[name] = {part: round(theirs / own, 3) for part, (theirs, own) in pairs.items() if theirs and own}
    return result


def report(records: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The contents of the result file: provenance, the case, and each engine's record."""
    failed = [name for name in options.names if not records[name].get("rounds")]
    result = {**provenance(), "case": options.case, "tiny": options.tiny, **options.settings.describe()}
    result |= {"engines": records, "failed": failed, "times_gruppo": ratios(records)}
    print(f"{'':10} {'step':>9} {'generation':>11} {'logps':>7} {'update':>8} {'tokens/s':>10} {'GiB':>7}")
    for name in [name for name in options.names if name not in failed]:
        median, memory = records[name]["median"], records[name].get("peak_device_gib", float("nan"))
        print(
            f"{name:10} {median['step']:8.3f}s {median['generation']:10.3f}s {median.get('logps', 0):6.2f}s "
            f"{median['update']:7.3f}s {median['tokens_per_second']:10.0f} {memory:7.2f}"
        )
    return result


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.make:
        make_model(options.settings, options.model, options.tokenizer)
        return
    if options.record:
        work(options)
        return
    end = time.monotonic() + options.total
    with tempfile.TemporaryDirectory() as folder:
        options.model = options.model or Path(folder) / "model"
        if not _is_model(options.model):
            subprocess.run(command("--make", "--model", str(options.model)), check=True)
        records = {}
        for name in options.names:
            left = max(0.0, min(options.limit, end - time.monotonic()))
            records[name] = apart(name, options, Path(folder) / f"{name}.json", left)
    result = report(records, options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if result["failed"]:
        sys.exit(f"no timed step of: {', '.join(result['failed'])}")


if __name__ == "__main__":
    main()
