"""The rows of one optimizer update: which of them are run, in which packs, and the scores of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gruppo.algo.reduce import UpdateSize
from gruppo.data.collate import join
from gruppo.policy.packing import PackedRows, Packer
from gruppo.policy.routing import Routing
from gruppo.trainer.books.ledger import Ledger
from gruppo.types import TrainBatch


@dataclass
class PackedUpdate:
    """All rows that this process contributes to an update.

    They come in nominal micro-batches (`per_device_train_batch_size` rows each), on which metrics and some losses are
    defined, and run in packs that are independent of these. A row that was run has its new scores; before that it has
    its old log-probs, if they are known, which makes its ratio 1.
    """

    batch: TrainBatch
    micro_batches: list[slice]
    size: UpdateSize  # over all processes
    logps_BT: Tensor
    entropy_BT: Tensor
    ran_B: Tensor  # bool
    tokens_B1: Tensor  # (B, 1): the loss tokens of the micro-batch that each row belongs to
    thresholds: list[Tensor | None] = field(default_factory=list)  # entropy thresholds, per micro-batch
    routing: dict[int, Routing] = field(default_factory=dict)  # of a mixture-of-experts model, by micro-batch
    passes: list[tuple[PackedRows, bool]] = field(default_factory=list)  # packs that were run; True: with backward

    @classmethod
    def of(cls, batches: Sequence[TrainBatch], size: UpdateSize) -> "PackedUpdate":
        bounds = [0, *accumulate(map(len, batches))]
        batch = join(batches)
        shape, device = batch.completion_ids.shape, batch.completion_ids.device
        known = batch.old_per_token_logps
        dtype = torch.float32 if batch.advantages is None else batch.advantages.dtype
        logps_BT = torch.zeros(shape, dtype=dtype, device=device) if known is None else known.clone()
        entropy_BT = torch.zeros(shape, dtype=dtype, device=device)
        if batch.engine_entropies is not None:
            entropy_BT = batch.engine_entropies * batch.loss_mask_BT
        micro_batches = [slice(a, b) for a, b in pairwise(bounds)]
        mask_BT = batch.loss_mask_BT
        tokens = [mask_BT[part].sum().expand(part.stop - part.start) for part in micro_batches]
        return cls(
            batch=batch,
            micro_batches=micro_batches,
            tokens_B1=torch.cat(tokens)[:, None].to(logps_BT.dtype),
            size=size,
            logps_BT=logps_BT,
            entropy_BT=entropy_BT,
            ran_B=torch.zeros(shape[0], dtype=torch.bool, device=device),
            thresholds=[None] * len(batches),
        )

    def packer(self, *, share: bool, whole: bool = False) -> Packer:
        return Packer(self.batch, share=share, whole=whole)

    def add_routing(self, micro_batch: int | None, routing: Routing | None) -> None:
        """Add the routing of the tokens of some rows of a micro-batch."""
        if routing is not None and micro_batch is not None:
            known = self.routing.get(micro_batch)
            self.routing[micro_batch] = routing if known is None else known + routing

    def keep(self, pack: PackedRows, logps_bT: Tensor, entropy_bT: Tensor) -> None:
        """Store the scores of rows that were run."""
        rows = pack.row_index
        self.logps_BT[rows] = logps_bT.detach().to(self.logps_BT.dtype)
        # Not rounded: one of them may be the threshold that the others are compared with.
        self.entropy_BT = self.entropy_BT.to(torch.promote_types(self.entropy_BT.dtype, entropy_bT.dtype))
        self.entropy_BT[rows] = entropy_bT.detach().to(self.entropy_BT.dtype)
        self.ran_B.index_fill_(0, rows, True)  # ran_B[rows] = True would wait for the device
        self.passes.append((pack, torch.is_grad_enabled()))

    def enter(self, ledger: Ledger, now: int) -> None:
        """Record the passes of this update in the ledger; `now` is the number of updates before it."""
        batch = self.batch
        prompts, completions = batch.prompt_mask.sum(1).tolist(), batch.completion_mask.sum(1).tolist()
        still = batch.zero_advantage_B.tolist()
        stale = [False] * len(batch) if batch.sampled_at is None else (batch.sampled_at < now).tolist()
        cut = [False] * len(batch) if batch.truncated is None else batch.truncated.tolist()
        for pack, backward in self.passes:
            ledger.ran(
                prompts=[prompts[row] for row in pack.rows],
                completions=[max(completions[row] - (pack.repeats is None), 0) for row in pack.rows],
                prompt_tokens=pack.prompt_tokens,
                scored=len(pack.targets),
                zero_advantage=[still[row] for row in pack.rows],
                truncated=[cut[row] for row in pack.rows],
                stale=[stale[row] for row in pack.rows],
                backward=backward,
            )


def enter_padded(batch: TrainBatch, ledger: Ledger, now: int) -> None:
    """Record one pass over a micro-batch of padded rows in the ledger; `now` is the number of updates before it."""
    prompts, completions = (mask.sum(1).tolist() for mask in (batch.prompt_mask, batch.completion_mask))
    ledger.ran(
        prompts=prompts,
        completions=completions,
        scored=sum(completions),
        padding_tokens=batch.prompt_ids.numel() + batch.completion_ids.numel() - sum(prompts) - sum(completions),
        zero_advantage=batch.zero_advantage_B.tolist(),
        truncated=None if batch.truncated is None else batch.truncated.tolist(),
        stale=None if batch.sampled_at is None else (batch.sampled_at < now).tolist(),
    )
