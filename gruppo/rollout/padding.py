"""Whether prompts may be padded to be sampled together, for models whose layers are not all standard attention."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gruppo.policy.support import padding_risks
from gruppo.policy.unwrap import inner_model
from gruppo.policy.widening import in_float32_if_half

logger = logging.getLogger(__name__)

_TOKENS = 2  # written after each prompt; a model may go wrong only at the second one
# Mean |difference| of their log-probs in nats that rounding may explain, by bytes per value.
_LIMIT = {2: 0.05, 4: 1e-2, 8: 1e-3}


class PromptPadding:
    """Compares a padded prompt with the same prompt alone, again when prompts are longer or need more padding.

    `logps_of` returns the log-probs of the last tokens of some rows, which `generate` writes in one batch.
    """

    def __init__(self, logps_of: Callable[[Sequence[Sequence[int]], int], Tensor]):
        self.logps_of = logps_of
        self.alone = False  # each prompt is to be sampled alone
        self.longest, self.padding = 0, 0  # of the prompts so far

    def check(self, policy: Callable[[], Any], prompts: Sequence[Sequence[int]]) -> None:
        """Decide whether these prompts are sampled alone; once they are, all later ones are as well."""
        short, long = min(prompts, key=len), max(prompts, key=len)
        padding = len(long) - len(short)
        if self.alone or not padding or (len(long) <= self.longest and padding <= self.padding):
            return
        self.longest, self.padding = max(len(long), self.longest), max(padding, self.padding)
        model = policy()
        if not (layers := padding_risks(model)):
            return
        # The third row only pads the second: what a model chooses or compresses may begin to matter in long rows.
        texts = (short, long, [*short, *long])
        rows = [[*text, *(list(text) * _TOKENS)[:_TOKENS]] for text in texts]

        def difference() -> float:
            padded = self.logps_of(rows, _TOKENS)
            apart = [(padded[i] - self.logps_of([rows[i]], _TOKENS)[0]).abs().mean() for i in (0, 1)]
            return max(float(one.nan_to_num(torch.inf)) for one in apart)

        found, dtype = in_float32_if_half(model, difference)
        if found > _LIMIT[dtype.itemsize]:
            self.alone = True
            logger.warning(
                f"{type(inner_model(model)).__name__} does not sample a prompt that is padded, from {len(short)} to "
                f"{len(long)} tokens, as it samples it alone: log-probs differ by {found:.2g} nats "
                f"({', '.join(layers)}). Each prompt is sampled alone, which is slower."
            )

    def state_dict(self) -> dict[str, Any]:
        """What was found so far. A run that is resumed with it samples the same completions."""
        return {"alone": self.alone, "longest": self.longest, "padding": self.padding}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.alone, self.longest, self.padding = state["alone"], state["longest"], state["padding"]
