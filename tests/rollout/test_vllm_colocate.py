"""Sampling with an engine in this process, which a stand-in for the package takes the place of."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, GenerationConfig

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.vllm import colocate
from gruppo.rollout.vllm.colocate import EngineSettings, VLLMColocateBackend, engine_arguments
from gruppo.rollout.vllm.requests import EXTRA
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import tiny_model
from tests.processes import run_together
from tests.rollout.vllm_doubles import saved_model
from tests.rollout.vllm_package import FakeLLM, fake_vllm, install_fake_vllm
from tests.trainer.runs import slow_scores

REQUESTS = [SampleRequest([9, 10, 11], 3, noise_key=5), SampleRequest([20], 2, noise_key=6)]
SYNC, CALL = ["reload_weights", "reset_prefix_cache"], ["generate"]


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_vllm().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved_model(tmp_path / "model"))


def backend_of(model: Any, fields: dict[str, Any] | None = None, **settings: Any) -> VLLMColocateBackend:
    extra = (fields or {}).pop(EXTRA, {})
    config = GenerationConfig(**({"do_sample": True, "max_new_tokens": 6, "pad_token_id": 0} | (fields or {})))
    setattr(config, EXTRA, extra)
    made = EngineSettings(rows=8, dtype=torch.float32, **settings)
    return VLLMColocateBackend(lambda: model, config, stop_ids=[1], settings=made)


def assert_sampled_from(model: Any, found: list[Completion]) -> None:
    prompts = [list(request.prompt_ids) for request in REQUESTS for _ in range(request.count)]
    for prompt, completion in zip(prompts, found, strict=True):
        expected, _ = slow_scores(model, prompt, completion.ids)
        assert completion.logps == pytest.approx(expected, abs=1e-4)


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)


def test_the_engine_is_set_up_as_the_config_says() -> None:
    settings = EngineSettings(512, torch.bfloat16, memory_share=0.4, context_length=900, model_impl="transformers")
    assert engine_arguments("org/model", settings, rank=0, processes=1) == {
        "model": "org/model",
        "revision": None,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.4,
        "max_model_len": 900,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 4096,
        "enable_sleep_mode": False,
        "model_impl": "transformers",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "seed": 0,
    }


def test_neighbours_share_an_engine() -> None:
    settings = EngineSettings(4096, torch.bfloat16, tensor_parallel_size=2)
    found = engine_arguments("org/model", settings, rank=5, processes=8)
    assert found["distributed_executor_backend"] == "external_launcher"
    assert (found["seed"], found["max_num_seqs"], found["max_num_batched_tokens"]) == (2, 8192, 8192)


def test_samples_are_those_of_the_policy_as_it_is_now(model: Any) -> None:
    backend = backend_of(model)
    (engine,) = FakeLLM.made
    assert_sampled_from(model, backend.sample(REQUESTS))
    backend.sample(REQUESTS)
    change(model)
    assert_sampled_from(model, backend.sample(REQUESTS))
    assert engine.log == SYNC + CALL + CALL + SYNC + CALL
    assert backend.metrics().keys() == {"rollout/sync_seconds"}


def test_each_group_is_one_request_with_its_own_seed_and_limit(model: Any) -> None:
    backend = backend_of(model, {"temperature": 0.5, "top_k": 7})
    backend.sample([*REQUESTS, SampleRequest([9] * 126, 1, noise_key=1), SampleRequest([9] * 128, 1, noise_key=1)])
    (engine,) = FakeLLM.made
    prompts, params = zip(*engine.asked, strict=True)
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [3, 1, 126]
    assert [p.n for p in params] == [3, 2, 1]
    assert [p.max_tokens for p in params] == [6, 6, 2]
    assert len({p.seed for p in params}) == 3
    assert {(p.temperature, p.top_k, p.logprobs, p.detokenize) for p in params} == {(0.5, 7, 0, False)}


def test_context_length_of_the_engine_bounds_completions(model: Any) -> None:
    backend = backend_of(model, context_length=10)
    (found, none) = backend.sample([SampleRequest([9] * 8, 1, noise_key=1), SampleRequest([9] * 10, 1, noise_key=1)])
    assert 1 <= len(found.ids) <= 2
    assert none.stop is StopReason.NO_ROOM


def test_a_minimum_is_lowered_where_there_is_less_room(model: Any) -> None:
    backend = backend_of(model, {"min_new_tokens": 4}, context_length=12)
    backend.sample([SampleRequest([9] * 10, 1, noise_key=1), SampleRequest([9], 1, noise_key=1)])
    (made,) = FakeLLM.made
    assert [(params.min_tokens, params.max_tokens) for _, params in made.asked] == [(2, 2), (4, 6)]


def test_what_only_vllm_knows_reaches_it(model: Any) -> None:
    repetition = {"max_pattern_size": 4, "min_count": 3}
    extra = {
        "structured_outputs": {"regex": "[0-9]+"},
        "repetition_detection": repetition,
        "presence_penalty": 0.5,
    }
    backend = backend_of(model, {EXTRA: extra, "stop_strings": ["\n"]})
    backend.sample(REQUESTS)
    ((_, params), *_) = FakeLLM.made[0].asked
    assert params.structured_outputs.regex == "[0-9]+"
    assert vars(params.repetition_detection) == repetition, "an object: SamplingParams takes a dictionary as it is"
    assert (params.presence_penalty, params.stop, params.detokenize) == (0.5, ["\n"], True)


# ---- sleep


def test_a_sleeping_engine_gets_its_weights_back(model: Any) -> None:
    backend = backend_of(model, sleeps=True)
    (engine,) = FakeLLM.made
    assert engine.log == ["sleep"]
    awake = ["wake weights", "reload_weights", "wake kv_cache", "reset_prefix_cache", "generate", "sleep"]
    for _ in range(2):
        engine.log.clear()
        assert_sampled_from(model, backend.sample(REQUESTS))
        assert engine.log == awake
    assert backend.weights_version is not None, "of the last samples"


def test_an_engine_stays_awake_between_turns(model: Any) -> None:
    backend = backend_of(model, sleeps=True)
    (engine,) = FakeLLM.made
    engine.log.clear()
    with backend.turns():
        for _ in range(3):
            assert_sampled_from(model, backend.sample(REQUESTS))
    assert engine.log.count("reload_weights") == 1
    assert engine.log[-1] == "sleep"


def test_memory_is_given_back_on_request(model: Any) -> None:
    backend = backend_of(model, sleeps=True)
    (engine,) = FakeLLM.made
    backend.refresh()
    assert not engine.asleep
    backend.release()
    assert engine.asleep
    wide_awake = backend_of(model)
    wide_awake.release()
    assert "sleep" not in FakeLLM.made[1].log


# ---- errors


def test_vllm_that_is_not_installed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        ConfigError,
        match=r"cannot be imported.*pip install .vllm[<>].*built-in engine, which needs no extra package",
    ):
        backend_of(model)


def test_a_release_that_is_not_known(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm("0.34.0")["vllm"])
    with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0 of this environment"):
        backend_of(model)
    assert FakeLLM.made == []


def test_a_model_without_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"by its name or from a folder, but this one has neither. Save it"):
        backend_of(tiny_model())


def test_weights_that_were_loaded_in_part_are_not_sampled_from(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(model)

    def fail(self: Any, method: str, kwargs: dict[str, Any]) -> None:
        next(kwargs["weights_iterator"])
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(FakeLLM, "collective_rpc", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            backend.sample(REQUESTS)
    assert backend.weights_version is None
    assert FakeLLM.made[0].log == []
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_parts_of_a_load_that_failed_do_not_count_for_the_next(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(model)

    def half(policy: Any) -> Any:
        yield from list(policy.named_parameters())[:5]
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(colocate, "named_weights", half)
        with pytest.raises(RuntimeError, match="interrupted"):
            backend.sample(REQUESTS)
    change(model)
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_a_prefix_cache_that_stays_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "reset_prefix_cache", lambda self: False)
    with pytest.raises(RolloutError, match="did not reset its prefix cache"):
        backend_of(model).sample(REQUESTS)


def test_answers_that_are_missing_are_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "generate", lambda self, *args, **kwargs: [])
    with pytest.raises(RolloutError, match="0 answers to 2 requests"):
        backend_of(model).sample(REQUESTS)


# ---- several processes


@pytest.mark.medium
def test_processes_that_share_an_engine_ask_together_and_keep_their_own(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    run_together(2, "tests.rollout.test_vllm_colocate", tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero["asked"] == one["asked"] == [[[9], 3], [[9], 1]], "all of them, in the same order"
    assert [len(zero["ids"]), len(one["ids"])] == [3, 1]
    assert zero["whole"] == zero["ids"] + one["ids"], "as if one process had asked for the group"
    assert zero["nothing"] == one["nothing"] == 1, "a process without requests takes part"
    assert zero["collective"]
    assert zero["arguments"] == ["external_launcher", 2, 16]


def main(folder: Path) -> None:
    rank = PartialState(cpu=True).process_index
    install_fake_vllm()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    backend = backend_of(model, tensor_parallel_size=2)
    engine = FakeLLM.made[-1]
    mine = SampleRequest([9], 3, noise_key=5) if rank == 0 else SampleRequest([9], 1, noise_key=5, first_sample=3)
    ids = [c.ids for c in backend.sample([mine])]
    asked = [[prompt["prompt_token_ids"], params.n] for prompt, params in engine.asked]
    whole = [c.ids for c in backend.sample([SampleRequest([9], 4, noise_key=5)])]
    engine.asked.clear()
    backend.sample([SampleRequest([9], 1, noise_key=5)] if rank == 0 else [])
    names = ("distributed_executor_backend", "tensor_parallel_size", "max_num_seqs")
    said = {
        "ids": ids,
        "asked": asked,
        "whole": whole,
        "nothing": len(engine.asked),
        "collective": backend.needs_every_process,
        "arguments": [engine.arguments[name] for name in names],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
