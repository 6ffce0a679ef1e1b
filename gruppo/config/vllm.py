"""Generation with vLLM."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class VLLMConfig:
    """Where vLLM runs and how it is set up."""

    use_vllm: bool = option(False, "Generate with vLLM.")
    vllm_mode: str = option("colocate", "Engine in this process (colocate) or behind HTTP (server).")
    vllm_model_impl: str = option("vllm", "vLLM's own model code, or its transformers backend.")
    vllm_enable_sleep_mode: bool = option(False, "Release engine weights and KV cache between generations.")
    vllm_structured_outputs_regex: str | None = option(None, "Constrain completions to a regular expression.")
    vllm_server_base_url: str | None = option(None, "URL of the server; overrides host and port.")
    vllm_server_host: str = option("0.0.0.0", "Host of the server.")
    vllm_server_port: int = option(8000, "Port of the server.")
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server to come up.")
    vllm_group_port: int = option(51216, "Port of the weight-transfer rendezvous.")
    vllm_gpu_memory_utilization: float = option(0.3, "Share of GPU memory for the colocated engine.")
    vllm_max_model_length: int | None = option(None, "Context length of the colocated engine; None is the model's.")
    vllm_tensor_parallel_size: int = option(1, "Tensor-parallel degree of the colocated engine.")


@dataclass
class VLLMCorrectionConfig:
    """Correction of the mismatch between trainer and sampler (GRPO)."""

    vllm_importance_sampling_correction: bool = option(True, "Correct the mismatch between trainer and sampler.")
    vllm_importance_sampling_mode: str = option(
        "sequence_mask", "token_truncate, token_mask, sequence_truncate or sequence_mask."
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Upper bound of the correction ratio.")
    vllm_importance_sampling_clip_min: float | None = option(None, "Lower bound of the correction ratio.")
    vllm_importance_sampling_cap: float | None = option(None, "Deprecated name of vllm_importance_sampling_clip_max.")
