"""What is logged of the completions."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class CompletionLoggingConfig:
    """Tables of prompts and completions."""

    log_completions: bool = option(False, "Log a table of prompts, completions and rewards at every log.")
    log_multimodal: bool = option(True, "Include images in those tables.")
    num_completions_to_print: int | None = option(
        None, "Number of randomly chosen rows shown on the console; None shows all, 0 or less none."
    )
    log_unique_prompts: bool = option(False, "Keep one row per prompt in wandb and trackio tables.")


@dataclass
class HubLoggingConfig:
    """A hub dataset of completions (GRPO)."""

    log_completions_hub_repo: str | None = option(None, "Dataset repository that receives the completion tables.")
