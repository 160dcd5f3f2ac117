"""What every engine promises, by Keras 2."""

from conformance.engines_tensorflow import KERAS
from conformance.promises import *  # noqa: F403

ENGINES = KERAS
