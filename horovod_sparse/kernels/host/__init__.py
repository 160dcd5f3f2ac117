"""What numba compiles for gradients in host memory, each kernel beside the checks of its arguments."""
