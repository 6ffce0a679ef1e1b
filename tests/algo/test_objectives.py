import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gruppo.algo.loss import LossSettings
from gruppo.algo.objectives import (
    OBJECTIVE_STATS,
    OBJECTIVES,
    Tokens,
    cispo,
    clip,
    clip_stats,
    gamma_weights,
    sapo,
    vespo,
)

D = torch.float64


def tokens(ratios: list[float], advantages: list[float] | float, logps: list[float] | None = None, **rest) -> Tokens:
    """One row of tokens with the given ratios r (not their logarithms); the row's log-ratios take the gradient."""
    log_ratio = torch.tensor([ratios], dtype=D).log().requires_grad_()
    A = torch.tensor([advantages if isinstance(advantages, list) else [advantages]], dtype=D)
    logps_BT = torch.zeros_like(log_ratio) if logps is None else torch.tensor([logps], dtype=D, requires_grad=True)
    return Tokens(logps_BT, log_ratio, log_ratio.detach(), A.view(1, -1), torch.ones_like(log_ratio), **rest)


def settings(objective: str, **changes) -> LossSettings:
    return LossSettings(objective, "token", "tokens", **changes)


def value_and_slope(objective, x: Tokens, s: LossSettings) -> tuple[list[float], list[float]]:
    """P and ∂P/∂(log r)."""
    terms = objective(x, s)
    terms.sum().backward()
    return terms[0].tolist(), x.log_ratio.grad[0].tolist()


@pytest.mark.parametrize(
    ("A", "delta", "values", "slopes"),
    [
        # r = 0.5, 1, 1.5, 3 with ε_low 0.2 and ε_high 0.3, so held to [0.8, 1.3] where that lowers the objective.
        (2.0, None, [-1.0, -2.0, -2.6, -2.6], [-1.0, -2.0, 0.0, 0.0]),
        (-2.0, None, [1.6, 2.0, 3.0, 6.0], [0.0, 2.0, 3.0, 6.0]),
        # δ = 2 caps the free branch: r = 3 with A < 0 stops at 2.
        (-2.0, 2.0, [1.6, 2.0, 3.0, 4.0], [0.0, 2.0, 3.0, 0.0]),
        (2.0, 2.0, [-1.0, -2.0, -2.6, -2.6], [-1.0, -2.0, 0.0, 0.0]),
        # δ = 1.1 < 1 + ε_high bites for A > 0 too; for A < 0 the clamp, which knows no δ, holds at 1.3.
        (2.0, 1.1, [-1.0, -2.0, -2.2, -2.2], [-1.0, -2.0, 0.0, 0.0]),
        (-2.0, 1.1, [1.6, 2.0, 2.6, 2.6], [0.0, 2.0, 0.0, 0.0]),
    ],
)
def test_clip(A, delta, values, slopes):
    s = settings("clip", epsilon_low=0.2, epsilon_high=0.3, delta=delta)
    got = value_and_slope(clip, tokens([0.5, 1.0, 1.5, 3.0], A), s)
    torch.testing.assert_close(got, (values, slopes), rtol=1e-12, atol=1e-12)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 20), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 3), st.none() | st.floats(0.5, 5))
def test_clip_is_the_textbook_minimum(r, A, low, high, delta):
    s = settings("clip", epsilon_low=low, epsilon_high=high, delta=delta)
    x = tokens([r], A)
    r = x.log_ratio.exp().item()
    textbook = -min(min(r, delta or math.inf) * A, min(max(r, 1 - low), 1 + high) * A)
    assert clip(x, s).item() == pytest.approx(textbook, abs=1e-12)


def test_clip_bounds_keep_the_precision_of_their_input():
    # 0.8 rounded to float32 is 0.800000012: at float64 a ratio between the two must count as inside.
    x = tokens([0.800000005], -1.0)
    assert clip(x, settings("clip")).item() == pytest.approx(0.800000005, abs=1e-15)


def test_cispo():
    # min(r, 1.4) = 0.5, 1, 1.4; A = 2; ℓ = −1, −2, −3: P = −weight · 2 · ℓ, ∂P/∂ℓ = −weight · 2, nothing through r.
    x = tokens([0.5, 1.0, 2.0], 2.0, [-1.0, -2.0, -3.0])
    terms = cispo(x, settings("cispo", epsilon_high=1.4))
    terms.sum().backward()
    torch.testing.assert_close(terms[0].tolist(), [1.0, 4.0, 8.4])
    torch.testing.assert_close(x.logps_BT.grad[0].tolist(), [-1.0, -2.0, -2.8])
    assert x.log_ratio.grad is None


@pytest.mark.parametrize(
    ("A", "tau"),
    [(3.0, 2.0), (-3.0, 0.5), (0.0, 0.5)],
)
def test_sapo(A, tau):
    # −(4/τ) σ(τ(r−1)) A; slope −4 σ(1−σ) r A, which at r = 1 is −A as in the unclipped objective.
    s = settings("sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=0.5)
    gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in (1.0, 2.0)]
    values, slopes = value_and_slope(sapo, tokens([1.0, 2.0], A), s)
    torch.testing.assert_close(values, [-4 / tau * g * A for g in gates])
    torch.testing.assert_close(slopes, [-A, -4 * gates[1] * (1 - gates[1]) * 2 * A])


def test_sapo_saturates():
    values, slopes = value_and_slope(sapo, tokens([math.inf, 0.0, 1e300], 1.0), settings("sapo"))
    torch.testing.assert_close(values, [-4.0, -4 / (1 + math.e), -4.0])
    assert slopes == [0.0, 0.0, 0.0]


MASK = torch.tensor([[1, 1, 0]])


def test_gamma_weights_by_hand():
    # w = 2 · ½ · 4 (the last masked): log w = 0, φ = e^{λ − λ} = 1, for either sign.
    log_ratio = torch.tensor([[2.0, 0.5, 4.0]], dtype=D).log()
    for A in (1.0, 0.0, -1.0):
        assert gamma_weights(torch.tensor([[A]]), log_ratio, MASK).item() == pytest.approx(1.0)
    # w = 2 · 2 = 4: A ≥ 0 takes k = 2, λ = 3: e^{3 − 12} · 16; A < 0 takes k = 3, λ = 2: e^{2 − 8} · 64.
    log_ratio = torch.tensor([[2.0, 2.0, 4.0]], dtype=D).log()
    for A, phi in ((1.0, math.exp(-9) * 16), (0.0, math.exp(-9) * 16), (-1.0, math.exp(-6) * 64)):
        assert gamma_weights(torch.tensor([[A]]), log_ratio, MASK).item() == pytest.approx(phi)


def test_gamma_weights_take_the_sampler_correction():
    # w = 4 from the ratios, ρ = ½ · ½ (the third is masked): log w = 0.
    log_ratio = torch.tensor([[2.0, 2.0, 1.0]], dtype=D).log()
    rho = torch.tensor([[0.5, 0.5, 9.0]], dtype=D)
    one = torch.ones(1, 1, dtype=D)
    assert gamma_weights(one, log_ratio, MASK, rho).item() == pytest.approx(1.0)
    # ρ = 0 counts as 1e-8: w = 4e-8 · ½, φ = w² e^{3 − 3w}.
    w = 4e-8 * 0.5
    rho = torch.tensor([[0.0, 0.5, 1.0]], dtype=D)
    assert gamma_weights(one, log_ratio, MASK, rho).item() == pytest.approx(
        w**2 * math.exp(3 - 3 * w), rel=1e-9, abs=0
    )
    with pytest.raises(ValueError, match="'token' importance sampling mode"):
        gamma_weights(one, log_ratio, MASK, one)


def test_gamma_weights_are_clamped_and_finite():
    one, mask = torch.ones(1, 1, dtype=D), torch.ones(1, 3)
    # log w = −∞ per token → −20 each, −60 in all → ln 1e-8: φ = 1e-16 · e^{3 − 3e-8}.
    low = gamma_weights(one, torch.full((1, 3), -math.inf, dtype=D), mask)
    assert low.item() == pytest.approx(1e-16 * math.exp(3), rel=1e-6, abs=0)
    # log w = 20: e^{3 + 40 − 3e^{20}} underflows to 0.
    assert gamma_weights(one, torch.full((1, 3), math.inf, dtype=D), mask).item() == 0.0
    # λ has a floor of 1e-4: φ at log w = 1 is e^{λ + 2 − λe}.
    phi = gamma_weights(one, torch.tensor([[1.0, 0.0, 0.0]], dtype=D), mask, lambda_pos=0.0)
    assert phi.item() == pytest.approx(math.exp(1e-4 + 2 - 1e-4 * math.e))
    # An exponent that overflows (absurd k) gives 0, not ∞.
    assert gamma_weights(one, torch.tensor([[20.0, 0.0, 0.0]], dtype=D), mask, k_pos=1e30).item() == 0.0


def test_vespo():
    # w = 2 · 2 = 4 and A = −1: φ = 64 e^{−6}; P = φ ℓ, ∂P/∂ℓ = φ.
    x = tokens([2.0, 2.0], -1.0, [-1.0, -2.0])
    terms = vespo(x, settings("vespo"))
    terms.sum().backward()
    phi = 64 * math.exp(-6)
    torch.testing.assert_close(terms[0].tolist(), [-phi, -2 * phi])
    torch.testing.assert_close(x.logps_BT.grad[0].tolist(), [phi, phi])
    assert x.log_ratio.grad is None
    with pytest.raises(ValueError, match="not row sums"):
        vespo(x._replace(token_log_ratio_BT=None), settings("vespo"))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_zero_advantage_is_silence(objective):
    # This is how tokens are dropped, so it must hold for the most hostile ratio too.
    x = tokens([0.0, 1.0, 5.0, math.inf], 0.0, [-math.inf, -1.0, -2.0, -3.0])
    terms = OBJECTIVES[objective](x, settings(objective))
    terms.sum().backward()
    assert terms.expand(1, 4)[0].tolist() == [0, 0, 0, 0]
    for leaf in (x.log_ratio, x.logps_BT):
        assert leaf.grad is None or leaf.grad.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("objective", ["clip", "sapo", "cispo", "vespo"])
def test_on_policy_every_objective_is_the_policy_gradient(objective):
    # At r = 1 each has the gradient −A of REINFORCE (cispo with a cap above 1).
    logps = torch.tensor([[-1.0, -2.0]], dtype=D, requires_grad=True)
    log_ratio = logps - logps.detach()
    A = torch.tensor([[0.7]], dtype=D)
    x = Tokens(logps, log_ratio, log_ratio, A, torch.ones(1, 2))
    OBJECTIVES[objective](x, settings(objective, epsilon_high=5.0)).sum().backward()
    torch.testing.assert_close(logps.grad.tolist(), [[-0.7, -0.7]])


def test_clip_stats():
    # Row 1 (A < 0): r = 0.5 is low, 2 is not high. Row 2 (A > 0): 2 is high, 0.5 is not low. Row 3 is masked.
    x = Tokens(
        torch.zeros(3, 2),
        torch.tensor([[0.5, 2.0], [0.5, 2.0], [0.5, 2.0]]).log(),
        None,
        torch.tensor([[-1.0], [1.0], [1.0]]),
        torch.tensor([[1, 1], [0, 1], [0, 0]]),
    )
    stats = clip_stats(x, settings("clip"))
    assert {k: (v.num.item(), v.den.item()) for k, v in stats.items() if k.endswith("mean")} == {
        "clip_ratio/low_mean": (1, 3),
        "clip_ratio/high_mean": (1, 3),
        "clip_ratio/region_mean": (2, 3),
    }
    torch.testing.assert_close(stats["clip_ratio/low_min"].values, torch.tensor([0.5, 0.0, math.nan]), equal_nan=True)
    torch.testing.assert_close(stats["clip_ratio/high_max"].values, torch.tensor([0.0, 1.0, math.nan]), equal_nan=True)
    # Measured on the capped ratio: δ = 1.1 hides what is above 1.2.
    assert clip_stats(x, settings("clip", delta=1.1))["clip_ratio/high_mean"].num.item() == 0


def test_clip_stats_of_a_sequence_ratio_count_sequences():
    x = Tokens(
        torch.zeros(3, 2),
        torch.tensor([[0.5], [2.0], [1.0]]).log(),
        None,
        torch.tensor([[-1.0], [1.0], [-1.0]]),
        torch.tensor([[1, 1], [0, 1], [0, 0]]),
    )
    stats = clip_stats(x, LossSettings("clip", "sequence_mean", "tokens"))
    assert (stats["clip_ratio/region_mean"].num.item(), stats["clip_ratio/region_mean"].den.item()) == (2, 3)
    # Also where completions have one column, and the third row none of its own.
    narrow = x._replace(logps_BT=x.logps_BT[:, :1], mask_BT=torch.tensor([[1], [1], [0]]))
    found = clip_stats(narrow, LossSettings("clip", "sequence_mean", "tokens"))["clip_ratio/region_mean"]
    assert (found.num.item(), found.den.item()) == (2, 3)
    torch.testing.assert_close(stats["clip_ratio/low_min"].values, torch.tensor([1.0, 0.0, math.nan]), equal_nan=True)


def test_a_ratio_at_its_bound_is_not_clipped():
    # r = 1 with ε = 0 sits on both bounds; cispo's cap of 1 likewise.
    for A in (1.0, -1.0):
        stats = clip_stats(tokens([1.0], A), settings("clip", epsilon_low=0.0, epsilon_high=0.0))
        assert stats["clip_ratio/region_mean"].num.item() == 0
    assert (
        OBJECTIVE_STATS["cispo"](tokens([1.0], 1.0), settings("cispo", epsilon_high=1.0))["cispo_clip_ratio"].num == 0
    )
    # And its gradient passes: −A r.
    s = settings("clip", epsilon_low=0.0, epsilon_high=0.0)
    assert value_and_slope(clip, tokens([1.0], 1.0), s) == ([-1.0], [-1.0])
    assert value_and_slope(clip, tokens([1.0], -1.0), s) == ([1.0], [1.0])


def test_zero_advantage_is_never_counted_as_clipped():
    stats = clip_stats(tokens([0.1, 9.0], 0.0), settings("clip"))
    assert stats["clip_ratio/region_mean"].num.item() == 0
    assert OBJECTIVE_STATS["cispo"](tokens([9.0], 0.0), settings("cispo"))["cispo_clip_ratio"].num.item() == 0
