"""The contents of a checkpoint besides the weights."""
