"""Reward models: sequence classifiers with one output."""

import difflib
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gruppo.errors import ConfigError
from gruppo.rewards import __all__ as shipped

FUNCTIONS = [name for name in shipped if name != "check_reward"]


def load_reward_model(name: str, trust_remote_code: bool) -> PreTrainedModel:
    """A classifier with one label. The policy's loading arguments do not apply to it."""
    refuse_shipped_name(name)
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, RuntimeError) as error:
        close = difflib.get_close_matches(name, FUNCTIONS, n=1, cutoff=0.6)
        mean = f" Did you mean `from gruppo.rewards import {close[0]}`?" if close else ""
        raise ConfigError(
            f"reward_funcs has the string {name!r}. A string means a reward model, by its name on the hub or its "
            f"folder; pass a function itself, not its name.{mean} The model could not be loaded: {error}"
        ) from error


def refuse_shipped_name(name: str) -> None:
    """Raise for the name of a shipped reward function, which would be looked up on the hub in vain.

    Example:
        refuse_shipped_name("accuracy_reward")
        ConfigError: reward_funcs has the string 'accuracy_reward', …: from gruppo.rewards import accuracy_reward
    """
    if name not in FUNCTIONS or Path(name).is_dir():
        return
    call = f"; reward_funcs={name}(…)" if name.startswith("get_") else f"; reward_funcs={name}"
    raise ConfigError(
        f"reward_funcs has the string {name!r}. A string means a reward model; pass the function itself: "
        f"from gruppo.rewards import {name}{call}"
    )


def load_reward_tokenizer(model: Any, tokenizer: Any, trust_remote_code: bool) -> Any:
    """The tokenizer of a reward model, with a pad token that model and tokenizer agree on."""
    if tokenizer is None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"The reward model {type(model).__name__} is not a PreTrainedModel, so its tokenizer is not known: "
                "pass it in reward_processing_classes."
            )
        if not model.config._name_or_path:
            raise ConfigError(
                f"The reward model {type(model).__name__} was not loaded from a name or folder, so its tokenizer is "
                "not known: pass it in reward_processing_classes."
            )
        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path, trust_remote_code=trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"reward_processing_classes must hold tokenizers, not {type(tokenizer).__name__}.")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError("The reward model's tokenizer has no pad token and no eos token; set its `pad_token`.")
        tokenizer.pad_token = tokenizer.eos_token
    if hasattr(model, "config"):
        # A classifier scores the last token that is not padding, so it needs the padding id.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer


def token_budget(device: torch.device) -> int:
    """The most tokens in one forward pass, padding included."""
    return 16384 if device.type == "cuda" else 4096


@torch.inference_mode()
def score_with_model(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], *, tokens: int, device: torch.device
) -> list[float | str]:
    """One score per text, or the traceback of the error.

    Texts of similar length share a forward pass of at most `tokens` tokens, or of one text. If a pass fails, each of
    its texts gets a pass of its own.
    """

    def encode(places: Sequence[int]) -> list[dict[str, Any]]:
        encoded = tokenizer(text=[texts[i] for i in places], add_special_tokens=False)
        return [{name: values[i] for name, values in encoded.items()} for i in range(len(places))]

    def score(places: Sequence[int]) -> list[float]:
        rows = {name: [encoded[i][name] for i in places] for name in encoded[places[0]]}
        inputs = tokenizer.pad(rows, return_tensors="pt", padding=True, padding_side="right").to(device)
        found: list[float] = model(**inputs).logits[:, 0].float().tolist()
        if len(found) != len(places):
            raise ValueError(f"The reward model returned {len(found)} scores for {len(places)} texts.")
        return found

    scores: dict[int, float | str] = {}
    encoded: dict[int, Any] = _split_on_error(encode, range(len(texts)), scores, device)
    known = list(encoded)
    for batch in batches_of([len(encoded[i]["input_ids"]) for i in known], tokens):
        scores |= _split_on_error(score, [known[place] for place in batch], scores, device)
    return [scores[i] for i in range(len(texts))]


def score_completions(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    chat_template_kwargs: dict[str, Any],
    *,
    tokens: int,
    device: torch.device,
) -> list[float | str]:
    """One score per completion, or the traceback of the error."""

    def render(places: Sequence[int]) -> list[str]:
        return [scored_text(tokenizer, prompts[i], completions[i], chat_template_kwargs) for i in places]

    scores: dict[int, float | str] = {}
    texts = _split_on_error(render, range(len(prompts)), scores, device)
    found = score_with_model(model, tokenizer, list(texts.values()), tokens=tokens, device=device)
    scores |= zip(texts, found, strict=True)
    return [scores[i] for i in range(len(prompts))]


def _split_on_error(
    work: Callable[[Sequence[int]], list[Any]], places: Sequence[int], errors: dict[int, Any], device: torch.device
) -> dict[int, Any]:
    """The results of `work` on all places, or on each alone if that raises; then tracebacks go to `errors`."""
    try:
        return dict(zip(places, work(places), strict=True)) if places else {}
    except Exception:
        pass  # leave the handler first: the traceback keeps the tensors of the failed pass alive
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found = {}
    for place in places:
        try:
            (found[place],) = work([place])
        except Exception:
            errors[place] = traceback.format_exc()
    return found


def batches_of(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Batches of text indices, longest first, each of at most `tokens` tokens when padded, or of one text.

    Example:
        batches_of([3, 9, 4], tokens=10) == [[1], [2, 0]]
    """
    places = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    while places:
        size = max(1, tokens // max(1, lengths[places[0]]))
        batches.append(places[:size])
        places = places[size:]
    return batches


def scored_text(tokenizer: Any, prompt: Any, completion: Any, chat_template_kwargs: dict[str, Any]) -> str:
    """The input of a reward model: prompt and completion, through its own chat template if they are messages.

    Only text is used: the text of each part if a message has content in parts.
    """
    if isinstance(prompt, str):
        return prompt + str(completion)
    messages = [_in_text(message) for message in (*prompt, *completion)]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **chat_template_kwargs))


def _in_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(str(part.get("text") or "") for part in content)}
