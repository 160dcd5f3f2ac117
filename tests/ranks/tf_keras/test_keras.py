"""What distributed optimizers of Keras 2 promise, of the new and of the old kind."""

from conformance.keras import *  # noqa: F403
