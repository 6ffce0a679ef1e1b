"""Samplers whose probabilities are all known: healthy ones, and ones that are broken in known ways."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gruppo.types import Completion, Prompt, Rollout, StopReason

VOCABULARY = 12
END = 0


def rollout(
    ids: Sequence[int], prompt: Sequence[int] = (1, 2), stop: StopReason = StopReason.EOS, **more: Any
) -> Rollout:
    """One completion of a prompt."""
    return Rollout(Prompt({}, "p", list(prompt)), Completion(list(ids), stop, **more), "")


class World:
    """A bigram model over a few tokens.

    A large `sharpness` makes it certain of its next token; `power` draws at another temperature than that of the
    reported log-probs; `copies` makes that many consecutive completions of a group equal.
    """

    def __init__(self, seed: int, *, sharpness: float = 1.0, power: float = 1.0, copies: int = 1):
        self.chance = np.random.default_rng(seed)
        logits = sharpness * self.chance.normal(size=(VOCABULARY, VOCABULARY))
        self.logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.entropies = -(np.exp(self.logps) * self.logps).sum(-1)
        drawn = np.exp(power * self.logps)
        self.cumulative = (drawn / drawn.sum(-1, keepdims=True)).cumsum(-1)
        self.copies = copies

    def completion(self, limit: int) -> Completion:
        ids: list[int] = []
        before, states = 1, []
        while len(ids) < limit and (not ids or ids[-1] != END):
            states.append(before)
            token = int(np.searchsorted(self.cumulative[before], self.chance.random()))
            before = min(token, VOCABULARY - 1)
            ids.append(before)
        ended = StopReason.EOS if ids[-1] == END else StopReason.LENGTH
        logps = self.logps[states, ids].tolist()
        return Completion(ids, ended, plain_logps=logps, entropies=self.entropies[states].tolist())

    def generation(self, prompts: int = 4, group: int = 8, limit: int = 24) -> list[Rollout]:
        rollouts = []
        for number in range(prompts):
            prompt = Prompt({}, "p", [1, number])
            for row in range(group):
                completion = rollouts[-1].completion if row % self.copies else self.completion(limit)
                rollouts.append(Rollout(prompt, completion, ""))
        return rollouts


SETTINGS: dict[str, Any] = dict(temperature=1.0, shaped=False, vocabulary=VOCABULARY, end_ids=[END], weights=None)
