"""How long `gruppo eval` takes: every problem of a benchmark, greedy, each evaluation in a separate process.

    python benchmarks/evaluation.py --model smollm2 --data-dir DATA --out benchmarks/results/eval_smollm2.json

The first process may have to compile kernels, which later processes find in a cache; every process is reported. With
`--vllm-site` the same prompts are also given to vLLM in a plain script, as many times. Reported for both:

    process_seconds      the whole process, including the imports
    load_seconds         loading the model, after the imports; for vLLM including the work before its first token
    after_load_seconds   from there to the end of the work. gruppo also prepares its sampler (`sampler_seconds`),
                         renders the prompts, grades, and stores every completion; vLLM gets tokens and only samples
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import provenance  # noqa: E402

VLLM = """
import json, sys, time
prompts, model, tokens, out = json.load(open(sys.argv[1])), sys.argv[2], int(sys.argv[3]), sys.argv[4]
from vllm import LLM, SamplingParams
start = time.perf_counter()
llm = LLM(model=model, seed=0)
loaded = time.perf_counter()
params = SamplingParams(temperature=0, max_tokens=tokens)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
ended = time.perf_counter()
tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
found = {"load": loaded - start, "after_load": ended - loaded, "problems": len(outputs), "tokens": tokens}
json.dump(found, open(out, "w"))
"""


def timed(command: list[str], variables: dict[str, str] | None = None) -> float:
    """Run a process and return its duration in seconds."""
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, env=variables)
    return round(time.perf_counter() - start, 2)


def run_ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One evaluation in a separate process."""
    asked = ["--benchmarks", options.benchmark, "--data-dir", str(options.data_dir)]
    asked += ["--max-new-tokens", str(options.max_new_tokens), "--output-dir", str(folder)]
    process = timed([sys.executable, "-m", "gruppo", "eval", str(options.model), *asked])
    results = json.loads((folder / "results.json").read_text())
    (passes,) = results["benchmarks"].values()
    greedy = passes["greedy"]
    return {
        "process_seconds": process,
        **{f"{key}_seconds": value for key, value in results["seconds"].items()},
        "pass_seconds": greedy["seconds"],
        **{key: greedy[key] for key in ("problems", "accuracy", "truncation_rate", "total_tokens")},
    }


def write_prompts(options: argparse.Namespace, path: Path) -> None:
    """Write the prompts of the benchmark as token ids."""
    from transformers import AutoTokenizer

    from gruppo.evaluation.benchmarks import find_benchmark
    from gruppo.evaluation.data import load_problems
    from gruppo.evaluation.prompts import choose_rendering, render

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    benchmark, limit = find_benchmark(options.benchmark)
    rendering = choose_rendering("auto", tokenizer)
    problems = load_problems(benchmark, options.data_dir, limit)
    asked = [render(each, benchmark, "cot", rendering=rendering, shots=0, tokenizer=tokenizer) for each in problems]
    path.write_text(json.dumps([prompt.ids for prompt in asked]))


def run_vllm(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same prompts with vLLM, in a separate process."""
    from benchmarks.rollout_vllm import ENVIRONMENT

    folder.mkdir()
    prompts, script, out = folder / "prompts.json", folder / "script.py", folder / "out.json"
    write_prompts(options, prompts)
    script.write_text(VLLM)
    paths = os.pathsep.join([str(options.vllm_site), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *map(str, (script, prompts, options.model, options.max_new_tokens, out))]
    process = timed(command, {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths})
    found = json.loads(out.read_text())
    return {
        "process_seconds": process,
        "load_seconds": round(found["load"], 2),
        "after_load_seconds": round(found["after_load"], 2),
        "problems": found["problems"],
        "total_tokens": found["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--benchmark", default="gsm8k")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-site", type=Path, help="where vLLM is installed; without it vLLM is left out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.model, options.data_dir = options.model.resolve(), options.data_dir.resolve()
    result: dict[str, Any] = {**provenance(), "benchmark": options.benchmark, "max_new_tokens": options.max_new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        result["runs"] = [run_ours(options, Path(folder) / str(i)) for i in range(options.rounds)]
        if options.vllm_site is not None:
            result["vllm"] = [run_vllm(options, Path(folder) / f"vllm-{i}") for i in range(options.rounds)]
    print(json.dumps({name: result[name] for name in ("runs", "vllm") if name in result}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
