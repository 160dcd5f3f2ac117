"""Whole iterations of a model across hosts: `scripts/bench train`."""
