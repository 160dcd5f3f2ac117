"""Sparse all-reduces of the same gradients across hosts: `scripts/bench allreduce`."""
