"""Score recorded completions again with other rewards."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from gruppo.config.hints import nearest
from gruppo.errors import ConfigError, DataError, RewardError
from gruppo.replay.record import RecordedGeneration
from gruppo.replay.settings import Settings
from gruppo.rewards.resolve import function_name, listed_rewards, resolve_rewards
from gruppo.rewards.runner import OWN_COLUMNS, RewardInputs, RewardRunner, RewardSettings, failed_rows
from gruppo.runs.rollouts import REWARD_KIND, prompt_id

__all__ = ["Rescorer", "places_of"]

NO_COLUMNS = "The record has no columns of the dataset: pass the dataset of the run as well (--dataset)."

Rewards = Callable[..., Any] | Sequence[Any] | Mapping[str, Any]


def places_of(rewards: Rewards, recorded: Sequence[str]) -> dict[str, Any]:
    """Map the name of each replaced recorded reward to the given reward that replaces it.

    In a mapping, the key names the recorded reward. Otherwise names are matched; if there is only one given and one
    recorded reward, the former replaces the latter whatever their names.
    """
    if isinstance(rewards, Mapping):
        named = dict(rewards)
    else:
        listed = listed_rewards(rewards)
        named = {function_name(reward): reward for reward in listed}
        if len(named) < len(listed):
            raise ConfigError(
                "Two rewards have the same name; name the recorded one that each replaces: recorded_name=reward."
            )
        if len(listed) == len(recorded) == 1:
            named = {recorded[0]: listed[0]}
    for name in named:
        if name not in recorded:
            raise ConfigError(
                f"The run has no reward `{name}`; it has {', '.join(recorded)}.{nearest(name, recorded)} Name the one "
                f"that it replaces: {recorded[0] if recorded else 'recorded_name'}={name}."
            )
    return named


@dataclass
class Rescorer:
    """Calls reward functions on recorded completions, generation by generation, as the run did.

    The record does not contain the columns of the dataset. Rewards that need some get them from `dataset`, in which a
    row is found by its index or, if the prompt there is another, by its prompt.
    """

    rewards: Rewards
    settings: Settings
    dataset: Any = None
    _runner: RewardRunner | None = None
    _places: dict[str, Any] = field(default_factory=dict)
    _by_prompt: dict[str, int] | None = None

    def score(self, generation: RecordedGeneration) -> Tensor:
        """Rewards (N, R) in the order of the recorded names, with the given rewards in place of those they replace."""
        runner = self._made(generation.names)
        columns = ["prompt", "prompt_format", "completion", "completion_format", "prompt_id", "prompt_index", "extra"]
        rows = generation.table.select([*columns, "update", "completion_tokens"]).to_pylist()
        inputs = RewardInputs(
            [self._columns(row) for row in rows],
            [_content(row, "prompt") for row in rows],
            [_content(row, "completion") for row in rows],
            [row["completion_tokens"] for row in rows],
        )
        try:
            scores = runner.score(inputs, trainer_state=TrainerState(global_step=rows[0]["update"]))
        except RewardError as error:
            if self.dataset is None and "missing a required argument" in str(error):
                raise DataError(f"{error} {NO_COLUMNS}") from error
            raise
        failed_N = failed_rows(scores.kinds_BR)
        if failed_N.all():
            raise DataError(self._all_failed(generation, runner.latest_failures))
        if scores.steps is not None:
            raise DataError("A reward scored steps, which a replay cannot compare: return their sum.")
        rewards_NR = generation.rewards_NR.clone()
        for i, name in enumerate(self._places):
            rewards_NR[:, generation.names.index(name)] = scores.values_BR[:, i]
        # As in training, a row on which one reward failed has no reward, whatever the other rewards are.
        rewards_NR[failed_N | self._failed_before(generation)] = torch.nan
        return rewards_NR

    def _all_failed(self, generation: RecordedGeneration, failures: Mapping[str, str]) -> str:
        """A short error message: the runner has already shown the first failure with its traceback."""
        ends = {name: said.strip().splitlines()[-1] for name, said in failures.items()}
        found = [f"The reward '{name}' failed: {end}." for name, end in ends.items()]
        lacks = self.dataset is None and any(end.startswith("KeyError") for end in ends.values())
        return " ".join(
            [f"No completion of generation {generation.number} could be scored.", *found, *([NO_COLUMNS] * lacks)]
        )

    def _failed_before(self, generation: RecordedGeneration) -> Tensor:
        """Bool (N,): rows on which a recorded reward that is not replaced failed."""
        failed_N = torch.zeros(len(generation), dtype=torch.bool)
        for name in generation.names:
            if name not in self._places:
                kinds = generation.table[REWARD_KIND + name].to_pylist()
                failed_N |= torch.tensor([kind in ("timeout", "failure") for kind in kinds])
        return failed_N

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _made(self, recorded: Sequence[str]) -> RewardRunner:
        if self._runner is None:
            self._places = places_of(self.rewards, recorded)
            functions, tokenizers, _ = resolve_rewards(
                list(self._places.values()), None, None, trust_remote_code=self.settings.config.trust_remote_code
            )
            asked = self.settings.recorded
            names = ("timeout", "sample_timeout", "workers", "memory_gb", "concurrency", "retries")
            known = {name: asked.get(f"reward_{name}") for name in names}
            bounds: dict[str, Any] = {name: value for name, value in known.items() if isinstance(value, int | float)}
            if isinstance(passed := asked.get("worker_env"), list):
                bounds["worker_env"] = passed
            self._runner = RewardRunner(
                functions,
                list(self._places),
                tokenizers,
                device=torch.device("cpu"),
                settings=RewardSettings(**bounds),
            )
        return self._runner

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword columns passed to rewards: the row of the dataset, and the logged extra columns."""
        logged = json.loads(row["extra"]) if row["extra"] else {}
        return logged if self.dataset is None else logged | self._row(row)

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        index, wanted = row["prompt_index"], row["prompt_id"]
        columns = self.dataset.column_names
        if "prompt" not in columns:
            raise DataError(
                f"The dataset has no column `prompt`, by which its rows are found; it has {', '.join(columns)}."
                f"{nearest('prompt', columns)}"
            )
        if index is not None and index < len(self.dataset) and prompt_id(self.dataset[index]["prompt"]) == wanted:
            return _further(self.dataset[index])
        if self._by_prompt is None:
            self._by_prompt = {prompt_id(prompt): i for i, prompt in enumerate(self.dataset["prompt"])}
        if wanted not in self._by_prompt:
            raise DataError(
                f"The dataset has no row with the prompt {row['prompt'][:200]!r}: it is not the one that the run was "
                "trained on, or the run's prompts were built from it."
            )
        return _further(self.dataset[self._by_prompt[wanted]])


def _further(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in OWN_COLUMNS}


def _content(row: Mapping[str, Any], name: str) -> Any:
    return json.loads(row[name]) if row[f"{name}_format"] == "messages" else row[name]
