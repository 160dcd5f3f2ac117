"""What every engine promises, by the hook of DistributedDataParallel."""

from conformance.engine_ddp import ENGINES  # noqa: F401
from conformance.promises import *  # noqa: F403
