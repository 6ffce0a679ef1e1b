"""vLLM for benchmarks/rollout.py, in a separate process.

For cases with random weights, vLLM creates its own (`load_format="dummy"`). TRL copies the policy's weights into vLLM
before each generation and resets the prefix cache; neither is timed here.
"""

import os
import socket
from typing import Any

from benchmarks.rollout_cases import Workload
from benchmarks.rollout_engines import Engine
from gruppo.types import Completion, SampleRequest, StopReason

# Variables that vLLM 0.24 needs on a machine without flashinfer and without a network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def as_trl(workload: Workload) -> Engine:
    """The arguments of TRL 1.16's colocate mode with its defaults; one request per completion, with log-probs.

    In TRL, vLLM has the tokenizer and decodes every token. Without a tokenizer folder this engine does not, which
    makes it a little faster than in TRL.
    """
    rows = workload.case.prompts * workload.case.completions
    _pretend_torchrun()
    engine_settings = dict(
        tensor_parallel_size=1,
        gpu_memory_utilization=0.3,
        max_model_len=None,
        max_num_seqs=rows,
        enable_sleep_mode=False,
        model_impl="vllm",
        distributed_executor_backend="external_launcher",
        seed=0,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
    )
    sampling = dict(n=1, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, logprobs=0)
    return _engine(workload, engine_settings, sampling, decode=workload.tokenizer_folder is not None)


def plain(workload: Workload) -> Engine:
    """Most of the memory, one request per group, token ids only."""
    case = workload.case
    engine_settings = dict(gpu_memory_utilization=0.85, max_num_seqs=case.prompts * case.completions, seed=0)
    return _engine(workload, engine_settings, dict(n=case.completions), decode=False)


def _pretend_torchrun() -> None:
    """The variables that TRL sets for vLLM's in-process launcher."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def _engine(workload: Workload, engine_settings: dict[str, Any], sampling: dict[str, Any], decode: bool) -> Engine:
    from vllm import LLM, SamplingParams

    case = workload.case
    settings = dict(engine_settings)
    if case.shape is not None:
        settings["load_format"] = "dummy"
    sampling = sampling | dict(temperature=1.0, max_tokens=case.new_tokens, detokenize=decode)
    if not workload.stop_ids:
        sampling["ignore_eos"] = True
    where: dict[str, Any] = (
        dict(tokenizer=str(workload.tokenizer_folder)) if decode else dict(skip_tokenizer_init=True)
    )
    llm = LLM(model=str(workload.config_folder()), **settings, **where)
    params = SamplingParams(**sampling, stop_token_ids=workload.stop_ids or None)
    share = sampling["n"]

    def sample(requests: list[SampleRequest]) -> list[Completion]:
        prompts = [
            {"prompt_token_ids": list(request.prompt_ids)}
            for request in requests
            for _ in range(request.count // share)
        ]
        results = llm.generate(prompts, sampling_params=params, use_tqdm=False)
        return [_completion(output) for result in results for output in result.outputs]

    return Engine(
        sample,
        {"engine": settings, "sampling": sampling, "decodes": decode, "weight_sync": "not timed"},
        before_call=llm.reset_prefix_cache,
        packages=("vllm",),
    )


def _completion(output: Any) -> Completion:
    stop = StopReason.EOS if output.finish_reason == "stop" else StopReason.LENGTH
    if output.logprobs is None:
        return Completion(list(output.token_ids), stop)
    logps = [
        choices[token].logprob for token, choices in zip(output.token_ids, output.logprobs, strict=True)
    ]  # of the sampled token; with logprobs=0 there are no others
    return Completion(list(output.token_ids), stop, logps)
