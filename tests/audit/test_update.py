import math

import pytest
import torch
from torch import nn

from gruppo.audit import WeightProbe, books, nonfinite, update


def found(finding):
    return None if finding is None else finding.check


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ((0.02, 0.9, 1.0), False),  # bfloat16
        ((1e-6, 1e-5, 1.0), False),
        ((0.1, None, None), False),
        ((0.0, 40.0, 1.0), False),  # one token may be far off where bfloat16 meets a tiny probability
        ((0.11, 0.2, 1.0), True),
        ((0.05, 0.2, 1.26), True),
        ((0.05, 0.2, 0.79), True),
        ((math.nan, 0.2, 1.0), True),
        ((0.01, 0.2, math.nan), True),
        ((0.01, 0.2, math.inf), True),
    ],
)
def test_drift(numbers, wrong):
    assert found(update.drift(*numbers)) == ("drift" if wrong else None)


def test_books():
    expected = {"rows": 8, "tokens": 120}
    assert books(expected, {"tokens": 120, "rows": 8}, "a generation") is None
    finding = books(expected, {"rows": 8, "tokens": 117}, "the micro-batches of generation 3")
    assert finding is not None
    assert finding.check == "token_books"
    assert "tokens: 120 expected, 117 found" in finding.message
    assert "generation 3" in finding.message
    assert "rows" not in finding.message.split(". ")[0]
    assert finding.values == {"tokens_missing": 3}
    assert found(books(expected, {"rows": 9, "tokens": 120}, "x")) == "token_books"
    assert found(books(expected, {"rows": 8}, "x")) == "token_books"


@pytest.mark.parametrize(
    ("loss", "norm", "checks"),
    [
        (0.3, 1.0, []),
        (None, None, []),
        (math.nan, 1.0, ["nonfinite_loss"]),
        (0.1, math.inf, ["nonfinite_gradient"]),
        (-math.inf, math.nan, ["nonfinite_loss", "nonfinite_gradient"]),
    ],
)
def test_nonfinite(loss, norm, checks):
    assert [finding.check for finding in nonfinite(loss, norm)] == checks


def test_what_became_of_an_update_is_said():
    assert "is skipped" in nonfinite(math.nan, None)[0].message
    (finding,) = nonfinite(math.nan, None, left_out=False)
    assert "is skipped" not in finding.message
    assert "go back to a checkpoint" in finding.message


def test_zero_gradient():
    assert update.zero_gradient(1e-12, 8) is None
    assert update.zero_gradient(0.0, 0) is None, "nothing was to be learned"
    assert found(update.zero_gradient(0.0, 8)) == found(update.zero_gradient(0.0, 8, 0.1)) == "zero_gradient"
    assert update.zero_gradient(0.0, 8, 1e-7) is None, "a policy that is certain"


def test_exploding_gradient():
    usual = [1.0, 2.0, 3.0] * 7
    assert update.exploding_gradient(200.0, usual) is None
    assert update.exploding_gradient(1e9, usual[:19]) is None, "too few are known"
    assert update.exploding_gradient(1e9, []) is None
    finding = update.exploding_gradient(201.0, usual)
    assert finding is not None
    assert finding.values == {"grad_norm": 201.0, "median": 2.0}
    assert found(update.exploding_gradient(math.inf, usual)) == "exploding_gradient"


@pytest.mark.parametrize(
    ("entropy", "first", "wrong"),
    [
        (0.5, 1.0, False),
        (0.011, 2.0, False),  # half a percent, but not yet certain
        (0.0099, 2.0, True),
        (0.005, 0.02, False),  # it began so
        (0.0001, 0.02, True),
        (math.nan, 1.0, False),
    ],
)
def test_entropy_collapse(entropy, first, wrong):
    assert found(update.entropy_collapse(entropy, first)) == ("entropy_collapse" if wrong else None)


@pytest.mark.parametrize(
    ("length", "first", "wrong"),
    [(100.0, 200.0, False), (2.9, 200.0, True), (3.1, 200.0, False), (1.0, 2.0, False), (0.05, 2.0, True)],
)
def test_length_collapse(length, first, wrong):
    assert found(update.length_collapse(length, first)) == ("length_collapse" if wrong else None)


def test_stale_rows():
    assert update.stale_rows(3, 3) is None
    assert found(update.stale_rows(4, 3)) == "stale_rows"


def test_unscored():
    assert update.unscored(0.99) is None
    assert found(update.unscored(1.0)) == "unscored"


# ---- weights


def model(**kwargs):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32, **kwargs) for _ in range(20)])


def test_the_probe_sees_an_optimizer_step():
    net = model()
    probe, optimizer = WeightProbe(net.parameters()), torch.optim.AdamW(net.parameters(), lr=1e-4)
    assert probe.changed() == 0.0
    net(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    assert probe.changed() > 0.9
    assert probe.changed() == 0.0, "nothing since"


def test_bfloat16_rounds_small_steps_away():
    net = model(dtype=torch.bfloat16)
    nn.init.ones_(net[0].weight)
    probe = WeightProbe([net[0].weight])
    with torch.no_grad():
        net[0].weight -= 1e-6
    assert probe.changed() == 0.0
    with torch.no_grad():
        net[0].weight -= 1e-2
    assert probe.changed() == 1.0


def test_the_probe_watches_few_elements_of_what_can_move():
    net = model()
    for layer in net[:19]:
        layer.requires_grad_(False)
    probe = WeightProbe(net.parameters(), per_tensor=10)
    with torch.no_grad():
        net[0].weight.add_(1.0)
        assert probe.changed() == 0.0
        net[19].weight.add_(1.0)
        assert probe.changed() == 0.5  # ten of its weight, ten of its bias
    assert WeightProbe([net[0].weight]).changed() is None, "nothing to watch"


def test_the_probe_reads_transposed_tensors_and_mixed_dtypes_and_scalars():
    parameters = [
        nn.Parameter(torch.randn(6, 5).t()),
        nn.Parameter(torch.randn(3, dtype=torch.bfloat16)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0)),
    ]
    probe = WeightProbe(parameters)
    with torch.no_grad():
        parameters[1].add_(1.0)
    assert probe.changed() == pytest.approx(3 / 34)
    with torch.no_grad():
        parameters[0].add_(1.0)
        parameters[2].add_(1.0)
    assert probe.changed() == pytest.approx(31 / 34)


def test_the_probe_picks_the_same_elements_every_time():
    first, second = model(), model()
    probes = [WeightProbe(net.parameters(), per_tensor=4, tensors=3) for net in (first, second)]
    for net in (first, second):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.view(-1)[::2] += 1
    assert probes[0].changed() == probes[1].changed()


def test_a_probe_goes_on_from_what_another_read():
    net = model(dtype=torch.bfloat16)
    first = WeightProbe(net.parameters()).last
    assert first.dtype == torch.bfloat16
    assert WeightProbe(net.parameters()).changed_since(first) == 0.0
    with torch.no_grad():
        for layer in net[:10]:
            layer.weight.add_(1.0)
    second = WeightProbe(net.parameters())
    assert second.changed_since(None) is None
    assert second.changed_since(first[1:]) is None, "of other parameters"
    assert 0 < second.changed_since(first) < 1
    assert WeightProbe([]).changed_since(first) is None


def test_the_probe_follows_a_parameter_whose_memory_moves():
    net = model()
    probe = WeightProbe(net.parameters())
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()
    assert probe.changed() == 0.0
    for parameter in net.parameters():
        parameter.data = parameter.data + 1
    assert probe.changed() == 1.0
