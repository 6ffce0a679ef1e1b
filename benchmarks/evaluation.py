"""How long `gruppo eval` takes: every problem of a benchmark, greedy, in processes of their own.

    python benchmarks/evaluation.py --model smollm2 --data-dir DATA --out benchmarks/results/eval_smollm2.json

The first process may have to compile kernels, which later ones find in a cache; each is reported. With `--vllm-site`
the same prompts are also given to vLLM in a plain script, once, after its own loading.
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
start = time.perf_counter()
from vllm import LLM, SamplingParams
llm = LLM(model=model, seed=0)
loaded = time.perf_counter()
params = SamplingParams(temperature=0, max_tokens=tokens)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
ended = time.perf_counter()
tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
json.dump({"load": loaded - start, "after_load": ended - loaded, "tokens": tokens}, open(out, "w"))
"""


def run_ours(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One evaluation in a process of its own."""
    asked = ["--benchmarks", options.benchmark, "--data-dir", str(options.data_dir)]
    asked += ["--max-new-tokens", str(options.max_new_tokens), "--output-dir", str(folder)]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "gruppo", "eval", str(options.model), *asked], cwd=ROOT, check=True, stdout=sys.stderr
    )
    process = time.perf_counter() - start
    results = json.loads((folder / "results.json").read_text())
    (passes,) = results["benchmarks"].values()
    greedy = passes["greedy"]
    return {
        "process_seconds": round(process, 2),
        **{f"{key}_seconds": value for key, value in results["seconds"].items()},
        "pass_seconds": greedy["seconds"],
        **{key: greedy[key] for key in ("problems", "accuracy", "truncation_rate", "total_tokens")},
    }


def run_vllm(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same prompts through vLLM; grading is left out."""
    from transformers import AutoTokenizer

    from benchmarks.rollout_vllm import ENVIRONMENT
    from gruppo.evaluation.benchmarks import find_benchmark
    from gruppo.evaluation.data import load_problems
    from gruppo.evaluation.prompts import choose_rendering, render

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    benchmark, limit = find_benchmark(options.benchmark)
    rendering = choose_rendering("auto", tokenizer)
    problems = load_problems(benchmark, options.data_dir, limit)
    asked = [render(each, benchmark, "cot", rendering=rendering, shots=0, tokenizer=tokenizer) for each in problems]
    (folder / "prompts.json").write_text(json.dumps([prompt.ids for prompt in asked]))
    (folder / "script.py").write_text(VLLM)
    paths = os.pathsep.join([str(options.vllm_site), os.environ.get("PYTHONPATH", "")])
    script = [
        folder / "script.py",
        folder / "prompts.json",
        options.model,
        options.max_new_tokens,
        folder / "out.json",
    ]
    variables = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    subprocess.run([sys.executable, *map(str, script)], check=True, stdout=sys.stderr, env=variables)
    found = json.loads((folder / "out.json").read_text())
    return {
        "load_seconds": round(found["load"], 2),
        "after_load_seconds": round(found["after_load"], 2),
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
            result["vllm"] = run_vllm(options, Path(folder))
    print(json.dumps(result["runs"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
