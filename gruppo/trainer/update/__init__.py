"""The second half of a training step: rows and packs, memory plans, the parity check, additional loss terms."""
