"""Gradients, residuals and buckets in tensors of PyTorch: what any front end of PyTorch needs; no Horovod."""
