"""Make the demo's starting model: `python -m gruppo.demo.build --out FOLDER`.

A small Llama is trained from scratch on demonstrations of the train split. The first lessons all work step by step;
after them most demonstrations answer at once and a minority works step by step. The resulting model nearly always
answers at once and is then often wrong; when it happens to work step by step, it is mostly right. Reinforcement
learning exploits that gap in the demo.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.demo.evaluate import MAX_NEW_TOKENS, accuracy
from gruppo.demo.task import Problem, exact_match, generate, load_task
from gruppo.demo.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["Settings", "build", "main"]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the weights."""

    seed: int = 7
    steps: int = 1700
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    lesson_steps: int = 600
    worked_share: float = 0.2
    hidden_size: int = 128
    intermediate_size: int = 320
    layers: int = 3
    heads: int = 4
    vocabulary_problems: int = 20_000
    threads: int = 2


def make_model(settings: Settings, tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    """A Llama of the given size with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def demonstrations(settings: Settings) -> Iterator[tuple[Problem, str]]:
    """Train-split problems with a demonstrated completion: all worked at first, then `worked_share` of them."""
    rng = random.Random(settings.seed)
    lessons = settings.lesson_steps * settings.batch_size
    for index, problem in enumerate(generate("train", settings.seed)):
        worked = index < lessons or rng.random() < settings.worked_share
        yield problem, problem.worked if worked else problem.direct


def collate(pairs: list[tuple[Problem, str]], tokenizer: "PreTrainedTokenizerFast") -> dict[str, "torch.Tensor"]:
    """Right-padded ids; the loss covers only the completion and its end-of-sequence token."""
    import torch

    prompts = tokenizer([problem.prompt for problem, _ in pairs])["input_ids"]
    targets = tokenizer([text for _, text in pairs])["input_ids"]
    rows = [(p, [*t, tokenizer.eos_token_id]) for p, t in zip(prompts, targets, strict=True)]
    width = max(len(p) + len(t) for p, t in rows)
    ids_BT = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels_BT = torch.full((len(rows), width), -100)
    for row, (p, t) in enumerate(rows):
        ids_BT[row, : len(p) + len(t)] = torch.tensor(p + t)
        labels_BT[row, len(p) : len(p) + len(t)] = torch.tensor(t)
    return {"input_ids": ids_BT, "labels": labels_BT}


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then half a cosine down to a hundredth of the peak."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def warm_up(model: "LlamaForCausalLM", tokenizer: "PreTrainedTokenizerFast", settings: Settings) -> None:
    """Supervised training on the demonstrations."""
    import torch

    stream = demonstrations(settings)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=settings.weight_decay)
    model.train()
    started = time.perf_counter()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        batch = collate(list(islice(stream, settings.batch_size)), tokenizer)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 200 == 0:
            elapsed = time.perf_counter() - started
            print(f"step {step + 1:5d}/{settings.steps}  loss {loss.item():.4f}  {elapsed:.0f} s", flush=True)


def sample(
    model: "LlamaForCausalLM", tokenizer: "PreTrainedTokenizerFast", prompts: list[str], seed: int
) -> list[str]:
    """One completion of each prompt at temperature 1, as the rollouts of the demo draw them."""
    import torch

    torch.manual_seed(seed)
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(model: "LlamaForCausalLM", tokenizer: "PreTrainedTokenizerFast", seed: int) -> dict[str, float]:
    """Held-out exact match, greedy and sampled; how often samples work step by step, and how often those are right."""
    _, held_out = load_task()
    prompts, answers = list(held_out["prompt"]), list(held_out["answer"])
    completions = sample(model, tokenizer, prompts, seed)
    scores = exact_match(completions, answers)
    worked = [score for score, text in zip(scores, completions, strict=True) if "=" in text]
    return {
        "greedy": accuracy(model, tokenizer, held_out),
        "sampled": sum(scores) / len(scores),
        "sampled_worked_share": len(worked) / len(scores),
        "sampled_worked_right": sum(worked) / max(1, len(worked)),
    }


def build(out: Path, settings: Settings) -> dict[str, Any]:
    """Train, measure and save the model, its tokenizer and a card; return the card."""
    started = time.perf_counter()
    vocabulary = islice(generate("train", settings.seed), settings.vocabulary_problems)
    tokenizer = build_tokenizer(text for p in vocabulary for text in (p.prompt, p.worked))
    model = make_model(settings, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    warm_up(model, tokenizer, settings)
    model.eval()
    card = {
        "settings": asdict(settings),
        "parameters": model.num_parameters(),
        "held_out": measure(model, tokenizer, settings.seed),
    }
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(card, indent=2))
    print(f"{time.perf_counter() - started:.0f} s in all")
    return card


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        prog="python -m gruppo.demo.build", description="Train the demo's starting model."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights, the tokenizer and the card")
    for name, default in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args(argv))
    settings = Settings(**{name: value for name, value in options.items() if name != "out"})

    import torch

    # The number of threads determines the order of float additions, so it is part of the recipe.
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    build(options["out"], settings)


if __name__ == "__main__":
    main()
