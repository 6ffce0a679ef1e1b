import math

import pytest
import torch

from gruppo.algo.kl import k1, k3, kl_to_reference

D = torch.float64
LOGPS = torch.tensor([[math.log(0.5), math.log(0.2)]], dtype=D)
REF = torch.tensor([[math.log(0.25), math.log(0.4)]], dtype=D)
LN2 = math.log(2)


def test_estimators_by_hand():
    # ℓ − ℓ_ref = ln 2 and −ln 2; k3 with d = ∓ln 2: ½ + ln 2 − 1 and 2 − ln 2 − 1.
    torch.testing.assert_close(k1(LOGPS, REF).tolist(), [[LN2, -LN2]])
    torch.testing.assert_close(k3(LOGPS, REF).tolist(), [[LN2 - 0.5, 1 - LN2]])


def test_the_estimators_are_unbiased():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=D)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=D)
    kl = (p * (p / q).log()).sum().item()
    assert (p * k1(p.log(), q.log())).sum().item() == pytest.approx(kl, abs=1e-12)
    assert (p * k3(p.log(), q.log())).sum().item() == pytest.approx(kl, abs=1e-12)


def test_bias_correction_multiplies_by_a_ratio_that_carries_gradient():
    # On-policy r = 1: same value, but ∂K = 1 − e^d becomes (1 − e^d) + K.
    for corrected, slope in ((False, 1 - 0.5), (True, 1 - 0.5 + LN2 - 0.5)):
        logps = LOGPS[:, :1].clone().requires_grad_()
        out = kl_to_reference(logps, REF[:, :1], (logps - logps.detach()).exp(), corrected)
        out.sum().backward()
        assert out.item() == pytest.approx(LN2 - 0.5)
        assert logps.grad.item() == pytest.approx(slope)


def test_the_corrected_gradient_is_that_of_the_kl():
    # Expectation over tokens of ∂(r·k3)/∂θ equals ∂KL/∂θ, for a softmax policy on-policy; without r it does not.
    theta = torch.tensor([0.3, -0.2, 0.5], dtype=D, requires_grad=True)
    q = torch.tensor([0.2, 0.3, 0.5], dtype=D)
    logps = theta.log_softmax(0)
    p = logps.detach().exp()
    (exact,) = torch.autograd.grad((logps.exp() * (logps - q.log())).sum(), theta, retain_graph=True)
    ratio = (logps - logps.detach()).exp()
    got = {c: torch.autograd.grad((p * kl_to_reference(logps, q.log(), ratio, c)).sum(), theta, retain_graph=True)[0]
           for c in (True, False)}  # fmt: skip
    torch.testing.assert_close(got[True], exact)
    assert not torch.allclose(got[False], exact, atol=1e-3)


def test_a_sequence_ratio_broadcasts():
    out = kl_to_reference(LOGPS, REF, torch.tensor([[2.0]], dtype=D), True)
    torch.testing.assert_close(out.tolist(), [[2 * (LN2 - 0.5), 2 * (1 - LN2)]])
