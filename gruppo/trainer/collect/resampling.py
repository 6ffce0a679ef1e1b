"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476): which groups of a generation are replaced, and by what.

A group whose rewards are all equal has advantages of 0: nothing can be learned from it, and its place in the batch is
wasted. Completions of the next prompts of the stream replace it, in rounds, until every group has spread or the
configured number of rounds is used up.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gruppo.algo.advantages import combine_rewards
from gruppo.algo.stats import nanstd
from gruppo.trainer.collect.generation import Generation


def groups_without_spread(rewards_N: Tensor, group_size: int) -> list[int]:
    """The groups whose rewards, as the recipe compares them, have a standard deviation of 0.

    Unscorable rows are ignored. A group with fewer than two scorable rows has no standard deviation and is not
    returned, as in `frac_reward_zero_std`.
    """
    std_P = nanstd(rewards_N.view(-1, group_size), dim=1)
    return [int(group) for group in std_P.isclose(torch.zeros_like(std_P)).nonzero()[:, 0].tolist()]


def resampling_metrics(generation: Generation, left: int, weights_R: Tensor, group_size: int) -> dict[str, float]:
    """Metrics of the replacements of a generation; `left` is the number of groups without spread that remain."""
    groups, sampled = len(generation.rewards_NR) // group_size, len(generation.lengths_N4) // group_size
    metrics = {
        "dynamic_sampling/rounds": float(len(generation.replaced)),
        "dynamic_sampling/prompts_sampled": float(sampled),
        "dynamic_sampling/prompts_replaced": float(sampled - groups),
        "dynamic_sampling/left_without_spread": left / groups,
    }
    if generation.replaced:
        rewards_M = combine_rewards(torch.cat([part.rewards_NR for part in generation.replaced]), weights_R)
        metrics["dynamic_sampling/reward_of_replaced"] = rewards_M.nanmean().item()
    return metrics


def runs(places: Sequence[int]) -> list[slice]:
    """Slices of consecutive places: runs([2, 3, 6, 7, 8]) == [slice(0, 2), slice(2, 5)]."""
    breaks = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return [slice(start, stop) for start, stop in pairwise([0, *breaks, len(places)])] if places else []
