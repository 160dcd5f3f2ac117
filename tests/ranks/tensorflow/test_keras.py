"""What distributed optimizers of Keras 3 promise."""

from conformance.keras import *  # noqa: F403
