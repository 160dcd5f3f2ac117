"""Iterations under several plans, predicted and measured: `scripts/bench merging`."""
