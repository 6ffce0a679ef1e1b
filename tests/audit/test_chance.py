"""Tests of tests: how often they cry wolf, and how soon they see one."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from gruppo.audit.chance import Duplicates, Surprise, equal_pairs, prompt_groups, repeats
from gruppo.audit.evidence import FALSE_ALARMS, BadUpdates, Evidence, Streak
from gruppo.audit.tokens import Tokens
from gruppo.types import Completion
from tests.audit.worlds import VOCABULARY, World, rollout


def duplicates(test, rollouts, *, temperature=1.0, shaped=False):
    return test.check(Tokens(rollouts), temperature=temperature, shaped=shaped)


def surprise(test, rollouts, *, temperature=1.0, shaped=False):
    return test.check(Tokens(rollouts), vocabulary=VOCABULARY, temperature=temperature, shaped=shaped)


def generations_until(find, most=50):
    """The number of generations after which something was found; None if nothing was."""
    return next((number for number in range(1, most + 1) if find() is not None), None)


# ---- healthy samplers


SHARPNESS = (0.0, 1.0, 3.0, 5.0, 10.0, 40.0)


@pytest.mark.parametrize("sharpness", SHARPNESS)
def test_200_healthy_generations_of_any_sharpness(sharpness):
    """From completions that are never equal to those that nearly always are."""
    world, first, second = World(3, sharpness=sharpness), Duplicates(), Surprise()
    for _ in range(200):
        rollouts = world.generation(limit=12)
        assert duplicates(first, rollouts) is None
        assert surprise(second, rollouts) is None


def test_the_healthy_worlds_have_every_share_of_duplicates():
    """Else the test above would say little."""
    shares = []
    for sharpness in SHARPNESS:
        rollouts = World(3, sharpness=sharpness).generation(prompts=50, limit=12)
        keys = Tokens(rollouts).keys()
        found, _ = repeats(keys, [0.0] * len(keys), prompt_groups(rollouts))
        shares.append(found / len(keys))
    assert shares[0] < 0.1
    assert any(0.2 < share < 0.7 for share in shares)
    assert shares[-1] > 0.8


def rare_event(seed, probability, tokens=2000):
    """Tokens of a model that is nearly certain: one that surprises comes with this probability."""
    chance = np.random.default_rng(seed)
    rare = chance.random(tokens) < probability
    logps = np.where(rare, math.log(probability), math.log1p(-probability))
    entropy = -(probability * math.log(probability) + (1 - probability) * math.log1p(-probability))
    ids = np.where(rare, 5, 6).tolist()
    return [rollout(ids, plain_logps=logps.tolist(), entropies=[entropy] * tokens)]


def test_rare_surprises_that_stay_away_are_no_finding():
    """The usual z-score of such a generation is -45: it takes what was seen for the spread."""
    for probability in (1e-3, 1e-4):
        test = Surprise()
        for seed in range(200):
            assert surprise(test, rare_event(seed, probability)) is None


def test_expected_repeats_are_right_on_average():
    """In a world with repeats of every kind, the two counts agree."""
    world, found, expected = World(3, sharpness=5.0), 0, 0.0
    for _ in range(100):
        rollouts = world.generation(limit=6)
        tokens = Tokens(rollouts)
        probabilities = np.exp(tokens.row_sums(tokens.logps)).tolist()
        more_found, more_expected = repeats(tokens.keys(), probabilities, prompt_groups(rollouts))
        found, expected = found + more_found, expected + more_expected
    assert found > 300
    assert expected == pytest.approx(found, rel=0.1)


def test_no_bet_can_gain_on_average():
    """exp(gain) is at most 1 + bet · x for one difference x ≥ −1: its mean is at most 1 if that of x is at most 0."""
    for x in np.concatenate([np.linspace(-1, 1, 401), np.geomspace(1, 1e3, 50)]):
        gains = Surprise()._gains(np.array([x]))
        assert all(math.exp(gain) <= 1 + bet * x + 1e-12 for gain, bet in zip(gains, Surprise.BETS, strict=True))
    for mean in (1e-6, 0.01, 0.3, 1.0):  # and exp(bet · n − (e^bet − 1) · mean), for a coin with this mean
        for bet in Duplicates.BETS:
            average = (1 - mean) * math.exp(-math.expm1(bet) * mean) + mean * math.exp(bet - math.expm1(bet) * mean)
            assert average <= 1 + 1e-12


def test_false_alarms_are_as_rare_as_promised():
    """The gain of a healthy generation has an exponential of mean at most 1; measured, with what noise allows."""
    world, test = World(5, sharpness=2.0), Surprise()
    unit = math.log(VOCABULARY) + test.BEYOND
    gains = []
    for _ in range(300):
        tokens = Tokens(world.generation(prompts=1))
        gains.append(test._gains((-tokens.logps - tokens.entropies) / unit))
    assert (np.exp(gains).mean(0) < 1.1).all()


# ---- broken ones


@pytest.mark.parametrize("seed", range(5))
def test_equal_samples_are_found_at_once(seed):
    assert duplicates(Duplicates(), World(seed, copies=2).generation()) is not None


def test_a_single_long_repeat_is_enough():
    finding = duplicates(Duplicates(), [rollout([5, 7] * 10, plain_logps=[-1.0] * 20)] * 2)
    assert finding is not None
    assert finding.values["found"] == 1
    assert finding.values["expected"] < 1e-8


def test_slightly_too_many_repeats_are_found_in_time():
    """Every eighth completion repeats its neighbour where a good part are equal anyway."""
    world, chance, test = World(3, sharpness=3.0), np.random.default_rng(0), Duplicates()

    def find():
        rollouts = world.generation(limit=12)
        copied = chance.random(len(rollouts)) < 1 / 8
        rows = [
            replace(row, completion=rollouts[i - 1].completion) if copied[i] and i % 8 else row
            for i, row in enumerate(rollouts)
        ]
        return duplicates(test, rows)

    assert generations_until(find) is not None


@pytest.mark.parametrize(("power", "word"), [(2.0, "colder"), (1.3, "colder"), (0.7, "hotter"), (0.3, "hotter")])
def test_another_temperature_is_found(power, word):
    world, test, found = World(1, sharpness=2.0, power=power), Surprise(), []
    assert (
        generations_until(lambda: found.append(surprise(test, world.generation(prompts=16))) or found[-1]) is not None
    )
    assert word in found[-1].message


def test_a_greedy_sampler_is_found():
    world, test = World(1, power=50.0), Surprise()
    assert generations_until(lambda: surprise(test, world.generation()), most=10) is not None


def test_a_late_failure_is_found_as_soon_as_an_early_one():
    """A healthy past is not credited."""
    healthy, broken = World(1, sharpness=2.0), World(1, sharpness=2.0, power=2.0)
    fresh, aged = Surprise(), Surprise()
    for _ in range(100):
        surprise(aged, healthy.generation())
    soon = generations_until(lambda: surprise(fresh, broken.generation(prompts=16)))
    late = generations_until(lambda: surprise(aged, broken.generation(prompts=16)))
    assert late <= soon + 2


# ---- what is not tested


def test_greedy_decoding_may_repeat_itself():
    rollouts = World(0, copies=8).generation()
    assert duplicates(Duplicates(), rollouts, temperature=0) is None
    assert surprise(Surprise(), World(0, power=50.0).generation(prompts=50), temperature=0) is None


def test_filters_change_the_distribution():
    rollouts = World(0, power=3.0, sharpness=2.0).generation(prompts=200)
    assert surprise(Surprise(), rollouts, shaped=True) is None
    assert surprise(Surprise(), rollouts) is not None


def without_logps(rollouts):
    return [replace(row, completion=replace(row.completion, plain_logps=None, entropies=None)) for row in rollouts]


def long_rows(different, group=8, length=20):
    """A group in which the first rows are different and all others are equal."""
    rows = [[3 + row % 5] * length if row < different else [9] * length for row in range(group)]
    return [rollout(ids) for ids in rows]


def test_without_log_probs_only_nearly_all_pairs_count():
    test = Duplicates()
    assert duplicates(test, without_logps(World(0).generation())) is None
    assert duplicates(test, long_rows(different=2)) is None  # 15 of 28 pairs
    assert duplicates(test, long_rows(different=0, length=15)) is None, "short answers may well be equal"
    assert duplicates(test, long_rows(different=0, group=4)) is None, "six pairs are too few"
    finding = duplicates(test, long_rows(different=0))
    assert finding is not None
    assert finding.values == {"equal": 28, "pairs": 28}
    assert duplicates(Duplicates(), long_rows(different=0), temperature=0) is None


def test_with_filters_pairs_are_counted_too():
    rows = [replace(row, completion=replace(row.completion, plain_logps=[0.0] * 20)) for row in long_rows(different=0)]
    assert duplicates(Duplicates(), rows) is None, "they were certain"
    assert duplicates(Duplicates(), rows, shaped=True) is not None


# ---- their parts


def test_groups_are_rows_of_the_same_prompt():
    prompts = [[1], [1], [2], [2], [2], [1]]
    assert prompt_groups([rollout([3], prompt=ids) for ids in prompts]) == [range(2), range(2, 5), range(5, 6)]
    assert prompt_groups([]) == []


def test_repeats_by_hand():
    keys, probabilities = [b"a", b"b", b"a", b"a", b"b"], [0.5, 0.25, 0.5, 0.5, 0.25]
    assert repeats(keys, probabilities, [range(5)]) == (3, 0 + 0.5 + 0.75 + 0.75 + 0.75)
    assert repeats(keys, probabilities, [range(2), range(2, 5)]) == (1, 0.5 + 0.5 + 0.5)


def test_pairs_by_hand():
    assert equal_pairs([b"a", b"b", b"a", b"a"], [True] * 4, [range(4)]) == (3, 6)
    assert equal_pairs([b"a", b"b", b"a", b"a"], [True, True, True, False], [range(4)]) == (1, 3)


def test_only_the_models_own_tokens_have_a_chance():
    """A tool's tokens have log-prob 0 or whatever: they were not drawn."""
    own = Completion([3, 7, 7, 4], rollout([]).completion.stop, None, [1, 0, 0, 1], [-30.0, 9.0, 9.0, -30.0])
    rows = [replace(rollout([]), completion=own)] * 2
    finding = duplicates(Duplicates(), rows)
    assert finding is not None
    assert finding.values["expected"] == pytest.approx(math.exp(-60))


def test_evidence_is_added_up_and_forgotten():
    evidence = Evidence(bets=2)
    assert evidence.enough == pytest.approx(math.log(2 / FALSE_ALARMS))
    assert not evidence.add([9.0, -9.0])
    assert evidence.sums == [9.0, 0.0]
    assert evidence.add([9.0, 0.0])
    assert evidence.sums == [0.0, 0.0]


def test_streaks_and_bad_updates():
    streak = Streak(2)
    assert [streak.add(bad) for bad in (True, False, True, True, True)] == [False, False, False, True, True]
    updates = BadUpdates(max_in_a_row=2)
    stops = []
    for bad in (True, False, True, True):
        updates.note(bad)
        stops.append(updates.should_stop)
    assert stops == [False, False, False, True]
    resumed = BadUpdates(max_in_a_row=2)
    resumed.load_state_dict(json.loads(json.dumps(updates.state_dict())))
    assert (resumed.total, resumed.in_a_row, resumed.should_stop) == (3, 0, False), "they stopped that run"
