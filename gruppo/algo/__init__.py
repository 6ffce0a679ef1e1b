"""The mathematics: pure functions of tensors, importing torch and the standard library only.

Shapes are suffixes: P prompts, G completions per prompt, B = P·G rows, T tokens, R rewards. `(B, 1)` is one value per
row that broadcasts over its tokens. `docs/algorithm.md` has every formula in one place.
"""
