"""Every combination of the loss, value and gradient, against the plain-Python reference."""

import itertools
import math
import random

import pytest
import torch

from gruppo.algo import advantages as adv
from gruppo.algo.loss import LossInputs, LossSettings, policy_loss
from gruppo.algo.masks import entropy_threshold
from gruppo.algo.mismatch import importance_weights
from gruppo.algo.recipes import LOSS_TYPES
from gruppo.algo.reduce import UpdateSize
from tests import reference

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

# One axis per modifier of the loss; None leaves it out.
AXES = {
    "ratio": ["token", "sequence_mean", "sequence_sum"],
    "kl": [None, "plain", "corrected"],
    "delta": [None, 1.1, 2.0],
    "entropy_share": [None, 0.4],
    "off_policy": [None, 0.0],
    "weights": [None, "token_truncate", "token_mask", "sequence_mask"],
    "entropy_coef": [0.0, 0.01],
    "old": ["given", "on-policy"],
    "advantage": ["row", "token"],
}


def random_mask(rng: random.Random, rows: int, width: int) -> torch.Tensor:
    mask = torch.tensor([[rng.random() < 0.7 for _ in range(width)] for _ in range(rows)])
    mask[rng.randrange(rows)] = False  # a row without a single loss token is always there
    return mask


def build(loss_type: str, choice: dict, seed: int) -> tuple[LossInputs, LossSettings, UpdateSize]:
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = rng.choice([(2, 3), (4, 5)])
    mask = random_mask(rng, rows, width)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    def garbage(x: torch.Tensor) -> torch.Tensor:
        # Padding may hold anything; nothing of it may reach the loss.
        return torch.where(mask, x, rng.choice([math.nan, math.inf, -math.inf]))

    logps = -normal(1.0).abs()
    sampler = garbage(logps + normal(0.3))
    old = garbage(logps + normal(0.3))
    entropy = normal(1.0).abs()
    share = choice["entropy_share"]
    mode = choice["weights"]
    advantages = normal(1.0) if choice["advantage"] == "token" else normal(1.0)[:, 0]
    inputs = LossInputs(
        logps_BT=garbage(logps).requires_grad_(),
        mask_BT=mask,
        advantages=advantages
        * torch.tensor(rng.choices([0.0, 1.0], [1, 5], k=rows)).view(-1, *[1] * (advantages.ndim - 1)),
        old_logps_BT=old if choice["old"] == "given" else None,
        ref_logps_BT=garbage(logps + normal(0.3)) if choice["kl"] else None,
        sampler_logps_BT=sampler if rng.random() < 0.5 else None,
        importance_weights=importance_weights(old, sampler, mask, mode, 0.7, 1.3) if mode else None,
        entropy_BT=garbage(entropy).requires_grad_(),
        entropy_threshold=None if share is None else entropy_threshold(entropy[mask], share),
        entropy_coef=choice["entropy_coef"],
    )
    objective, reduction = LOSS_TYPES[loss_type]
    settings = LossSettings(
        objective=objective,
        ratio=choice["ratio"],
        reduction=reduction,
        epsilon_low=0.1,
        epsilon_high=1.2 if objective == "cispo" else 0.15,
        delta=choice["delta"],
        beta=0.1 if choice["kl"] else 0.0,
        use_bias_correction_kl=choice["kl"] == "corrected",
        off_policy_mask_threshold=choice["off_policy"],
        max_completion_length=width + 2,
    )
    return inputs, settings, UpdateSize(rows=3 * rows, tokens=17, micro_batches=3)


def check(inputs: LossInputs, settings: LossSettings, size: UpdateSize) -> None:
    expected = reference.loss(inputs, settings, size)
    out = policy_loss(inputs, settings, size)
    out.loss.backward()
    torch.testing.assert_close(out.loss.item(), expected.loss, **TOLERANCE)
    torch.testing.assert_close(out.policy_loss.item(), expected.policy_loss, **TOLERANCE)
    torch.testing.assert_close(inputs.logps_BT.grad.tolist(), expected.grad_logps, **TOLERANCE)
    if inputs.entropy_coef:
        torch.testing.assert_close(inputs.entropy_BT.grad.tolist(), expected.grad_entropy, **TOLERANCE)
    if settings.beta:
        kl = out.stats["kl"]
        torch.testing.assert_close((kl.num / kl.den.clamp(min=1)).item(), expected.kl, **TOLERANCE)


def valid(loss_type: str, choice: dict) -> bool:
    return not (loss_type == "vespo" and choice["weights"] == "sequence_mask")


def samples(loss_type: str, n: int) -> list[dict]:
    rng = random.Random(f"samples of {loss_type}")
    drawn = ({axis: rng.choice(values) for axis, values in AXES.items()} for _ in itertools.count())
    return list(itertools.islice((c for c in drawn if valid(loss_type, c)), n))


N_SAMPLES = 80


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_samples_cover_every_pair_of_choices(loss_type):
    seen = {frozenset(pair) for c in samples(loss_type, N_SAMPLES) for pair in itertools.combinations(c.items(), 2)}
    for a, b in itertools.combinations(AXES, 2):
        for x, y in itertools.product(AXES[a], AXES[b]):
            assert not valid(loss_type, {"weights": None, a: x, b: y}) or frozenset([(a, x), (b, y)]) in seen


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_matches_reference(loss_type):
    for seed, choice in enumerate(samples(loss_type, N_SAMPLES)):
        check(*build(loss_type, choice, seed))


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_full_product_matches_reference(loss_type):
    choices = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    checked = 0
    for seed, choice in enumerate(choices):
        if valid(loss_type, choice):
            check(*build(loss_type, choice, seed))
            checked += 1
    assert checked >= len(choices) * 3 // 4


@pytest.mark.parametrize(
    ("old", "off_policy"),
    [("tokens", None), ("(B,)", None), ("(B, 1)", None), ("on-policy", None), ("tokens", 0.0), ("on-policy", 0.0)],
)
def test_rloo_matches_reference(old, off_policy):
    for seed in range(15):
        choice = {axis: values[0] for axis, values in AXES.items()} | {"off_policy": off_policy}
        inputs, _, size = build("grpo", choice, seed)
        old_BT = None if old == "on-policy" else inputs.old_logps_BT
        if old.startswith("("):
            old_BT = old_BT.masked_fill(~inputs.mask_BT, 0.0).sum(1, keepdim=old == "(B, 1)")
        inputs = LossInputs(inputs.logps_BT, inputs.mask_BT, inputs.advantages, old_logps_BT=old_BT)
        settings = LossSettings("clip", "sequence_sum", "rows", off_policy_mask_threshold=off_policy)
        check(inputs, settings, size)


@pytest.mark.parametrize("ratio", AXES["ratio"])
@pytest.mark.parametrize("objective", ["clip", "sapo", "cispo", "vespo"])
@pytest.mark.parametrize("delta", [None, 1.1])
def test_infinite_log_ratios_where_the_loss_is_finite(objective, ratio, delta):
    # A>0 with r = ∞ is held at the ceiling, A<0 with r = 0 at the floor, and either with A = 0 is nothing at all.
    logps = torch.tensor([[-1.0, -0.5], [-math.inf, -0.5], [-1.0, -0.2], [-1.0, -2.0]], dtype=torch.float64)
    old = torch.tensor([[-math.inf, -0.4], [-1.0, -0.5], [-math.inf, -0.3], [-1.1, -1.9]], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    if objective == "vespo":  # its weight never vanishes, so ℓ = −∞ is an honest infinity there
        logps[1, 0] = -30.0
    inputs = LossInputs(logps.requires_grad_(), torch.ones(4, 2), advantages, old_logps_BT=old)
    settings = LossSettings(objective, ratio, "tokens", delta=delta)
    check(inputs, settings, UpdateSize(4, 8, 1))
    assert inputs.logps_BT.grad.isfinite().all()


def test_dropped_tokens_leave_no_trace_of_their_infinite_ratio():
    # r = ∞ with A < 0 is an infinite loss, unless the token is dropped: by entropy, by ρ = 0, or with its sequence.
    old = torch.tensor([[-math.inf, -0.4]], dtype=torch.float64)
    for dropped in (
        {"entropy_BT": torch.tensor([[0.1, 2.0]]), "entropy_threshold": 1.0},
        {"importance_weights": torch.tensor([[0.0, 1.0]], dtype=torch.float64)},
        {"sampler_logps_BT": torch.tensor([[9.0, 9.0]], dtype=torch.float64)},
    ):
        logps = torch.tensor([[-1.0, -0.5]], dtype=torch.float64, requires_grad=True)
        inputs = LossInputs(logps, torch.ones(1, 2), torch.tensor([-1.0], dtype=torch.float64), old, **dropped)
        threshold = 0.5 if "sampler_logps_BT" in dropped else None
        settings = LossSettings("clip", "token", "tokens", off_policy_mask_threshold=threshold)
        check(inputs, settings, UpdateSize(1, 2, 1))
        assert logps.grad[0, 0] == 0
        assert logps.grad[0, 1] == pytest.approx(0.0 if threshold else math.exp(-0.1) / 2)


# --- advantages


def random_rewards(rng: random.Random, groups: int, group_size: int, kinds: int) -> list[list[float]]:
    rows = []
    for g in range(groups):
        style = rng.choice(["mixed", "missing", "equal", "one scorable", "none scorable"])
        for i in range(group_size):
            row = [rng.gauss(0, 1) for _ in range(kinds)]
            if style == "missing":
                row = [math.nan if rng.random() < 0.5 else x for x in row]
            elif style == "equal":
                row = [0.1 * (g + 1)] * kinds
            elif style == "none scorable" or (style == "one scorable" and i != 0):
                row = [math.nan] * kinds
            rows.append(row)
    return rows


@pytest.mark.parametrize("group_size", [1, 2, 3, 8])
def test_advantages_match_reference(group_size):
    for seed in range(25):
        rng = random.Random(seed)
        rewards = random_rewards(rng, groups=rng.choice([1, 4]), group_size=group_size, kinds=rng.choice([1, 3]))
        weights = [rng.uniform(0.1, 2) for _ in rewards[0]]
        R, w = torch.tensor(rewards, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
        penalty = [rng.gauss(0, 1) for _ in rewards]
        clip_range = rng.choice([None, (-0.5, 0.5)])
        cases = [
            (
                adv.sum_then_normalize(R, w, group_size, s),
                reference.sum_then_normalize(rewards, weights, group_size, s),
            )
            for s in ("group", "batch", "none")
        ]
        cases.append(
            (adv.normalize_then_sum(R, w, group_size), reference.normalize_then_sum(rewards, weights, group_size))
        )
        for normalize in (False, True):
            ours = adv.leave_one_out(
                R,
                w,
                group_size,
                kl_penalty_B=torch.tensor(penalty, dtype=torch.float64),
                clip_range=clip_range,
                normalize=normalize,
            )
            cases.append((ours, reference.leave_one_out(rewards, weights, group_size, penalty, clip_range, normalize)))
        for ours, expected in cases:
            torch.testing.assert_close(ours.advantages_B.tolist(), expected, rtol=1e-9, atol=1e-9)
