"""Measurements of horovod_sparse.

Each file or folder here is one, started by `scripts/bench NAME`; `common` is what they share.
"""
