"""The vLLM backend that a config asks for."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gruppo.policy.sharding import shape_of
from gruppo.policy.unwrap import inner_model
from gruppo.rollout.vllm.base import VLLMBackend
from gruppo.rollout.vllm.client import VLLMClient
from gruppo.rollout.vllm.colocate import EngineSettings, VLLMColocateBackend
from gruppo.rollout.vllm.server import VLLMServerBackend

__all__ = ["vllm_backend"]


def vllm_backend(
    args: Any,
    policy: Callable[[], Any],
    config: Any,
    *,
    stop_ids: Sequence[int],
    autocast_dtype: torch.dtype | None = None,
) -> VLLMBackend:
    """A backend in this process or for a server; raises if it cannot sample for this run."""
    if args.vllm_mode == "server":
        url = args.vllm_server_base_url or f"http://{_bracketed(args.vllm_server_host)}:{args.vllm_server_port}"
        return VLLMServerBackend(
            policy,
            config,
            stop_ids=stop_ids,
            client=VLLMClient(url, request_timeout=args.vllm_request_timeout),
            start_timeout=args.vllm_server_timeout,
            group_port=args.vllm_group_port,
            seeded=args.vllm_seed_requests,
        )
    settings = EngineSettings(
        rows=args.per_device_train_batch_size * args.steps_per_generation,
        # The dtype in which the update computes, whatever dtype the weights are stored in.
        dtype=autocast_dtype or _usual_dtype(policy()),
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        memory_share=args.vllm_gpu_memory_utilization,
        context_length=args.vllm_max_model_length,
        sleeps=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        revision=(args.model_init_kwargs or {}).get("revision"),
        trust_remote_code=args.trust_remote_code,
    )
    return VLLMColocateBackend(policy, config, stop_ids=stop_ids, settings=settings, seeded=args.vllm_seed_requests)


def _usual_dtype(policy: Any) -> torch.dtype:
    """The dtype of most weights: the output head, and embeddings tied to it, may be wider."""
    counts: Counter[torch.dtype] = Counter()
    for weight in inner_model(policy).parameters():
        counts[weight.dtype] += shape_of(weight).numel() if len(shape_of(weight)) > 1 else 0
    layers = {dtype: count for dtype, count in counts.items() if dtype.is_floating_point}
    return max(layers, key=lambda dtype: (layers[dtype], -dtype.itemsize))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
