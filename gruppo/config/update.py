"""How the update is computed. None of this changes the loss: the slower paths have the same gradients."""

from dataclasses import dataclass

from gruppo.config.fields import option


@dataclass
class UpdateConfig:
    """Micro-batches, fast paths, and the check of the fast paths against the reference path."""

    max_tokens_per_micro_batch: int | None = option(
        None,
        "Maximum tokens in one forward and backward pass of packed rows; None plans it from the free memory.",
    )
    packed_update: bool = option(
        True, "Score and train rows without padding, each prompt once per group; False pads every row."
    )
    fused_head: bool = option(
        True, "With packed rows: compute log-probs and entropies without a tensor of tokens × vocabulary."
    )
    fused_layers: bool = option(
        True, "With packed rows: norms, and on a GPU rotary embeddings and gated MLPs, in fewer kernels."
    )
    balance_processes: bool = option(
        True,
        "With packed rows and several processes: run rows on the processes with the least work, so that none waits "
        "long for the others; False runs them where they were sampled.",
    )
    skip_zero_advantage: bool = option(True, "Skip rows that cannot change the update.")
    reuse_sampling_logps: bool = option(
        True,
        "Take old log-probs from the sampling engine where the parity check found them to agree (mean difference at "
        "most 1e-3); False recomputes them.",
    )
    parity_check: str = option(
        "first",
        "Compare packed rows with the padded reference path, on real rows: at the `first` update, `every:N` updates, "
        "or `off`.",
    )
