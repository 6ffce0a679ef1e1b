"""The trainer, from bottom to top: reporting ← feeding ← collecting ← updating ← core ← grpo, rloo."""
