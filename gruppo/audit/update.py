"""Checks of an update, from numbers that the host already has; most are functions that return a finding or None.

drift                the sampler's and the trainer's log-probs differ at the same weights
token_books          tokens or rows were lost or counted twice between rollout and loss
nonfinite_loss, nonfinite_gradient
zero_gradient        the gradient is 0 although there was something to learn
exploding_gradient   the gradient is far larger than before
frozen_weights       weights do not change although there is a gradient
no_signal            no group has reward spread, for many generations
unscored             no completion has a reward
entropy_collapse, length_collapse
stale_rows           completions are older than the settings explain
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from gruppo.audit.findings import Finding

DRIFT = 0.1  # nats, mean of the absolute differences: bfloat16 gives about 0.02
DRIFT_RATIO = (0.8, 1.25)  # mean of p_trainer / p_sampler, which is 1 up to noise: bfloat16 gives 1.00
CERTAIN = 1e-4  # nats per token: tokens of probability 1 have no gradient
EXPLODING = 100.0  # times the median of earlier norms
FEWEST_NORMS = 20
ENTROPY_LEFT, LEAST_ENTROPY = 0.01, 0.01  # share of the initial entropy; nats
LENGTH_LEFT, LEAST_LENGTH = 0.05, 3.0  # share of the initial length; tokens


def drift(mean: float, largest: float | None, ratio: float | None) -> Finding | None:
    """The sampler's and the trainer's log-probs of the same tokens at the same weights are too far apart."""
    low, high = DRIFT_RATIO
    # Comparisons with NaN are false, so NaN is reported too.
    if mean <= DRIFT and (ratio is None or low <= ratio <= high):
        return None
    values = {"mean": mean, "max": largest, "ratio": ratio}
    known = {name: value for name, value in values.items() if value is not None}
    seen = ", ".join(f"{name} {value:.4g}" for name, value in known.items())
    return Finding(
        "drift",
        f"The sampler's log-probs are not the trainer's, at the same weights and tokens: {seen}, where a mean of "
        f"{DRIFT} and a ratio between {low} and {high} are the most that rounding explains. The gradient is that of "
        "another policy. Look at the sampler's weights (an update or an adapter that it missed), at the temperature, "
        "at dtypes that differ, and at dropout or noise in the model.",
        known,
    )


def books(expected: Mapping[str, int], found: Mapping[str, int], where: str) -> Finding | None:
    """Check `token_books`: two counts of the same things must agree.

    Example:
        books({"rows": 8, "tokens": 120}, {"rows": 8, "tokens": 117}, "the micro-batches of a generation")
        -> Finding: … tokens: 120 expected, 117 found
    """
    wrong = [name for name in expected if expected[name] != found.get(name)]
    if not wrong:
        return None
    said = "; ".join(f"{name}: {expected[name]} expected, {found.get(name)} found" for name in wrong)
    return Finding(
        "token_books",
        f"The token counts of {where} do not add up: {said}. Some tokens were lost or are trained on twice, and the "
        "loss is divided by the wrong number. Look at custom hooks and collators that cut, mask or repeat rows; if "
        "there are none, this is a bug in the trainer.",
        {f"{name}_missing": float(expected[name] - found.get(name, 0)) for name in wrong},
    )


def nonfinite(loss: float | None, grad_norm: float | None, *, left_out: bool = True) -> list[Finding]:
    """Checks `nonfinite_loss` and `nonfinite_gradient`: such an update must not reach the weights.

    `left_out` is False if the optimizer step could not be prevented.
    """
    outcome = (
        "The update is skipped."
        if left_out
        else "Its step was taken before it could be skipped: the weights may be corrupted; go back to a checkpoint."
    )
    advice = (
        f"{outcome} Look at rewards that are huge, at log-probs of -inf, at a learning rate that has already ruined "
        "the weights, and at float16, which overflows where bfloat16 does not."
    )
    named = {"loss": loss, "gradient": grad_norm}
    return [
        Finding(f"nonfinite_{name}", f"The {name} of the update is {value}. {advice}", {name: value})
        for name, value in named.items()
        if value is not None and not math.isfinite(value)
    ]


def zero_gradient(grad_norm: float, moving_rows: int, entropy: float | None = None) -> Finding | None:
    """A norm of exactly 0 although some rows must have a gradient and the policy is not deterministic."""
    if grad_norm != 0 or not moving_rows or (entropy is not None and entropy < CERTAIN):
        return None
    return Finding(
        "zero_gradient",
        "The gradient is exactly 0, though there are rows that were sampled with these very weights and have an "
        "advantage. The loss is cut off from the weights: no parameter that needs a gradient, a detached output, a "
        "frozen adapter, a custom loss that masks everything.",
        {"rows": float(moving_rows)},
    )


def exploding_gradient(grad_norm: float, earlier: Sequence[float]) -> Finding | None:
    """A norm of more than a hundred times the usual one."""
    usual = median(earlier) if len(earlier) >= FEWEST_NORMS else 0.0
    if not usual or not grad_norm > EXPLODING * usual:
        return None
    return Finding(
        "exploding_gradient",
        f"The norm of the gradient is {grad_norm:.4g}, {grad_norm / usual:.0f} times the median {usual:.4g} of the "
        f"last {len(earlier)} updates. Look at the rewards and ratios of this update's completions; "
        "max_grad_norm bounds what one update can do, a lower learning rate keeps it from happening.",
        {"grad_norm": grad_norm, "median": usual},
    )


def frozen_weights(updates: int, learning_rate: float) -> Finding:
    """None of the probed weights has changed over several updates that had a gradient."""
    return Finding(
        "frozen_weights",
        f"Not one of the sampled elements of the trainable weights has changed in {updates} updates, though gradient "
        f"and learning rate ({learning_rate:.3g}) are not 0. Likely: weights in bfloat16 whose steps are rounded "
        "away (load the model in float32 and train under bf16=True, or raise the learning rate), or an optimizer that "
        "holds other parameters than the model.",
        {"updates": float(updates), "learning_rate": learning_rate},
    )


def no_signal(generations: int) -> Finding:
    """No group has reward spread."""
    return Finding(
        "no_signal",
        f"In {generations} generations in a row all completions of each prompt got the same reward: every advantage "
        "is 0, and nothing is learned. Look at some completions and their rewards: the task is too hard or too easy, "
        "or the reward never counts an answer as correct (one in a form that it cannot parse).",
        {"generations": float(generations)},
    )


def unscored(share: float) -> Finding | None:
    """No completion of a generation could be scored."""
    if share < 1:
        return None
    return Finding(
        "unscored",
        "Not one completion of this generation has a reward: every reward failed, ran out of time or abstained. The "
        "log has the first traceback of each; rewards/<name>/failures, timeouts and abstained count them.",
        {"share": share},
    )


def entropy_collapse(entropy: float, first: float) -> Finding | None:
    """The policy has become certain of every token."""
    if not entropy < min(ENTROPY_LEFT * first, LEAST_ENTROPY):
        return None
    return Finding(
        "entropy_collapse",
        f"The policy's entropy is {entropy:.2g} nats per token; the run began with {first:.3g}. It hardly explores "
        "any more: groups become equal and advantages 0. Go back to a checkpoint from before, with a lower learning "
        "rate, beta > 0, a higher epsilon_high or an entropy bonus.",
        {"entropy": entropy, "first": first},
    )


def length_collapse(length: float, first: float) -> Finding | None:
    """Completions have become a few tokens long."""
    if not length < min(LENGTH_LEFT * first, LEAST_LENGTH):
        return None
    return Finding(
        "length_collapse",
        f"Completions have {length:.1f} tokens on average; the run began with {first:.0f}. Look at some of them: most "
        "likely nearly empty answers get the reward, or a penalty on length outweighs it.",
        {"length": length, "first": first},
    )


def stale_rows(oldest: int, allowed: int) -> Finding | None:
    """Rows were sampled more updates ago than num_iterations, steps_per_generation and async_rollouts explain."""
    if oldest <= allowed:
        return None
    return Finding(
        "stale_rows",
        f"The update trained on completions that were sampled {oldest} updates ago; num_iterations, "
        f"steps_per_generation and async_rollouts explain at most {allowed}. They come from an older policy, and "
        "clipping may remove most of their gradient. Look at hooks that keep batches, and at how the run was resumed.",
        {"oldest": float(oldest), "allowed": float(allowed)},
    )
