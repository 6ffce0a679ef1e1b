"""How completions are sampled."""

from dataclasses import dataclass
from typing import Any

from gruppo.config.fields import option


@dataclass
class SamplingConfig:
    """Prompts, group sizes, lengths and the sampling distribution."""

    num_generations: int | None = option(8, "G: completions sampled per prompt.")
    num_generations_eval: int | None = option(None, "G in evaluation; None or 0 means num_generations.")
    max_prompt_length: int | None = option(
        None,
        "Keep only this many tokens at the end of a prompt (counted in prompts/truncated_ratio); None keeps them all.",
    )
    max_completion_length: int | None = option(512, "Maximum number of tokens sampled per completion.")
    temperature: float = option(1.0, "Sampling temperature; the training log-probs are tempered by it too.")
    top_p: float = option(1.0, "Nucleus mass; 1.0 is off.")
    top_k: int = option(0, "Sample among the k likeliest tokens; 0 is off.")
    min_p: float | None = option(None, "Drop tokens less likely than min_p times the likeliest; None is off.")
    repetition_penalty: float = option(1.0, "Penalty on tokens that already occurred; 1.0 is off.")
    generation_kwargs: dict[str, Any] | str | None = option(
        None,
        "Further fields of transformers' GenerationConfig, or with vLLM of its SamplingParams; they override the "
        "fields above of the same name.",
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Extra variables for every rendering of the chat template."
    )
    rollout_backend: str = option(
        "auto",
        "Sampling backend: builtin, transformers or vllm; auto is builtin, or transformers where that cannot run, "
        "decided when the trainer is created.",
    )
    cache_implementation: str | None = option(None, "Kind of KV cache used by transformers generation.")
    use_transformers_continuous_batching: bool = option(False, "Generate with transformers' continuous batching.")
    transformers_continuous_batching_config: dict[str, Any] | str | None = option(
        None, "Arguments of transformers' ContinuousBatchingConfig."
    )
    use_transformers_paged: bool = option(False, "Deprecated name of use_transformers_continuous_batching.")
    ds3_gather_for_generation: bool = option(True, "DeepSpeed ZeRO-3: gather all weights before generating.")
