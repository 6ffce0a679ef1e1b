"""The trainer, from bottom to top.

reporting ← feeding ← scoring ← rewarding ← sampling ← collecting ← updating ← core ← grpo, rloo
"""
