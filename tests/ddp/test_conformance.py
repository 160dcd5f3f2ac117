"""What every engine promises, by the hook of DistributedDataParallel."""

# ruff: noqa: F401, F403
from conformance.engine import *
from conformance.engine_ddp import ENGINES
from conformance.failures import *
from conformance.levels import *
from conformance.promises import *
from conformance.pytorch import *
