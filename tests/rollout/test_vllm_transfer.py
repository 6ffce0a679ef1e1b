"""Weights in parts, and NCCL's side of a transfer with a stand-in for vLLM's own code."""

import json
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.vllm import transfer
from gruppo.rollout.vllm.client import VLLMClient
from gruppo.rollout.vllm.threads import all_at_once, started
from gruppo.rollout.vllm.transfer import IPCSender, NCCLSender, chunks, described, push
from tests.rollout.vllm_doubles import Double, serving


def tensors(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(f"{dtype}{i}", torch.zeros(size, dtype=dtype)) for i, size in enumerate(sizes)]


def test_parts_have_one_dtype_and_at_most_so_many_bytes() -> None:
    weights = [*tensors(1, 2, 1), *tensors(3, 1, dtype=torch.bfloat16), *tensors(100)]
    found = [[tensor.numel() for _, tensor in chunk] for chunk in chunks(iter(weights), 12)]
    assert found == [[1, 2], [1], [3, 1], [100]]
    assert list(chunks(iter([]), 12)) == []


def test_what_the_server_is_told_of_a_part() -> None:
    weights = [("a", torch.zeros(2, 3)), ("b", torch.zeros(()))]
    assert described(weights) == {
        "names": ["a", "b"],
        "dtype_names": ["float32", "float32"],
        "shapes": [[2, 3], []],
    }


# ---- threads


def test_threads_give_back_what_functions_return_and_raise() -> None:
    assert started(lambda: 3).result(timeout=5) == 3
    with pytest.raises(ZeroDivisionError):
        started(lambda: 1 // 0).result(timeout=5)
    futures = all_at_once(lambda x: 10 // x, [1, 2, 0, 5], most=2)
    assert [f.result(timeout=5) for f in futures if f.exception(timeout=5) is None] == [10, 5, 2]
    assert isinstance(futures[2].exception(), ZeroDivisionError)
    assert all_at_once(abs, [], most=2) == []


def test_no_more_than_so_many_at_once_and_none_that_was_cancelled() -> None:
    gate, lock, running, most = threading.Event(), threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(5)
        with lock:
            running -= 1

    futures = all_at_once(work, range(6), most=2)
    time.sleep(0.05)
    assert [f.cancel() for f in futures[4:]] == [True, True]
    gate.set()
    for future in futures[:4]:
        future.result(timeout=5)
    assert most == 2


# ---- CUDA IPC

# What vLLM does with an update: the buffer by its handle, on its own number of the device, and copies of its parts.
READER = """
import base64, json, pickle, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

for line in sys.stdin:
    info = json.loads(line)
    arguments = list(pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))[sys.argv[1]])
    arguments[6] = 0
    packed = rebuild_cuda_tensor(*arguments)[: sum(info["tensor_sizes"])]
    described = zip(packed.split(info["tensor_sizes"]), info["dtype_names"], info["shapes"], strict=True)
    parts = [part.view(getattr(torch, dtype)).view(*shape).clone() for part, dtype, shape in described]
    torch.cuda.synchronize()
    del packed, described  # zip keeps the last of the parts
    print(json.dumps([part.double().flatten().tolist() for part in parts]), flush=True)
"""


@pytest.mark.gpu
def test_another_process_reads_the_buffer() -> None:
    values = torch.arange(12.0, device="cuda")
    weights = [("a", values.view(3, 4)), ("b", values[:5] + 100), ("c", values.bfloat16()), ("d", values[:3] - 7)]
    device = str(torch.cuda.get_device_properties(0).uuid)
    read: list[list[float]] = []
    with subprocess.Popen(
        [sys.executable, "-c", READER, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def post_once(path: str, body: dict[str, Any]) -> None:
            assert path == "/update_weights"
            print(json.dumps(body["update_info"]), file=reader.stdin, flush=True)
            read.extend(json.loads(reader.stdout.readline()))

        used = torch.cuda.memory_allocated()
        sender = IPCSender(types.SimpleNamespace(post_once=post_once), chunk_bytes=70)  # type: ignore[arg-type]
        for _ in range(2):
            sender.send(iter(weights))
            sender.release()
            assert torch.cuda.memory_allocated() == used
    assert read == 2 * [weight.double().flatten().tolist() for _, weight in weights]


# ---- NCCL


class Group:
    """What two sides that wait for each other share."""

    def __init__(self) -> None:
        self.sent: list[dict[str, torch.Tensor]] = []


class FakeEngine:
    """vLLM's code for the trainer's side of NCCL."""

    joined: Any = None

    @classmethod
    def trainer_init(cls, info: dict[str, Any]) -> Group:
        cls.joined = info
        return Group()

    @staticmethod
    def broadcast(weights: Any, group: Group, src: int, post_iter_func: Any, **buffers: int) -> None:
        assert (src, buffers) == (0, {"buffer_size_bytes": 1 << 30, "num_buffers": 2})
        group.sent.append({pair[0]: post_iter_func(pair) for pair in weights})


RELEASES = ["0.24.0", "0.27.1", "0.32.0"]


def module_of_vllm(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    """Of the package and the server; tests that do not ask for it have the last one."""
    return str(request.param)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    release = request.getfixturevalue("release") if "release" in request.fixturenames else RELEASES[-1]
    transfer_code = "vllm.distributed.weight_transfer"
    module_of_vllm(monkeypatch, "vllm", __version__=release)
    module_of_vllm(monkeypatch, "vllm.distributed")
    module_of_vllm(monkeypatch, transfer_code)
    module_of_vllm(monkeypatch, f"{transfer_code}.packed_tensor", packed_nccl_broadcast_producer=FakeEngine.broadcast)
    if release == "0.24.0":
        module_of_vllm(monkeypatch, f"{transfer_code}.nccl_engine", NCCLWeightTransferEngine=FakeEngine)
    else:
        module_of_vllm(monkeypatch, f"{transfer_code}.nccl_common", trainer_init=FakeEngine.trainer_init)
    monkeypatch.setattr(transfer, "_on_device", lambda own: own())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return FakeEngine


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    with serving("org/model", transfer="nccl") as double:
        monkeypatch.setattr(double, "_update", lambda info: None)
        double.workers = 4
        yield double


def sender_of(double: Double, timeout: float = 5.0) -> tuple[NCCLSender, VLLMClient]:
    client = VLLMClient(double.url, request_timeout=timeout)
    sender = transfer.make_sender(client, client.facts(), group_port=51216)
    assert isinstance(sender, NCCLSender)
    return sender, client


def test_trainer_and_workers_join_and_weights_go_in_parts(double: Double, engine: Any, release: str) -> None:
    double.version = release
    sender, client = sender_of(double)
    sender.chunk_bytes = 12
    weights = tensors(1, 2, 1)
    for _ in range(2):
        push(client, sender, client.facts(), iter(weights))
    own = {"master_address": "127.0.0.1", "master_port": 51216, "world_size": 5}
    assert engine.joined == own
    packing = {"packed": True, "packed_buffer_size_bytes": 1 << 30, "packed_num_buffers": 2}
    once, each = (packing, {}) if release == "0.32.0" else ({}, packing)
    assert double.calls("/init_weight_transfer_engine") == [{"init_info": own | {"rank_offset": 1} | once}], "once"
    assert [list(part) for part in sender.group.sent[:2]] == [["torch.float320", "torch.float321"], ["torch.float322"]]
    assert [body["update_info"] for body in double.calls("/update_weights")][:2] == [
        described(weights[:2]) | each,
        described(weights[2:]) | each,
    ]
    assert "/reset_prefix_cache" in {path for path, _ in double.log}


def test_a_server_that_started_again_joins_again(double: Double, engine: Any) -> None:
    sender, client = sender_of(double)
    push(client, sender, client.facts(), iter(tensors(1)))
    double.restart()
    push(client, sender, client.facts(), iter(tensors(1)))
    assert len(double.calls("/init_weight_transfer_engine")) == 2


def test_a_group_that_another_trainer_has_replaced_is_made_again(double: Double, engine: Any) -> None:
    sender, client = sender_of(double)
    push(client, sender, client.facts(), iter(tensors(1)))
    sender.forget()
    assert sender.group is None, "its port is free"
    push(client, sender, client.facts(), iter(tensors(1)))
    assert len(double.calls("/init_weight_transfer_engine")) == 2


def test_a_refused_update_does_not_leave_the_trainer_waiting(
    double: Double, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, client = sender_of(double)
    sender.begin(client.facts())
    monkeypatch.setattr(sender, "_broadcast", lambda *_, **__: time.sleep(30))
    double.broken["/update_weights"] = [500]
    start = time.monotonic()
    with pytest.raises(RolloutError, match="status 500"):
        push(client, sender, client.facts(), iter(tensors(1)))
    assert time.monotonic() - start < 5
    monkeypatch.undo()
    double.log.clear()
    sender.begin(client.facts())
    assert double.calls("/init_weight_transfer_engine"), "nobody knows where the old group stands"


def test_a_broadcast_that_fails_or_hangs_is_an_error(
    double: Double, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, client = sender_of(double, timeout=0.3)
    sender.begin(client.facts())

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("unhandled cuda error")

    monkeypatch.setattr(sender, "_broadcast", fail)
    with pytest.raises(RolloutError, match="NCCL failed during /update_weights: unhandled cuda error"):
        sender.send(iter(tensors(1)))
    monkeypatch.setattr(sender, "_broadcast", lambda *_, **__: time.sleep(3))
    with pytest.raises(RolloutError, match=r"NCCL had not finished 0.3 s after /update_weights was called"):
        sender.send(iter(tensors(1)))


def test_nccl_needs_a_release_that_is_known(double: Double, engine: Any) -> None:
    sys.modules["vllm"].__version__ = "0.34.0"  # type: ignore[attr-defined]
    client = VLLMClient(double.url, request_timeout=1.0)
    with pytest.raises(ConfigError, match=r"vLLM 0.34.0 of this environment is not supported"):
        transfer.make_sender(client, client.facts(), group_port=1)


def test_nccl_needs_a_gpu(double: Double, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        sender_of(double)
