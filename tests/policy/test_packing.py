"""Rows to packs: what is in them, where it goes back to, and how they are cut."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gruppo.policy.packing import Packer, cut_rows
from gruppo.types import TrainBatch

PROMPTS = [[5, 6, 7], [5, 6, 7], [9], [5, 6, 7], [9]]
COMPLETIONS = [[8, 9, 2], [3, 2], [4], [], [4, 4, 4, 2]]


def batch(tool_mask: Any = None) -> TrainBatch:
    def padded(rows: Sequence[list[int]], width: int, left: bool, mask: bool) -> torch.Tensor:
        values = [[1] * len(row) if mask else row for row in rows]
        blank = [[0] * (width - len(row)) for row in rows]
        return torch.tensor([b + v if left else v + b for v, b in zip(values, blank, strict=True)])

    return TrainBatch(
        prompt_ids=padded(PROMPTS, 4, True, False),
        prompt_mask=padded(PROMPTS, 4, True, True),
        completion_ids=padded(COMPLETIONS, 5, False, False),
        completion_mask=padded(COMPLETIONS, 5, False, True),
        tool_mask=tool_mask,
    )


def test_the_pack_of_the_docstring() -> None:
    (pack,) = Packer(batch()).packs([0, 1], 100)
    assert pack.input_ids.tolist() == [5, 6, 7, 8, 9, 3]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert (pack.segments.lengths, pack.segments.parents) == ((3, 2, 1), (-1, 0, 0))
    assert pack.sources.tolist() == [2, 3, 4, 2, 5]
    assert pack.targets.tolist() == [8, 9, 2, 3, 2]
    assert pack.places.tolist() == [0, 1, 2, 5, 6]
    assert (pack.tokens, pack.prompt_tokens) == (6, 3)


def test_every_token_is_scored_once_and_goes_back_to_its_place() -> None:
    rows = batch()
    found = torch.zeros_like(rows.completion_ids)
    for pack in Packer(rows).packs(range(5), 4):
        found[torch.tensor(pack.rows)] += pack.padded(pack.targets)
    assert torch.equal(found, rows.completion_ids)


def test_a_completion_of_one_token_adds_nothing_to_the_pack() -> None:
    (pack,) = Packer(batch()).packs([2], 100)
    assert pack.input_ids.tolist() == [9]
    assert (pack.sources.tolist(), pack.targets.tolist()) == ([0], [4])


def test_an_empty_completion_is_a_row_without_scores() -> None:
    (pack,) = Packer(batch()).packs([3], 100)
    assert pack.padded(torch.ones(0)).tolist() == [[0.0] * 5]
    assert pack.input_ids.tolist() == [5, 6, 7]


def test_tokens_that_an_environment_wrote_are_read_but_not_scored() -> None:
    tool_mask = torch.ones(5, 5, dtype=torch.long)
    tool_mask[0, 1] = 0
    (pack,) = Packer(batch(tool_mask)).packs([0], 100)
    assert pack.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert (pack.sources.tolist(), pack.targets.tolist(), pack.places.tolist()) == ([2, 4], [8, 2], [0, 2])


def test_rows_may_have_prompts_of_their_own() -> None:
    (pack,) = Packer(batch(), share=False).packs([0, 1], 100)
    assert pack.input_ids.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 3]
    assert pack.segments.parents == (-1, 0, -1, 2)


def test_gradients_go_back_from_the_padded_rows() -> None:
    (pack,) = Packer(batch()).packs([0, 1], 100)
    values = torch.arange(5.0, requires_grad=True)
    (pack.padded(values) * torch.arange(10.0).view(2, 5)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, 1.0, 2.0, 5.0, 6.0]


def sizes(cut: list[list[int]], keys: Any, prompts: Sequence[int], tails: Sequence[int]) -> list[int]:
    return [sum({keys[i]: prompts[i] for i in part}.values()) + sum(tails[i] for i in part) for part in cut]


def test_the_cut_of_the_docstring() -> None:
    assert cut_rows("aaab", [10] * 4, [20, 20, 20, 5], 60) == [[0, 2], [1, 3]]


def test_groups_stay_together_while_they_fit() -> None:
    keys = "aaaabbbbcccc"
    cut = cut_rows(keys, [10] * 12, [20] * 12, 100)
    assert cut == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert cut_rows(keys, [10] * 12, [20] * 12, 180) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]


def test_a_group_that_does_not_fit_is_cut_evenly() -> None:
    cut = cut_rows("a" * 16, [200] * 16, [511] * 16, 8192)
    assert [len(part) for part in cut] == [8, 8]


def test_a_single_group_may_have_a_budget_of_its_own() -> None:
    keys, prompts, tails = "a" * 8 + "b" * 2, [10] * 10, [10] * 10
    assert cut_rows(keys, prompts, tails, 60, 100) == [list(range(8)), [8, 9]]
    assert [len(part) for part in cut_rows(keys, prompts, tails, 60, 80)] == [4, 4, 2]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_keep_every_row_and_the_budget(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    keys = draw(0, 6, 30)
    of_key = draw(1, 30, 6)
    prompts, tails = [of_key[key] for key in keys], draw(0, 40, 30)
    budget = draw(20, 200, 1)[0]
    cut = cut_rows(keys, prompts, tails, budget)
    assert sorted(i for part in cut for i in part) == list(range(30))
    for part, size in zip(cut, sizes(cut, keys, prompts, tails), strict=True):
        assert size <= budget or len(part) == 1
