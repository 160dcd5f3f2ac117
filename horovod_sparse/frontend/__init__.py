"""What the PyTorch and the TensorFlow front end have in common, free of both."""

from horovod_sparse.frontend.agreement import agreed_plan, describe_model
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
from horovod_sparse.frontend.dense import sum_densely
from horovod_sparse.frontend.encoding import from_bytes, to_bytes
from horovod_sparse.frontend.planning import make_plan
from horovod_sparse.frontend.saved import redistributed, share_factor
from horovod_sparse.frontend.text import describe_recipe

__all__ = [
    "QUICK",
    "THOROUGH",
    "Choices",
    "Extent",
    "Where",
    "agreed_plan",
    "calibration",
    "carry_out",
    "describe_model",
    "describe_recipe",
    "from_bytes",
    "make_plan",
    "needed_kinds",
    "redistributed",
    "share_factor",
    "sum_densely",
    "to_bytes",
]
