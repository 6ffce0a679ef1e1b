"""The engines that benchmarks/rollout.py compares, behind one interface, and how their calls are timed."""

import importlib.metadata as metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.rollout_cases import Workload
from gruppo.rollout.hf import TransformersBackend
from gruppo.types import Completion, SampleRequest, StopReason

# Tokens of the warm-up call of transformers' generate, which compiles and captures nothing: a short call suffices.
SHORT_WARM_UP = 16


@dataclass
class Engine:
    """A sampler that is ready to be called."""

    sample: Callable[[list[SampleRequest]], list[Completion]]
    settings: dict[str, Any] = field(default_factory=dict)
    warm_up: Callable[[list[SampleRequest]], list[Completion]] | None = None  # a shorter first call
    before_call: Callable[[], Any] = lambda: None  # not timed
    counters: Callable[[], Mapping[str, float]] = dict
    packages: Sequence[str] = ()  # whose versions are in the result
    policy: Any = None


def builtin(workload: Workload, new_tokens: int | None = None, policy: Any = None) -> Engine:
    """gruppo's built-in engine on the training module."""
    from gruppo.rollout.builtin import BuiltinBackend

    case = workload.case
    policy = workload.policy() if policy is None else policy
    backend = BuiltinBackend(
        lambda: policy,
        workload.generation_config(new_tokens),
        stop_ids=workload.stop_ids,
        tokenizer=workload.tokenizer,
        autocast_dtype=getattr(torch, case.autocast) if case.autocast else None,
    )
    return Engine(backend.sample, counters=lambda: dict(getattr(backend, "counters", {})), policy=policy)


def transformers(workload: Workload, share_prefill: bool = False) -> Engine:
    """transformers' generate on the whole batch; without `share_prefill` as TRL calls it, with a prompt for every row.

    With autocast, accelerate wraps the forward pass, as in a Trainer.
    """
    case, policy = workload.case, workload.policy()
    if case.autocast:
        policy = Accelerator(mixed_precision="bf16", cpu=case.device == "cpu").prepare_model(policy)
    common: dict[str, Any] = dict(stop_ids=workload.stop_ids, share_prefill=share_prefill)
    full = TransformersBackend(lambda: policy, workload.generation_config(), **common)
    warm_tokens = min(SHORT_WARM_UP, case.new_tokens)
    short = TransformersBackend(lambda: policy, workload.generation_config(warm_tokens), **common)
    settings = {"share_prefill": share_prefill, "attention": policy.config._attn_implementation}
    return Engine(full.sample, settings, warm_up=short.sample)


def transformers_shared(workload: Workload) -> Engine:
    """transformers' generate, each distinct prompt encoded once."""
    return transformers(workload, share_prefill=True)


def vllm(workload: Workload) -> Engine:
    """vLLM as TRL's colocate mode drives it."""
    from benchmarks import rollout_vllm

    return rollout_vllm.as_trl(workload)


def vllm_best(workload: Workload) -> Engine:
    """vLLM as a plain script would drive it, with most of the memory and returning no more than necessary."""
    from benchmarks import rollout_vllm

    return rollout_vllm.plain(workload)


ENGINES: dict[str, Callable[[Workload], Engine]] = {
    "builtin": builtin,
    "transformers": transformers,
    "transformers-shared": transformers_shared,
    "vllm": vllm,
    "vllm-best": vllm_best,
}


def synchronize() -> None:
    """Wait for the device, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """A call's result, its wall seconds and its processor seconds."""
    synchronize()
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    synchronize()
    return result, time.perf_counter() - wall, time.process_time() - processor


def _round(engine: Engine, workload: Workload, call: int, first: bool) -> dict[str, Any]:
    """Time one call. The completions are counted, and their lengths are checked if they are known."""
    requests = workload.requests(call)
    torch.manual_seed(call)
    engine.before_call()
    sample = engine.warm_up if first and engine.warm_up else engine.sample
    completions, wall, processor = timed(lambda: sample(requests))
    lengths = [len(completion.ids) for completion in completions]
    if len(lengths) != sum(request.count for request in requests):
        raise RuntimeError(f"{len(lengths)} completions came back for {len(requests)} requests.")
    if not first and not workload.stop_ids and set(lengths) != {workload.case.new_tokens}:
        raise RuntimeError(f"Completions of {min(lengths)} to {max(lengths)} tokens, not {workload.case.new_tokens}.")
    facts = {
        "seconds": round(wall, 4),
        "processor_seconds": round(processor, 4),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "ended": sum(completion.stop == StopReason.EOS for completion in completions),
        "tokens_per_second": round(sum(lengths) / wall, 1),
    }
    counters = engine.counters()
    return {**facts, "counters": dict(counters)} if counters else facts


def _summary(record: dict[str, Any]) -> None:
    """Add medians over the rounds so far, and the memory, to the record."""
    rounds = record["rounds"]
    for key in ("seconds", "processor_seconds", "tokens_per_second"):
        record[f"median_{key}"] = round(statistics.median(facts[key] for facts in rounds), 4)
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        record["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        record["device_memory_gib"] = round((total - free) / 2**30, 2)  # includes CUDA graphs and torch's cache


def measure(
    names: Sequence[str], workload: Workload, rounds: Mapping[str, int], save: Callable[[dict[str, Any]], None]
) -> dict[str, Engine]:
    """Build the engines, call each once, then in turns; `save` is called with the records after every call."""
    engines: dict[str, Engine] = {}
    records: dict[str, dict[str, Any]] = {}
    for name in names:
        engines[name], seconds, _ = timed(lambda name=name: ENGINES[name](workload))
        records[name] = {"settings": engines[name].settings, "construct_seconds": round(seconds, 2)}
        records[name]["versions"] = {package: metadata.version(package) for package in engines[name].packages}
        records[name]["first_call"] = _round(engines[name], workload, 0, first=True)
        records[name]["rounds"] = []
        save(records)
    for call in range(1, max(rounds.values()) + 1):
        for name in names:
            if call <= rounds[name]:
                records[name]["rounds"].append(_round(engines[name], workload, call, first=False))
                _summary(records[name])
                save(records)
    return engines
