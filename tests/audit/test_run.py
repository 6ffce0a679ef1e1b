import json
import math

import pytest

from gruppo.audit import RunAudits
from gruppo.audit.tokens import Tokens
from gruppo.types import StopReason
from tests.audit.worlds import END, SETTINGS, VOCABULARY, World, rollout

HEALTHY = dict(
    drift_mean=0.02,
    drift_max=0.5,
    drift_ratio=1.0,
    grad_norm=1.0,
    learning_rate=1e-6,
    moving_rows=64,
    entropy=1.0,
    mean_length=100.0,
    oldest_rows=1,
    allowed_age=1,
    changed_share=0.9,
)
UNKNOWN = dict(
    drift_mean=None,
    drift_max=None,
    drift_ratio=None,
    grad_norm=None,
    entropy=None,
    mean_length=None,
    changed_share=None,
)


def checks(findings):
    return [finding.check for finding in findings]


def test_a_healthy_run_finds_nothing():
    world, audits = World(0, sharpness=2.0), RunAudits()
    for _ in range(200):
        rollouts = world.generation()
        assert audits.after_sampling(rollouts, **SETTINGS) == []
        assert audits.after_scoring(spread_share=0.3, unscorable_share=0.1) == []
        assert audits.after_update(**HEALTHY) == []
        assert audits.after_update(**{**HEALTHY, **UNKNOWN}) == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"drift_mean": 0.5}, "drift"),
        ({"grad_norm": 0.0}, "zero_gradient"),
        ({"grad_norm": 101.0}, "exploding_gradient"),
        ({"entropy": 0.001}, "entropy_collapse"),
        ({"mean_length": 1.5}, "length_collapse"),
        ({"oldest_rows": 2}, "stale_rows"),
    ],
)
def test_an_update_that_goes_wrong(change, check):
    audits = RunAudits()
    for _ in range(25):
        assert audits.after_update(**HEALTHY) == []
    assert checks(audits.after_update(**{**HEALTHY, **change})) == [check]


@pytest.mark.parametrize(
    ("rollouts", "change", "check"),
    [
        ([rollout([3, END], plain_logps=[0.5, -1.0])], {}, "impossible_logps"),
        ([rollout([3, 77])], {}, "bad_tokens"),
        ([rollout([3], stop=StopReason.NAN), rollout([4, END])], {}, "nan_logits"),
        ([rollout([END]), rollout([END])], {}, "empty"),
        ([rollout([3, END])], {"weights": (3, 4)}, "stale_weights"),
        ([rollout([5] * 20, plain_logps=[-2.0] * 20)] * 4, {}, "duplicates"),
        (World(0, sharpness=2.0, power=4.0).generation(prompts=60), {}, "entropy"),
    ],
)
def test_a_generation_that_goes_wrong(rollouts, change, check):
    findings = RunAudits().after_sampling(rollouts, **{**SETTINGS, **change})
    assert check in checks(findings)
    assert set(checks(findings)) <= {check, "duplicates"}, "a colder sampler repeats itself, too"


def test_no_rollouts_are_nobodys_fault():
    assert RunAudits().after_sampling([], **SETTINGS) == []


def test_weights_that_never_move():
    audits, still = RunAudits(), {**HEALTHY, "changed_share": 0.0}
    assert checks(audits.after_update(**still)) == []
    assert checks(audits.after_update(**{**still, "learning_rate": 0.0})) == [], "warm-up says nothing"
    assert checks(audits.after_update(**{**still, "grad_norm": 0.0, "moving_rows": 0})) == []
    assert checks(audits.after_update(**still)) == []
    assert checks(audits.after_update(**still)) == ["frozen_weights"]
    assert checks(audits.after_update(**HEALTHY)) == []
    assert checks(audits.after_update(**still)) == []


def test_nothing_ends():
    audits, cut = RunAudits(), [rollout([3, 4], stop=StopReason.LENGTH), rollout([3], stop=StopReason.TOOL_BUDGET)]
    for _ in range(19):
        assert audits.after_sampling(cut, **SETTINGS) == []
    assert audits.after_sampling([*cut, rollout([3, END])], **SETTINGS) == []
    for _ in range(19):
        assert audits.after_sampling(cut, **SETTINGS) == []
    assert checks(audits.after_sampling(cut, **SETTINGS)) == ["no_end"]


def test_nothing_is_learned():
    audits = RunAudits()
    for share in [0.0] * 19 + [0.1] + [0.0] * 10 + [None] + [0.0] * 9:
        assert audits.after_scoring(spread_share=share, unscorable_share=0.0) == []
    assert checks(audits.after_scoring(spread_share=0.0, unscorable_share=0.0)) == ["no_signal"]


def test_nothing_is_scored():
    assert checks(RunAudits().after_scoring(spread_share=None, unscorable_share=1.0)) == ["unscored"]


def test_updates_without_a_gradient_do_not_lower_the_median():
    audits = RunAudits()
    for _ in range(25):
        audits.after_update(**HEALTHY)
    for _ in range(60):
        audits.after_update(**{**HEALTHY, "grad_norm": 0.0, "moving_rows": 0})
    assert audits.after_update(**HEALTHY) == []


def test_a_beginning_that_is_not_a_number_is_not_one():
    audits = RunAudits()
    for _ in range(3):
        audits.after_update(**{**HEALTHY, "entropy": math.nan})
    for _ in range(5):
        audits.after_update(**HEALTHY)
    assert checks(audits.after_update(**{**HEALTHY, "entropy": 0.001})) == ["entropy_collapse"]


def test_a_state_does_not_change_with_the_run():
    audits = RunAudits()
    states = []
    for entropy in (1.0, 2.0):
        audits.after_update(**{**HEALTHY, "entropy": entropy})
        audits.surprise.check(
            Tokens(World(0, power=2.0).generation()), vocabulary=VOCABULARY, temperature=1.0, shaped=False
        )
        states.append(audits.state_dict())
        if len(states) == 1:
            saved = json.dumps(states[0])
    assert json.dumps(states[0]) == saved != json.dumps(states[1])


def test_a_resumed_run_finds_what_the_other_finds():
    """Everything that is remembered is in the state, which is plain JSON."""
    straight, world = RunAudits(), World(0, sharpness=2.0, power=1.5)
    bad = {**HEALTHY, "changed_share": 0.0, "grad_norm": 0.5, "entropy": 2.0, "mean_length": 50.0}
    cut = [rollout([3, 4], stop=StopReason.LENGTH)]
    for _ in range(2):
        straight.after_update(**bad)
        straight.after_scoring(spread_share=0.0, unscorable_share=0.0)
        straight.after_sampling(cut, **SETTINGS)
    straight.surprise.check(Tokens(world.generation()), vocabulary=VOCABULARY, temperature=1.0, shaped=False)
    straight.duplicates.evidence.sums = [1.0] * 6
    resumed = RunAudits()
    fresh = resumed.state_dict()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.state_dict() == straight.state_dict()
    assert [name for name, value in straight.state_dict().items() if value == fresh[name]] == []
    for audits in (straight, resumed):
        assert checks(audits.after_update(**bad)) == ["frozen_weights"]
