"""The examples with scripted completions in place of the model's, so that the expected measurements are known."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from gruppo import GRPOTrainer
from gruppo.rollout.base import RolloutBackend
from gruppo.types import Completion, SampleRequest, StopReason

Script = Callable[[str, int], str]


class ScriptedBackend(RolloutBackend):
    """Writes `script(text so far, sample number)`, followed by the end-of-sequence token."""

    name = "scripted"

    def __init__(self, config: Any, tokenizer: Any, script: Script):
        self.config, self.tokenizer, self.script = config, tokenizer, script

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return [self._write(request, request.first_sample + i) for request in requests for i in range(request.count)]

    def _write(self, request: SampleRequest, sample: int) -> Completion:
        text = self.script(self.tokenizer.decode(request.prompt_ids), sample)
        return Completion([*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id], StopReason.EOS)


def follow(script: Script, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make an example's trainer follow a script, without a warm-up; the trainers it creates are added to the list."""
    made: list[Any] = []

    class Scripted(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.backend = ScriptedBackend(self.backend.config, self.processing_class, script)
            made.append(self)

    monkeypatch.setattr(example, "GRPOTrainer", Scripted)
    monkeypatch.setattr(example, "imitate", lambda *args, **kwargs: None)
    for name, value in {"logging_steps": 1, "per_device_train_batch_size": 16}.items():
        monkeypatch.setitem(example.CPU_SETTINGS, name, value)
    return made
