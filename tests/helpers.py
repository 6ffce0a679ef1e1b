"""Helpers that many tests need: a tokenizer, a model, a dataset, scripted rollouts."""

import hashlib
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHARACTERS = [chr(c) for c in range(32, 127)]
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<unk>"]


def tiny_tokenizer(**kwargs: Any) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
        **(settings | kwargs),
    )


def tiny_model(seed: int = 0, **kwargs: Any) -> LlamaForCausalLM:
    """A random Llama of a few thousand weights."""
    settings = dict(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | kwargs)))
    torch.random.set_rng_state(state)
    return model


def tiny_gpt2(seed: int = 0, **kwargs: Any) -> GPT2LMHeadModel:
    """A random GPT-2, whose learned positions require correct position ids for rows that are padded on the left."""
    size = dict(vocab_size=len(SPECIAL) + len(CHARACTERS), n_positions=64, n_embd=16, n_layer=2, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(**(size | dict(pad_token_id=0, eos_token_id=1, bos_token_id=None) | kwargs)))


def sharp(model: Any, factor: float = 8.0) -> Any:
    """The model in float64 with larger weights, so that every token and position visibly affects the output."""
    with torch.no_grad():
        for module in model.double().eval().modules():
            if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
                module.weight.mul_(factor)
    return model


def in_double(model: Any) -> Any:
    """The model in float64 throughout: transformers' own norms would round to float32 in between."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__ == "LlamaRMSNorm":
                exact = torch.nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon)
                exact.weight.data.copy_(norm.weight.data)
                setattr(parent, name, exact)
    return model.double()


def prompts(count: int = 16, **columns: Any) -> Dataset:
    """Plain prompts `p0:` … with the column `answer` and any given columns."""
    return Dataset.from_dict(
        {"prompt": [f"p{i}:" for i in range(count)], "answer": [str(i) for i in range(count)], **columns}
    )


def chats(count: int = 16) -> Dataset:
    """Conversational prompts of one user message each."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"p{i}"}], "answer": str(i)} for i in range(count)]
    )


def length_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """A cheap reward with spread: the number of letters."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ch.isalpha() for ch in text) / 10 for text in texts]


def base_args(tmp_path: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments that make a run small, quiet and in float32 on the CPU."""
    settings = dict(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        learning_rate=1e-3,
    )
    return settings | kwargs


def scripted_completion(prompt: Any, sample: int, length: int = 8) -> list[int]:
    """A completion that depends only on the prompt and the sample number."""
    digest = hashlib.sha256(f"{prompt}/{sample}".encode()).digest()
    count = 2 + digest[0] % (length - 1)
    ids = [len(SPECIAL) + digest[1 + t] % len(CHARACTERS) for t in range(count - 1)]
    return [*ids, 1 if digest[31] % 3 else len(SPECIAL) + 5]  # most of them end with <eos>


def timeless(log: dict[str, Any]) -> dict[str, Any]:
    """A log entry without timing-dependent values, so that those of two equal runs are equal."""
    return {
        key: value
        for key, value in log.items()
        if not any(word in key for word in ("time", "second", "mfu", "slowest"))
    }
