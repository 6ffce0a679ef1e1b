"""The trainer, from bottom to top: reporting ← feeding ← collecting ← core ← grpo, rloo."""
