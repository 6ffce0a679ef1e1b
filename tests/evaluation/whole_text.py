"""A scripted model whose script gets the whole prompt."""

from typing import Any

from gruppo.types import Completion, SampleRequest
from tests.evaluation.test_tir import EOS, ScriptedBackend, text_of


class WholeText(ScriptedBackend):
    """A backend that passes the text of the whole prompt to its script."""

    def __init__(self, script: Any):
        super().__init__(script)
        self.config.eos_token_id = [EOS]

    def _write(self, request: SampleRequest, sample: int) -> Completion:
        script, whole = self.script, text_of(request.prompt_ids)
        self.script = lambda _, sample: script(whole, sample)
        try:
            return super()._write(request, sample)
        finally:
            self.script = script
