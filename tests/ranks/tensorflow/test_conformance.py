"""What every engine promises, by tapes and by Keras 3."""

# ruff: noqa: F403
from conformance.engine import *
from conformance.engines_tensorflow import KERAS, TAPES
from conformance.failures import *
from conformance.levels import *
from conformance.promises import *

ENGINES = [*TAPES, *KERAS]
