"""A scripted model that is told the whole prompt."""

from typing import Any

from gruppo.types import Completion, SampleRequest
from tests.evaluation.test_tir import EOS, ScriptedBackend, text_of


class WholeText(ScriptedBackend):
    """Its script is told the prompt as well."""

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
