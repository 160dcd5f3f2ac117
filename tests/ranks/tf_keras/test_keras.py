"""What distributed optimizers of Keras 2 promise, of the new and of the old kind."""

# ruff: noqa: F403
from conformance.keras import *
