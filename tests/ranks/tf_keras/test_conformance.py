"""What every engine promises, by Keras 2."""

# ruff: noqa: F403
from conformance.engine import *
from conformance.engines_tensorflow import KERAS
from conformance.failures import *
from conformance.levels import *
from conformance.promises import *

ENGINES = KERAS
