"""Metrics, token and time accounting, audits, and a description of the machine."""
