"""What happened in a step: density, bytes, residual norm, time per phase."""

from horovod_sparse.telemetry.history import Telemetry
from horovod_sparse.telemetry.report import BucketReport, StepReport

__all__ = ["BucketReport", "StepReport", "Telemetry"]
