"""Sequential tests that run as long as the training run: how much evidence is needed before chance is ruled out.

A test bets against the hypothesis that all is well. Each generation yields a gain, a number whose exponential has a
mean of at most 1 under that hypothesis, and the gains of successive generations are added up. By chance the sum
reaches log(1/p) with a probability of at most p, however often it is checked (Ville's inequality). The sum never falls
below 0, so that a failure need not first make up for a healthy past. Each generation may then be the start of a false
alarm, so the false alarm rate is per generation.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

FALSE_ALARMS = 1e-6  # per generation and test, at most


class Evidence:
    """The summed gains of several bets against the same hypothesis, each suited to a different size of the failure.

    Example:
        evidence = Evidence(bets=2)
        evidence.add([9.0, -1.0])    # False
        evidence.add([9.0, -1.0])    # True: 18 is above log(2 / 1e-6); it begins anew
    """

    def __init__(self, bets: int):
        self.enough = math.log(bets / FALSE_ALARMS)
        self.sums = [0.0] * bets

    def add(self, gains: Sequence[float]) -> bool:
        """Add one generation's gains, one per bet; returns whether the evidence suffices, and if so resets it."""
        self.sums = [max(before + gain, 0.0) for before, gain in zip(self.sums, gains, strict=True)]
        if max(self.sums) < self.enough:
            return False
        self.sums = [0.0] * len(self.sums)
        return True

    def state_dict(self) -> list[float]:
        return list(self.sums)

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.sums = list(state)


class Streak:
    """How many times in a row a condition held.

    Example, of a limit of 2:
        [streak.add(bad) for bad in (True, False, True, True, True)] == [False, False, False, True, True]
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.length = 0

    def add(self, bad: bool) -> bool:
        """Count one observation; returns whether the limit is reached."""
        self.length = self.length + 1 if bad else 0
        return self.length >= self.limit

    def state_dict(self) -> int:
        return self.length

    def load_state_dict(self, state: int) -> None:
        self.length = state


class BadUpdates:
    """Updates that were skipped because their loss or gradient was not finite.

    Example:
        bad = BadUpdates(max_in_a_row=5)
        bad.note(True)
        bad.total == bad.in_a_row == 1 and not bad.should_stop
    """

    def __init__(self, max_in_a_row: int):
        self.max_in_a_row = max_in_a_row
        self.total = 0
        self.in_a_row = 0

    def note(self, bad: bool) -> None:
        """Count an update."""
        self.total += bad
        self.in_a_row = self.in_a_row + 1 if bad else 0

    @property
    def should_stop(self) -> bool:
        return self.in_a_row >= self.max_in_a_row

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.in_a_row = int(state["total"]), int(state["in_a_row"])
        if self.should_stop:
            self.in_a_row = 0  # these updates stopped the run; a resumed run has presumably fixed the cause
