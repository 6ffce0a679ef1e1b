"""How completions become micro-batches and optimizer updates."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class BatchingConfig:
    """The generation batch, its reuse, and the order of prompts."""

    generation_batch_size: int | None = option(
        None, "Completions per generation over all processes; None derives it from steps_per_generation."
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches cut from one generation; None means gradient_accumulation_steps."
    )
    num_iterations: int = option(1, "μ: passes over each generated batch.")
    dynamic_sampling: bool = option(
        False, "In training, replace prompts whose completions all have the same reward with the next prompts (DAPO)."
    )
    max_resample_rounds: int = option(
        4, "Maximum rounds of such replacements per generation; after that, groups with equal rewards are kept."
    )
    shuffle_dataset: bool | None = option(True, "Shuffle the training prompts.")
    pad_to_multiple_of: int | str | None = option(
        None, "Round padded prompt and completion widths up to a multiple of this; None (or 'auto') is off."
    )
