"""Every trainer tries its model out before it trains: a few tokens by the engine, and a pack of rows.

Hundreds of tests train the same tiny models, so a trial that found nothing wrong is not repeated for the next plain
model with the same config. What trials find is tested in tests/engine/test_support.py and tests/policy/test_packed.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from gruppo.policy import support
from gruppo.rollout import builtin

_PASSED: set[Any] = set()


@pytest.fixture(autouse=True)
def _trials_once_per_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "trial", _remembered(builtin.trial))
    monkeypatch.setattr(support, "packed_trial", _remembered(support.packed_trial))


def _remembered(trial: Callable[..., str | None]) -> Callable[..., str | None]:
    def run(model: nn.Module, *given: Any, **named: Any) -> str | None:
        if not _is_plain(model):
            return trial(model, *given, **named)
        policy = [(type(one), sorted(vars(one).items(), key=str)) for one in given]
        key = repr((trial, type(model), model.dtype, model.config.to_dict(), policy, named))
        failure = None if key in _PASSED else trial(model, *given, **named)
        if failure is None:
            _PASSED.add(key)
        return failure

    return run


def _is_plain(model: Any) -> bool:
    """Whether the model is as transformers makes it: no adapters, hooks or replaced methods."""
    return isinstance(model, PreTrainedModel) and all(
        type(part).__module__.partition(".")[0] in ("torch", "transformers")
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in model.modules()
    )
