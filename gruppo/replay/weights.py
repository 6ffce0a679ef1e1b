"""Gradients with respect to weights: how two recipes would update a model, compared on a few groups.

A gradient is d loss / d log-prob from the record times d log-prob / d weights of a model. With the checkpoint that the
update started from, it is the gradient of that update; `logp_difference` is how far the model's log-probs are from the
recorded ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gruppo.errors import ConfigError, DataError
from gruppo.policy.loading import load_policy, placeholder_ids
from gruppo.policy.logprobs import score_tokens
from gruppo.replay.compare import likeness
from gruppo.replay.compute import Computed
from gruppo.replay.measures import groups_of
from gruppo.replay.record import MicroBatch, RecordedGeneration, RecordedUpdate, arrays, padded

__all__ = ["Policy"]


@dataclass
class Policy:
    """A model, and the number of groups whose gradients are still to be compared."""

    model: nn.Module
    temperature: float
    groups: int

    @classmethod
    def of(cls, model: Any, config: Mapping[str, Any], groups: int) -> "Policy":
        """Create it from a model name, a folder, or a loaded model."""
        if isinstance(model, nn.Module):
            return cls(model.eval(), float(config.get("temperature") or 1.0), groups)
        # trust_remote_code is never taken from the record: the run folder may come from an untrusted source.
        wanted = SimpleNamespace(model_init_kwargs=None, trust_remote_code=False)
        try:
            loaded = load_policy(str(model), wanted)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The model {str(model)!r} cannot be loaded: {error}\nAn adapter alone is not a model: load it onto "
                "its base model in Python, and pass that to gruppo.replay.replay."
            ) from error
        return cls(loaded.eval(), float(config.get("temperature") or 1.0), groups)

    @property
    def done(self) -> bool:
        return self.groups <= 0

    def compare(
        self, update: RecordedUpdate, generations: Mapping[int, RecordedGeneration], computed: Sequence[Computed]
    ) -> list[dict[str, Any]]:
        """Compare the gradients of the groups of an update in which the first recipe's gradient is largest."""
        group_size = next(iter(generations.values())).group_size
        places = groups_of(update, group_size)
        sizes = {key: sum(float(computed[0].gradients[i].abs().sum()) for i in rows) for key, rows in places.items()}
        chosen = sorted((key for key in places if sizes[key]), key=lambda key: (-sizes[key], key))[: self.groups]
        self.groups -= len(chosen)
        where = [(batch, i) for batch in update.micro_batches for i in range(len(batch))]
        said = []
        for key in chosen:
            rows = [where[place] for place in places[key]]
            wanted = [[each.gradients[place] for place in places[key]] for each in computed]
            gradients, difference = self._gradients(rows, generations[key[0]], wanted)
            facts = {"update": update.number, "generation": key[0], "group": key[1], "logp_difference": difference}
            facts |= {"gradient_norm": float(gradients[0].double().norm())}
            said.append(facts | (likeness(*gradients)._asdict() if len(gradients) == 2 else {}))
        return said

    def _gradients(
        self,
        rows: Sequence[tuple[MicroBatch, int]],
        generation: RecordedGeneration,
        wanted: Sequence[Sequence[Tensor]],
    ) -> tuple[list[Tensor], float]:
        """For each recipe, the gradient of all weights; and the mean difference of log-probs."""
        ids, mask, width = _tokens(generation, [batch.row[i] for batch, i in rows])
        unseen = torch.tensor(placeholder_ids(self.model), dtype=torch.long)
        if torch.isin(ids[:, :-width], unseen).any():
            raise DataError("Prompts have images, which are not in the record: a model cannot score them again.")
        device = next(self.model.parameters()).device
        logps_BT = score_tokens(
            self.model, ids.to(device), mask.to(device), width, temperature=self.temperature
        ).logps_BT
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        found = []
        for n, gradients in enumerate(wanted):
            outer_BT = padded([gradient.numpy() for gradient in gradients], width).to(logps_BT)
            parts = torch.autograd.grad(
                (logps_BT * outer_BT).sum(), weights, retain_graph=n + 1 < len(wanted), allow_unused=True
            )
            zeros = (torch.zeros_like(w) if p is None else p for w, p in zip(weights, parts, strict=True))
            found.append(torch.cat([part.float().flatten().cpu() for part in zeros]))
        return found, _difference(rows, logps_BT.detach().cpu())


def _tokens(generation: RecordedGeneration, rows: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Left-padded prompts followed by right-padded completions, their mask, and the width of the completions."""
    table = generation.table.take(rows)
    prompts, completions = (
        [[] if ids is None else ids.tolist() for ids in arrays(table[f"{kind}_tokens"])]
        for kind in ("prompt", "completion")
    )
    longest, width = max(map(len, prompts)), max(1, *map(len, completions))
    ids, mask = (torch.zeros(len(rows), longest + width, dtype=torch.long) for _ in range(2))
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(longest - len(prompt), longest + len(completion))
        ids[i, place], mask[i, place] = torch.tensor([*prompt, *completion], dtype=torch.long), 1
    return ids, mask, width


def _difference(rows: Sequence[tuple[MicroBatch, int]], logps_BT: Tensor) -> float:
    """The mean absolute difference between these log-probs and the recorded ones; NaN if none are recorded."""
    apart = []
    for (batch, i), own in zip(rows, logps_BT, strict=True):
        if batch.known_B[i]:
            written = batch.mask_BT[i, : batch.lengths[i]]
            apart.append((own[: batch.lengths[i]] - batch.logps_BT[i, : batch.lengths[i]])[written].abs())
    return float(torch.cat(apart).mean()) if apart else float("nan")
