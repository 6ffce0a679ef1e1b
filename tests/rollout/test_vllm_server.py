"""Sampling from a server: it has the policy's weights of now, or there is an error. Stale ones show in the tokens."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.vllm import claims, transfer
from gruppo.rollout.vllm import client as client_module
from gruppo.rollout.vllm.base import walked
from gruppo.rollout.vllm.claims import hold
from gruppo.rollout.vllm.client import ServerFacts, ServerRefusedError, VLLMClient
from gruppo.rollout.vllm.server import VLLMServerBackend, check_server
from gruppo.types import Completion, SampleRequest, StopReason
from tests.helpers import tiny_model
from tests.processes import run_together
from tests.rollout.vllm_doubles import Double, serving, share_bytes
from tests.trainer.runs import slow_scores

REQUESTS = [SampleRequest([9, 10, 11], 3, noise_key=5), SampleRequest([20], 2, noise_key=6)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(transfer, "share", share_bytes)


@pytest.fixture
def double() -> Any:
    with serving("org/model") as double:
        yield double


def backend_of(double: Double, model: Any = None, timeout: float = 5.0, **settings: Any) -> VLLMServerBackend:
    policy = tiny_model() if model is None else model
    return VLLMServerBackend(
        lambda: policy,
        GenerationConfig(do_sample=True, max_new_tokens=6, pad_token_id=0, eos_token_id=[1]),
        stop_ids=[1],
        client=VLLMClient(double.url, request_timeout=timeout),
        start_timeout=2.0,
        **settings,
    )


def change(model: Any) -> None:
    """What an update does, but more of it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)


def assert_sampled_from(model: Any, found: list[Completion], temperature: float = 1.0) -> None:
    """The log-probs are those of this very model, for every token."""
    prompts = [list(request.prompt_ids) for request in REQUESTS for _ in range(request.count)]
    for prompt, completion in zip(prompts, found, strict=True):
        expected, _ = slow_scores(model, prompt, completion.ids, temperature)
        assert completion.logps == pytest.approx(expected, abs=1e-4)


# ---- samples


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0", "0.27.0", "0.32.0"])  # formats changed in between
def test_samples_are_those_of_the_policy(version: str) -> None:
    with serving("org/model") as double:
        double.version = version
        model = tiny_model()
        backend = backend_of(double, model)
        found = backend.sample(REQUESTS)
        assert len(found) == 5
        assert_sampled_from(model, found)
        assert all(c.stop in (StopReason.EOS, StopReason.LENGTH) for c in found)
        assert (backend.timer, backend.has_own_weights, backend.needs_every_process) == ("vLLM.generate", True, False)


def test_the_same_requests_draw_the_same_and_groups_may_be_cut(double: Double) -> None:
    backend = backend_of(double)
    whole = backend.sample([SampleRequest([9], 4, noise_key=5)])
    assert [c.ids for c in backend.sample([SampleRequest([9], 4, noise_key=5)])] == [c.ids for c in whole]
    parts = [SampleRequest([9], 1, noise_key=5), SampleRequest([9], 3, noise_key=5, first_sample=1)]
    assert [c.ids for c in backend.sample(parts)] == [c.ids for c in whole]
    assert len({tuple(c.ids) for c in whole}) > 1


def test_one_call_per_group(double: Double) -> None:
    backend_of(double).sample(REQUESTS)
    assert sorted(body["n"] for body in double.calls("/v1/completions")) == [2, 3]


def test_no_requests_and_requests_without_room(double: Double) -> None:
    backend = backend_of(double)
    assert backend.sample([]) == []
    (found,) = backend.sample([SampleRequest([9] * 128, 1, noise_key=1)])
    assert found == Completion([], StopReason.NO_ROOM)
    (found,) = backend.sample([SampleRequest([9] * 126, 1, noise_key=1)])
    assert len(found.ids) <= 2


def test_a_minimum_is_lowered_where_there_is_less_room(double: Double) -> None:
    backend = backend_of(double)
    backend.config.min_new_tokens = 4
    backend.sample([SampleRequest([9] * 126, 1, noise_key=1), SampleRequest([9], 1, noise_key=1, max_new_tokens=3)])
    backend.sample([SampleRequest([9], 1, noise_key=1)])
    lengths = [(body["min_tokens"], body["max_tokens"]) for body in double.calls("/v1/completions")]
    assert sorted(lengths) == [(2, 2), (3, 3), (4, 6)]


def test_settings_are_read_at_each_call(double: Double) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    backend.config.temperature = 2.0
    assert_sampled_from(model, backend.sample(REQUESTS), temperature=2.0)


def test_stop_strings_end_completions(double: Double) -> None:
    backend = backend_of(double)
    backend.config.stop_strings = [chr(c) for c in range(32, 80)]
    found = backend.sample([SampleRequest([9], 8, noise_key=5)])
    assert StopReason.STOP_STRING in {c.stop for c in found}


# ---- weights


def test_weights_are_sent_when_they_changed_and_only_then(double: Double) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    for _ in range(3):
        backend.sample(REQUESTS)
    assert len(double.calls("/reset_prefix_cache")) == 1
    assert backend.metrics().keys() == {"rollout/sync_seconds"}
    assert backend.metrics() == {}
    change(model)
    found = backend.sample(REQUESTS)
    assert len(double.calls("/reset_prefix_cache")) == 2
    assert_sampled_from(model, found)


def test_the_prefix_cache_does_not_outlive_the_weights(double: Double) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    assert double.sampler.prefixes
    change(model)
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_an_update_that_torch_does_not_see_is_sent_as_well(double: Double) -> None:
    """Some optimizers write through `.data`; the clock of the run tells of their updates."""
    model, updates = tiny_model(), 0
    backend = backend_of(double, model)
    backend.clock = lambda: updates
    backend.sample(REQUESTS)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    updates = 1
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_adapters_are_sent_merged(double: Double) -> None:
    policy = get_peft_model(tiny_model(), LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])).eval()
    backend = backend_of(double, policy)
    found = backend.sample(REQUESTS)
    assert_sampled_from(policy, found)
    version = backend.weights_version
    backend.sample(REQUESTS)
    assert backend.weights_version == version, "merging is not an update"
    assert len(double.calls("/reset_prefix_cache")) == 1


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
)
def test_after_half_an_update_nothing_is_known_and_the_next_call_begins_anew(double: Double, path: str) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    change(model)
    double.broken[path] = [500] if path != "/start_weight_update" else [503]
    with pytest.raises(RolloutError, match=f"{path}.*: status"):
        backend.sample(REQUESTS)
    assert backend.weights_version is None
    asked = len(double.calls("/v1/completions"))
    found = backend.sample(REQUESTS)
    assert_sampled_from(model, found)
    assert backend.weights_version is not None
    assert len(double.calls("/v1/completions")) == asked + 2, "nothing was sampled in between"


def test_keys_of_old_weights_go_though_a_request_is_running(double: Double) -> None:
    """vLLM keeps them, and says nothing, unless it is told to begin the request anew."""
    model = tiny_model()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    change(model)
    double.busy = True
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_keys_that_cannot_go_are_an_error(double: Double) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    change(model)
    double.stuck = True
    with pytest.raises(RolloutError, match=r"status 500.*Failed to reset KV cache"):
        backend.sample(REQUESTS)
    assert backend.weights_version is None
    double.stuck, double.keeps_old = False, True
    with pytest.raises(RolloutError, match="did not drop its KV cache"):
        backend.sample(REQUESTS)
    assert backend.weights_version is None


def test_keys_outside_the_engine_go_as_well(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    double.connector = "OffloadingConnector"
    backend = backend_of(double, model)
    assert "also keeps KV cache outside the engine (OffloadingConnector)" in caplog.text
    backend.sample(REQUESTS)
    change(model)
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_another_adapter_is_another_policy(double: Double) -> None:
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    model.set_adapter("other")
    assert_sampled_from(model, backend.sample(REQUESTS))
    assert len(double.calls("/reset_prefix_cache")) == 2


def test_adapters_that_are_switched_off_and_on_are_two_policies(double: Double) -> None:
    config = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).eval()
    backend = backend_of(double, model)
    assert_sampled_from(model, backend.sample(REQUESTS))
    with model.disable_adapter():
        assert_sampled_from(model, backend.sample(REQUESTS))
        assert_sampled_from(model, backend.sample(REQUESTS))
    assert_sampled_from(model, backend.sample(REQUESTS))
    assert len(double.calls("/reset_prefix_cache")) == 3, "once at each change"


def test_an_adapter_of_another_strength_is_another_policy(double: Double) -> None:
    config = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(), config).eval()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)
    assert_sampled_from(model, backend.sample(REQUESTS))
    assert len(double.calls("/reset_prefix_cache")) == 2


def test_an_error_of_any_kind_is_heard_by_all(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Exception | None] = []
    monkeypatch.setattr("gruppo.rollout.vllm.base.raise_on_all", heard.append)

    def fail(weights: Any) -> None:
        raise RuntimeError("peft cannot merge this")

    walked(tiny_model(), fail)
    assert [str(error) for error in heard] == ["peft cannot merge this"]


def test_a_slow_update_is_not_repeated(double: Double) -> None:
    backend = backend_of(double, timeout=0.3)
    double.slow["/update_weights"] = 1.0
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"had no answer within 0.3 s"):
        backend.sample(REQUESTS)
    assert time.monotonic() - start < 2
    assert len(double.calls("/update_weights")) == 1


def test_an_update_that_another_trainer_left_open_is_closed(double: Double) -> None:
    double.active = True
    model = tiny_model()
    assert_sampled_from(model, backend_of(double, model).sample(REQUESTS))


def test_parts_of_an_update_that_failed_do_not_count_for_the_next(double: Double) -> None:
    """Of this trainer, and of one before it that nobody knows of."""
    model = tiny_model()
    for backend in (backend_of(double, model), backend_of(double, model)):
        backend.sender.chunk_bytes = 1000  # type: ignore[union-attr]
        sent = len(double.calls("/update_weights"))

        def fail_late(sent: int = sent) -> None:
            if len(double.calls("/update_weights")) == sent + 4:
                double.broken["/update_weights"] = [500]
                double.active = False

        double.before["/update_weights"] = fail_late
        with pytest.raises(RolloutError, match="status 500"):
            backend.sample(REQUESTS)
        assert len(double.sampler.counted) > 1
        change(model)
    double.before.clear()
    for last in (backend, backend_of(double, model)):
        change(model)
        assert_sampled_from(model, last.sample(REQUESTS))
        last.forget()


def test_large_models_go_in_parts_of_one_dtype(double: Double) -> None:
    model = tiny_model()
    model.model.norm.to(torch.bfloat16)
    model.model.layers[0].mlp.to(torch.bfloat16)
    backend = backend_of(double, model)
    backend.sender.chunk_bytes = 1000  # type: ignore[union-attr]
    backend.refresh()
    infos = [body["update_info"] for body in double.calls("/update_weights")]
    assert len(infos) > 4
    assert all(len(set(info["dtype_names"])) == 1 for info in infos)
    held = dict(double.sampler.model.named_parameters())
    assert all(torch.equal(held[name], weight.float()) for name, weight in model.named_parameters())


# ---- whose server it is


def test_a_server_of_another_process_is_refused(double: Double) -> None:
    lock = hold(double.url, double.instance)
    with pytest.raises(ConfigError, match="Another trainer on this machine"):
        backend_of(double)
    lock.release()
    backend = backend_of(double)
    with pytest.raises(ConfigError, match="Another trainer on this machine"):
        hold(double.url, double.instance)
    backend.sample(REQUESTS)


def test_a_server_that_starts_again_may_be_anothers_by_then(double: Double) -> None:
    backend = backend_of(double)
    backend.sample(REQUESTS)
    double.restart()
    sent = len(double.calls("/start_weight_update"))
    lock = hold(double.url, double.instance)
    with pytest.raises(ConfigError, match="Another trainer on this machine"):
        backend.sample(REQUESTS)
    assert len(double.calls("/start_weight_update")) == sent
    lock.release()
    backend.sample(REQUESTS)
    with pytest.raises(ConfigError, match="Another trainer on this machine"):
        hold(double.url, double.instance)


def test_a_lock_in_a_folder_of_someone_else_is_refused(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        monkeypatch.setattr(claims, "_folder", lambda name=name: tmp_path / name)
        with pytest.raises(ConfigError, match=f"could not be taken.*{name} must be a folder of your own"):
            hold(double.url, double.instance)
    assert not list((tmp_path / "theirs").iterdir())
    monkeypatch.setattr(claims, "_folder", lambda: tmp_path / "own")
    hold(double.url, double.instance).release()
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0


def two_trainers(double: Double) -> list[tuple[Any, VLLMServerBackend]]:
    return [(model, backend_of(double, model)) for model in (tiny_model(1).eval(), tiny_model(2).eval())]


def test_trainers_of_one_process_do_not_sample_from_each_others_weights(double: Double) -> None:
    trainers = two_trainers(double)
    for _ in range(2):
        for model, backend in trainers:
            assert_sampled_from(model, backend.sample(REQUESTS))
            assert_sampled_from(model, backend.sample(REQUESTS))
    assert len(double.calls("/reset_prefix_cache")) == 4, "once at each turn"


def test_what_another_trainers_update_left_is_cleared(double: Double) -> None:
    (model, backend), (_, other) = two_trainers(double)
    backend.sample(REQUESTS)
    other.sender.chunk_bytes = 1000  # type: ignore[union-attr]

    def fail_late() -> None:
        if len(double.sampler.counted) > 3:
            double.broken["/update_weights"], double.active = [500], False

    double.before["/update_weights"] = fail_late
    with pytest.raises(RolloutError, match="status 500"):
        other.sample(REQUESTS)
    double.before.clear()
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_another_trainers_transfer_while_it_samples_is_noticed(double: Double) -> None:
    (model, backend), (_, other) = two_trainers(double)
    backend.refresh()

    def once() -> None:
        double.before.clear()
        other.refresh()

    double.before["/v1/completions"] = once
    assert_sampled_from(model, backend.sample(REQUESTS))
    backend.refresh()
    double.before["/v1/completions"] = once
    flight = backend.begin(REQUESTS)
    flight.settle()
    assert flight.take() is None
    assert flight.lost == "received the weights of another trainer while sampling"


# ---- a server that starts again


def test_a_restart_between_calls_is_noticed(double: Double) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    double.restart()
    assert_sampled_from(model, backend.sample(REQUESTS))
    assert len(double.calls("/reset_prefix_cache")) == 2


def test_a_restart_while_it_samples_is_noticed(double: Double) -> None:
    model = tiny_model()
    backend = backend_of(double, model)

    def once() -> None:
        double.before.clear()
        double.restart()

    backend.refresh()
    double.before["/v1/completions"] = once
    assert_sampled_from(model, backend.sample(REQUESTS))
    assert len(double.calls("/reset_prefix_cache")) == 2


def test_a_server_that_goes_away_is_waited_for(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    backend = backend_of(double, model)
    backend.sample(REQUESTS)
    double.stop()
    waited = iter([None, None, double.start])

    def pause() -> None:
        if (begin := next(waited, None)) is not None:
            begin()

    backend.pause = pause
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_it_says_when_it_is_busy_with_the_server(double: Double) -> None:
    """The trainer names this process if it takes long, instead of counting it among those that wait."""
    backend, now, entered, during = backend_of(double), [], [], []

    @contextmanager
    def working(phase: str) -> Iterator[None]:
        now.append(phase)
        entered.append(phase)
        yield
        now.pop()

    double.before["/update_weights"] = lambda: during.append(list(now))
    backend.working = working
    backend.refresh()
    assert during == [["sending weights"]]
    backend.begin(REQUESTS)
    backend.forget()
    backend.refresh()
    assert during == [["sending weights"]] * 2
    assert entered == ["sending weights", "waiting for rollouts", "sending weights"]


def test_a_server_that_stays_away_is_an_error(double: Double) -> None:
    backend = backend_of(double)
    backend.start_timeout = 0.2
    backend.sample(REQUESTS)
    double.stop()
    with pytest.raises(ConnectionError, match="No vLLM server answered"):
        backend.sample(REQUESTS)
    double.start()


def test_a_server_that_starts_again_and_again_is_an_error(double: Double) -> None:
    backend = backend_of(double)
    double.before["/v1/completions"] = double.restart
    with pytest.raises(RolloutError, match=r"failed 3 times in one generation\. .* was restarted while sampling"):
        backend.sample(REQUESTS)


def test_a_server_that_comes_back_as_another_is_an_error(double: Double) -> None:
    backend = backend_of(double)
    backend.sample(REQUESTS)
    double.restart()
    double.mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="'raw_logprobs'"):
        backend.sample(REQUESTS)


def test_samples_that_take_too_long_are_an_error(double: Double) -> None:
    backend = backend_of(double, timeout=0.3)
    backend.refresh()
    double.slow["/v1/completions"] = 3.0
    start = time.monotonic()
    with pytest.raises(RolloutError, match=r"v1/completions had no answer within 0.3 s"):
        backend.sample(REQUESTS)
    assert time.monotonic() - start < 2


def test_sampling_can_be_ended(double: Double) -> None:
    backend = backend_of(double)
    backend.refresh()
    double.slow["/v1/completions"] = 5.0

    def stop() -> None:
        if double.calls("/v1/completions"):
            raise KeyboardInterrupt

    pending: list[int] = []
    complete = backend.client.complete

    def counted(*args: Any) -> Any:
        pending.append(1)
        try:
            return complete(*args)
        finally:
            pending.pop()

    backend.client.complete, backend.pause = counted, stop  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        backend.sample(REQUESTS)
    assert time.monotonic() - start < 4
    assert not pending, "weights may be sent next"


def test_when_one_request_is_refused_the_others_are_given_up(double: Double) -> None:
    backend = backend_of(double)
    backend.refresh()
    double.slow["/v1/completions"] = 5.0
    complete, pending = backend.client.complete, []

    def first_refused(body: Any, line: Any = None) -> Any:
        if body["prompt"] == list(REQUESTS[0].prompt_ids):
            raise ServerRefusedError("no", 400)
        pending.append(1)
        try:
            return complete(body, line)
        finally:
            pending.pop()

    backend.client.complete = first_refused  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(ServerRefusedError):
        backend.sample(REQUESTS)
    assert not pending
    assert time.monotonic() - start < 4


def test_an_aborted_completion_is_an_error(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(double)
    aborted = {"ids": [5], "logps": [-1.0], "finish": "abort", "stop": None}
    monkeypatch.setattr(type(double.sampler), "complete", lambda self, prompt, words: [aborted] * words["n"])
    with pytest.raises(RolloutError, match="'abort'"):
        backend.sample(REQUESTS)


# ---- checks at the start


def set_to(**values: Any) -> Callable[[Double], None]:
    return lambda double: [setattr(double, name, value) for name, value in values.items()] and None


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (set_to(version="0.34.0"), "vLLM 0.34.0 of the server at .* is not supported"),
        (set_to(dev_mode=False), "VLLM_SERVER_DEV_MODE=1"),
        (set_to(transfer=None), "does not accept weights.*--weight-transfer ipc"),
        (set_to(transfer="sparse"), "does not accept weights.*'sparse'"),
        (set_to(mode="raw_logprobs"), "'raw_logprobs'.*--logprobs-mode processed_logprobs"),
        (set_to(unpickles=False), "VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
        (set_to(workers=2), "runs on 2 GPUs.*nccl"),
        (set_to(generation_config="auto"), "takes sampling settings.*--generation-config vllm"),
        (set_to(overrides={"max_new_tokens": 5}), "takes sampling settings.*--override-generation-config"),
        (set_to(api_processes=2), "has 2 API processes.*--api-server-count 1"),
        (set_to(transfer="nccl"), "vLLM must be installed in the trainer's environment"),
    ],
    ids=[
        "release",
        "dev-mode",
        "no-transfer",
        "other-transfer",
        "logprobs",
        "unpickles",
        "gpus",
        "generation-config",
        "overrides",
        "api",
        "nccl-without-vllm",
    ],
)
def test_a_server_that_cannot_be_sampled_from(double: Double, prepare: Any, message: str) -> None:
    prepare(double)
    with pytest.raises(ConfigError, match=message):
        backend_of(double)


def test_a_port_that_nobody_listens_on_is_named(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    backend_of(double)
    assert "vllm_group_port" not in caplog.text
    backend_of(double, group_port=5000)
    assert "vllm_group_port=5000 has no effect: the server at" in caplog.text


def test_another_model_is_refused_by_name(double: Double) -> None:
    model = tiny_model()
    model.config._name_or_path = "org/another"
    with pytest.raises(
        ConfigError, match=r"serves 'org/model' .* the policy is 'org/another'.*vllm-serve org/another"
    ):
        backend_of(double, model)
    model.config._name_or_path = "/somewhere/model/"
    backend_of(double, model)  # the same name in another folder


@pytest.mark.parametrize(
    ("policy", "model", "root", "same"),
    [
        ("org/model", "org/model", "org/model", True),
        ("org-a/model", "org-b/model", "org-b/model", False),
        ("org/model", "policy", "org/model", True),
        ("/runs/a/checkpoint-100", "/runs/b/checkpoint-100", "/runs/b/checkpoint-100", False),
        ("/runs/a/../b/checkpoint-100/", "/runs/b/checkpoint-100", "/runs/b/checkpoint-100", True),
        ("/runs/a/checkpoint-100", "/runs/a/checkpoint-100", "/copies/of-it", True),  # --served-model-name
        ("/runs/a/checkpoint-100", "a/checkpoint-100", "a/checkpoint-100", True),  # from where it was started
        ("runs/here", "{tmp}/runs/here", "{tmp}/runs/here", True),  # a folder of the trainer's
        ("runs/here", "/else/runs/here", "/else/runs/here", False),
        ("model", "org/model", "org/model", True),
    ],
)
def test_which_names_mean_the_same_model(
    policy: str, model: str, root: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = {"model": model.format(tmp=tmp_path), "root": root.format(tmp=tmp_path)}
    facts = ServerFacts(
        "1", "0.24.0", **names, context_length=9, logprobs_mode="processed_logprobs", transfer=None, unpickles=False,
        workers=1,
    )  # fmt: skip
    if same:
        check_server(facts, "url", policy)
        return
    with pytest.raises(ConfigError, match=f"serves .* the policy is .*--served-model-name {policy}"):
        check_server(facts, "url", policy)


def test_a_policy_without_a_name_is_said_not_to_be_compared(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    backend_of(double, tiny_model())
    assert "The policy has no name or folder" in caplog.text


def test_handles_do_not_leave_the_machine(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VLLMClient, "is_loopback", False)
    with pytest.raises(ConfigError, match=r"pickles handles: .* listen on 127.0.0.1 only.*nccl"):
        backend_of(double)


def test_weights_on_a_cpu_have_no_handle(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="device cpu cannot be sent by IPC"):
        backend_of(double).sample(REQUESTS)


def test_a_policy_that_cannot_be_copied_is_refused_before_anything_is_sent(double: Double, tmp_path: Path) -> None:
    model = tiny_model()
    model.is_quantized = True
    with pytest.raises(ConfigError, match="quantised"):
        backend_of(double, model)
    assert double.log == []


# ---- without waiting


def test_no_weights_are_sent_while_requests_are_out(double: Double) -> None:
    """Whoever wants other weights waits; what was asked for is of the weights of then."""
    model = tiny_model()
    before = copy.deepcopy(model)
    backend = backend_of(double, model)
    backend.refresh()
    starts = len(double.calls("/start_weight_update"))
    out: list[bool] = []
    double.slow = {"/v1/completions": 0.3}
    double.before["/start_weight_update"] = lambda: out.append(not flight.known)
    flight = backend.begin(REQUESTS)
    change(model)
    backend.refresh()
    assert len(double.calls("/start_weight_update")) == starts + 1
    assert out == [False], "the answers were there"
    found = flight.take()
    assert found is not None
    assert_sampled_from(before, found)
    assert 0.3 <= flight.seconds < 5
    double.slow = {}
    assert_sampled_from(model, backend.sample(REQUESTS))


def test_what_was_asked_for_before_is_waited_for_by_the_next(double: Double) -> None:
    backend = backend_of(double)
    first = backend.begin(REQUESTS)
    second = backend.begin(REQUESTS)
    assert first.known is not None
    second.settle()
    assert [c.ids for c in second.take() or []] == [c.ids for c in first.take() or []]


def test_a_server_that_was_started_again_has_lost_what_it_was_asked(double: Double) -> None:
    backend = backend_of(double)
    double.before["/v1/completions"] = double.restart
    flight = backend.begin(REQUESTS)
    flight.settle()
    assert flight.take() is None
    assert flight.lost == "was restarted while sampling"


def test_an_error_ends_the_wait_for_the_others(double: Double) -> None:
    backend = backend_of(double)
    double.broken = {"/v1/completions": [400]}
    flight = backend.begin(REQUESTS)
    flight.settle()
    with pytest.raises(ServerRefusedError, match=r"status 400\. broken on purpose"):
        flight.take()


def test_a_backend_in_this_process_cannot_ask_without_waiting() -> None:
    with pytest.raises(NotImplementedError, match="RolloutBackend samples in this process"):
        RolloutBackend().begin(REQUESTS)


# ---- several processes


@pytest.mark.medium
def test_processes_agree_on_a_server_that_was_started_between_their_looks(double: Double, tmp_path: Path) -> None:
    double.before["/restart"] = double.restart
    (tmp_path / "url").write_text(double.url)
    run_together(2, "tests.rollout.test_vllm_server", tmp_path)


def main(folder: Path) -> None:
    """One process looks before the server starts again, the other after it: first this, then that one."""
    rank = PartialState(cpu=True).process_index
    transfer.share = share_bytes
    model = tiny_model()
    backend = backend_of(SimpleNamespace(url=(folder / "url").read_text()), model)  # type: ignore[arg-type]
    backend.refresh()
    look = backend._notice_restart

    def restart() -> None:
        with pytest.raises(ServerRefusedError):  # of a path that there is not; what comes before it happens
            backend.client.get("/restart")

    for first in (0, 1):

        def one_after_the_other(first: int = first) -> None:
            backend._notice_restart = look  # type: ignore[method-assign]
            if rank == first:
                look()
                restart()
            torch.distributed.barrier()
            if rank != first:
                look()

        backend._notice_restart = one_after_the_other  # type: ignore[method-assign]
        backend.refresh()
        assert_sampled_from(model, backend.sample(REQUESTS))
        torch.distributed.barrier()
    if rank == 0:
        restart()
    torch.distributed.barrier()
    with pytest.raises(RolloutError, match=r"was restarted\. .*resume from the last checkpoint"):
        backend.sample(REQUESTS)
