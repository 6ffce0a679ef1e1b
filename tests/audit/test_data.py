import json

import pytest
import torch

from gruppo.audit import PromptBooks
from gruppo.errors import CheckpointError


def checks(findings):
    return [finding.check for finding in findings]


def totals(books):
    return {name.removeprefix("prompts/"): count for name, count in books.metrics().items()}


def test_epochs_that_balance():
    books = PromptBooks(5, left_over=1)
    for epoch, order in enumerate(([3, 0, 4, 1], [1, 2, 0, 3], [4, 2, 1, 0])):
        assert books.take(order[:2], epoch) == []
        assert books.take(order[2:], epoch) == []
    assert books.close(before=3) == []
    assert totals(books) == {"seen": 12, "skipped": 3, "repeated": 0}


def test_a_prompt_that_comes_twice():
    books = PromptBooks(5)
    assert books.take([3, 0], 0) == []
    (finding,) = books.take([4, 3], 0)
    assert finding.check == "prompt_repeated"
    assert "(3)" in finding.message
    assert checks(books.take([1, 1, 1], 0)) == ["prompt_repeated"]
    assert totals(books)["repeated"] == 3


def test_counts_do_not_overflow():
    books = PromptBooks(1)
    books.take([0], 0)
    for _ in range(3):
        assert checks(books.take([0] * 200, 0)) == ["prompt_repeated"]
    assert totals(books)["repeated"] == 600
    assert books.close(before=1) == []


def test_prompts_that_are_left_out():
    books = PromptBooks(5, left_over=1)
    books.take([3, 0, 4], 0)
    (finding,) = books.take([1, 2], 1)
    assert finding.check == "prompt_skipped"
    assert finding.values == {"epoch": 0, "skipped": 2, "expected": 1}
    assert "(1, 2)" in finding.message


def test_fewer_left_out_than_fill_no_generation_is_wrong_too():
    books = PromptBooks(4, left_over=1)
    books.take([0, 1, 2, 3], 0)
    assert checks(books.close(before=1)) == ["prompt_skipped"]


def test_an_epoch_that_was_left_out_altogether():
    books = PromptBooks(2)
    books.take([0, 1], 0)
    (finding,) = books.take([0], 2)
    assert (finding.check, finding.values["epoch"]) == ("prompt_skipped", 1)


def test_an_epoch_that_is_ended_on_purpose():
    books = PromptBooks(4)
    books.take([0, 1], 0)
    books.end_early(0)
    books.end_early(2)
    books = resumed(books, prompts=4)
    assert books.take([3], 1) == []
    assert totals(books)["skipped"] == 2
    books.end_early(0)  # it is over
    assert checks(books.take([0], 2)) == ["prompt_skipped"], "epoch 1 was not"
    assert books.take([0], 3) == []
    assert totals(books)["skipped"] == 2 + 3 + 3


def test_prompts_that_do_not_exist():
    books = PromptBooks(3)
    (finding,) = books.take([0, 3, -1], 0)
    assert finding.check == "prompt_unknown"
    assert "(3, -1)" in finding.message
    assert books.take([1, 2], 0) == []
    assert books.close(before=1) == []


def test_a_generation_may_cross_the_border_of_epochs():
    books = PromptBooks(3)
    assert books.take([2, 0], 0) == []
    assert books.take([1, 2], [0, 1]) == []
    assert books.take([0, 1], 1) == []
    assert books.close(before=2) == []
    assert totals(books) == {"seen": 6, "skipped": 0, "repeated": 0}


def test_an_epoch_that_was_over():
    books = PromptBooks(2)
    books.take([0, 1], 0)
    books.take([0], 1)
    (finding,) = books.take([1], 0)
    assert finding.check == "prompt_repeated"
    assert "epoch 0, which was over" in finding.message


def test_streams_without_end_are_counted_only():
    books = PromptBooks(None)
    assert books.take([7, 7, 7], 0) == []
    assert books.take([7], 1) == []
    assert totals(books) == {"seen": 4, "skipped": 0, "repeated": 0}
    again = PromptBooks(None)
    again.load_state_dict(books.state_dict())
    assert totals(again)["seen"] == 4


def test_a_run_that_begins_in_the_middle():
    books = PromptBooks(3, first_epoch=2)
    assert books.take([1, 1], 1) == []
    assert books.take([0, 1, 2], 2) == []
    assert books.close(before=3) == []
    assert totals(books) == {"seen": 5, "skipped": 0, "repeated": 0}


def resumed(books, **kwargs):
    state = books.state_dict()
    counts = state.pop("counts")
    assert counts.dtype == torch.uint8
    again = PromptBooks(**kwargs)
    again.load_state_dict({**json.loads(json.dumps(state)), "counts": counts.clone()})
    return again


def test_books_go_on_after_a_checkpoint():
    straight = PromptBooks(5, left_over=1)
    straight.take([3, 0], 0)
    other = resumed(straight, prompts=5, left_over=1)
    for books in (straight, other):
        assert checks(books.take([3, 4], 0)) == ["prompt_repeated"]
        assert checks(books.take([1, 2], 1)) == ["prompt_skipped"]
        assert totals(books) == {"seen": 6, "skipped": 2, "repeated": 1}
    assert checks(resumed(straight, prompts=5, left_over=1).take([4], 0)) == ["prompt_repeated"], "epoch 0 is closed"


def test_a_checkpoint_does_not_change_with_the_run():
    books = PromptBooks(3)
    books.take([0], 0)
    state = books.state_dict()
    books.take([1], 0)
    assert state["counts"].tolist() == [[1, 0, 0]]


def test_another_dataset_is_refused():
    books = PromptBooks(3)
    books.take([0], 0)
    with pytest.raises(CheckpointError, match="had 3 prompts and this one has 4"):
        PromptBooks(4).load_state_dict(books.state_dict())
