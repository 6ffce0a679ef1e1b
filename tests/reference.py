"""A slow reference implementation: advantages and losses in plain Python, token by token, with gradients by hand.

Nothing here is shared with `gruppo.algo` except the types that hold the inputs, and no tensor arithmetic is used: each
formula is written as in the papers, and each derivative is derived by hand.
"""

import math
import statistics
from typing import NamedTuple

from gruppo.algo.loss import LossInputs, LossSettings
from gruppo.algo.reduce import UpdateSize

Matrix = list[list[float]]


class Reference(NamedTuple):
    loss: float
    policy_loss: float
    grad_logps: Matrix
    grad_entropy: Matrix
    kl: float


class Term(NamedTuple):
    """A value with its derivatives with respect to the log-ratio (at its level) and to the token's own log-prob."""

    value: float
    by_log_ratio: float = 0.0
    by_logp: float = 0.0


def exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# --- the loss


def loss(inputs: LossInputs, s: LossSettings, size: UpdateSize) -> Reference:
    mask = [[bool(v) for v in row] for row in inputs.mask_BT.tolist()]
    rows, width = len(mask), len(mask[0])
    lengths = [sum(row) for row in mask]
    logps = inputs.logps_BT.tolist()
    old = logps if inputs.old_logps_BT is None else inputs.old_logps_BT.tolist()
    advantages = inputs.advantages.tolist()
    entropy = None if inputs.entropy_BT is None else inputs.entropy_BT.tolist()
    grad_logps = [[0.0] * width for _ in range(rows)]
    grad_entropy = [[0.0] * width for _ in range(rows)]
    policy = kl_sum = 0.0

    for i in range(rows):
        log_ratios = _log_ratios(logps[i], old[i], mask[i], s.ratio)
        for t, weight in _weights(mask, i, s, size):
            A = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
            term = _objective(i, t, A, log_ratios[t], logps, old, mask, inputs, s)
            policy += weight * term.value
            _spread(grad_logps[i], t, weight, term, mask[i], lengths[i], s.ratio)
            if s.beta:
                kl = _kl(logps[i][t], inputs.ref_logps_BT[i][t].item(), log_ratios[t], s)
                policy += weight * s.beta * kl.value
                kl_sum += kl.value
                _spread(grad_logps[i], t, weight * s.beta, kl, mask[i], lengths[i], s.ratio)

    total = policy
    if inputs.entropy_coef:
        chosen = [(i, t) for i in range(rows) for t in range(width) if mask[i][t] and _chosen(inputs, i, t)]
        for i, t in chosen:
            share = inputs.entropy_coef / len(chosen) / float(size.micro_batches)
            total -= share * entropy[i][t]
            grad_entropy[i][t] -= share
    return Reference(total, policy, grad_logps, grad_entropy, kl_sum / max(sum(lengths), 1))


def _log_ratios(logps: list[float], old: list[float] | float, mask: list[bool], level: str) -> list[float]:
    if level == "sequence_sum" and not (isinstance(old, list) and len(old) == len(logps)):
        old_sum = old[0] if isinstance(old, list) else old
        total = sum(l for l, m in zip(logps, mask, strict=True) if m) - old_sum if any(mask) else 0.0
        return [total] * len(mask)
    differences = [l - o if m else 0.0 for l, o, m in zip(logps, old, mask, strict=True)]
    if level == "token":
        return differences
    total = 0.0
    for d in differences:
        total += d
    return [total / max(sum(mask), 1) if level == "sequence_mean" else total] * len(mask)


def _weights(mask: list[list[bool]], i: int, s: LossSettings, size: UpdateSize) -> list[tuple[int, float]]:
    """(position, weight) of every term of row i in the update's loss."""
    if s.reduction == "rows":
        return [(0, 1 / float(size.rows))]
    weight = {
        "sequence": lambda: 1 / sum(mask[i]) / float(size.rows),
        "micro_batch": lambda: 1 / sum(map(sum, mask)) / float(size.micro_batches),
        "constant": lambda: 1 / (float(size.rows) * s.max_completion_length),
        "tokens": lambda: 1 / float(size.tokens),
        "length_weighted": lambda: 1 / float(size.rows),
    }[s.reduction]
    return [(t, weight()) for t, m in enumerate(mask[i]) if m]


def _spread(grad: list[float], t: int, weight: float, term: Term, mask: list[bool], length: int, level: str) -> None:
    grad[t] += weight * term.by_logp
    if level == "token":
        grad[t] += weight * term.by_log_ratio
        return
    for u, m in enumerate(mask):
        if m:
            grad[u] += weight * term.by_log_ratio / (length if level == "sequence_mean" else 1)


def _chosen(inputs: LossInputs, i: int, t: int) -> bool:
    return inputs.entropy_threshold is None or inputs.entropy_BT[i][t].item() >= float(inputs.entropy_threshold)


def _objective(i, t, A, log_ratio, logps, old, mask, inputs: LossInputs, s: LossSettings) -> Term:
    rho = 1.0
    if inputs.importance_weights is not None and s.objective != "vespo":
        row = inputs.importance_weights[i].tolist()
        rho = row[t] if len(row) > 1 else row[0]
    kept = rho != 0 and _chosen(inputs, i, t) and _on_policy(i, A, logps, old, mask, inputs, s)
    if A == 0 or not kept:
        return Term(0.0)
    if s.objective == "vespo":
        term = _vespo(i, A, logps[i][t], logps, old, mask, inputs, s)
    elif s.objective == "cispo":
        weight = min(exp(log_ratio), s.epsilon_high)
        term = Term(-weight * A * logps[i][t] if weight else 0.0, by_logp=-weight * A)
    else:
        term = {"clip": _clip, "sapo": _sapo}[s.objective](exp(log_ratio), A, s)
    return Term(term.value * rho, term.by_log_ratio * rho, term.by_logp * rho)


def _clip(r: float, A: float, s: LossSettings) -> Term:
    low, high = 1 - s.epsilon_low, 1 + s.epsilon_high
    delta = math.inf if s.delta is None else s.delta
    free, held = min(r, delta) * A, clamp(r, low, high) * A
    free_moves, held_moves = r <= delta, low <= r <= high
    moves = free_moves if free < held else held_moves if held < free else free_moves or held_moves
    return Term(-min(free, held), by_log_ratio=-r * A if moves else 0.0)


def _sapo(r: float, A: float, s: LossSettings) -> Term:
    tau = s.sapo_temperature_pos if A > 0 else s.sapo_temperature_neg
    gate = 1 / (1 + exp(-tau * (r - 1)))
    slope = 0.0 if gate == 1 else gate * (1 - gate) * r
    return Term(-4 / tau * gate * A, by_log_ratio=-4 * slope * A)


def _vespo(i, A, logp, logps, old, mask, inputs: LossInputs, s: LossSettings) -> Term:
    floor = math.log(1e-8)
    log_w = 0.0
    for t, m in enumerate(mask[i]):
        if m:
            log_w += clamp(logps[i][t] - old[i][t], -20, 20)
            if inputs.importance_weights is not None:
                rho = inputs.importance_weights[i][t].item()
                log_w += clamp(math.log(rho) if rho > 0 else -math.inf, floor, 20)
    log_w = clamp(log_w, floor, 20)
    k, decay = (s.vespo_k_pos, s.vespo_lambda_pos) if A >= 0 else (s.vespo_k_neg, s.vespo_lambda_neg)
    decay = max(decay, 1e-4)
    phi = exp(decay + k * log_w - decay * exp(log_w))
    phi = phi if math.isfinite(phi) else 0.0
    return Term(-phi * A * logp if phi else 0.0, by_logp=-phi * A)


def _on_policy(i, A, logps, old, mask, inputs: LossInputs, s: LossSettings) -> bool:
    if s.off_policy_mask_threshold is None or A >= 0:
        return True
    sampler = old if inputs.sampler_logps_BT is None else inputs.sampler_logps_BT.tolist()
    drift = 0.0
    for t, m in enumerate(mask[i]):
        if m and not math.isnan(sampler[i][t] - logps[i][t]):
            drift += sampler[i][t] - logps[i][t]
    return drift / max(sum(mask[i]), 1) <= s.off_policy_mask_threshold


def _kl(logp: float, ref: float, log_ratio: float, s: LossSettings) -> Term:
    d = ref - logp
    value, slope = exp(d) - d - 1, 1 - exp(d)
    if not s.use_bias_correction_kl:
        return Term(value, by_logp=slope)
    r = exp(log_ratio)
    return Term(value * r, by_log_ratio=value * r, by_logp=slope * r)


# --- advantages


def weighted_sum(row: list[float], weights: list[float]) -> float:
    known = [w * x for w, x in zip(weights, row, strict=True) if not math.isnan(x)]
    return math.fsum(known) if known else math.nan


def mean(xs: list[float]) -> float:
    known = [x for x in xs if not math.isnan(x)]
    return statistics.mean(known) if known else math.nan  # exact: the mean of equal values is that value


def std(xs: list[float]) -> float:
    known = [x for x in xs if not math.isnan(x)]
    return statistics.stdev(known) if len(known) > 1 else math.nan


def _standardized(xs: list[float], deviation: float) -> list[float]:
    return [(x - mean(xs)) / (deviation + 1e-4) for x in xs]


def _zeroed(xs: list[float]) -> list[float]:
    return [0.0 if math.isnan(x) else x for x in xs]


def sum_then_normalize(rewards: Matrix, weights: list[float], group_size: int, scale: str) -> list[float]:
    sums = [weighted_sum(row, weights) for row in rewards]
    out = []
    for g in range(0, len(sums), group_size):
        group = sums[g : g + group_size]
        population = sums if scale == "batch" else group
        deviation = std(population) if len(population) > 1 else 0.0
        out += [x - mean(group) for x in group] if scale == "none" else _standardized(group, deviation)
    return _zeroed(out)


def normalize_then_sum(rewards: Matrix, weights: list[float], group_size: int) -> list[float]:
    sums = []
    for g in range(0, len(rewards), group_size):
        group = rewards[g : g + group_size]
        columns = [list(column) for column in zip(*group, strict=True)]
        scaled = [_standardized(c, std(c) if group_size > 1 else 0.0) for c in columns]
        for row, values in zip(group, zip(*scaled, strict=True), strict=True):
            total = math.fsum(w * z for w, z in zip(weights, values, strict=True) if not math.isnan(z))
            sums.append(math.nan if all(map(math.isnan, row)) else total)
    return _zeroed(_standardized(sums, std(sums) if len(sums) > 1 else 0.0))


def leave_one_out(
    rewards: Matrix,
    weights: list[float],
    group_size: int,
    penalty: list[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    normalize: bool = False,
) -> list[float]:
    sums = [weighted_sum(row, weights) for row in rewards]
    if clip_range is not None:
        sums = [x if math.isnan(x) else clamp(x, *clip_range) for x in sums]
    if penalty is not None:
        sums = [x - p for x, p in zip(sums, penalty, strict=True)]
    out = []
    for g in range(0, len(sums), group_size):
        group = sums[g : g + group_size]
        for i, x in enumerate(group):
            out.append(x - mean(group[:i] + group[i + 1 :]))
    return _zeroed(_standardized(out, std(out)) if normalize else out)
