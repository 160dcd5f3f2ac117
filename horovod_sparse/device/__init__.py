"""Buckets in tensors of PyTorch on any device, and Triton's kernels for those on a GPU; knows no Horovod."""
