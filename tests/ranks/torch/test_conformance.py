"""What every engine promises, by our optimizer and by Horovod's with our compressor."""

from conformance.engines_torch import ENGINES  # noqa: F401
from conformance.promises import *  # noqa: F403
