"""The primitives on a GPU: the same as `horovod_sparse.device.plain`, in Triton."""
