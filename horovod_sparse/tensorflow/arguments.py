"""The arguments that tapes and optimizers share: one set of them, which is checked and given on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.frontend.drift import check_drift_arguments
from horovod_sparse.frontend.levels import check_levels
from horovod_sparse.frontend.poison import RAISE, check_on_nonfinite
from horovod_sparse.merging import Plan
from horovod_sparse.tensorflow import planning
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor
from horovod_sparse.tensorflow.stock import refuse_adasum
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer

#: that go with a sparsifier only
_OF_SPARSIFIERS = (
    *("bucket_bytes", "plan", "merging", "tensor_selection", "profile"),
    *("check_every", "on_drift", "deadline_seconds"),
)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    """What a tape or optimizer is made with, besides what it is put around.

    Names, meaning and defaults are those of the public functions, of which each has some: see
    `horovod_sparse.tensorflow.keras.DistributedOptimizer`.

    Example:
        >>> def wrapped(optimizer, op=hvd.Sum, groups=None):
        ...     arguments = Arguments.of(locals())
        ...     return arguments.op == hvd.Sum, arguments.taken_by(wrapped)
        >>> wrapped("sgd", groups=2) == (True, {"op": hvd.Sum, "groups": 2})
        True
    """

    name: str | None = None
    use_locking: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: Any = hvd.Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    num_groups: int = 0
    groups: Any = None
    process_set: Any = hvd.global_process_set
    scale_local_gradients: bool = True
    bucket_bytes: int | None = None
    plan: Plan | None = None
    merging: Any = None
    tensor_selection: Any = None
    profile: Any = None
    on_nonfinite: str = RAISE
    check_every: int | None = None
    on_drift: str | None = None
    deadline_seconds: float | None = None
    levels: str = "flat"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Those of a function.

        Args:
            given: its ``locals()``, before there are others than its arguments.
        """
        return cls(**{name: given[name] for name in _NAMES if name in given})

    def taken_by(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Those that a function takes, by name: of Horovod's, or of ours."""
        return {
            name: getattr(self, name) for name in inspect.signature(function).parameters if name in _NAMES
        }

    @property
    def is_sparse(self) -> bool:
        """Whether there is a sparsifier."""
        return isinstance(self.compression, SparseCompressor)

    def parsed(self) -> Arguments:
        """With the compression that a text stands for, where it is one."""
        if not isinstance(self.compression, str):
            return self
        return dataclasses.replace(self, compression=Compression.parse(self.compression))

    def checked(self) -> Arguments:
        """With the groups, by whichever name they came, in `groups` alone.

        Raises:
            ArgumentError: for an argument that is not allowed.
            UnsupportedError: for Adasum.
        """
        refuse_adasum(self.op)
        check_on_nonfinite(self.on_nonfinite)
        self._drift()
        check_levels(self.levels)
        if self.op not in (hvd.Average, hvd.Sum):
            raise ArgumentError("op", self.op, "Average or Sum")
        if self.gradient_predivide_factor != 1.0 and self.op != hvd.Average:
            factor = self.gradient_predivide_factor
            raise ArgumentError("gradient_predivide_factor", factor, "1.0, or op=Average")
        groups = self.num_groups or None if self.groups is None else self.groups
        if groups is not None and not isinstance(groups, list):
            check_count("groups", groups, "a number of 1 or more, or lists of variables")
        return dataclasses.replace(self, groups=groups, num_groups=0)

    def refuse_sparse(self) -> None:
        """Refuses arguments that a dense reduction has no use for; the compression is no sparsifier.

        Raises:
            ArgumentError: if one was given.
        """
        given = [name for name in _OF_SPARSIFIERS if getattr(self, name) is not None]
        given += ["on_nonfinite"] * (self.on_nonfinite != RAISE) + ["levels"] * (self.levels == "host")
        if given:
            allowed = f"a sparsifier, which {' and '.join(given)} is for"
            raise ArgumentError("compression", self.compression, allowed)

    def synchronizer(self) -> GradientSynchronizer:
        """Of the gradients, with a sparsifier: made at the first call with a compression, and kept by it."""
        bound: GradientSynchronizer = self.compression.bind(
            process_set=self.process_set,
            average=self.op == hvd.Average,
            groups=self.groups,
            **{name: getattr(self, name) for name in _OF_SPARSIFIERS},
            sparse_as_dense=self.sparse_as_dense,
            on_nonfinite=self.on_nonfinite,
            levels=self.levels,
        )
        bound.declared = bound.declared or self.declared()
        return bound

    def declared(self) -> dict[str, object]:
        """Those that change what is applied, in words: ranks compare them."""
        return {
            "op": planning.op_name(self.op),
            "gradient_predivide_factor": float(self.gradient_predivide_factor),
            "backward_passes_per_step": self.backward_passes_per_step,
            "average_aggregated_gradients": self.average_aggregated_gradients,
            "sparse_as_dense": self.sparse_as_dense,
            "scale_local_gradients": self.scale_local_gradients,
            "on_nonfinite": self.on_nonfinite,
            **dict(zip(("check_every", "on_drift"), self._drift(), strict=True)),
            "levels": self.levels,
        }

    def _drift(self) -> tuple[int, str]:
        return check_drift_arguments(self.check_every, self.on_drift)

    def __reduce__(self) -> Any:
        if self.process_set is not hvd.global_process_set:
            raise UnsupportedError(
                "an optimizer of some ranks alone cannot be copied or pickled: wrap a plain optimizer again, "
                "with the same process_set"
            )
        return _made, ({name: getattr(self, name) for name in _NAMES if name != "process_set"},)


_NAMES = tuple(field.name for field in dataclasses.fields(Arguments))


def _made(given: dict[str, Any]) -> Arguments:
    return Arguments.of(given)


def checked_layers(local_layers: Any) -> list[Any]:
    """The layers in an argument `local_layers`.

    Args:
        local_layers: a layer, several, or None.

    Raises:
        ArgumentError: if something is no layer.
    """
    several: Iterable[Any] = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    layers = [layer for layer in several if layer is not None]
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ArgumentError("local_layers", local_layers, "layers")
    return layers
