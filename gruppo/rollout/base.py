"""What a rollout backend is: something that answers sample requests."""

from collections.abc import Sequence
from typing import Protocol

from gruppo.types import Completion, SampleRequest


class RolloutBackend(Protocol):
    """Samples completions from the current weights of the policy.

    The trainer never knows where sampling runs. A backend returns, for requests in order, `count` completions each,
    flat and in order; it leaves the policy as it found it.
    """

    name: str

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]: ...


def group_requests(prompt_ids: Sequence[Sequence[int]]) -> list[SampleRequest]:
    """One request per run of equal prompts.

    Example:
        [[1, 2], [1, 2], [3]] -> [SampleRequest([1, 2], 2), SampleRequest([3], 1)]
    """
    requests: list[SampleRequest] = []
    for ids in prompt_ids:
        if requests and list(requests[-1].prompt_ids) == list(ids):
            requests[-1] = SampleRequest(requests[-1].prompt_ids, requests[-1].count + 1)
        else:
            requests.append(SampleRequest(ids, 1))
    return requests
