"""Gradient sparsification for Horovod, for PyTorch and TensorFlow/Keras.

Importing this package imports neither torch, nor tensorflow, nor horovod: descriptions of
sparsifiers are plain values. The front ends are `horovod_sparse.torch` and
`horovod_sparse.tensorflow`.
"""

__version__ = "0.1.0"
