"""Training with vLLM: the correction of the sampler, and runs in both modes that are the same run."""

import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from gruppo.errors import AuditError, ConfigError, RolloutError
from gruppo.replay import replay
from gruppo.rollout.vllm import client as client_module
from gruppo.rollout.vllm import transfer
from gruppo.rollout.vllm.colocate import VLLMColocateBackend
from gruppo.rollout.vllm.server import VLLMServerBackend
from gruppo.trainer.construct.tooling import reject_shared_engines
from gruppo.types import SampleRequest
from tests.helpers import base_args, length_reward, prompts
from tests.processes import run_together
from tests.rollout.vllm_doubles import Double, saved_model, serving, share_bytes
from tests.rollout.vllm_package import FakeLLM, fake_vllm
from tests.tools.scripted import call, questions, tokens, tool_tokenizer
from tests.trainer.runs import SaveAt, logs, slow_scores
from tests.trainer.test_tools import add

RATIO = "sampling/importance_sampling_ratio"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_vllm().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(transfer, "share", share_bytes)
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture
def double(folder: Path) -> Iterator[Double]:
    with serving(folder) as double:
        yield double


def trainer_of(
    folder: Path, output: Path, *, server: Double | None = None, rloo: bool = False, more: Any = None, **settings: Any
) -> Any:
    """A trainer that samples with vLLM, in this process or from the server."""
    if server is not None:
        settings |= {"vllm_mode": "server", "vllm_server_port": server.port}
    config, trainer = (RLOOConfig, RLOOTrainer) if rloo else (GRPOConfig, GRPOTrainer)
    args = config(**base_args(output, **({"use_vllm": True, "audit": "error"} | settings)))
    arguments = {"reward_funcs": length_reward, "train_dataset": prompts(8)} | (more or {})
    return trainer(model=str(folder), args=args, **arguments)


def weights(trainer: Any) -> dict[str, list[float]]:
    return {name: weight.tolist() for name, weight in trainer.model.state_dict().items()}


def rows(trainer: Any, groups: int = 2) -> list[Any]:
    return [trainer.train_dataset[group] for group in range(groups) for _ in range(trainer.num_generations)]


def sampler_of(trainer: Any, server: Double | None = None) -> Any:
    return server.sampler if server is not None else FakeLLM.made[-1].sampler


# ---- the correction


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_replay_weighs_them_too(folder: Path, tmp_path: Path, mode: str) -> None:
    bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}
    settings = {"vllm_importance_sampling_mode": mode, "num_iterations": 2, "learning_rate": 1e-2, "audit": "off"}
    trainer = trainer_of(folder, tmp_path, **settings, **bounds)
    sampler_of(trainer).factor = 1.4
    trainer.train()
    found = replay(tmp_path, changes={"vllm_importance_sampling_correction": False})
    for update, line in zip(found.updates, logs(trainer), strict=True):
        assert update["loss"] == pytest.approx(line["loss"], abs=1e-6)
        assert abs(update["second_loss"] - line["loss"]) > 1e-3, "without them it is another"
    assert found.notes == []


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_tokens_are_weighed_by_how_likely_policy_and_sampler_were(folder: Path, tmp_path: Path, mode: str) -> None:
    low, high = 0.97, 1.02
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    trainer = trainer_of(folder, tmp_path, audit="off", vllm_importance_sampling_mode=mode, **bounds)
    sampler_of(trainer).factor = 1.4
    batch = trainer.collect(rows(trainer))
    assert batch.importance_sampling_ratio is not None
    seen = []
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row].bool()].tolist()
        ids = batch.completion_ids[row][batch.completion_mask[row].bool()].tolist()
        old, _ = slow_scores(trainer.model.eval(), prompt, ids)
        sampled = batch.sampling_per_token_logps[row][: len(ids)].tolist()
        assert batch.old_per_token_logps[row][: len(ids)].tolist() == pytest.approx(old, abs=1e-4)
        ratios = [math.exp(a - b) for a, b in zip(old, sampled, strict=True)]
        if mode.startswith("sequence"):
            ratios = [math.prod(ratios)]
        kept = [min(max(r, low), high) if "truncate" in mode else r if low <= r <= high else 0.0 for r in ratios]
        assert batch.importance_sampling_ratio[row][: len(kept)].tolist() == pytest.approx(kept, rel=1e-3)
        seen += kept
    found = trainer.metrics.take("train")
    assert found[f"{RATIO}/min"] == pytest.approx(min(seen), rel=1e-3)
    assert found[f"{RATIO}/mean"] == pytest.approx(sum(seen) / len(seen), rel=1e-3)
    assert found[f"{RATIO}/max"] == pytest.approx(max(seen), rel=1e-3)
    assert found["sampling/dropped_share"] == pytest.approx(seen.count(0.0) / len(seen))
    assert min(seen) < 1 < max(seen) or "mask" in mode


def test_log_probs_without_a_correction_are_known_to_the_loss_alone(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, vllm_importance_sampling_correction=False)
    batch = trainer.collect(rows(trainer))
    assert batch.importance_sampling_ratio is None
    assert batch.old_per_token_logps is None, "on-policy, nothing needs them"
    assert batch.sampling_per_token_logps is not None
    assert not any(key.startswith(RATIO) for key in trainer.metrics.take("train"))


def test_rloo_measures_the_difference_and_corrects_nothing(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, rloo=True)
    batch = trainer.collect(rows(trainer))
    assert batch.importance_sampling_ratio is None
    assert batch.sampling_per_token_logps is None
    assert batch.engine_logps is not None
    trainer.train()
    assert logs(trainer)[0]["sampling/sampling_logp_difference/max"] < 1e-4
    filtered = trainer_of(folder, tmp_path, rloo=True, top_p=0.9)
    assert filtered.collect(rows(filtered)).engine_logps is None, "of another distribution"


def test_a_sequence_that_is_dropped_moves_nothing(folder: Path, tmp_path: Path) -> None:
    bounds = {"vllm_importance_sampling_clip_min": 50.0, "vllm_importance_sampling_clip_max": 60.0}
    trainer = trainer_of(folder, tmp_path, max_steps=1, audit="off", **bounds)
    before = weights(trainer)
    trainer.train()
    assert weights(trainer) == before
    assert logs(trainer)[0]["sampling/dropped_share"] == 1.0


def test_the_off_policy_mask_reads_the_samplers_log_probs(folder: Path, tmp_path: Path) -> None:
    settings = {"vllm_importance_sampling_correction": False, "audit": "off", "max_steps": 1}

    def train(**more: Any) -> Any:
        trainer = trainer_of(folder, tmp_path, **settings, **more)
        sampler_of(trainer).factor = 3.0  # sure of itself: each of its log-probs is above the policy's
        trainer.train()
        return weights(trainer)

    assert train(off_policy_mask_threshold=100.0) == train()
    assert train(off_policy_mask_threshold=0.0) != train()


def test_a_sampler_of_other_weights_is_found(folder: Path, tmp_path: Path) -> None:
    """If every check before failed: log-probs that are not those of the policy are an audit's finding."""
    trainer = trainer_of(folder, tmp_path, max_steps=1)
    sampler_of(trainer).factor = 3.0
    with pytest.raises(AuditError, match="log-probs are not the trainer's"):
        trainer.train()


@pytest.mark.parametrize(
    "shaped",
    [{"top_p": 0.9}, {"vllm_structured_outputs_regex": "[0-9]+"}, {"generation_kwargs": {"presence_penalty": 0.5}}],
    ids=["top-p", "regex", "penalty"],
)
def test_settings_that_shape_the_samples_are_named_and_explain_the_difference(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, shaped: dict[str, Any]
) -> None:
    trainer = trainer_of(folder, tmp_path, max_steps=1, **shaped)
    assert "so the ratios are biased" in caplog.text
    sampler_of(trainer).factor = 3.0
    trainer.train()  # not a finding
    assert logs(trainer)[0]["sampling/sampling_logp_difference/mean"] > 0.1


def test_the_models_own_generation_config_is_not_read(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path)
    trainer.model.generation_config.top_k = 3
    assert trainer.backend.filters(1.0) == {}
    trainer.collect(rows(trainer))
    assert FakeLLM.made[-1].asked[0][1].top_k == 0


def test_evaluation_is_corrected_as_well(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(
        folder,
        tmp_path,
        more={"eval_dataset": prompts(2)},
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        max_steps=1,
    )
    trainer.train()
    found = logs(trainer, "eval_reward")[0]
    assert found[f"eval_{RATIO}/mean"] == pytest.approx(1.0, abs=1e-4)
    engine = FakeLLM.made[-1]
    assert engine.log.count("reload_weights") == 2, "the policy that is evaluated is the updated one"


@pytest.mark.parametrize("serves", [False, True], ids=["colocate", "server"])
def test_the_base_model_is_evaluated_without_its_adapters(
    folder: Path, tmp_path: Path, double: Double, serves: bool
) -> None:
    """Samples of the adapted model would show in the difference of log-probs."""
    lora = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = trainer_of(
        folder,
        tmp_path,
        server=double if serves else None,
        more={"eval_dataset": prompts(2), "peft_config": lora},
        per_device_eval_batch_size=4,
    )
    trainer.evaluate()
    with trainer.model.disable_adapter():
        found = trainer.evaluate()
    assert found["eval_sampling/sampling_logp_difference/max"] < 1e-3
    assert trainer.evaluate()["eval_sampling/sampling_logp_difference/max"] < 1e-3


def test_a_rollout_function_is_corrected_with_vllm_and_finds_fresh_weights(folder: Path, tmp_path: Path) -> None:
    def rollout(prompt_list: list[str], trainer: Any) -> dict[str, Any]:
        engine = FakeLLM.made[-1]
        held = engine.sampler.model.state_dict()
        assert all(torch.equal(held[name], weight) for name, weight in trainer.model.state_dict().items())
        ids = trainer.processing_class(prompt_list)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[9, 1]] * len(ids), "logprobs": [[-1.0, None]] * len(ids)}

    trainer = trainer_of(folder, tmp_path, audit="off", more={"rollout_func": rollout})
    batch = trainer.collect(rows(trainer))
    assert batch.importance_sampling_ratio is not None
    expected = (batch.old_per_token_logps[:, 0] + 1.0).exp()
    expected = torch.where(expected <= 3.0, expected, 0.0)
    torch.testing.assert_close(batch.importance_sampling_ratio[:, 0], expected)


def test_a_hook_that_asks_the_backend_gets_its_log_probs(folder: Path, tmp_path: Path) -> None:
    class Hooked(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    args = GRPOConfig(**base_args(tmp_path, use_vllm=True))
    trainer = Hooked(str(folder), length_reward, args, prompts(8))
    batch = trainer.collect(rows(trainer))
    assert batch.sampling_per_token_logps is not None
    assert not batch.sampling_per_token_logps[batch.completion_mask.bool()].isnan().any()


# ---- runs


SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "slept": {"vllm_enable_sleep_mode": True},
    "several passes": {"num_iterations": 2, "max_steps": 4},
    "groups replaced": {"dynamic_sampling": True, "max_resample_rounds": 2},
    "kl": {"beta": 0.1},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_both_modes_make_the_same_run(folder: Path, tmp_path: Path, double: Double, settings: dict[str, Any]) -> None:
    colocated = trainer_of(folder, tmp_path / "c", **({"max_steps": 3} | settings))
    assert isinstance(colocated.backend, VLLMColocateBackend)
    colocated.train()
    shared = {name: value for name, value in settings.items() if name != "vllm_enable_sleep_mode"}
    served = trainer_of(folder, tmp_path / "s", server=double, **({"max_steps": 3} | shared))
    assert isinstance(served.backend, VLLMServerBackend)
    served.train()
    assert weights(colocated) == weights(served)
    assert weights(served) != weights(trainer_of(folder, tmp_path / "start"))
    assert colocated.timings.calls["sync_weights"] == served.timings.calls["sync_weights"] > 0
    assert colocated.timings.calls["vLLM.generate"] > 0


def test_rollout_backend_is_another_name_of_use_vllm(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path, use_vllm=False, rollout_backend="vllm")
    assert isinstance(trainer.backend, VLLMColocateBackend)
    assert trainer.collect(rows(trainer)).importance_sampling_ratio is not None


def test_a_server_that_starts_again_in_a_run_does_not_change_it(folder: Path, tmp_path: Path, double: Double) -> None:
    straight = trainer_of(folder, tmp_path / "straight", server=double, max_steps=4)
    straight.train()
    starts = len(double.calls("/reset_prefix_cache"))
    disturbed = trainer_of(folder, tmp_path / "disturbed", server=double, max_steps=4)
    asked = len(double.calls("/v1/completions"))

    def sometimes() -> None:
        if len(double.calls("/v1/completions")) == asked + 3:
            double.restart()

    double.before["/v1/completions"] = sometimes
    disturbed.train()
    assert weights(disturbed) == weights(straight)
    assert len(double.calls("/reset_prefix_cache")) == 2 * starts + 1


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_another_run_of_the_same_trainer_sends_its_weights(
    folder: Path, tmp_path: Path, double: Double, mode: str
) -> None:
    """A fused optimizer writes weights without counting it, and the number of updates starts at 0 again."""
    server = double if mode == "server" else None
    settings = {"max_steps": 1, "optim": "adamw_torch_fused", "learning_rate": 1e-2}
    trainer = trainer_of(folder, tmp_path, server=server, audit="off", **settings)
    for _ in range(2):
        now = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        trainer.train()
        sampled = sampler_of(trainer, server).model.state_dict()
        assert all(torch.equal(sampled[name], weight) for name, weight in now.items())
        assert any(not torch.equal(weight, now[name]) for name, weight in trainer.model.state_dict().items())


def test_a_callback_samples_from_the_weights_of_the_step_that_was_just_made(folder: Path, tmp_path: Path) -> None:
    class Sample(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.backend.sample([SampleRequest([5, 6], 1, 1, 0)])
            sampled = sampler_of(trainer).model.state_dict()
            same.append(all(torch.equal(sampled[k], v) for k, v in trainer.model.state_dict().items()))

    same: list[bool] = []
    trainer = trainer_of(folder, tmp_path, audit="off", optim="adamw_torch_fused", max_steps=2)
    trainer.add_callback(Sample)
    trainer.train()
    assert same == [True, True]


def test_a_resumed_run_sends_its_weights_and_goes_on(folder: Path, tmp_path: Path, double: Double) -> None:
    settings = {"server": double, "max_steps": 4, "save_strategy": "no"}
    straight = trainer_of(folder, tmp_path, more={"callbacks": [SaveAt(2)]}, **settings)
    straight.train()
    double.restart()
    resumed = trainer_of(folder, tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert weights(resumed) == weights(straight)


def test_runs_without_seeds_ask_without_them(folder: Path, tmp_path: Path, double: Double) -> None:
    trainer = trainer_of(folder, tmp_path, server=double, vllm_seed_requests=False)
    trainer.collect(rows(trainer))
    assert not any("seed" in body for body in double.calls("/v1/completions"))


def test_generation_kwargs_and_a_regex_reach_vllm(folder: Path, tmp_path: Path, double: Double) -> None:
    trainer = trainer_of(
        folder,
        tmp_path,
        server=double,
        vllm_structured_outputs_regex="[0-9]+",
        generation_kwargs={"presence_penalty": 0.5, "max_tokens": 3},
    )
    batch = trainer.collect(rows(trainer))
    assert batch.completion_ids.shape[1] <= 3
    asked = double.calls("/v1/completions")[0]
    assert asked["structured_outputs"] == {"regex": "[0-9]+"}
    assert (asked["presence_penalty"], asked["max_tokens"]) == (0.5, 3)


def test_every_setting_reaches_the_engine(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_model_impl": "transformers",
        "vllm_max_model_length": 99,
        "vllm_enable_sleep_mode": True,
        "vllm_seed_requests": False,
        "trust_remote_code": True,
        "model_init_kwargs": {"revision": "main"},
        "max_steps": 1,
    }
    trainer = trainer_of(folder, tmp_path, **settings)
    trainer.train()
    engine = FakeLLM.made[-1]
    asked = {
        "gpu_memory_utilization": 0.4,
        "model_impl": "transformers",
        "max_model_len": 99,
        "enable_sleep_mode": True,
        "trust_remote_code": True,
        "revision": "main",
    }
    assert {name: engine.arguments[name] for name in asked} == asked
    assert {words.seed for _, words in engine.asked} == {None}
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size=2"):
        trainer_of(folder, tmp_path, vllm_tensor_parallel_size=2)


def test_every_setting_reaches_the_server(
    folder: Path, tmp_path: Path, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {"vllm_server_timeout": 31.0, "vllm_request_timeout": 32.0, "vllm_group_port": 33333}
    backend = trainer_of(folder, tmp_path, server=double, vllm_seed_requests=False, **waits).backend
    assert (backend.start_timeout, backend.client.request_timeout, backend.seeded) == (31.0, 32.0, False)
    double.transfer = "nccl"
    monkeypatch.setattr(transfer, "_nccl_code", lambda: (None, None))
    assert trainer_of(folder, tmp_path, server=double, **waits).backend.sender.group_port == 33333


def test_the_policy_decides_the_dtype_of_the_engine(folder: Path, tmp_path: Path) -> None:
    trainer_of(folder, tmp_path)
    trainer_of(folder, tmp_path, bf16=True)
    assert [engine.arguments["dtype"] for engine in FakeLLM.made] == ["float32", "bfloat16"]
    assert FakeLLM.made[0].arguments["model"] == str(folder)


# ---- tools


@pytest.mark.parametrize("serves", [False, True], ids=["colocate", "server"])
def test_tools_are_called_between_turns(
    folder: Path, tmp_path: Path, double: Double, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripted(self: Any, prompt: list[int], words: dict[str, Any]) -> list[dict[str, Any]]:
        later = "tool_response" in tool_tokenizer().decode(prompt)
        ids = tokens(("done" if later else call("add", a=1, b=2)) + "<eos>")
        return [{"ids": ids, "logps": [-0.5] * len(ids), "finish": "stop", "stop": None}] * words["n"]

    monkeypatch.setattr("tests.rollout.vllm_doubles.Sampler.complete", scripted)
    dataset = questions(*(f"q{i}" for i in range(8)))
    trainer = trainer_of(
        folder,
        tmp_path,
        server=double if serves else None,
        more={"tools": [add], "train_dataset": dataset, "processing_class": tool_tokenizer()},
        max_completion_length=120,
        audit="off",
        **({} if serves else {"vllm_enable_sleep_mode": True}),
    )
    (first, *_) = trainer.rollout(rows(trainer))
    assert first.output[-1]["content"] == "done"
    assert "3" in first.output[1]["content"]
    mask, logps = first.completion.model_mask, first.completion.logps
    assert 0 in mask
    assert all(logp == (-0.5 if own else 0.0) for own, logp in zip(mask, logps, strict=True))
    batch = trainer.collect(rows(trainer))
    assert batch.importance_sampling_ratio is not None
    if not serves:
        assert FakeLLM.made[-1].log.count("reload_weights") == 2, "once per generation, not per turn"


def test_the_context_of_the_engine_bounds_conversations(folder: Path, tmp_path: Path) -> None:
    more = {"tools": [add], "train_dataset": questions("q0", "q1"), "processing_class": tool_tokenizer()}
    for length in (None, 100):
        trainer = trainer_of(folder, tmp_path, more=more, vllm_max_model_length=length)
        assert trainer.tool_loop.context_length == (length or 128)


def test_engines_that_are_shared_by_processes_cannot_have_tools() -> None:
    args = SimpleNamespace(
        world_size=2, max_tool_calling_iterations=None, fsdp=None, samples_with_vllm=True, vllm_tensor_parallel_size=2
    )
    with pytest.raises(ConfigError, match="Tools cannot work with vllm_tensor_parallel_size=2"):
        reject_shared_engines(args)


# ---- several processes

RANK = int(os.environ.get("RANK", "0"))


@pytest.mark.medium
def test_processes_ask_for_their_own_rows_and_one_sends_the_weights(
    folder: Path, tmp_path: Path, double: Double
) -> None:
    alone = trainer_of(folder, tmp_path / "alone", server=double, max_steps=3, num_generations=4)
    alone.train()
    expected, alone_starts = weights(alone), len(double.calls("/reset_prefix_cache"))
    del alone  # a server has one trainer
    gc.collect()
    (tmp_path / "place.json").write_text(json.dumps({"model": str(folder), "url": double.url}))
    run_together(2, "tests.trainer.test_vllm", tmp_path)
    zero, one = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert zero["weights"] == one["weights"]
    assert len(double.calls("/reset_prefix_cache")) == 2 * alone_starts + 1, "one process sends for both"
    assert zero["ratio"] == one["ratio"]
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(zero["weights"][name]), torch.tensor(value), rtol=1e-4, atol=1e-5)
    assert "all of them must update vLLM together" in zero["error"]
    assert zero["after"] == one["after"] == 1


def main(output: Path) -> None:
    place = json.loads((output / "place.json").read_text())
    transfer.share = share_bytes
    args = GRPOConfig(
        **base_args(
            output,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=place["url"],
            max_steps=3,
            per_device_train_batch_size=2,
            num_generations=4,
        )
    )
    trainer = GRPOTrainer(place["model"], length_reward, args, prompts(8))
    trainer.train()
    said = {"weights": weights(trainer), "ratio": logs(trainer)[0][f"{RATIO}/mean"]}
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.0)
    request = SampleRequest([9], 1, noise_key=1)
    with pytest.raises(RolloutError) as found:
        trainer.backend.sample([request])
    trainer.backend.refresh()
    said |= {"error": str(found.value), "after": len(trainer.backend.sample([request]))}
    (output / f"rank{RANK}.json").write_text(json.dumps(said))
