"""What every engine promises, by tapes and by Keras 3."""

from conformance.engines_tensorflow import KERAS, TAPES
from conformance.promises import *  # noqa: F403

ENGINES = [*TAPES, *KERAS]
