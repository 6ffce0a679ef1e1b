"""The composed loss on the worked example: two completions, values and gradients to the printed digits."""

import dataclasses
import math

import pytest
import torch

from gruppo.algo.loss import LossInputs, LossSettings, Max, Mean, Min, policy_loss
from gruppo.algo.masks import entropy_threshold
from gruppo.algo.recipes import LOSS_TYPES
from gruppo.algo.reduce import UpdateSize
from gruppo.algo.stats import nanmax, nanmin

D = torch.float64
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOGPS = torch.tensor([[-1, -0.5, -2], [-0.7, -1.2, 0]], dtype=D)
OLD = torch.tensor([[-1.1, -0.9, -1.5], [-0.7, -1.6, 0]], dtype=D)
REF = torch.tensor([[-1.2, -0.6, -1.9], [-0.9, -1, 0]], dtype=D)
ENTROPY = torch.tensor([[1, 2, 0.5], [1.5, 0.2, 0]], dtype=D)
ADVANTAGES = torch.tensor([1, -0.5], dtype=D)
SIZE = UpdateSize(rows=2, tokens=5, micro_batches=1)


def inputs(**changes) -> LossInputs:
    given = {
        "logps_BT": LOGPS.clone().requires_grad_(),
        "mask_BT": MASK,
        "advantages": ADVANTAGES,
        "old_logps_BT": OLD,
        "ref_logps_BT": REF,
        "entropy_BT": ENTROPY.clone().requires_grad_(),
    }
    return LossInputs(**given | changes)


def settings(loss_type: str, **changes) -> LossSettings:
    objective, reduction = LOSS_TYPES[loss_type]
    base = LossSettings(objective, "token", reduction, epsilon_high=0.28, max_completion_length=4)
    return dataclasses.replace(base, **changes)


def value(stat: Mean | Min | Max) -> float:
    if isinstance(stat, Mean):
        return (stat.num / stat.den).item()
    return (nanmin(stat.values) if isinstance(stat, Min) else nanmax(stat.values)).item()


# Ratios r = e^{ℓ − ℓ_old}: 1.10517, 1.49182, 0.60653 | 1, 1.49182. With A = 1 the second is held at 1.28, with
# A = −0.5 nothing is: −P = 1.10517, 1.28, 0.60653 | −0.5, −0.74591, row sums 2.99170 and −1.24591, total 1.74579.
DAPO_GRAD = [[-0.22103, 0, -0.12131], [0.1, 0.14918, 0]]  # −A r / 5, and 0 where held
GOLDEN = {
    # −(2.99170/3 − 1.24591/2) / 2
    "grpo": (settings("grpo"), -0.187139, [[-0.1842, 0, -0.10109], [0.125, 0.18648, 0]]),
    # −1.74579 / 5
    "bnpo": (settings("bnpo"), -0.349158, DAPO_GRAD),
    # −1.74579 / (2 · 4)
    "dr_grpo": (settings("dr_grpo"), -0.218224, [[-0.13815, 0, -0.07582], [0.0625, 0.09324, 0]]),
    "dapo": (settings("dapo"), -0.349158, DAPO_GRAD),
    # First token: 4 σ(0.10517) = 2.10507; slope 4 σ(1−σ) r = 1.10212, / 3 / 2 = 0.18369
    "sapo": (settings("sapo"), -0.496787, [[-0.18369, -0.23419, -0.09727], [0.125, 0.17458, 0]]),
    # log w = 0 and 0.4: φ = 1 and e^{2 + 1.2 − 2·1.49182} = 1.24154; −(−3.5·1 + 1.24154·0.5·1.9) / 5
    "vespo": (settings("vespo"), 0.464108, [[-0.2, -0.2, -0.2], [0.12415, 0.12415, 0]]),
    # −1.74579 / 2
    "luspo, token": (settings("luspo"), -0.872895, None),
    # r = e^0 = 1 and e^0.2 = 1.22140: −(3·1 − 2·0.5·1.22140) / 2
    "luspo, sequence": (
        settings("luspo", ratio="sequence_mean"),
        -0.889299,
        [[-0.5, -0.5, -0.5], [0.30535, 0.30535, 0]],
    ),
    # min(r, 1.4): 1.10517, 1.4, 0.60653 | 1, 1.4; (1.10517 + 0.7 + 1.21306 − 0.35 − 0.84) / 5
    "cispo": (settings("cispo", epsilon_high=1.4), 0.365646, [[-0.22103, -0.28, -0.12131], [0.1, 0.14, 0]]),
    # −(1 − 0.5 · 1.22140) / 2
    "grpo, sequence": (
        settings("grpo", ratio="sequence_mean"),
        -0.194649,
        [[-0.16667, -0.16667, -0.16667], [0.15268, 0.15268, 0]],
    ),
    # 1.1, 1.1, 0.60653 | −0.5, −0.5·1.28: −1.66653 / 5
    "delta": (settings("dapo", delta=1.1), -0.333306, [[0, 0, -0.12131], [0.1, 0, 0]]),
    # dapo + 0.1 · 0.01634
    "KL, corrected": (
        settings("dapo", beta=0.1),
        -0.347524,
        [[-0.21661, 0.00298, -0.12252], [0.104, 0.14322, 0]],
    ),
    "KL, plain": (settings("dapo", beta=0.1, use_bias_correction_kl=False), -0.34778, None),
    # Row 2 has A < 0 and drift −0.2 > −0.3: only 2.99170 / 5 is left.
    "off-policy, drops": (
        settings("dapo", off_policy_mask_threshold=-0.3),
        -0.59834,
        [[-0.22103, 0, -0.12131], [0, 0, 0]],
    ),
    "off-policy, keeps": (settings("dapo", off_policy_mask_threshold=0.1), -0.349158, DAPO_GRAD),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    s, loss, grad = GOLDEN[name]
    given = inputs()
    out = policy_loss(given, s, SIZE)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, abs=6e-7)
    assert out.policy_loss.item() == out.loss.item()
    if grad is not None:
        torch.testing.assert_close(given.logps_BT.grad, torch.tensor(grad, dtype=D), rtol=0, atol=6e-6)


def test_golden_top_entropy():
    # Of 2, 1.5, 1, 0.5, 0.2 the top 0.4 is at least 1.2: the held 1.28 and −0.5 remain, −0.78 / 5.
    given = inputs(entropy_threshold=entropy_threshold(ENTROPY[MASK.bool()], 0.4))
    out = policy_loss(given, settings("dapo"), SIZE)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.156, abs=1e-12)
    torch.testing.assert_close(given.logps_BT.grad, torch.tensor([[0, 0, 0], [0.1, 0, 0]], dtype=D))
    # The metric is over all loss tokens (5.2 / 5), the controller's over the chosen ones (3.5 / 2).
    assert value(out.stats["entropy"]) == pytest.approx(1.04)
    assert value(out.chosen_entropy) == pytest.approx(1.75)


def test_golden_tool_mask():
    # Tool tokens leave the mask: m = [[1, 0, 1], [1, 1, 0]], 4 tokens: −(1.10517 + 0.60653 − 1.24591) / 4.
    given = inputs(mask_BT=MASK * torch.tensor([[1, 0, 1], [1, 1, 1]]))
    out = policy_loss(given, settings("dapo"), UpdateSize(2, 4, 1))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.116447, abs=6e-7)
    expected = torch.tensor([[-0.27629, 0, -0.15163], [0.125, 0.18648, 0]], dtype=D)
    torch.testing.assert_close(given.logps_BT.grad, expected, rtol=0, atol=6e-6)


def test_golden_entropy_bonus():
    # −0.349158 − 0.01 · 1.04, and −0.01 / 5 on each token's entropy.
    given = inputs(entropy_coef=0.01)
    out = policy_loss(given, settings("dapo"), SIZE)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.359558, abs=6e-7)
    assert out.policy_loss.item() == pytest.approx(-0.34916, abs=6e-6)
    torch.testing.assert_close(given.entropy_BT.grad, -0.002 * MASK.to(D))
    # The bonus is defined on the micro-batch: one of four contributes a quarter of its mean.
    quarter = policy_loss(inputs(entropy_coef=0.01), settings("dapo"), UpdateSize(2, 5, 4))
    assert (quarter.policy_loss - quarter.loss).item() == pytest.approx(0.01 * 1.04 / 4)


def test_golden_rloo():
    # Sums −3.5 against −3.5 and −1.9 against −2.3: r = 1 and e^0.4 = 1.49182; −(1 − 0.5 · 1.49182) / 2 = −0.127044.
    s = LossSettings("clip", "sequence_sum", "rows")
    for old in (OLD, torch.tensor([-3.5, -2.3], dtype=D)):
        given = inputs(old_logps_BT=old)
        out = policy_loss(given, s, SIZE)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(-0.127044, abs=6e-7)
        expected = torch.tensor([[-0.5, -0.5, -0.5], [0.372956, 0.372956, 0]], dtype=D)
        torch.testing.assert_close(given.logps_BT.grad, expected, rtol=0, atol=6e-7)
    # Both rows truncated: ratio 1 each, and they still count, −(1 − 0.5) / 2.
    given = inputs(mask_BT=MASK * 0)
    out = policy_loss(given, s, SIZE)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.25)
    assert torch.equal(given.logps_BT.grad, torch.zeros(2, 3, dtype=D))


def test_metrics():
    out = policy_loss(inputs(), settings("dapo"), SIZE)
    got = {key: round(value(stat), 4) for key, stat in out.stats.items()}
    assert got == {
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/high_mean": 0.2,
        "clip_ratio/high_max": 0.3333,
        "clip_ratio/region_mean": 0.2,
        "entropy": 1.04,
    }
    assert all(not part.requires_grad for stat in out.stats.values() for part in stat)
    assert not out.policy_loss.requires_grad


@pytest.mark.parametrize(
    ("s", "key", "expected"),
    [
        (settings("dapo", beta=0.1), "kl", 0.01634),
        (settings("dapo", beta=0.1, use_bias_correction_kl=False), "kl", 0.01377),
        (settings("cispo", epsilon_high=1.4), "cispo_clip_ratio", 0.2),
        (settings("vespo"), "vespo/phi_seq_mean", 1.12077),
        (settings("dapo", delta=1.1), "clip_ratio/region_mean", 0.0),
        (settings("dapo", delta=1.1), "clip_ratio/high_max", 0.0),
        # r = 1 and 1.2214 against a ceiling of 0.9 for A > 0: one sequence of two.
        (settings("grpo", ratio="sequence_mean", epsilon_high=-0.1), "clip_ratio/high_mean", 0.5),
    ],
)
def test_metric_values(s, key, expected):
    assert value(policy_loss(inputs(), s, SIZE).stats[key]) == pytest.approx(expected, abs=6e-6)


def test_phi_is_that_of_sequences_with_an_advantage():
    out = policy_loss(inputs(), settings("vespo"), SIZE).stats["vespo/phi_seq_mean"]
    first = policy_loss(inputs(advantages=torch.tensor([1.0, 0.0])), settings("vespo"), SIZE)
    second = policy_loss(inputs(advantages=torch.tensor([0.0, -0.5])), settings("vespo"), SIZE)
    parts = [each.stats["vespo/phi_seq_mean"] for each in (first, second)]
    assert [part.den.item() for part in parts] == [1.0, 1.0]
    assert sum(part.num.item() for part in parts) == pytest.approx(out.num.item())
    nothing = policy_loss(inputs(advantages=torch.zeros(2)), settings("vespo"), SIZE).stats["vespo/phi_seq_mean"]
    assert nothing.num.isnan()
    assert nothing.den.isnan()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_clip_ratio_exists_for_the_clip_objective_only(loss_type):
    stats = policy_loss(inputs(entropy_BT=None), settings(loss_type), SIZE).stats
    extra = {"cispo": {"cispo_clip_ratio"}, "vespo": {"vespo/phi_seq_mean"}, "sapo": set()}
    clipped = {f"clip_ratio/{k}" for k in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
    assert set(stats) == extra.get(loss_type, clipped)


def test_importance_weights_scale_the_policy_term_but_not_the_kl():
    zero = torch.zeros(2, 1, dtype=D)
    out = policy_loss(inputs(importance_weights=zero), settings("dapo", beta=0.1), SIZE)
    assert out.loss.item() == pytest.approx(0.1 * 0.0163427, abs=1e-8)
    double = policy_loss(inputs(importance_weights=zero + 2), settings("dapo"), SIZE)
    assert double.loss.item() == pytest.approx(2 * -0.349158, abs=1e-6)


def test_vespo_takes_importance_weights_inside_its_sequence_weight():
    rho = torch.full((2, 3), 0.5, dtype=D)
    out = policy_loss(inputs(importance_weights=rho), settings("vespo"), SIZE)
    # log w = −3 ln 2 and 0.4 − 2 ln 2: φ = e^{3 − 6 ln 2 − 3/8} and e^{2 + 1.2 − 6 ln 2 − 2·e^0.4/4}.
    phi = [math.exp(3 - 3 / 8) / 64, math.exp(3.2 - math.exp(0.4) / 2) / 64]
    assert out.loss.item() == pytest.approx((phi[0] * 3.5 - phi[1] * 0.5 * 1.9) / 5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_without_old_log_probs_the_ratio_is_one_and_carries_the_gradient(loss_type):
    s = settings(loss_type, ratio="token", epsilon_high=5.0)
    implicit, explicit = inputs(old_logps_BT=None), inputs(old_logps_BT=LOGPS)
    a, b = policy_loss(implicit, s, SIZE).loss, policy_loss(explicit, s, SIZE).loss
    a.backward()
    b.backward()
    assert a.item() == pytest.approx(b.item(), abs=1e-15)
    assert torch.equal(implicit.logps_BT.grad, explicit.logps_BT.grad)
    assert implicit.logps_BT.grad.abs().sum() > 0


def test_advantages_per_token():
    per_row = policy_loss(inputs(), settings("dapo"), SIZE).loss
    per_token = policy_loss(inputs(advantages=ADVANTAGES[:, None].expand(2, 3)), settings("dapo"), SIZE).loss
    assert torch.equal(per_row, per_token)
    # Only the first token: −1.10517 / 5.
    first = torch.tensor([[1, 0, 0], [0, 0, 0]], dtype=D)
    assert policy_loss(inputs(advantages=first), settings("dapo"), SIZE).loss.item() == pytest.approx(
        -0.221034, abs=1e-6
    )


@pytest.mark.parametrize("ratio", ["token", "sequence_mean"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_micro_batch_without_a_loss_token_gives_zero(loss_type, ratio):
    given = inputs(
        mask_BT=MASK * 0,
        logps_BT=torch.full((2, 3), math.nan, requires_grad=True),
        entropy_coef=0.1,
        entropy_threshold=entropy_threshold(torch.tensor([]), 0.4),
    )
    out = policy_loss(given, settings(loss_type, ratio=ratio, beta=0.1, off_policy_mask_threshold=0.0), SIZE)
    out.loss.backward()
    assert out.loss.item() == 0
    assert torch.equal(given.logps_BT.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("loss_type", [t for t in LOSS_TYPES if t != "bnpo"])
def test_micro_batches_add_up(loss_type):
    s = settings(loss_type, beta=0.1)
    whole = policy_loss(inputs(), s, SIZE).loss
    rows = [
        LossInputs(LOGPS[i : i + 1], MASK[i : i + 1], ADVANTAGES[i : i + 1], OLD[i : i + 1], REF[i : i + 1])
        for i in (0, 1)
    ]
    parts = [policy_loss(row, s, SIZE).loss for row in rows]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_give_a_float32_loss(dtype):
    given = LossInputs(LOGPS.to(dtype).requires_grad_(), MASK, ADVANTAGES.to(dtype), OLD.to(dtype), REF.to(dtype))
    widened = LossInputs(
        *(x.float() for x in (given.logps_BT.detach(), MASK, given.advantages)), OLD.to(dtype).float()
    )
    out = policy_loss(given, settings("dapo"), SIZE)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.loss.detach(), policy_loss(widened, settings("dapo"), SIZE).loss)
    assert given.logps_BT.grad.dtype == dtype


# One change per setting that the loss must notice; a field without a row here fails the test.
SENSITIVITY = {
    "objective": ("dapo", {}, {"objective": "sapo"}),
    "ratio": ("dapo", {}, {"ratio": "sequence_mean"}),
    "reduction": ("dapo", {}, {"reduction": "sequence"}),
    "epsilon_low": ("dapo", {"epsilon_low": 0.0}, {"epsilon_low": -0.2}),
    "epsilon_high": ("dapo", {}, {"epsilon_high": 0.29}),
    "delta": ("dapo", {}, {"delta": 1.4}),
    "sapo_temperature_pos": ("sapo", {}, {"sapo_temperature_pos": 1.01}),
    "sapo_temperature_neg": ("sapo", {}, {"sapo_temperature_neg": 1.06}),
    "vespo_k_pos": ("vespo", {}, {"vespo_k_pos": 2.1}),
    "vespo_lambda_pos": ("vespo", {}, {"vespo_lambda_pos": 3.1}),
    "vespo_k_neg": ("vespo", {}, {"vespo_k_neg": 3.1}),
    "vespo_lambda_neg": ("vespo", {}, {"vespo_lambda_neg": 2.1}),
    "beta": ("dapo", {}, {"beta": 0.01}),
    "use_bias_correction_kl": ("dapo", {"beta": 0.1}, {"use_bias_correction_kl": False}),
    "off_policy_mask_threshold": ("dapo", {}, {"off_policy_mask_threshold": -0.3}),
    "max_completion_length": ("dr_grpo", {}, {"max_completion_length": 5}),
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LossSettings)])
def test_every_setting_is_felt(field):
    loss_type, base, change = SENSITIVITY[field]
    shifted = OLD - 0.05  # away from w = 1, where VESPO's weight is flat
    before = settings(loss_type, **base)
    losses = [
        policy_loss(inputs(old_logps_BT=shifted), s, SIZE).loss.item()
        for s in (before, dataclasses.replace(before, **change))
    ]
    assert abs(losses[0] - losses[1]) > 1e-5


@pytest.mark.parametrize(
    ("changes", "s", "message"),
    [
        ({"ref_logps_BT": None}, settings("dapo", beta=0.1), "ref_logps_BT is None, but beta needs it"),
        ({"entropy_BT": None, "entropy_coef": 0.1}, settings("dapo"), "the entropy bonus needs it"),
        ({"entropy_BT": None, "entropy_threshold": 0.1}, settings("dapo"), "the entropy mask needs it"),
        ({}, settings("dapo", objective="ppo"), "objective must be one of .* not 'ppo'"),
        (
            {"old_logps_BT": torch.zeros(2)},
            settings("dapo", ratio="sequence_sum", off_policy_mask_threshold=0.1),
            "off-policy mask needs old or sampler log-probs per token",
        ),
    ],
)
def test_what_is_missing_is_named(changes, s, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(inputs(**changes), s, SIZE)
