"""Checks and construction of the parts of a run before it begins."""
