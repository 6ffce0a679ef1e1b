"""Metrics, where tokens and seconds went, audits, and the machine of a run."""
