"""Supervised warm-up: SmolLM2 learns to solve GSM8K in the style of the dataset, with the answer in a box.

    python -m recipes.gsm8k_smollm2.warmup --model MODEL --data DATA --output-dir runs/warmup

A plain training loop in torch. The weights are float32, and the passes run in bfloat16. A batch has as many problems
of similar length as fit into `--batch-tokens`. They are padded on the right, which causal attention never sees, so no
mask is needed. The loss covers only the completion, and the head is computed only there. The model is saved in
float32, together with warmup.json.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from gruppo.evaluation.models import weights_fingerprint
from recipes.gsm8k_smollm2 import task
from recipes.gsm8k_smollm2.record import origin


class Example(NamedTuple):
    ids: list[int]
    prompt_tokens: int


class Batch(NamedTuple):
    ids_BT: Tensor
    rows_N: Tensor
    places_N: Tensor


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to begin with")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds gsm8k/train.jsonl(.gz)")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="at its peak (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="padding included (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="first problems only, to try it")
    return parser.parse_args(argv)


def encode(rows: list[task.Row], tokenizer: Any) -> list[Example]:
    """The prompt and completion of every problem as tokens, split at the same point as in a trainer."""
    texts = tokenizer.apply_chat_template(
        [task.prompt(row) for row in rows], add_generation_prompt=True, tokenize=False
    )
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    targets = [task.target(row) + tokenizer.eos_token for row in rows]
    completions = tokenizer(targets, add_special_tokens=False)["input_ids"]
    return [Example([*before, *after], len(before)) for before, after in zip(prompts, completions, strict=True)]


def batches(examples: list[Example], budget: int, draw: random.Random) -> list[list[Example]]:
    """The examples of one epoch in batches of similar length, at most `budget` tokens each, in random order."""
    # Noise of a few tokens puts different problems into the same batch in every epoch.
    order = sorted(examples, key=lambda example: len(example.ids) + draw.uniform(-8, 8))
    result: list[list[Example]] = [[]]
    longest = 0
    for example in order:
        longest = max(longest, len(example.ids))
        if result[-1] and longest * (len(result[-1]) + 1) > budget:
            result.append([])
            longest = len(example.ids)
        result[-1].append(example)
    draw.shuffle(result)
    return result


def collate(batch: list[Example], device: torch.device) -> Batch:
    """A batch as padded rows, and the positions whose next token belongs to a completion."""
    width = max(len(example.ids) for example in batch)
    ids_BT = torch.tensor([example.ids + [0] * (width - len(example.ids)) for example in batch])
    starts_B = torch.tensor([example.prompt_tokens for example in batch])
    ends_B = torch.tensor([len(example.ids) for example in batch])
    next_T = torch.arange(1, width)
    rows_N, places_N = ((next_T >= starts_B[:, None]) & (next_T < ends_B[:, None])).nonzero(as_tuple=True)
    return Batch(ids_BT.to(device), rows_N.to(device), places_N.to(device))


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Mean loss over the tokens of the completions."""
    device = batch.ids_BT.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):  # most CPUs only emulate bfloat16
        hidden_BTD = model.base_model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        logits_NV = model.get_output_embeddings()(hidden_BTD[batch.rows_N, batch.places_N])
    return cross_entropy(logits_NV.float(), batch.ids_BT[batch.rows_N, batch.places_N + 1])


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: rises over the first 5 % of the steps, then falls along a cosine to a tenth."""
    rising = max(1, steps // 20)
    if step < rising:
        return (step + 1) / rising
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / max(1, steps - rising))


def train(model: Any, plan: list[Batch], learning_rate: float) -> list[float]:
    """Take one optimizer step per batch; return the loss of each batch before its step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, len(plan)))
    losses: list[Tensor] = []
    began = time.perf_counter()
    for step, batch in enumerate(plan, 1):
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        losses[-1] = losses[-1].detach()  # stays on the device: reading it would synchronize
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == len(plan):
            recent = torch.stack(losses[-20:]).mean().item()
            print(f"step {step}/{len(plan)}  {time.perf_counter() - began:6.1f} s  loss {recent:.4f}", flush=True)
    return [round(value, 4) for value in torch.stack(losses).tolist()]


@contextmanager
def reproducible() -> Iterator[None]:
    """Make training reproducible on the same kind of device, so that runs of several sittings share their start."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    # Not warn_only: with it, the backward pass of attention still picks a kernel that adds in an arbitrary order.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads uninitialized memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).train()
    examples = encode(task.read(options.data, options.limit), tokenizer)
    epochs = [batches(examples, options.batch_tokens, draw) for _ in range(options.epochs)]
    plan = [collate(batch, device) for epoch in epochs for batch in epoch]  # fits on the device as a whole

    ready = time.perf_counter()
    with reproducible():
        losses = train(model, plan, options.learning_rate)
    trained = time.perf_counter()

    # The model has learned to end completions with this token, so samplers that load the folder must stop at it.
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    facts = {
        **origin("warmup"),
        "seed": options.seed,
        "config": {name: getattr(options, name) for name in ("epochs", "learning_rate", "batch_tokens", "limit")},
        "rows": len(examples),
        "tokens": options.epochs * sum(len(example.ids) for example in examples),
        "updates": len(plan),
        "load_seconds": round(ready - began, 1),
        "train_seconds": round(trained - ready, 1),
        "weights": weights_fingerprint(model),
        "losses": losses,
    }
    (options.output_dir / "warmup.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    print(f"{facts['tokens']:,} tokens in {facts['train_seconds']} s, saved in {options.output_dir}")


if __name__ == "__main__":
    main()
