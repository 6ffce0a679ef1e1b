"""Padding, trimming, splitting, shuffling."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gruppo.data.collate import collate, join, pad, shuffle_sequence_dict, split_tensor_dict, trim
from gruppo.types import LAYOUTS, Completion, Prompt, Rollout, StopReason, TrainBatch

CPU = torch.device("cpu")
NAN = math.nan


def rollout(prompt: list[int], completion: list[int], **further) -> Rollout:
    return Rollout(
        Prompt(row={}, text="p", ids=prompt), Completion(completion, StopReason.UNKNOWN, **further), output=""
    )


# ---- pad


@pytest.mark.parametrize(
    ("tensors", "options", "expected"),
    [
        ([[1, 2], [3]], {}, [[1, 2], [3, 0]]),
        ([[1, 2], [3]], {"padding_side": "left"}, [[1, 2], [0, 3]]),
        ([[1, 2], [3]], {"padding_value": 9}, [[1, 2], [3, 9]]),
        ([[1, 2, 3], [4]], {"pad_to_multiple_of": 4}, [[1, 2, 3, 0], [4, 0, 0, 0]]),
        ([[1, 2, 3], [4]], {"pad_to_multiple_of": 2, "padding_side": "left"}, [[0, 1, 2, 3], [0, 0, 0, 4]]),
        ([[1, 2], [3]], {"pad_to_multiple_of": 2}, [[1, 2], [3, 0]]),
        ([[1], []], {"padding_value": 7}, [[1], [7]]),
        ([[[1, 2]], [[3], [4]]], {}, [[[1, 2], [0, 0]], [[3, 0], [4, 0]]]),
        ([[[1, 2]], [[3], [4]]], {"padding_side": "left"}, [[[0, 0], [1, 2]], [[3, 0], [4, 0]]]),
    ],
)
def test_pad(tensors, options, expected):
    padded = pad([torch.tensor(t, dtype=torch.long) for t in tensors], **options)
    assert padded.tolist() == expected
    assert padded.dtype == torch.long


def test_pad_takes_two_sides_only():
    with pytest.raises(ValueError, match="padding_side='middle' must be 'left' or 'right'"):
        pad([torch.tensor([1])], padding_side="middle")


# ---- collate


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    batch = collate([rollout([5, 6], [3, 4, 2]), rollout([7, 8, 9], [3, 2])], pad_token_id=0, device=CPU)
    assert {name: tensor.tolist() for name, tensor in batch.to_dict().items()} == {
        "prompt_ids": [[0, 5, 6], [7, 8, 9]],
        "prompt_mask": [[0, 1, 1], [1, 1, 1]],
        "completion_ids": [[3, 4, 2], [3, 2, 0]],
        "completion_mask": [[1, 1, 1], [1, 1, 0]],
    }


def test_masks_of_the_model_are_padded_with_one_and_log_probs_with_nan():
    batch = collate(
        [rollout([5], [3, 4, 2], model_mask=[1, 0, 1]), rollout([5], [3, 2], logps=[-0.5, None])],
        pad_token_id=0,
        device=CPU,
    )
    assert batch.tool_mask.tolist() == [[1, 0, 1], [1, 1, 1]]
    assert batch.loss_mask_BT.tolist() == [[1, 0, 1], [1, 1, 0]]
    expected = torch.tensor([[NAN] * 3, [-0.5, NAN, NAN]])
    assert torch.equal(batch.sampling_per_token_logps.nan_to_num(9), expected.nan_to_num(9))
    assert batch.sampling_per_token_logps.dtype == torch.float32


def test_widths_are_rounded_up():
    batch = collate([rollout([5, 6, 7], [3] * 5)], pad_token_id=9, device=CPU, pad_to_multiple_of=4)
    assert batch.prompt_ids.tolist() == [[9, 5, 6, 7]]
    assert batch.completion_ids.tolist() == [[3, 3, 3, 3, 3, 9, 9, 9]]


@pytest.mark.parametrize(("multiple", "width"), [(None, 1), (4, 4)])
def test_completions_that_are_all_empty_still_have_a_column(multiple, width):
    batch = collate([rollout([5], []), rollout([5, 6], [])], pad_token_id=7, device=CPU, pad_to_multiple_of=multiple)
    assert batch.completion_ids.tolist() == [[7] * width] * 2
    assert batch.completion_mask.sum() == 0


# ---- trim


def batch_of(widths: list[int], prompts: list[int], full: int = 5) -> dict[str, torch.Tensor]:
    """Rows whose completions and prompts are so wide, in a batch that is `full` wide on both sides."""
    columns = torch.arange(full)
    completion_mask = (columns < torch.tensor(widths)[:, None]).long()
    prompt_mask = (columns >= full - torch.tensor(prompts)[:, None]).long()
    return {
        "prompt_ids": prompt_mask * 7,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_mask * 8,
        "completion_mask": completion_mask,
        "advantages": torch.arange(len(widths)).float(),
        "old_per_token_logps": completion_mask * -0.5,
        "importance_sampling_ratio": torch.ones(len(widths), 1),
        "num_items_in_batch": torch.tensor(3.0),
    }


def test_trim_cuts_what_is_padding_in_every_row():
    full = batch_of([1, 3], [2, 4])
    cut = trim(full)
    assert cut["prompt_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert cut["prompt_ids"].tolist() == [[0, 0, 7, 7], [7, 7, 7, 7]]
    assert cut["completion_ids"].tolist() == [[8, 0, 0], [8, 8, 8]]
    assert cut["old_per_token_logps"].tolist() == [[-0.5, 0, 0], [-0.5, -0.5, -0.5]]
    for name in ("advantages", "importance_sampling_ratio", "num_items_in_batch"):
        assert cut[name] is full[name]
    assert full["completion_ids"].shape == (2, 5)


def test_trim_cuts_advantages_per_token_too():
    full = batch_of([2, 3], [5, 5]) | {"advantages": torch.arange(10.0).view(2, 5), "mine": torch.ones(2, 5)}
    cut = trim(full)
    assert cut["advantages"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert cut["mine"].shape == (2, 3)


@pytest.mark.parametrize(("multiple", "width"), [(2, 4), (4, 4), (8, 5), (3, 3)])
def test_trim_keeps_a_multiple_but_never_grows(multiple, width):
    assert trim(batch_of([1, 3], [1, 3]), multiple)["completion_ids"].shape == (2, width)
    assert trim(batch_of([1, 3], [1, 3]), multiple)["prompt_ids"].shape == (2, width)


def test_trim_keeps_what_is_behind_a_hole_in_a_mask():
    full = batch_of([3, 4], [2, 3])
    full["completion_mask"][:, :2] = 0
    full["prompt_mask"][:, -1] = 0
    cut = trim(full)
    assert cut["completion_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert cut["prompt_mask"].tolist() == [[0, 1, 0], [1, 1, 0]]


def test_trim_leaves_a_column_for_rows_that_are_all_masked():
    assert trim(batch_of([0, 0], [1, 1]))["completion_ids"].shape == (2, 1)


@given(data=st.data(), rows=st.integers(1, 4), multiple=st.sampled_from([None, 2, 3]))
def test_trim_loses_no_token(data, rows, multiple):
    widths = data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
    prompts = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    full = batch_of(widths, prompts)
    cut = trim(full, multiple)
    for side in ("prompt", "completion"):
        kept = [ids[mask.bool()].tolist() for ids, mask in zip(cut[f"{side}_ids"], cut[f"{side}_mask"], strict=True)]
        had = [ids[mask.bool()].tolist() for ids, mask in zip(full[f"{side}_ids"], full[f"{side}_mask"], strict=True)]
        assert kept == had


# ---- split and shuffle


def test_split_cuts_equal_slices_of_tensors_and_lists():
    parts = split_tensor_dict(
        {"x": torch.arange(8).view(4, 2), "names": ["a", "b", "c", "d"], "none": None, "total": torch.tensor(5.0)}, 2
    )
    assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"]]
    assert [part["none"] for part in parts] == [None, None]
    assert [part["total"].item() for part in parts] == [5.0, 5.0]


def test_split_looks_for_the_length_past_entries_that_have_none():
    parts = split_tensor_dict({"none": None, "total": torch.tensor(1.0), "x": torch.arange(6)}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


def test_shuffle_applies_one_permutation_to_everything():
    torch.manual_seed(0)
    rows = 16
    before = {
        "x": torch.arange(rows),
        "wide": torch.arange(rows)[:, None] * torch.ones(3, dtype=torch.long),
        "names": list(range(rows)),
        "none": None,
        "total": torch.tensor(3.0),
    }
    after = shuffle_sequence_dict(before)
    order = after["x"].tolist()
    assert sorted(order) == list(range(rows))
    assert order != list(range(rows))
    assert after["wide"][:, 0].tolist() == after["wide"][:, 2].tolist() == after["names"] == order
    assert after["none"] is None
    assert after["total"] is before["total"]
    assert before["x"].tolist() == list(range(rows))


def test_shuffle_draws_from_the_global_generator():
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(shuffle_sequence_dict({"x": torch.arange(20)})["x"].tolist())
    assert orders[0] == orders[1] != orders[2]


# ---- joining


def numbered(rows: int, prompt: int, width: int, first: int = 1, **further: Any) -> TrainBatch:
    """Rows of consecutive numbers, in which every place can be told apart."""
    prompts = torch.arange(first, first + rows * prompt).reshape(rows, prompt)
    completions = torch.arange(first + 100, first + 100 + rows * width).reshape(rows, width)
    return TrainBatch(prompts, torch.ones_like(prompts), completions, torch.ones_like(completions), **further)


def test_every_field_of_a_batch_has_a_layout() -> None:
    assert list(LAYOUTS) == [each.name for each in fields(TrainBatch)]


def test_joined_rows_are_padded_where_their_kind_is() -> None:
    joined = join([numbered(1, 1, 3), numbered(1, 2, 1, first=50)])
    assert joined.prompt_ids.tolist() == [[0, 1], [50, 51]]
    assert joined.prompt_mask.tolist() == [[0, 1], [1, 1]]
    assert joined.completion_ids.tolist() == [[101, 102, 103], [150, 0, 0]]
    assert joined.completion_mask.tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("turned", [False, True], ids=["first without", "first with"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tool_mask", torch.tensor([[0, 1]]), [[1, 1, 1], [0, 1, 1]]),
        ("importance_sampling_ratio", torch.tensor([[0.5, 2.0]]), [[1, 1, 1], [0.5, 2.0, 1]]),
        ("importance_sampling_ratio", torch.tensor([[0.5]]), [[1, 1, 1], [0.5, 0.5, 0.5]]),
        ("sampling_per_token_logps", torch.tensor([[-1.0, -2.0]]), [[None] * 3, [-1.0, -2.0, None]]),
        ("engine_logps", torch.tensor([[-1.0, -2.0]]), None),
        ("engine_entropies", torch.tensor([[1.0, 2.0]]), None),
    ],
)
def test_a_tensor_that_only_some_rows_have(name: str, value: Tensor, expected: Any, turned: bool) -> None:
    batches = [numbered(1, 1, 3), numbered(1, 1, 2, **{name: value})]
    joined = getattr(join(batches[::-1] if turned else batches), name)
    if expected is None:
        assert joined is None
        return
    found = [[None if number != number else number for number in row] for row in joined.tolist()]
    assert found == (expected[::-1] if turned else expected)


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps", "advantages", "old_logps"])
def test_a_tensor_that_nothing_stands_for_must_be_known_for_all_rows(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is known for the rows of some generations"):
        join([numbered(1, 1, 2), numbered(1, 1, 2, **{name: torch.ones(1, 2)})])


def test_advantages_of_rows_and_of_tokens() -> None:
    rows, tokens = torch.tensor([0.5, -0.5]), torch.tensor([[1.0, 2.0]])
    joined = join([numbered(2, 1, 3, advantages=rows), numbered(1, 1, 2, advantages=tokens)])
    assert joined.advantages is not None
    assert joined.advantages.tolist() == [[0.5] * 3, [-0.5] * 3, [1.0, 2.0, 0.0]]
    alone = join([numbered(2, 1, 3, advantages=rows), numbered(2, 1, 2, advantages=rows)])
    assert alone.advantages is not None
    assert alone.advantages.tolist() == [0.5, -0.5, 0.5, -0.5]


def test_one_weight_for_each_row_is_kept_as_it_is() -> None:
    weights = [torch.tensor([[2.0]]), torch.tensor([[3.0]])]
    joined = join([numbered(1, 1, 3 - i, importance_sampling_ratio=each) for i, each in enumerate(weights)])
    assert joined.importance_sampling_ratio is not None
    assert joined.importance_sampling_ratio.tolist() == [[2.0], [3.0]]
