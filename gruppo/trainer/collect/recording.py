"""The rows of a generation as written to the record of a run."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from gruppo.rewards.outcomes import Kind
from gruppo.runs.rollouts import RolloutRow, prompt_id
from gruppo.trainer.collect.generation import Generation
from gruppo.types import Completion, Rollout, TrainBatch


def recorded_rows(
    generation: Generation,
    batch: TrainBatch,
    rewards_N: Tensor,
    reward_names: Sequence[str],
    *,
    update: int,
    split: str,
    group_size: int,
) -> list[RolloutRow]:
    """This process's rows of a generation, including rows whose groups were replaced."""
    common: dict[str, Any] = {"update": update, "split": split, "group_size": group_size, "names": reward_names}
    common["prompt_ids"] = {}  # a cache: members of a group share their prompt, and a long one is slow to serialise
    rows = []
    for part in generation.replaced:
        rewards, kinds = part.rewards_NR[part.own_N].tolist(), part.kinds_NR[part.own_N].tolist()
        rows += [_row(part, i, rewards[i], kinds[i], {}, replaced=True, **common) for i in range(len(part.rollouts))]
    own = list(generation.own_N)
    rewards, kinds = generation.rewards_NR[own].tolist(), generation.kinds_NR[own].tolist()
    totals, learned = rewards_N[own].tolist(), _learned(batch, generation.rollouts)
    for i in range(len(generation.rollouts)):
        more = {"reward": _known(totals[i]), **learned[i]}
        rows.append(_row(generation, i, rewards[i], kinds[i], more, **common))
    return rows


def _row(
    part: Generation,
    i: int,
    rewards: Sequence[float],
    kinds: Sequence[int],
    more: Mapping[str, Any],
    *,
    names: Sequence[str],
    group_size: int,
    update: int,
    split: str,
    prompt_ids: dict[int, str],
    replaced: bool = False,
) -> RolloutRow:
    rollout, place = part.rollouts[i], part.places[i]
    prompt, completion, shown = rollout.prompt, rollout.completion, rollout.prompt.shown
    if id(shown) not in prompt_ids:
        prompt_ids[id(shown)] = prompt_id(shown)
    extra = {name: column[i] for name, column in part.columns.items()}
    known: dict[str, Any] = {"logps": completion.plain_logps, "reward": None, "advantage": None, "advantages": None}
    return RolloutRow(
        update=update,
        split=split,
        row=place,
        group=place // group_size,
        round=part.rounds[i],
        replaced=replaced,
        prompt_id=prompt_ids[id(shown)],
        prompt_index=part.indices[i],
        prompt=shown,
        prompt_tokens=prompt.ids,
        completion=rollout.output,
        completion_tokens=completion.ids,
        model_mask=completion.model_mask,
        entropies=completion.entropies,
        rewards={name: _known(value) for name, value in zip(names, rewards, strict=True)},
        reward_kinds={name: Kind(kind).name.lower() for name, kind in zip(names, kinds, strict=True)},
        stop=str(completion.stop),
        truncated=not completion.stop.ended,
        turns=_turns(completion),
        extra=extra or None,
        **(known | {name: value for name, value in more.items() if value is not None}),
    )


def _learned(batch: TrainBatch, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """The advantage of each row, and its log-probs if the trainer computed them and the sampler's are missing."""
    assert batch.advantages is not None
    lengths = [len(rollout.completion.ids) for rollout in rollouts]
    values: list[Any] = batch.advantages.tolist()
    if batch.advantages.dim() == 1:
        rows: list[dict[str, Any]] = [{"advantage": value} for value in values]
    else:
        own = [value[:length] for value, length in zip(values, lengths, strict=True)]
        rows = [{"advantage": sum(value) / max(len(value), 1), "advantages": value} for value in own]
    if batch.old_per_token_logps is not None and any(r.completion.plain_logps is None for r in rollouts):
        logps = batch.old_per_token_logps.tolist()
        for row, value, length, rollout in zip(rows, logps, lengths, rollouts, strict=True):
            if rollout.completion.plain_logps is None:
                row["logps"] = value[:length]
    return rows


def _turns(completion: Completion) -> int:
    """The number of turns that the model wrote."""
    if completion.model_mask is None:
        return 1
    return sum(bool(written) for written, _ in groupby(completion.model_mask))


def _known(value: float) -> float | None:
    return None if value != value else value
