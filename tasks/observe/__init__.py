"""Observing experts: one task plans, one runs, layer by layer."""
