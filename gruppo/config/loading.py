"""How the policy is loaded."""

from dataclasses import dataclass
from typing import Any

from gruppo.config.fields import option


@dataclass
class LoadingConfig:
    """Loading of the policy, and changes to it."""

    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Keyword arguments for loading the model when it is given by name; `revision` also serves the tokenizer."
    )
    trust_remote_code: bool = option(False, "Allow custom code from the hub for policy, tokenizer and reward models.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of the load-balancing loss of mixture-of-experts models; None takes the model's own value."
    )
    disable_dropout: bool = option(False, "Set p = 0 on every dropout module of the policy and the reference.")


@dataclass
class HeadConfig:
    """Precision of the language-model head (GRPO)."""

    cast_lm_head_to_fp32: bool = option(False, "Run the language-model head of policy and reference in float32.")
