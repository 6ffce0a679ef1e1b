"""How far the policy has moved from the one that sampled: log-ratios per token or per sequence."""

import torch
from torch import Tensor

from gruppo.algo.tensors import count, masked_sum, widen

__all__ = ["LEVELS", "log_ratio"]

LEVELS = ("token", "sequence_mean", "sequence_sum")


def log_ratio(logps_BT: Tensor, old_logps_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """log r of the current to the old policy; exactly 0 at masked positions, whatever the inputs contain there.

    - "token" (B, T): ℓ − ℓ_old
    - "sequence_mean" (B, 1): its mean over the row's tokens (GSPO, https://arxiv.org/abs/2507.18071)
    - "sequence_sum" (B, 1): its sum, the ratio of the whole completion (RLOO, https://arxiv.org/abs/2402.14740). At
      this level the old log-probs may also be given as row sums, (B,) or (B, 1), since only the sums are needed.
    """
    if level not in LEVELS:
        raise ValueError(f"ratio level must be one of {LEVELS}, not {level!r}")
    if old_logps_BT.shape != logps_BT.shape:
        return _from_row_sums(logps_BT, old_logps_BT, mask_BT, level)
    difference_BT = widen(logps_BT) - widen(old_logps_BT)
    if level == "token":
        return difference_BT.masked_fill(~mask_BT.bool(), 0.0)
    summed_B1 = masked_sum(difference_BT, mask_BT, dim=1, keepdim=True)
    if level == "sequence_sum":
        return summed_B1
    return summed_B1 / count(mask_BT, summed_B1, dim=1, keepdim=True).clamp(min=1.0)


def _from_row_sums(logps_BT: Tensor, old_logps_B: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    rows = logps_BT.shape[0]
    if level != "sequence_sum" or old_logps_B.shape not in {(rows,), (rows, 1)}:
        raise ValueError(
            f"old log-probs of shape {tuple(old_logps_B.shape)} do not fit log-probs of shape {tuple(logps_BT.shape)} "
            f"at ratio level {level!r}; row sums are accepted at level 'sequence_sum' only"
        )
    difference_B1 = masked_sum(logps_BT, mask_BT, dim=1, keepdim=True) - widen(old_logps_B).view(rows, 1)
    return torch.where(mask_BT.bool().any(dim=1, keepdim=True), difference_B1, 0.0)
