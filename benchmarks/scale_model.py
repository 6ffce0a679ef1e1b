"""A prediction, not a measurement: the time of an update on many GPUs, from one GPU's measured phases and link speeds.

    python -m benchmarks.scale_model --out benchmarks/results/scale_model.json

Every GPU has the work that was measured (the batch grows with the number of GPUs), so an ideal step takes as long as
on one GPU. The model adds the communication between processes, and the wait for the slowest. The assumptions are
printed and stored in the result.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import provenance
from gruppo.plan import ModelShape

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
WAYS = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Links:
    """Bandwidth of links in one direction, as collectives achieve it, and the latency of a message."""

    inside_gb_s: float = 300.0  # NVLink of an 8-GPU node: 450 GB/s on paper
    between_gb_s: float = 40.0  # one 400 Gbit/s adapter per GPU: 50 GB/s on paper
    latency_us: float = 20.0  # per step of a collective
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Measured:
    """The step of one GPU: seconds of its phases, number of packs in its update, and the model's size."""

    generation: float
    rewards: float
    update: float  # forward and backward passes
    other: float  # whatever else the step took
    packs: int
    weights: int
    bytes_per_weight: int  # also of a gradient under DDP

    @property
    def step(self) -> float:
        return self.generation + self.rewards + self.update + self.other


@dataclass(frozen=True)
class Assumptions:
    """Values that were not measured."""

    # The next two are taken to be the same for any number of GPUs, although the largest of more values is larger.
    straggler: float = 1.1  # the slowest process's sampling over the mean: `balance/seconds_max_over_mean`
    imbalance: float = 1.03  # of the update, after rows were exchanged: `balance/tokens_max_over_mean`
    hidden: float = 0.7  # share of FSDP2's communication that overlaps with computation
    reduced_bytes: int = 4  # per gradient element reduced by FSDP2: float32 in mixed precision, as in the ready config
    small_collectives: int = 25  # per update: counts, rewards, metrics, findings
    pack_tokens: int = 8192  # tokens per pack, that is per forward and backward pass of the update
    exchanged_mb: float = 0.2  # rows and scores that one process sends to all others in an update


def bandwidth(links: Links, gpus: int) -> float:
    """Bytes per second of the slowest link in a ring of `gpus` GPUs."""
    return 1e9 * (links.inside_gb_s if gpus <= links.gpus_per_node else links.between_gb_s)


def ring(size: float, gpus: int, links: Links) -> float:
    """Seconds of an all-gather (or a reduce-scatter) of `size` bytes in total over `gpus` GPUs.

    Example, 8 GB on 8 GPUs over 100 GB/s without latency: 8 · 7/8 / 100 = 0.07 s.
    """
    if gpus == 1:
        return 0.0
    return size * (gpus - 1) / gpus / bandwidth(links, gpus) + (gpus - 1).bit_length() * links.latency_us * 1e-6


def predict(way: str, gpus: int, measured: Measured, links: Links, given: Assumptions) -> dict[str, float]:
    """Seconds of the phases of a step on `gpus` GPUs."""
    size = measured.weights * measured.bytes_per_weight
    once = ring(size, gpus, links)
    if way == "ddp":
        exchanged, gathered = 2 * once, 0.0  # all-reduce of the gradients once per update: reduce-scatter, all-gather
    else:
        # Each pack gathers the weights for its forward and its backward pass, and reduce-scatters its gradients.
        scattered = ring(measured.weights * given.reduced_bytes, gpus, links)
        exchanged, gathered = measured.packs * (2 * once + scattered) * (1 - given.hidden), once
    small = given.small_collectives * (gpus - 1).bit_length() * links.latency_us * 1e-6
    rows = ring(given.exchanged_mb * 1e6 * gpus, gpus, links)
    slow, uneven = (given.straggler, given.imbalance) if gpus > 1 else (1.0, 1.0)
    parts = {
        "sampling": measured.generation * slow,
        "rewards": measured.rewards * slow,
        "passes": measured.update * uneven,
        "other": measured.other,
        "weights_and_gradients": exchanged,
        "gathered_for_sampling": gathered,
        "rows_exchanged": rows if gpus > 1 else 0.0,
        "small_collectives": small,
    }
    total = sum(parts.values())
    return {**parts, "step": total, "efficiency": measured.step / total}


def read_measured(path: Path, pack_tokens: int) -> Measured:
    """The mean of the rounds of a result of benchmarks/step.py, as if run in packs of `pack_tokens` tokens."""
    result = json.loads(path.read_text(encoding="utf-8"))
    rounds = result["engines"]["gruppo"]["rounds"]

    def mean(name: str) -> float:
        return float(sum(one[name] for one in rounds) / len(rounds))

    shape = result["shape"]
    heads = shape["num_attention_heads"]
    model = ModelShape(
        layers=shape["num_hidden_layers"],
        hidden=shape["hidden_size"],
        intermediate=shape["intermediate_size"],
        heads=heads,
        kv_heads=shape["num_key_value_heads"],
        head_dim=shape["hidden_size"] // heads,
        vocabulary=shape["vocab_size"],
    )
    embeddings = model.hidden * model.vocabulary * (1 if shape["tie_word_embeddings"] else 2)
    tokens = result["prompts"] * (result["prompt_tokens"] + result["completions"] * (result["new_tokens"] - 1))
    phases = {"generation": mean("generation"), "rewards": mean("rewards"), "update": mean("update")}
    return Measured(
        **phases,
        other=mean("step") - sum(phases.values()),
        packs=-(-tokens // pack_tokens),
        weights=model.layer_weights + embeddings,
        bytes_per_weight=getattr(torch, result["weights"]).itemsize,
    )


def table(measured: Measured, links: Links, given: Assumptions) -> list[dict[str, Any]]:
    return [
        {"way": way, "gpus": gpus, **{k: round(v, 4) for k, v in predict(way, gpus, measured, links, given).items()}}
        for way in WAYS
        for gpus in GPUS
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    results = Path(__file__).parent / "results"
    options.add_argument("--measured", type=Path, default=results / "step_qwen2-1.5b.json")
    options.add_argument("--out", type=Path)
    for name, value in {**asdict(Links()), **asdict(Assumptions())}.items():
        options.add_argument(f"--{name}", type=type(value), default=value)
    chosen = vars(options.parse_args())
    links = Links(**{name: chosen[name] for name in asdict(Links())})
    given = Assumptions(**{name: chosen[name] for name in asdict(Assumptions())})
    measured = read_measured(chosen["measured"], given.pack_tokens)
    rows = table(measured, links, given)
    print("A prediction. One GPU, measured:", asdict(measured))
    print("Links:", asdict(links))
    print("Assumed:", asdict(given))
    for row in rows:
        print(f"{row['way']:>6} {row['gpus']:>5} GPUs: {row['step']:7.2f} s a step, {row['efficiency']:.0%} of ideal")
    if chosen["out"] is not None:
        facts = {"measured_in": chosen["measured"].name, "measured": asdict(measured), "links": asdict(links)}
        result = {**provenance(), "is": "a prediction", **facts, "assumed": asdict(given), "rows": rows}
        chosen["out"].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
