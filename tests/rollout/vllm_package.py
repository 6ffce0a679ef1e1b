"""A stand-in for the package `vllm`: an in-process engine that samples from the weights that it is given."""

import sys
import types
from typing import Any, ClassVar

import torch

from tests.rollout.vllm_doubles import Sampler


class FakeLLM:
    """Stands in for vllm.LLM: an engine in this process."""

    made: ClassVar[list["FakeLLM"]] = []

    def __init__(self, **arguments: Any):
        self.arguments = arguments
        self.sampler = Sampler(arguments.get("max_model_len") or 128)
        self.asleep: set[str] = set()
        self.log: list[str] = []
        self.asked: list[tuple[dict[str, Any], Any]] = []
        FakeLLM.made.append(self)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[None]:
        assert method == "reload_weights"
        assert "weights" not in self.asleep
        self.log.append(method)
        held = {}  # an engine may buffer tensors until their layer is complete
        self.sampler.begin()
        try:
            for name, tensor in kwargs["weights_iterator"]:
                held[name] = tensor
        finally:
            self.sampler.load(held)
        self.sampler.end()
        return [None]

    def reset_prefix_cache(self) -> bool:
        self.log.append("reset_prefix_cache")
        self.sampler.prefixes.clear()
        return True

    def sleep(self, level: int) -> None:
        assert level == 2
        assert self.arguments["enable_sleep_mode"]
        assert not self.asleep
        self.asleep = {"weights", "kv_cache"}
        self.log.append("sleep")
        with torch.no_grad():
            for parameter in self.sampler.model.parameters():
                parameter.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep
        self.asleep -= set(tags)
        self.log.append(f"wake {tags[0]}")

    def generate(self, prompts: list[dict[str, Any]], sampling_params: list[Any], use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        self.log.append("generate")
        self.asked += zip(prompts, sampling_params, strict=True)
        return [
            types.SimpleNamespace(
                outputs=[
                    _output(index, one, "logprobs" in vars(params))
                    for index, one in enumerate(self.sampler.complete(prompt["prompt_token_ids"], vars(params)))
                ]
            )
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]


def _output(index: int, one: dict[str, Any], with_logps: bool) -> Any:
    pairs = zip(one["ids"], one["logps"], strict=True)
    return types.SimpleNamespace(
        index=index,
        token_ids=one["ids"],
        logprobs=[{token: types.SimpleNamespace(logprob=logp)} for token, logp in pairs] if with_logps else None,
        finish_reason=one["finish"],
        stop_reason=one["stop"],
    )


def fake_vllm(version: str = "0.32.0") -> dict[str, types.ModuleType]:
    """The modules that `import vllm` finds."""
    package, params = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    package.__version__ = version  # type: ignore[attr-defined]
    package.LLM = FakeLLM  # type: ignore[attr-defined]
    package.SamplingParams = types.SimpleNamespace  # type: ignore[attr-defined]
    params.StructuredOutputsParams = types.SimpleNamespace  # type: ignore[attr-defined]
    params.RepetitionDetectionParams = types.SimpleNamespace  # type: ignore[attr-defined]
    package.sampling_params = params  # type: ignore[attr-defined]
    return {"vllm": package, "vllm.sampling_params": params}


def install_fake_vllm(version: str = "0.32.0") -> None:
    """Install the stand-in for the rest of this process."""
    sys.modules.update(fake_vllm(version))
