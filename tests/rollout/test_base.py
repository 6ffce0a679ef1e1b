"""Requests of groups, and which settings matter."""

import pytest
from transformers import GenerationConfig

from gruppo.rollout.base import group_requests, stop_strings
from gruppo.types import SampleRequest, StopReason

A, B, C = [1, 2], [3], [4, 5, 6]


def parts(requests: list[SampleRequest]) -> list[tuple[list[int], int, int]]:
    """Prompt, count and first sample."""
    return [(list(r.prompt_ids), r.count, r.first_sample) for r in requests]


def streams(requests: list[SampleRequest]) -> list[tuple[int, int]]:
    """The stream of random numbers of every completion."""
    return [(r.noise_key, r.first_sample + i) for r in requests for i in range(r.count)]


def test_a_group_is_one_request():
    assert parts(group_requests([A, A, B, B], group_size=2)) == [(A, 2, 0), (B, 2, 0)]
    assert group_requests([], group_size=2) == []


def test_two_groups_of_one_prompt_are_two_requests():
    requests = group_requests([A] * 4, group_size=2)
    assert parts(requests) == [(A, 2, 0), (A, 2, 0)]
    assert requests[0].noise_key != requests[1].noise_key


def test_rows_of_a_group_may_differ():
    requests = group_requests([A, B, B, A, C, C, C, C], group_size=4)
    assert parts(requests) == [(A, 1, 0), (B, 2, 1), (A, 1, 3), (C, 4, 0)]
    assert len(set(streams(requests))) == 8


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_processes_share_a_batch_and_its_random_numbers(world):
    rows = [A] * 4 + [B] * 4 + [C] * 4
    share = len(rows) // world
    together = group_requests(rows, group_size=4, key=[7])
    apart = [
        request
        for rank in range(world)
        for request in group_requests(
            rows[rank * share : (rank + 1) * share], group_size=4, first_row=rank * share, key=[7]
        )
    ]
    assert streams(apart) == streams(together)
    assert len(set(streams(together))) == 12


def test_a_group_that_straddles_processes_goes_on_where_it_was_left():
    assert parts(group_requests([A, B, B, B], group_size=3, first_row=2)) == [(A, 1, 2), (B, 3, 0)]


def test_noise_keys_depend_on_every_word_and_fit_64_bits():
    keys = {
        request.noise_key
        for seed in (0, 1, 2**63)
        for place in ((0,), (0, 1), (1, 0))
        for request in group_requests([A, B], group_size=1, key=[seed, *place])
    }
    assert len(keys) == 3 * 3 * 2
    assert all(0 <= key < 2**64 for key in keys)
    assert group_requests([A], group_size=2, key=[1, 2]) == group_requests([A], group_size=2, key=[1, 2])


@pytest.mark.parametrize(("given", "read"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"])])
def test_stop_strings_are_a_list(given, read):
    assert stop_strings(GenerationConfig(stop_strings=given)) == read


def test_which_reasons_are_an_end():
    assert {reason for reason in StopReason if reason.ended} == {StopReason.EOS, StopReason.STOP_STRING}
