"""Metrics, where tokens and seconds went, and audits."""
