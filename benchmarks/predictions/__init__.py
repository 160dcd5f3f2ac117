"""Iterations predicted from a calibration of the hosts, and measured there: `scripts/bench predictions`."""
