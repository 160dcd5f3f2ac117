"""What the PyTorch and the TensorFlow front end have in common, free of both."""

from horovod_sparse.frontend.agreement import agreed_plan, describe_model
from horovod_sparse.frontend.asked import Asked, asked_for
from horovod_sparse.frontend.backward_times import BackwardRecorder, BackwardTimes
from horovod_sparse.frontend.calibration import (
    QUICK,
    THOROUGH,
    Extent,
    Where,
    calibration,
    carry_out,
    needed_kinds,
)
from horovod_sparse.frontend.choices import Choices
from horovod_sparse.frontend.correction import measured_step, probe_of
from horovod_sparse.frontend.decision import Decision, check_agreement, decide, plan_by_times
from horovod_sparse.frontend.dense import sum_densely
from horovod_sparse.frontend.encoding import from_bytes, to_bytes
from horovod_sparse.frontend.momentum import check_momentum
from horovod_sparse.frontend.names import common_names, next_label
from horovod_sparse.frontend.planning import make_plan
from horovod_sparse.frontend.saved import companions_fit, feedback_name, redistributed, share_factor
from horovod_sparse.frontend.standing import Standing, Start, agreed_start, kept_share
from horovod_sparse.frontend.text import describe_recipe

__all__ = [
    "QUICK",
    "THOROUGH",
    "Asked",
    "BackwardRecorder",
    "BackwardTimes",
    "Choices",
    "Decision",
    "Extent",
    "Standing",
    "Start",
    "Where",
    "agreed_plan",
    "agreed_start",
    "asked_for",
    "calibration",
    "carry_out",
    "check_agreement",
    "check_momentum",
    "common_names",
    "companions_fit",
    "decide",
    "describe_model",
    "describe_recipe",
    "feedback_name",
    "from_bytes",
    "kept_share",
    "make_plan",
    "measured_step",
    "needed_kinds",
    "next_label",
    "plan_by_times",
    "probe_of",
    "redistributed",
    "share_factor",
    "sum_densely",
    "to_bytes",
]
