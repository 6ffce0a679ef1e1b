"""All checks of a run in one place, with the state that they keep between updates."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import mean
from typing import Any

from gruppo.audit import sampler, update
from gruppo.audit.chance import Duplicates, Surprise
from gruppo.audit.evidence import Streak
from gruppo.audit.findings import Finding
from gruppo.audit.tokens import Tokens
from gruppo.types import Rollout

PATIENCE = 20  # generations in which no completion ends, or without a learning signal
FROZEN = 3  # updates
NORMS = 50  # updates whose norms are remembered
BEGINNING = 5  # updates that define the initial values of a run


class Beginning:
    """The mean of the first values of a run; None while there are too few."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> float | None:
        if len(self.values) < BEGINNING:
            self.values += [value] if math.isfinite(value) else []
            return None
        return mean(self.values)

    def state_dict(self) -> list[float]:
        return list(self.values)

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.values = list(state)


class Recent:
    """The last norms that were neither 0 nor infinite: updates without a signal would lower the median."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=NORMS)

    def add(self, value: float) -> None:
        if 0 < value < math.inf:
            self.values.append(value)

    def state_dict(self) -> list[float]:
        return list(self.values)

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.values = deque(state, maxlen=NORMS)


class RunAudits:
    """Checks every generation and every update, and returns the findings.

    Unknown numbers are None, and their checks are skipped. `state_dict` is plain JSON.

    Example:
        audits, auditor = RunAudits(), Auditor("warn")
        auditor.report(audits.after_sampling(rollouts, temperature=1.0, shaped=False, vocabulary=32000, …))
        auditor.report(audits.after_scoring(spread_share=0.4, unscorable_share=0.0))
        auditor.report(audits.after_update(grad_norm=0.7, learning_rate=1e-6, …))
    """

    def __init__(self) -> None:
        self.duplicates, self.surprise = Duplicates(), Surprise()
        self.no_end, self.no_signal, self.frozen = Streak(PATIENCE), Streak(PATIENCE), Streak(FROZEN)
        self.norms = Recent()
        self.first_entropies, self.first_lengths = Beginning(), Beginning()

    def after_sampling(
        self,
        rollouts: Sequence[Rollout],
        *,
        temperature: float,
        shaped: bool,
        vocabulary: int,
        end_ids: Collection[int],
        weights: tuple[Any, Any] | None,
    ) -> list[Finding]:
        """Checks of the sampler, given all rollouts that this process sampled.

        `rollouts` includes those that dynamic sampling replaces, since rows selected by reward are not a fair sample.
        `temperature` is 0 for greedy decoding. `shaped` means that tokens are drawn from a distribution other than
        softmax(logits / temperature). `vocabulary` is the size of the logits. `weights` is a pair of values, from the
        sampler and from the trainer, that are equal if their weights are from the same update.
        """
        if not rollouts:
            return []
        tokens = Tokens(rollouts)
        drawn: dict[str, Any] = {"temperature": temperature, "shaped": shaped}
        without_end = self.no_end.add(not any(rollout.completion.stop.ended for rollout in rollouts))
        return _found(
            sampler.impossible_logps(tokens, vocabulary),
            sampler.bad_tokens(tokens, vocabulary, end_ids),
            sampler.nan_logits(tokens),
            sampler.empty(tokens, end_ids),
            sampler.stale_weights(weights) if weights is not None else None,
            self.duplicates.check(tokens, **drawn),
            self.surprise.check(tokens, vocabulary=vocabulary, **drawn),
            sampler.no_end(self.no_end.length) if without_end else None,
        )

    def after_scoring(self, *, spread_share: float | None, unscorable_share: float) -> list[Finding]:
        """Checks of a generation's rewards, by the shares of groups with spread and of completions without a score."""
        without_signal = spread_share is not None and self.no_signal.add(spread_share == 0)
        return _found(
            update.no_signal(self.no_signal.length) if without_signal else None,
            update.unscored(unscorable_share),
        )

    def after_update(
        self,
        *,
        drift_mean: float | None,
        drift_max: float | None,
        drift_ratio: float | None,
        grad_norm: float | None,
        learning_rate: float,
        moving_rows: int,
        entropy: float | None,
        mean_length: float | None,
        oldest_rows: int,
        allowed_age: int,
        changed_share: float | None,
    ) -> list[Finding]:
        """Checks of an update that reached the weights.

        `drift_*` are mean and maximum of |trainer − sampler| of log-probs, and the mean of exp(trainer − sampler),
        over the loss tokens whose rows were sampled with the weights of this update. `moving_rows` counts the rows
        that must have a gradient: nonzero advantage, loss tokens, and not clipped or dropped. `oldest_rows` and
        `allowed_age` are in updates. `changed_share` is the result of a WeightProbe.
        """
        return _found(
            update.drift(drift_mean, drift_max, drift_ratio) if drift_mean is not None else None,
            update.zero_gradient(grad_norm, moving_rows, entropy) if grad_norm is not None else None,
            *self._gradient(grad_norm, learning_rate, changed_share),
            *self._collapse(entropy, mean_length),
            update.stale_rows(oldest_rows, allowed_age),
        )

    def _gradient(
        self, grad_norm: float | None, learning_rate: float, changed_share: float | None
    ) -> list[Finding | None]:
        if grad_norm is None:
            return []
        found = [update.exploding_gradient(grad_norm, self.norms.values)]
        self.norms.add(grad_norm)
        # An update with a gradient or learning rate of 0 proves nothing and does not end a streak.
        if changed_share is not None and grad_norm and learning_rate and self.frozen.add(changed_share == 0):
            found.append(update.frozen_weights(self.frozen.length, learning_rate))
        return found

    def _collapse(self, entropy: float | None, mean_length: float | None) -> list[Finding | None]:
        found: list[Finding | None] = []
        if entropy is not None and (first := self.first_entropies.add(entropy)) is not None:
            found.append(update.entropy_collapse(entropy, first))
        if mean_length is not None and (first := self.first_lengths.add(mean_length)) is not None:
            found.append(update.length_collapse(mean_length, first))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in vars(self).items():
            part.load_state_dict(state[name])


def _found(*findings: Finding | None) -> list[Finding]:
    return [finding for finding in findings if finding is not None]
