"""Numba's kernels for gradients in host memory, each beside the checks of its arguments."""
