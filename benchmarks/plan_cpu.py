"""Peak memory and seconds of small runs on the CPU, phase by phase, for comparison with `gruppo plan`.

    python benchmarks/plan_cpu.py --out benchmarks/results/plan_cpu.json

Each run has a separate process. Memory is the process's resident set, whose peak is reset at each phase. Memory that a
phase frees may stay in the resident set, so later phases include what is left of earlier ones.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import provenance
from benchmarks.plan_runs import GIB, Case, apart, work

SMALL = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8)
SMALL |= dict(num_key_value_heads=2, vocab_size=32000, tie_word_embeddings=True)
MIDDLE = SMALL | dict(hidden_size=640, intermediate_size=2304, num_attention_heads=10, tie_word_embeddings=False)
DEMO = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
DEMO |= dict(num_key_value_heads=2, vocab_size=256, tie_word_embeddings=True)
_SMALL = Case(SMALL, prompts=3, completions=6, prompt_tokens=64, new_tokens=24, updates=2)
CASES = {
    "tiny": Case(DEMO, prompts=16, completions=8, prompt_tokens=32, new_tokens=32),
    "52M": _SMALL,
    "52M, long rows": replace(_SMALL, prompts=1, completions=6, prompt_tokens=384, new_tokens=96),
    "52M, LoRA": replace(_SMALL, lora={"r": 16, "target_modules": "all-linear"}),
    "52M, with a reference": replace(_SMALL, fields={"beta": 0.04}),
    "52M, checkpointing": replace(_SMALL, fields={"gradient_checkpointing": True}),
    "52M, bf16 autocast": replace(_SMALL, fields={"bf16": True}),
    "92M, untied": replace(_SMALL, shape=MIDDLE),
    "92M, without parity check": replace(_SMALL, shape=MIDDLE, fields={"parity_check": "off"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--limit", type=float, default=400, help="seconds for a run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    for hidden in ("--case-file", "--answer"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.case_file:
        work(options.case_file, options.answer, on_cpu=True, loads=True)
        return
    runs = {}
    for name in options.cases:
        found = apart(CASES[name], on_cpu=True, limit=options.limit, script=__file__, threads=options.threads)
        runs[name] = {"case": asdict(CASES[name]), **found}
        peaks = {phase: round(peak / GIB, 3) for phase, peak in found.get("peak_bytes", {}).items()}
        print(name, found.get("failed", peaks), found.get("steps", [None])[-1], flush=True)
        if options.out:
            options.out.write_text(
                json.dumps({**provenance(), "threads": options.threads, "runs": runs}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
