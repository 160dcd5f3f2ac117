"""Gradient sparsification for Horovod, for PyTorch and TensorFlow/Keras.

Importing this package imports neither torch, nor tensorflow, nor horovod: descriptions of
sparsifiers are plain values. The front ends are `horovod_sparse.torch` and
`horovod_sparse.tensorflow`.
"""

from horovod_sparse._version import __version__ as __version__
