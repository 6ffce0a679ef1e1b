"""The cases of benchmarks/step.py: a model, its prompts, a reward, and the settings of a step."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from benchmarks.rollout_cases import QWEN2_1_5B, TINY
from gruppo.demo import model_path
from gruppo.demo.task import problems

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model, the groups of one step, and how the step is split into micro-batches.

    Models with random weights (of a public shape) get prompts of equal length, write every completion up to the limit,
    and get a reward that differs within every group, so that all engines do the same work. A real model gets real
    prompts and a real reward and ends its completions itself; in some of its groups all rewards are equal.
    """

    prompts: int
    completions: int  # per prompt
    new_tokens: int
    shape: dict[str, Any] | None = None  # None: a real model from a folder
    prompt_tokens: int | None = None
    weights: str = "bfloat16"
    rows: int = 8  # per micro-batch; gruppo may split the update differently
    memory_gib: float | None = None  # limit on what the process may allocate on the device
    device: str = "cuda"
    warm_up: int = 1  # steps that are not counted: compilation, graph capture, optimizer state
    rounds: int = 2  # timed steps of gruppo
    rounds_peers: int = 1  # timed steps of the other engines, which are slow
    engines: tuple[str, ...] = ("gruppo", "trl", "trl-kept", "trl-liger", "trl-vllm")

    def describe(self) -> dict[str, Any]:
        """The description of the case in a result file."""
        facts = asdict(self)
        return {key: facts[key] for key in facts if key not in ("device", "rounds", "rounds_peers", "engines")}


_1_5B = Case(32, 16, 512, shape=QWEN2_1_5B, prompt_tokens=200)
CASES = {
    "qwen2-1.5b": _1_5B,
    "qwen2-1.5b-lean": replace(_1_5B, memory_gib=21, engines=("gruppo",)),
    "long-prompt": replace(
        _1_5B, prompts=16, new_tokens=256, prompt_tokens=1500, engines=("gruppo", "trl", "trl-liger")
    ),
    "smollm2": Case(64, 16, 256, weights="float32", rows=32, rounds=3, rounds_peers=3, engines=("gruppo", "trl-vllm")),
}


def tiny(case: Case) -> Case:
    """The same case small enough for a CPU and a few seconds."""
    small = replace(case, prompts=2, completions=4, new_tokens=8, rows=4, device="cpu", memory_gib=None)
    if case.shape is None:
        return replace(small, new_tokens=32)  # uses the demo's model; some groups have differing rewards
    return replace(small, shape=TINY, prompt_tokens=min(case.prompt_tokens or 0, 24) // 2)


def make_model(case: Case, folder: Path, tokenizer: Path) -> None:
    """Write random weights of the case's shape, with a tokenizer, to a folder that every engine can load."""
    none = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)  # no token ends a completion
    config = Qwen2Config(**(case.shape or {}), **none, max_position_embeddings=32768)
    torch.manual_seed(0)
    with torch.device(case.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.weights))
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)


def training_rows(case: Case, folder: Path, steps: int) -> Rows:
    """The prompts of `steps` steps, in training order."""
    count = case.prompts * steps
    if case.shape is not None:
        return word_prompts(AutoTokenizer.from_pretrained(folder), count, case.prompt_tokens or 1)
    if not (folder / "prompts.jsonl").exists():
        return [{"prompt": problem.prompt, "answer": str(problem.answer)} for problem in problems("train", count, 0)]
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows: Rows = [json.loads(line) for line in lines]
    if "answer" not in rows[0]:
        raise SystemExit(f"{folder / 'prompts.jsonl'} has no answers; make it again with prepare_smollm2.py")
    if len(rows) < count:
        raise SystemExit(f"{folder / 'prompts.jsonl'} has {len(rows)} prompts; {steps} steps need {count}")
    return rows[:count]


def word_prompts(tokenizer: Any, count: int, length: int) -> Rows:
    """Distinct texts of exactly `length` tokens, made of words that are one token each."""
    words = single_tokens(tokenizer, " [a-z]{3,}") or single_tokens(tokenizer, "[a-z]")  # letters if it has no words
    draw = random.Random(0)
    texts = ["".join(draw.choices(words, k=length)) for _ in range(count)]
    lengths = {len(ids) for ids in tokenizer(texts)["input_ids"]}
    if lengths != {length}:
        raise RuntimeError(f"Prompts of {min(lengths)} to {max(lengths)} tokens, not {length}.")
    return [{"prompt": text} for text in texts]


def single_tokens(tokenizer: Any, pattern: str) -> list[str]:
    """The texts that match a pattern and are encoded as one token."""
    texts = [text for text in map(tokenizer.decode, range(len(tokenizer))) if re.fullmatch(pattern, text)]
    return [text for text in texts if len(tokenizer(text)["input_ids"]) == 1]


def spread(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that is hardly ever the same for two completions, and hardly ever equal to the mean of a group."""
    return [sum(ids) % 1009 / 1009 for ids in completion_ids]


def last_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if the last number of the completion is the answer, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    found = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", text) for text in texts]
    last = [numbers[-1].replace(",", "") if numbers else "" for numbers in found]
    return [float(_same_number(number, gold)) for number, gold in zip(last, answer, strict=True)]


def _same_number(number: str, gold: str) -> bool:
    return bool(number) and float(number) == float(gold.replace(",", ""))


def reward_of(case: Case) -> Callable[..., list[float]]:
    """The reward function of a case."""
    return last_number if case.shape is None else spread


def settings(case: Case, steps: int) -> dict[str, Any]:
    """Fields of GRPOConfig that all engines share: one optimizer step per generation. Others keep their defaults."""
    fields: dict[str, Any] = dict(
        max_steps=steps,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        beta=0.0,
        num_generations=case.completions,
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=case.prompts * case.completions // case.rows,
        max_completion_length=case.new_tokens,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    if case.shape is not None:
        fields["model_init_kwargs"] = {"dtype": case.weights}
        fields["generation_kwargs"] = {"min_new_tokens": case.new_tokens}
    if case.device == "cpu":
        fields |= dict(use_cpu=True, bf16=False)
    return fields


def default_model(case: Case) -> Path | None:
    """The demo's model for a tiny run of a case with a real model; None for all other cases."""
    return Path(model_path()) if case.shape is None and case.device == "cpu" else None
