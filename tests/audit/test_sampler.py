import math

import pytest

from gruppo.audit import sampler
from gruppo.audit.tokens import Tokens
from gruppo.errors import RolloutError
from gruppo.types import StopReason
from tests.audit.worlds import END, VOCABULARY, World, rollout


def impossible(**numbers):
    rollouts = [rollout([3, 4, 5]), rollout([3, 4, END], **numbers)]
    if "logps" not in numbers:
        rollouts[0] = rollout([3, 4, 5], plain_logps=[-1.0] * 3, entropies=[0.5] * 3)
    return sampler.impossible_logps(Tokens(rollouts), VOCABULARY)


def known(logps=(-1.0, -2.0, 0.0), entropies=(0.0, 1.0, 2.48), **more):
    return {"plain_logps": list(logps), "entropies": list(entropies), **more}


@pytest.mark.parametrize(
    "numbers",
    [
        known(),
        known(logps=[-1.0, 5e-5, 0.0], entropies=[0.0, -1e-3, math.log(VOCABULARY) + 1e-3]),  # rounding
        known(logps=[-1.0, math.nan, -1.0], entropies=[1.0, math.nan, 1.0], model_mask=[1, 0, 1]),  # a tool's token
        {"logps": [-1.0, None, -2.0]},
    ],
)
def test_possible_logps(numbers):
    assert impossible(**numbers) is None


@pytest.mark.parametrize(
    ("numbers", "which"),
    [
        (known(logps=[-1.0, 0.01, -1.0]), "above_zero"),
        (known(logps=[-1.0, math.nan, -1.0]), "nan"),
        (known(logps=[-1.0, -math.inf, -1.0]), "minus_infinity"),
        (known(entropies=[-0.1, 1.0, 1.0]), "entropies"),
        (known(entropies=[1.0, 2.6, 1.0]), "entropies"),
        (known(entropies=[1.0, math.nan, 1.0]), "entropies"),
        ({"logps": [0.4, None, 0.9]}, "above_zero"),  # probabilities, from a rollout function
        ({"logps": [-1.0, None, math.nan]}, "nan"),
    ],
)
def test_impossible_logps(numbers, which):
    finding = impossible(**numbers)
    assert finding is not None
    assert [name for name, count in finding.values.items() if count] == [which]


def test_log_probs_that_are_not_one_per_token():
    with pytest.raises(RolloutError, match="3 tokens came with 2"):
        sampler.impossible_logps(Tokens([rollout([3, 4, 5], plain_logps=[-1.0, -1.0])]), VOCABULARY)


def bad(*rollouts):
    return sampler.bad_tokens(Tokens(rollouts), VOCABULARY, [END, 9])


def test_good_tokens():
    assert (
        bad(rollout([3, VOCABULARY - 1, END]), rollout([], stop=StopReason.NO_ROOM), rollout([9]), rollout([4]))
        is None
    )
    assert bad(rollout([3, END, 5, 5, END], model_mask=[1, 1, 0, 0, 1])) is None, "turns end, too"


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        ([3, VOCABULARY, END], {"unknown": 1, "behind_end": 0}),
        ([3, -1], {"unknown": 1, "behind_end": 0}),
        ([3, END, 4], {"unknown": 0, "behind_end": 1}),
        ([3, END, END], {"unknown": 0, "behind_end": 1}),  # padding that came back
        ([9, 9, END, END, VOCABULARY], {"unknown": 1, "behind_end": 1}),
    ],
)
def test_bad_tokens(ids, values):
    finding = bad(rollout([3, END]), rollout([]), rollout(ids), rollout([END]))
    assert finding is not None
    assert finding.values == values


def test_nan_logits():
    healthy = [rollout([3, END]), rollout([3], stop=StopReason.LENGTH)]
    assert sampler.nan_logits(Tokens(healthy)) is None
    finding = sampler.nan_logits(Tokens([*healthy, rollout([3], stop=StopReason.NAN)]))
    assert finding is not None
    assert "1 of 3" in finding.message


@pytest.mark.parametrize(
    ("completions", "share"),
    [
        ([[END], [], [3, END], [4]], None),  # a half is not yet most
        ([[END], [], [END], [4]], 0.75),
        ([[], [], []], 1.0),
        ([[5], [6], [7]], None),  # one token is an answer
        ([], None),
    ],
)
def test_empty(completions, share):
    finding = sampler.empty(Tokens([rollout(ids) for ids in completions]), [END])
    assert (None if finding is None else finding.values["share"]) == share


def test_stale_weights():
    assert sampler.stale_weights((7, 7)) is None
    finding = sampler.stale_weights(("update 6", "update 7"))
    assert finding is not None
    assert "'update 6'" in finding.message
    assert "'update 7'" in finding.message


def test_a_healthy_world_passes():
    for seed in range(20):
        rollouts = World(seed).generation()
        tokens = Tokens(rollouts)
        assert sampler.impossible_logps(tokens, VOCABULARY) is None
        assert sampler.bad_tokens(tokens, VOCABULARY, [END]) is None


def test_many_tokens_are_thinned_out():
    few = Tokens([rollout([3] * 10)] * 5)
    assert few.some is few
    many = Tokens([rollout([row % 5] * 1000) for row in range(200)])
    assert len(many) == 200_000
    assert many.some.ids[::1000].tolist() == [row % 5 for row in range(0, 200, 4)]


def test_rows_of_tokens():
    tokens = Tokens([rollout([5, 9, 2]), rollout([]), rollout([7, 2]), rollout([5, 9, 2])])
    assert tokens.row_sums(tokens.ids.astype(float)).tolist() == [16, 0, 9, 16]
    first, second, third, fourth = tokens.keys()
    assert first == fourth != third
    assert second == b""
