"""The data types of a training step, in the order in which they appear.

    Prompt ─► SampleRequest ─► Completion ─► Rollout ─► TrainBatch
    (a row)   (what to sample) (what came back) (both, decoded) (padded tensors of many rows)

Shape suffixes used throughout: P prompts, G completions per prompt, B = P·G rows, T completion tokens, R rewards; N
rows of all processes together where that matters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    *("LAYOUTS", "Completion", "Layout", "Message", "Prompt", "Rollout", "SampleRequest", "Span", "StopReason"),
    *("Row", "TrainBatch", "Vision", "required"),
]

Message = dict[str, Any]
Row = Mapping[str, Any]  # a dataset row


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # the model wrote an end-of-sequence token
    STOP_STRING = "stop_string"  # the model wrote one of the stop strings
    LENGTH = "length"  # it reached the token limit
    NO_ROOM = "no_room"  # the prompt, or the request's own limit, left no room for a token
    NAN = "nan"  # the logits were not finite
    TOOL_BUDGET = "tool_budget"  # the tool results left no room for another token
    UNKNOWN = "unknown"  # a custom rollout function does not report it

    @property
    def ended(self) -> bool:
        """Whether the model ended the completion itself; all others count as truncated."""
        return self in (StopReason.EOS, StopReason.STOP_STRING)


@dataclass(frozen=True, eq=False)
class Vision:
    """A processor's output for one prompt, apart from the token ids. Completions of the prompt share this object.

    Example, of a Qwen2-VL prompt with one image of 2 by 2 patches, which take one token:
        Vision({"pixel_values": (4, 96), "image_grid_thw": (1, 3)}, {"mm_token_type_ids": [0, 0, 1, 0, 0]})
    """

    pixels: "Mapping[str, Tensor]"  # one or more rows per image; empty without images
    types: "Mapping[str, Tensor]"  # (prompt tokens,): which of them stand for images


@dataclass(frozen=True)
class Prompt:
    """One dataset row, ready to be sampled from.

    Example:
        Prompt(row={"prompt": "2+2=", "answer": "4"}, text="2+2=", ids=[17, 10, 17, 28])
    """

    row: Mapping[str, Any]
    text: str | list[Message]  # the `prompt` column: a string, or a conversation, with its images in it
    ids: Sequence[int]
    truncated: bool = False  # tokens were cut from the left to fit max_prompt_length
    vision: Vision | None = None  # only with a processor
    images: Sequence[Any] = ()
    stored: str | list[Message] | None = None  # the text as written to files; None: same as `text`

    @property
    def shown(self) -> str | list[Message]:
        """The text without the images themselves."""
        return self.text if self.stored is None else self.stored

    @property
    def is_conversation(self) -> bool:
        return not isinstance(self.text, str)


@dataclass(frozen=True)
class SampleRequest:
    """Ask a backend for `count` completions of one prompt.

    Example, the second half of a group of eight, whose first half another process samples:
        SampleRequest(prompt_ids=[17, 10, 17, 28], count=4, noise_key=93, first_sample=4)
    """

    prompt_ids: Sequence[int]
    count: int
    # The prompt's stream of random numbers: completion i draws from (noise_key, first_sample + i). None: the key
    # follows from the request's position among the requests.
    noise_key: int | None = None
    first_sample: int = 0
    max_new_tokens: int | None = None  # limit of this request, if lower than that of the settings
    turn: int = 0  # number of the turn in a conversation with an environment; each draws different random numbers
    vision: Vision | None = None  # of the prompt that `prompt_ids` begin with

    def limit(self, most: int) -> int:
        """The token limit of a completion, where the settings allow `most` tokens."""
        return most if self.max_new_tokens is None else max(min(self.max_new_tokens, most), 0)


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Example, a model that wrote two tokens, got one from an environment and ended:
        Completion(ids=[5, 9, 40, 2], stop=StopReason.EOS, logps=[-0.1, -2.3, 0.0, -0.01], model_mask=[1, 1, 0, 1])
    """

    ids: Sequence[int]
    stop: StopReason
    logps: Sequence[float | None] | None = None  # of the sampled tokens, under the sampler; None where unknown
    model_mask: Sequence[int] | None = None  # 1 = written by the model; None = all of it
    plain_logps: Sequence[float] | None = None  # with the temperature applied, but not top-k, top-p and the like
    entropies: Sequence[float] | None = None  # of that distribution, at each token
    sampled_at: int | None = None  # number of updates behind the sampler's weights; None: the current weights

    @property
    def written(self) -> int:
        """The number of tokens that the model wrote."""
        return len(self.ids) if self.model_mask is None else sum(self.model_mask)


@dataclass(frozen=True)
class Rollout:
    """One completion with its prompt, decoded, as a reward function sees it.

    Example:
        Rollout(prompt=Prompt(...), completion=Completion(...), output=" 4", extra={"turns": 2})
    """

    prompt: Prompt
    completion: Completion
    output: str | list[Message]  # decoded text, or assistant messages when the prompt is a conversation
    extra: Mapping[str, Any] = field(default_factory=dict)  # additional fields from a custom rollout function


@dataclass
class TrainBatch:
    """Padded tensors of several rows, from scoring to loss.

    Example, two rows, prompts left-padded and completions right-padded with 0:
        prompt_ids      [[0, 5, 6], [7, 8, 9]]     prompt_mask      [[0, 1, 1], [1, 1, 1]]
        completion_ids  [[3, 4, 2], [3, 2, 0]]     completion_mask  [[1, 1, 1], [1, 1, 0]]
        advantages      [0.7, -0.7]

    `advantages` may be (B,) or (B, T). Optional tensors are None when a recipe does not need them. `tool_mask` is 0 on
    tokens that an environment wrote.
    """

    prompt_ids: "Tensor"
    prompt_mask: "Tensor"
    completion_ids: "Tensor"
    completion_mask: "Tensor"
    advantages: "Tensor | None" = None
    old_per_token_logps: "Tensor | None" = None
    old_logps: "Tensor | None" = None  # (B,) sums over each sequence; RLOO uses these instead
    ref_per_token_logps: "Tensor | None" = None
    sampling_per_token_logps: "Tensor | None" = None  # NaN where unknown
    importance_sampling_ratio: "Tensor | None" = None  # (B, T) or (B, 1)
    tool_mask: "Tensor | None" = None
    num_items_in_batch: "Tensor | None" = None  # 0-d: loss tokens of the whole generation batch
    # Computed by the built-in engine while sampling, (B, T): with the temperature applied, but not top-k and the like
    engine_logps: "Tensor | None" = None
    engine_entropies: "Tensor | None" = None
    truncated: "Tensor | None" = None  # (B,) bool: completions that did not end by themselves
    sampled_at: "Tensor | None" = None  # (B,) number of updates done when each row was sampled
    scored_at: "Tensor | None" = None  # (B,) … when its old log-probs were computed; None: same as `sampled_at`
    vision: "list[Vision | None] | None" = None  # of each row's prompt; only with a processor
    # Where the rows are in the run's record, (B,) each: number of the generation, and position within it
    generation: "Tensor | None" = None
    place: "Tensor | None" = None
    kl_penalty: "Tensor | None" = None  # (B,): subtracted from the reward by recipes that put the KL there

    def __len__(self) -> int:
        return len(self.completion_ids)

    @property
    def loss_mask_BT(self) -> "Tensor":
        """1 on the tokens that the loss counts."""
        if self.tool_mask is None:
            return self.completion_mask
        return self.completion_mask * self.tool_mask

    @property
    def zero_advantage_B(self) -> "Tensor":
        """Bool (B,): rows whose advantage is 0, or 0 at every token if advantages are per token."""
        assert self.advantages is not None
        still: Tensor = (self.advantages == 0).reshape(len(self), -1).all(1)
        return still

    def to_dict(self) -> "dict[str, Any]":
        """The fields that are not None, by name: tensors, and the list `vision`."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @property
    def has_images_B(self) -> "Tensor":
        """Bool (B,): rows whose prompt has images."""
        shown = [vision is not None and bool(vision.pixels) for vision in self.vision or [None] * len(self)]
        return self.completion_mask.new_tensor(shown).bool()

    @classmethod
    def from_dict(cls, tensors: "Mapping[str, Any]") -> "TrainBatch":
        """The inverse of `to_dict`; unknown keys (a subclass may add some) are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in tensors.items() if name in names})

    def rows(self, index: "Tensor | slice") -> "TrainBatch":
        """The rows at `index`; 0-d tensors are kept whole."""
        return replace(self, **{name: _rows(value, index) for name, value in self.to_dict().items()})


def _rows(value: Any, index: "Tensor | slice") -> Any:
    if not isinstance(value, list):
        return value if value.dim() == 0 else value[index]
    if isinstance(index, slice):
        return value[index]
    chosen = index.tolist()
    if chosen and isinstance(chosen[0], bool):
        return [row for row, keep in zip(value, chosen, strict=True) if keep]
    return [value[place] for place in chosen]


class Span(StrEnum):
    """What the second dimension of a batch tensor stands for."""

    NONE = "none"  # (B,): one value for each row
    PROMPT = "prompt"  # (B, tokens of the prompt), padded on the left
    COMPLETION = "completion"  # (B, T), padded on the right; or (B, 1) or (B,): one value for all tokens of a row
    BATCH = "batch"  # 0-d: one value for all rows
    LIST = "list"  # not a tensor: a list with one entry per row, which may be None


@dataclass(frozen=True)
class Layout:
    """How a tensor's rows are cut, and joined with those of other batches."""

    span: Span
    # When batches with and without this tensor are joined:
    absent: float | None = None  # the value for rows without the tensor; None: there is no such value
    droppable: bool = False  # the joined batch does not have the tensor


LOSS_TOKENS = "loss_tokens"  # of a micro-batch when it was cut; compared with those when it is used

LAYOUTS: dict[str, Layout] = {
    "prompt_ids": Layout(Span.PROMPT),
    "prompt_mask": Layout(Span.PROMPT),
    "completion_ids": Layout(Span.COMPLETION),
    "completion_mask": Layout(Span.COMPLETION),
    "advantages": Layout(Span.COMPLETION),
    "old_per_token_logps": Layout(Span.COMPLETION),
    "old_logps": Layout(Span.NONE),
    "ref_per_token_logps": Layout(Span.COMPLETION),
    "sampling_per_token_logps": Layout(Span.COMPLETION, absent=math.nan),
    "importance_sampling_ratio": Layout(Span.COMPLETION, absent=1.0),
    "tool_mask": Layout(Span.COMPLETION, absent=1),
    "num_items_in_batch": Layout(Span.BATCH),
    "engine_logps": Layout(Span.COMPLETION, droppable=True),
    "engine_entropies": Layout(Span.COMPLETION, droppable=True),
    "truncated": Layout(Span.NONE),
    "sampled_at": Layout(Span.NONE),
    "scored_at": Layout(Span.NONE),
    "vision": Layout(Span.LIST),
    "generation": Layout(Span.NONE, droppable=True),
    "place": Layout(Span.NONE, droppable=True),
    "kl_penalty": Layout(Span.NONE, droppable=True),
}
"""The fields of TrainBatch; whatever cuts, pads or joins rows goes by this table."""


def required(tensor: "Tensor | None") -> "Tensor":
    """A batch field that must be set at this point."""
    assert tensor is not None
    return tensor
