"""The cases of benchmarks/rollout.py: a model, its prompts, and how many completions are sampled."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config

from gruppo.demo import model_path
from gruppo.demo.task import problems
from gruppo.types import SampleRequest

QWEN2_1_5B = dict(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
QWEN2_7B = dict(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
TINY = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Case:
    """A model and the groups that are sampled from it.

    Models with random weights (of a public shape) get random prompts of equal length and write every completion up to
    the limit, so that all engines do the same work. Real models get real prompts and end their completions themselves.
    """

    prompts: int
    completions: int  # per prompt
    new_tokens: int
    shape: dict[str, Any] | None = None  # None: a real model from a folder
    prompt_tokens: int | None = None
    weights: str = "bfloat16"
    autocast: str | None = None
    device: str = "cuda"
    together: bool = False  # engines take turns in one process instead of each having a separate process
    rounds: int = 3
    engines: tuple[str, ...] = field(default=("builtin", "transformers", "vllm", "vllm-best"))

    def describe(self) -> dict[str, Any]:
        """The description of the case in a result file."""
        facts = asdict(self)
        return {key: facts[key] for key in facts if key not in ("device", "together", "rounds", "engines")}


_1_5B = Case(32, 16, 512, shape=QWEN2_1_5B, prompt_tokens=200)
CASES = {
    "qwen2-1.5b": _1_5B,
    "qwen2-1.5b-fp32": replace(_1_5B, weights="float32", autocast="bfloat16"),
    "qwen2-7b": Case(16, 16, 1024, shape=QWEN2_7B, prompt_tokens=200),
    "smollm2": Case(64, 16, 256),
    "demo-cpu": Case(
        16,
        8,
        32,
        weights="float32",
        device="cpu",
        together=True,
        rounds=9,
        engines=("builtin", "transformers", "transformers-shared"),
    ),
}


def tiny(case: Case) -> Case:
    """The same case small enough for a CPU and a few seconds."""
    small = dict(prompts=2, completions=2, new_tokens=8, device="cpu", together=True, rounds=2)
    if case.shape is not None:
        small |= dict(shape=TINY, prompt_tokens=6)
    return replace(case, **small)


class Workload:
    """A case with everything an engine needs: weights, prompts, generation settings."""

    def __init__(self, case: Case, folder: Path | None, tokenizer_folder: Path | None = None):
        self.case = case
        self.folder = None if case.shape is not None else Path(folder or model_path())
        self.tokenizer = None if self.folder is None else AutoTokenizer.from_pretrained(self.folder)
        self.tokenizer_folder = tokenizer_folder or self.folder  # for engines that decode tokens while sampling
        self._prompts = None if self.folder is None else self._real_prompts(self.folder)

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a completion; none for random weights."""
        return [] if self.tokenizer is None else [self.tokenizer.eos_token_id]

    def generation_config(self, new_tokens: int | None = None) -> GenerationConfig:
        """Plain sampling at temperature 1, as GRPO samples by default."""
        return GenerationConfig(
            max_new_tokens=new_tokens or self.case.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            pad_token_id=0 if self.tokenizer is None else self.tokenizer.pad_token_id,
            eos_token_id=self.stop_ids or None,
            use_cache=True,
            disable_compile=True,
        )

    def config(self) -> Qwen2Config:
        """The config of a random model, without tokens that end a completion."""
        none = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
        return Qwen2Config(**self.case.shape, **none, max_position_embeddings=32768)

    def policy(self) -> Any:
        """The model on its device: random weights are created there, real weights are loaded."""
        dtype = getattr(torch, self.case.weights)
        if self.folder is not None:
            return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).to(self.case.device)
        torch.manual_seed(0)
        with torch.device(self.case.device):
            return AutoModelForCausalLM.from_config(self.config(), dtype=dtype)

    def config_folder(self) -> Path:
        """A folder from which other engines can load the model; for random weights it contains only the config."""
        if self.folder is not None:
            return self.folder
        folder = Path(tempfile.mkdtemp())
        config = self.config()
        config.architectures, config.dtype = ["Qwen2ForCausalLM"], torch.bfloat16
        config.save_pretrained(folder)
        return folder

    def requests(self, call: int) -> list[SampleRequest]:
        """The requests of one call; every call has different prompts, the same for all engines."""
        first = call * self.case.prompts
        numbers = range(first, first + self.case.prompts)
        return [SampleRequest(self._prompt(n), self.case.completions, noise_key=n) for n in numbers]

    def _prompt(self, number: int) -> Sequence[int]:
        if self._prompts is not None:
            return self._prompts[number % len(self._prompts)]
        generator = torch.Generator().manual_seed(number)
        size = (self.case.prompt_tokens,)
        return torch.randint(1, min(self.case.shape["vocab_size"], 150_000), size, generator=generator).tolist()

    def _real_prompts(self, folder: Path) -> list[list[int]]:
        """Token ids of the prompts in the folder's prompts.jsonl; without that file, of the demo's problems."""
        path = folder / "prompts.jsonl"
        if not path.exists():
            return [self.tokenizer(problem.prompt)["input_ids"] for problem in problems("train", 256, 0)]
        lines = path.read_text(encoding="utf-8").splitlines()
        return [self._render(json.loads(line)["prompt"]) for line in lines]

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
