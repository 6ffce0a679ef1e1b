"""Put the measured numbers into README.md and docs/, from the result files: `python benchmarks/readme.py`."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROLLOUTS = ("qwen2-1.5b", "qwen2-1.5b-fp32", "qwen2-7b", "smollm2", "demo-cpu")
PEERS = {
    "transformers": "gruppo's transformers backend",  # not TRL's generate, which the table of steps has
    "vllm": "vLLM 0.24 as TRL drives it",
    "vllm-best": "vLLM 0.24 in a plain script",
}
SEEDS = "grpo_big_tokens_t06_mean"  # the experiment on a real model with several seeds
# The cases of benchmarks/step.py and their labels in the README, in its order; then the same for engines.
STEPS = {
    "qwen2-1.5b": "1.5B Qwen2 shape in bfloat16, 32 prompts × 16 × 512 tokens",
    "qwen2-1.5b-lean": "the same, with 21 GiB in all",
    "long-prompt": "the same shape, prompts of 1,500 tokens, 16 × 16 × 256",
    "smollm2": "SmolLM2-135M on GSM8K, 64 × 16 × up to 256 tokens",
}
STEP_ENGINES = {
    "gruppo": "gruppo",
    "trl": "TRL 1.16",
    "trl-kept": "TRL 1.16, no gradient checkpointing",
    "trl-liger": "TRL 1.16 + liger-kernel",
    "trl-vllm": "TRL 1.16 + vLLM 0.24",
}
STEP_MARKS = ("<!-- steps: benchmarks/readme.py -->", "<!-- end of steps -->")
# Parts of a decoding step, and patterns of the names of their kernels.
PARTS = {
    "matrix products, the head included": "^nvjet|cutlass|splitK",
    "attention": "^_decode_kernel|^_prompt_kernel|^_merge_kernel",
    "noise, argmax and log-prob": "^_chunk_kernel|^_row_kernel",
    "gated activations": "^_gated_kernel",
    "norms": "^_norm_kernel",
    "residual additions": r"elementwise_kernel<8, at::native::CUDAFunctor_add<c10::B",
    "rotary embeddings": "^_rotary_kernel",
    "KV writes": "^_write_kernel",
}


def rows() -> dict[str, str]:
    """The result cells of the table in the README, keyed by the name of their result file."""
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")}
    runs = results["demo"]["runs"]
    befores, afters, seconds = ([run[key] for run in runs] for key in ("before", "after", "seconds"))
    step = results["cpu_step"]
    cases = results["trl_parity"]["cases"]
    half = [case["weights_difference"] for name, case in cases.items() if "bfloat16" in name]
    full = [case["weights_difference"] for name, case in cases.items() if "bfloat16" not in name]
    return {
        "demo": f"held-out accuracy {befores[0]:.3f} → {min(afters):.3f} to {max(afters):.3f}, "
        f"at most {math.ceil(max(seconds))} s",
        "cpu_step": f"{step['wall_ratio']:.2f} × faster ({step['wall_seconds']['gruppo']:.2f} s against "
        f"{step['wall_seconds']['trl']:.2f} s)",
        **{f"rollout_{case}": rollout(results[f"rollout_{case}"]) for case in ROLLOUTS},
        "trl_parity": f"equal to {max(full):.0e} of their size in {len(full)} settings in float32 "
        f"({max(half):.0e} in bfloat16)",
        "random_recipes": random_recipes(results["random_recipes"]),
        "tools": learned(results["tools"]["runs"]),
        "rewards": f"{results['rewards']['added_by_worker']:.0f} ms more than in process",
        "eval_smollm2": evaluated(results["eval_smollm2"]),
        "learn_demo": lifted(results["learn_demo"]["runs"]),
        f"learn_smollm2_{SEEDS}": taught(results["learn_smollm2_start"], results[f"learn_smollm2_{SEEDS}"]),
        "learn_smollm2_trl": raced(results["learn_smollm2_grpo"], results["learn_smollm2_trl"]),
        "soak": soaked(results["soak"]),
        "view": looked_at(results["view"]),
        "replay": f"equal to the logged losses to {replayed(results['replay']):.0e}",
        "import_time": imported(results["import_time"]["fastest_seconds"]),
        "recording": "{record:.1%} and {audit:.1%} of it".format(**results["recording"]["cases"]["demo"]["share"]),
    }


def lifted(runs: list[dict[str, Any]]) -> str:
    """The gains of short runs of every recipe, and those with the sign of the advantages reversed."""
    points = {
        way: [100 * (run["after"] - run["before"]) for run in runs if run["reversed"] == way] for way in (False, True)
    }
    return (
        f"held-out accuracy {min(points[False]):+.0f} to {max(points[False]):+.0f} points; with the sign of the "
        f"advantages reversed {min(points[True]):+.0f} to {max(points[True]):+.0f}"
    )


def random_recipes(found: dict[str, Any]) -> str:
    off, largest = len(found["beyond_or_failed"]), found["largest_within"]
    return (
        f"{found['runs'] - off} of {found['runs']} equal to {largest['float32']:.0e} of the movement in float32, "
        f"{largest['float64']:.0e} in float64"
    )


def taught(start: dict[str, Any], result: dict[str, Any]) -> str:
    """What a few minutes of reinforcement learning gain on a real model, averaged over all seeds."""
    (before,) = (run["evaluation"] for run in start["runs"])
    after = {key: statistics.fmean(run["evaluation"][key] for run in result["runs"]) for key in ("greedy", "maj")}
    gain = result["gain"]["top-1"]
    word = "significant" if gain["significant"] else "not significant"
    return (
        f"greedy {100 * before['greedy']:.1f} → {100 * after['greedy']:.1f} % ({gain['difference']:+.1f}, {word}), "
        f"majority of eight {100 * before['maj']:.1f} → {100 * after['maj']:.1f} %; the setting was chosen on the "
        "test set ([docs/experiments.md](docs/experiments.md))"
    )


def raced(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The time that each took for as many updates as the slower one completed."""
    (mine,), (peer,) = ours["runs"], theirs["runs"]
    updates = min(mine["updates"], peer["updates"])
    (first, second) = (run["steps"]["seconds"][updates - 1] for run in (mine, peer))
    times = peer["seconds_per_update"] / mine["seconds_per_update"]
    return (
        f"the first {updates} updates in {first:.0f} s against {second:.0f} s; later "
        f"{mine['seconds_per_update']:.2f} s an update, {times:.0f} × faster ({mine['updates']} updates in "
        f"{mine['train_seconds']:.0f} s)"
    )


def replayed(result: dict[str, Any]) -> float:
    """The largest difference between the losses of a run and of its replay."""
    return float(max(run["loss"] for run in (result["demo"], *result["runs"].values())))


def imported(seconds: dict[str, float]) -> str:
    """The time of `import gruppo` and `gruppo --help` in excess of Python's own start-up."""
    added = [seconds[name] - seconds["python"] for name in ("import gruppo", "gruppo --help")]
    return f"{added[0]:.2f} s and {added[1]:.2f} s more than Python alone"


def evaluated(result: dict[str, Any]) -> str:
    """The time of an evaluation, the first time on a machine and later; and that of vLLM, if it was measured."""
    first, *later = (run["after_load_seconds"] for run in result["runs"])
    text = f"{statistics.median(later):.1f} s after loading; {first:.1f} s the first time, which compiles kernels"
    if "vllm" in result:
        peer = statistics.median(run["after_load_seconds"] for run in result["vllm"])
        text += f"; vLLM 0.24 in a plain script {peer:.1f} s"
    return text


def soaked(result: dict[str, Any]) -> str:
    """The outcome of a long run with faults and kills."""
    growth = max(process["memory_growth"] for process in result["processes"])
    left = sum(result["left"].values())
    books = "every row is accounted for" if not result["problems"] else "; ".join(result["problems"])
    return f"memory of a process grows by at most {growth:.1%} after its first tenth, {left} leaks, {books}"


def looked_at(result: dict[str, Any]) -> str:
    """The waiting times of a user of the viewer."""
    worst = result["worst_ms"]
    filters = max(numbers["worst"] for name, numbers in result["filters_ms"].items() if name != "search")
    return (
        f"first paint after at most {worst['first_paint']:.0f} ms, curves {worst['curves']:.0f} ms; a filter over all "
        f"of them {filters:.0f} ms, a search {result['filters_ms']['search']['worst']:.0f} ms"
    )


def fill_view_page(text: str) -> str:
    """docs/view.md with the sentence on speed replaced."""
    result = json.loads((ROOT / "benchmarks/results/view.json").read_text())
    return re.sub(r"(?<=three starts\):\n).*?(?=\.\n)", lambda _: looked_at(result), text, flags=re.DOTALL)


def learned(runs: list[dict[str, Any]]) -> str:
    """The results of the examples with tools, as ranges over their seeds."""

    def change(example: str, key: str) -> str:
        values = [(run["before"][key], run["after"][key]) for run in runs if run["example"] == example]
        before, after = zip(*values, strict=True)
        return f"{min(before):.2f} to {max(before):.2f} → {min(after):.2f} to {max(after):.2f}"

    accuracy, calls = change("calculator", "accuracy"), change("calculator", "call_rate")
    return f"calculator: accuracy {accuracy}, calls {calls}; game: found {change('guessing_game', 'found')}"


def rollout(result: dict[str, Any]) -> str:
    """Tokens per second of the built-in engine, and its speed-up over each peer of the same run."""
    rates = {name: engine["median_tokens_per_second"] for name, engine in result["engines"].items()}
    own = rates.pop("builtin")
    peers = ", ".join(f"{ratio(own / rate)} × {PEERS[name]}" for name, rate in rates.items() if name in PEERS)
    seconds = result["engines"]["builtin"]["median_seconds"]
    return f"{own:,.0f} tokens/s, {seconds:.2f} s a batch" + (f"; {peers}" if peers else "")


def ratio(times: float) -> str:
    """A ratio with two significant digits; with two decimals if it is below 2."""
    return f"{times:.2f}" if times < 2 else f"{times:.2g}"


def step_table() -> str:
    """Whole training steps as a Markdown table, one row per engine and case; empty if none were measured."""
    lines = []
    for case, what in STEPS.items():
        path = ROOT / f"benchmarks/results/step_{case}.json"
        if path.exists():
            records = json.loads(path.read_text())["engines"]
            done = [name for name in STEP_ENGINES if records.get(name, {}).get("median")]
            labels = [f"{what} ([file](benchmarks/results/{path.name}))"] + [""] * len(done)
            lines += [step_row(label, name, records) for label, name in zip(labels, done, strict=False)]
    if not lines:
        return ""
    head = [
        "| one training step | with | seconds | sampling | old log-probs | update | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines])


def step_row(label: str, name: str, records: dict[str, Any]) -> str:
    """The medians of an engine, and its step time as a multiple of gruppo's."""
    median, memory = records[name]["median"], records[name].get("peak_device_gib")
    times = ""
    if name != "gruppo" and "median" in records.get("gruppo", {}):
        times = f" ({median['step'] / records['gruppo']['median']['step']:.1f} ×)"
    cells = [
        label,
        STEP_ENGINES[name],
        f"{median['step']:.1f}{times}",
        f"{median['generation']:.1f}",
        f"{median['logps']:.1f}" if median.get("logps", 0) >= 0.05 else "–",
        f"{median['update']:.1f}",
        "–" if memory is None else f"{memory:.1f} GiB",
    ]
    return f"| {' | '.join(cells)} |"


def fill_steps(text: str) -> str:
    """The README with its table of steps replaced; if it has none yet, the table is added after that of results."""
    table = step_table()
    if not table:
        return text
    first, last = STEP_MARKS
    block = f"{first}\n{table}\n{last}"
    if first in text:
        return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: block, text, flags=re.DOTALL)
    end = "Each file names commit, device, versions and the command that made it."
    if text.count(end) != 1:
        raise SystemExit(f"README.md has no place for the table of steps: neither {first} nor {end!r}")
    return text.replace(end, f"{block}\n\n{end}")


def time_table() -> str:
    """The time of the parts of a decoding step as a Markdown table, from the profile of the 1.5B case."""
    lines = (ROOT / "benchmarks/results/rollout_qwen2-1.5b.profile.txt").read_text().splitlines()
    kernels = [(float(line.split()[0]), line.split(maxsplit=3)[3]) for line in lines[3:] if line.strip()]
    busy = float(re.search(r"kernels ([\d.]+) ms", lines[0])[1])  # type: ignore[index]
    rows = {what: sum(us for us, name in kernels if re.search(match, name)) / 1000 for what, match in PARTS.items()}
    rows["bookkeeping and what is below 2 µs"] = busy - sum(rows.values())
    table = [f"| {what} | {ms:.2f} | {100 * ms / busy:.0f} % |" for what, ms in rows.items()]
    return "\n".join(["| part of a step | ms | share |", "|---|---|---|", *table, f"| all kernels | {busy:.2f} | |"])


def fill_engine_page(text: str) -> str:
    """docs/engine.md with its table replaced."""
    return re.sub(r"\| part of a step .*?\n(?=\n)", lambda _: time_table() + "\n", text, flags=re.DOTALL)


UPDATE_CASES = {
    "everything": "nothing",
    "prompts not shared": "every completion has a prompt of its own",
    "fused_layers=False": "`fused_layers=False`",
    "fused_head=False": "`fused_head=False`",
    "packed_update=False, 8 rows at a time": "`packed_update=False`: 8 padded rows at a time",
    "packed_update=False, checkpointing": "the same with gradient checkpointing, TRL's default",
    "gradient_checkpointing=True": "`gradient_checkpointing=True`",
    "max_tokens_per_micro_batch=4400": "half a group at a time (`max_tokens_per_micro_batch=4400`)",
    "max_tokens_per_micro_batch=2300": "a quarter of a group at a time",
    "garbage collection": "Python collects garbage during the update",
}


def update_table(result: dict[str, Any]) -> str:
    """An update with one optimisation switched off at a time, as a Markdown table."""
    cases = result["cases"]
    rows = [
        f"| {what} | {cases[name]['seconds']:.2f} | {cases[name]['tokens']:,} | {cases[name]['peak_gib']:.1f} GiB |"
        for name, what in UPDATE_CASES.items()
    ]
    return "\n".join(["| changed | seconds | tokens run | peak memory |", "|---|---|---|---|", *rows])


def update_limit(result: dict[str, Any]) -> str:
    """A sentence that compares the time of that update with the time of its arithmetic alone."""
    limit, seconds = result["limit"], result["cases"]["everything"]["seconds"]
    rate = limit["measured_flops_per_second"] / 1e12
    return (
        f"The arithmetic of this update is {limit['flops'] / 1e15:.2f} PFLOP, {limit['seconds']:.2f} s at the "
        f"{rate:.0f} TFLOP/s that a large matrix product reaches in the same run. The update takes {seconds:.2f} s, "
        f"{seconds / limit['seconds']:.2f} times that."
    )


def fill_performance_page(text: str) -> str:
    """docs/performance.md with its table and the sentence on the limit replaced."""
    result = json.loads((ROOT / "benchmarks/results/update_qwen2-1.5b.json").read_text())
    text = re.sub(r"\| changed .*?\n(?=\n)", lambda _: update_table(result) + "\n", text, flags=re.DOTALL)
    return re.sub(r"^The arithmetic of this update is .*?$", lambda _: update_limit(result), text, flags=re.MULTILINE)


MODE_NAMES = {
    "builtin": "the built-in engine",
    "colocate": "vLLM in the trainer's process",
    "sleep": "the same with `vllm_enable_sleep_mode`",
    "server": "a server, weights by IPC",
    "server-async": "the same with `async_rollouts=1`",
    "server-unseeded": "a server with `vllm_seed_requests=False`",
    "server-nccl": "a server, weights by NCCL over sockets",
}


def mode_table(result: dict[str, Any]) -> str:
    """Training with each sampler as a Markdown table: medians over all updates but the first; drift over all."""
    head = "| sampled by | seconds an update | sampling | waiting for it | sending weights | mean drift | largest |"
    lines = [f"{head} dropped |", "|---" * 8 + "|"]
    for mode, name in MODE_NAMES.items():
        if mode in result["modes"]:
            record = result["modes"][mode]
            cells = [name]
            for key in ("step_time", "rollout/seconds", "rollout/wait_seconds", "rollout/sync_seconds"):
                values = [update[key] for update in record["updates"][1:] if key in update]
                cells.append(f"{statistics.median(values):.2f}" if values else "–")
            cells += [f"{record['drift_mean']:.3f}", f"{record['drift_max']:.2f}"]
            cells.append("–" if record["dropped_share"] is None else f"{record['dropped_share']:.1%}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fill_vllm_page(text: str) -> str:
    """docs/vllm.md with its table replaced."""
    result = json.loads((ROOT / "benchmarks/results/vllm_modes.json").read_text())
    return re.sub(r"\| sampled by .*?\n(?=\n)", lambda _: mode_table(result) + "\n", text, flags=re.DOTALL)


def fill_cells(text: str) -> tuple[str, set[str]]:
    """The page with its result cells replaced, and the names of their result files."""
    found: set[str] = set()
    for name, cell in rows().items():
        pattern = rf"^(\| [^|]+ \| )[^|]+( \| \[{name}\.json\])"
        text, count = re.subn(pattern, lambda row, cell=cell: row[1] + cell + row[2], text, flags=re.MULTILINE)
        if count > 1:
            raise SystemExit(f"{count} rows for {name}.json on one page")
        found |= {name} if count else set()
    return text, found


def fill(text: str) -> str:
    """The README with the result cells and the table of steps replaced."""
    return fill_steps(fill_cells(text)[0])


def fill_measured_page(text: str) -> str:
    """docs/measured.md with its result cells replaced; it must have a row for every result file."""
    text, found = fill_cells(text)
    if missing := set(rows()) - found:
        raise SystemExit(f"docs/measured.md has no row for {', '.join(sorted(missing))}")
    return text.replace("](docs/", "](")


if __name__ == "__main__":
    pages = {"README.md": fill, "docs/engine.md": fill_engine_page, "docs/performance.md": fill_performance_page}
    pages |= {"docs/view.md": fill_view_page, "docs/measured.md": fill_measured_page, "docs/vllm.md": fill_vllm_page}
    for page, filled in pages.items():
        (ROOT / page).write_text(filled((ROOT / page).read_text()))
