"""Old names that still work, each with a FutureWarning."""

from dataclasses import dataclass, fields
from typing import Any

from gruppo.config.fields import option
from gruppo.errors import ConfigError, warn_deprecated

# old name -> the name to use instead
ALIASES = {
    "use_transformers_paged": "use_transformers_continuous_batching",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


@dataclass
class DeprecatedConfig:
    """Names of earlier releases that no other mixin declares."""

    use_liger_loss: bool | None = option(None, "Deprecated name of use_liger_kernel.")
    vllm_guided_decoding_regex: str | None = option(None, "Deprecated name of vllm_structured_outputs_regex.")
    wandb_log_unique_prompts: bool | None = option(None, "Deprecated name of log_unique_prompts.")


def resolve_aliases(config: Any) -> None:
    """Move the value of every old name that was set to its new name, with a FutureWarning."""
    defaults = {f.name: f.default for f in fields(config)}
    for old, new in ALIASES.items():
        if old not in defaults or getattr(config, old) == defaults[old]:
            continue
        if getattr(config, new) not in (defaults.get(new), getattr(config, old)):
            raise ConfigError(f"`{old}` is the old name of `{new}`, and both are set to different values.")
        warn_deprecated(f"`{old}` is deprecated; use `{new}` instead.")
        setattr(config, new, getattr(config, old))
        # Reset the old name to its default, so that a copy of this config does not warn or override again.
        setattr(config, old, defaults[old])
