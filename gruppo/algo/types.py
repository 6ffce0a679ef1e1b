"""What goes into the loss and what comes out of it."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["LossInputs", "LossOutput", "LossSettings", "Max", "Mean", "Min", "Stat"]


class Mean(NamedTuple):
    """A mean as numerator and denominator (0-d each), summed over ranks and micro-batches before dividing."""

    num: Tensor
    den: Tensor


class Min(NamedTuple):
    """Values (B,) whose smallest is the statistic; NaN does not count."""

    values: Tensor


class Max(NamedTuple):
    """Values (B,) whose largest is the statistic; NaN does not count."""

    values: Tensor


Stat = Mean | Min | Max


@dataclass(frozen=True)
class LossSettings:
    """The choices that define the loss; names and defaults are those of the config.

    >>> LossSettings(objective="clip", ratio="token", reduction="tokens", epsilon_high=0.28)  # DAPO
    """

    objective: str
    ratio: str
    reduction: str
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    beta: float = 0.0
    """Weight of the KL term in the loss; RLOO subtracts its KL from the reward and leaves this at 0."""
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    max_completion_length: int | None = None


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch; values at masked positions are ignored, NaN and infinities included.

    Completions of three and two tokens: `logps_BT` (2, 3), `mask_BT` [[1, 1, 1], [1, 1, 0]], `advantages` [1.0, -0.5].
    """

    logps_BT: Tensor
    mask_BT: Tensor
    advantages: Tensor
    """(B,), or (B, T) with one per token."""
    old_logps_BT: Tensor | None = None
    """None means strictly on-policy: the value of `logps_BT` without its gradient. With ratio "sequence_sum" the row
    sums (B,) or (B, 1) are accepted too."""
    ref_logps_BT: Tensor | None = None
    sampler_logps_BT: Tensor | None = None
    """NaN where the sampler returned no log-prob."""
    importance_weights: Tensor | None = None
    """(B, T) or (B, 1), from `mismatch.importance_weights`."""
    entropy_BT: Tensor | None = None
    entropy_threshold: Tensor | float | None = None
    """If given, only tokens with at least this entropy contribute to the policy loss."""
    entropy_coef: float = 0.0


class LossOutput(NamedTuple):
    """One micro-batch's share of the update's loss: the shares of all micro-batches and ranks sum to the loss."""

    loss: Tensor
    """0-d, with the entropy bonus."""
    policy_loss: Tensor
    """0-d, detached, without the bonus, on the same scale as `loss`: a share of the update. The loss of the nominal
    micro-batch is `size.micro_batches` times this, averaged over ranks ("tokens": sum over ranks instead)."""
    stats: dict[str, Stat]
    """Detached and local, keyed by metric name."""
    chosen_entropy: Mean | None = None
    """Entropy of the tokens the bonus acts on (after the entropy mask), which steers the adaptive coefficient."""
