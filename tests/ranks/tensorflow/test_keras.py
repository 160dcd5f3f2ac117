"""What distributed optimizers of Keras 3 promise."""

# ruff: noqa: F403
from conformance.keras import *
