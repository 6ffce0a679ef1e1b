"""The second half of a training step: rows and packs, plans of memory, the parity check, terms beside the loss."""
