"""What every engine promises, by our optimizer and by Horovod's with our compressor."""

# ruff: noqa: F401, F403
from conformance.engine import *
from conformance.engines_torch import ENGINES
from conformance.failures import *
from conformance.levels import *
from conformance.promises import *
from conformance.pytorch import *
