"""Whether the sampler is as random as its log-probs claim: two statistical tests.

    duplicates   how many completions of a prompt are equal, compared with the expected number
    entropy      how surprising the sampled tokens are, compared with the expected surprise

Both use the log-probs under the distribution that was sampled from. With top-k, top-p and the like (`shaped`) these
are unknown, and at temperature 0 nothing is random.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gruppo.audit.evidence import Evidence
from gruppo.audit.findings import Finding
from gruppo.audit.tokens import Floats, Tokens
from gruppo.types import Rollout

LONG = 16  # tokens: completions this long are not equal by chance, unless the policy has collapsed
NEARLY_ALL = 0.9
FEWEST_PAIRS = 10


def prompt_groups(rollouts: Sequence[Rollout]) -> list[range]:
    """Consecutive rows with the same prompt.

    These need not be blocks of the group size: a group may span processes, and environments may change prompts.
    """
    prompts = [rollout.prompt.ids for rollout in rollouts]
    starts = [row for row, ids in enumerate(prompts) if not row or not _same(ids, prompts[row - 1])]
    return [range(start, end) for start, end in pairwise([*starts, len(rollouts)])]


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return one is other or (len(one) == len(other) and one == other)


def repeats(keys: Sequence[bytes], probabilities: Sequence[float], groups: Sequence[range]) -> tuple[int, float]:
    """How many completions equal an earlier one of their group, and the expected number.

    The probability that a completion equals an earlier one is the total probability of the distinct earlier ones,
    which is known before it is drawn: the difference between the two counts is a martingale for every model.
    """
    found, expected = 0, 0.0
    for group in groups:
        seen: set[bytes] = set()
        mass = 0.0
        for row in group:
            expected += min(mass, 1.0)
            if keys[row] in seen:
                found += 1
            else:
                seen.add(keys[row])
                mass += probabilities[row]
    return found, expected


def equal_pairs(keys: Sequence[bytes], long: Sequence[bool], groups: Sequence[range]) -> tuple[int, int]:
    """Number of equal pairs and of all pairs of long completions of the same prompt."""
    equal, pairs = 0, 0
    for group in groups:
        counts = Counter(keys[row] for row in group if long[row])
        equal += sum(math.comb(count, 2) for count in counts.values())
        pairs += math.comb(counts.total(), 2)
    return equal, pairs


class Duplicates:
    """Check `duplicates`: completions of a prompt are equal more often than their log-probs allow."""

    # A bet gains if equal completions are too frequent by more than a factor, which is 1.3 for the smallest bet and
    # half a million for the largest. For a count whose mean is at most m, the exponential of
    # bet · count − (e^bet − 1) · m has a mean of at most 1.
    BETS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

    def __init__(self) -> None:
        self.evidence = Evidence(len(self.BETS))

    def check(self, tokens: Tokens, *, temperature: float, shaped: bool) -> Finding | None:
        if temperature == 0:
            return None
        keys, groups = tokens.keys(), prompt_groups(tokens.rollouts)
        if tokens.logps is None or shaped:
            return self._without_logps(keys, (tokens.lengths >= LONG).tolist(), groups)
        logps = np.where(tokens.own, np.nan_to_num(tokens.logps, nan=0.0), 0.0)
        probabilities = np.exp(np.minimum(tokens.row_sums(logps), 0.0)).tolist()
        found, expected = repeats(keys, probabilities, groups)
        if not self.evidence.add([bet * found - math.expm1(bet) * expected for bet in self.BETS]):
            return None
        return Finding(
            "duplicates",
            f"{found} of {len(keys)} completions equal an earlier one of the same prompt; their own log-probs predict "
            f"about {expected:.3g}. Samples of a group are not drawn independently: look at the random numbers of the "
            "sampler (one seed for all of a group?), at a cache of completions, or at a sampler that is greedy though "
            "a temperature is set.",
            {"found": float(found), "expected": expected},
        )

    def _without_logps(self, keys: Sequence[bytes], long: Sequence[bool], groups: Sequence[range]) -> Finding | None:
        equal, pairs = equal_pairs(keys, long, groups)
        if pairs < FEWEST_PAIRS or equal <= NEARLY_ALL * pairs:
            return None
        return Finding(
            "duplicates",
            f"{equal / pairs:.0%} of the pairs of completions of the same prompt that have {LONG} tokens or more are "
            "equal. Groups of equal completions have no advantage, and nothing is learned. Either the sampler does "
            "not draw independently (one seed for all of a group, greedy decoding, top_k=1), or the policy has "
            "collapsed: compare `entropy` with what it was at the beginning.",
            {"equal": float(equal), "pairs": float(pairs)},
        )

    def state_dict(self) -> Any:
        return self.evidence.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.evidence.load_state_dict(state)


class Surprise:
    """Check `entropy`: tokens are less or more surprising than the reported distribution implies.

    At every token and for every model, the mean of the surprise −log p of the drawn token is the entropy of the
    distribution: their difference is a martingale. If x is such a difference in units that keep it above −1, the
    exponential of bet · x + (log(1 − bet) + bet) · x² has a mean of at most 1. The spread is thus measured, not
    assumed. Still, a generation that happens to lack rare tokens proves nothing, since no bet is above 1.
    """

    BETS = (0.05, 0.2, 0.5, 0.9)
    TOLERANCE = 0.02  # share of the entropy: allows for rounding and differences between kernels
    BEYOND = 10.0  # surprises are capped at this many nats above log(vocabulary) where they must be bounded

    def __init__(self) -> None:
        self.colder, self.hotter = Evidence(len(self.BETS)), Evidence(len(self.BETS))

    def check(self, tokens: Tokens, *, vocabulary: int, temperature: float, shaped: bool) -> Finding | None:
        tokens = tokens.some
        if temperature == 0 or shaped or tokens.logps is None or tokens.entropies is None:
            return None
        surprise, entropy = -tokens.logps, tokens.entropies
        usable = tokens.own & np.isfinite(surprise) & np.isfinite(entropy)
        if not usable.all():
            surprise, entropy = surprise[usable], entropy[usable]
        if not len(surprise):
            return None
        unit = math.log(vocabulary) + self.BEYOND
        lost = math.exp(-self.BEYOND - 1)  # most that the cap lowers the mean: Σ p (−log p − unit)
        too_hot = surprise - (1 + self.TOLERANCE) * entropy
        too_cold = (1 - self.TOLERANCE) * entropy - lost - np.minimum(surprise, unit)
        hotter, colder = self.hotter.add(self._gains(too_hot / unit)), self.colder.add(self._gains(too_cold / unit))
        if not hotter and not colder:
            return None
        return self._finding("hotter" if hotter else "colder", surprise.mean(), entropy.mean(), temperature)

    def _gains(self, x: Floats) -> list[float]:
        total, squares = float(x.sum()), float(np.square(x).sum())
        return [bet * total + (math.log1p(-bet) + bet) * squares for bet in self.BETS]

    @staticmethod
    def _finding(word: str, surprise: float, entropy: float, temperature: float) -> Finding:
        return Finding(
            "entropy",
            f"The sampler is {word} than requested: its tokens have a mean surprise of {surprise:.4f} nats, but the "
            f"distribution at temperature {temperature:g} that their log-probs belong to has an entropy of "
            f"{entropy:.4f}. The tokens drawn do not match their log-probs: look at the temperature that the sampler "
            "really uses, at filters (top-k, top-p) that it applies on its own, and at its random numbers.",
            {"surprise": float(surprise), "entropy": float(entropy)},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"colder": self.colder.state_dict(), "hotter": self.hotter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.colder.load_state_dict(state["colder"])
        self.hotter.load_state_dict(state["hotter"])
