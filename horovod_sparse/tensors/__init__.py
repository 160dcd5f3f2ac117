"""PyTorch without Horovod: hooks, buckets and residuals in tensors, for `torch` and `ddp`."""
