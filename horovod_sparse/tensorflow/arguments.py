"""The arguments that tapes and optimizers share, checked in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from horovod_sparse.checks import check_count, check_number
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.compression import Compression, SparseCompressor
from horovod_sparse.tensorflow.synchronizer import GradientSynchronizer
from horovod_sparse.tensorflow.tensors import checked_variable
from horovod_sparse.training.compression import check_compression
from horovod_sparse.training.settings import PlannedOptions, Settings, raise_if_no_sparsifier


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Arguments:
    """The arguments of a tape or optimizer: Horovod's own, and `options` for `Settings`."""

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
    every: int = 1
    delay: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Settings = dataclasses.field(default_factory=Settings)

    @classmethod
    def of(cls, given: Mapping[str, Any], front_end: Callable[..., Any]) -> Arguments:
        """Makes `Arguments` from the ``locals()`` of the function `front_end`; raises on wrong types."""
        name = f"{front_end.__module__.rpartition('.')[0]}.{front_end.__name__}"
        beside = [one for one in _parameter_names(front_end) if one != "options"]
        for one in ("name", "device_dense", "device_sparse"):  # the second argument, by its place
            if not isinstance(given.get(one) or "", str):
                raise ArgumentError(one, given[one], "text; a sparsifier is given as compression=...")
        if not isinstance(given["process_set"], hvd.ProcessSet):
            allowed = "a process set, of hvd.add_process_set([0, 2]), say"
            raise ArgumentError("process_set", given["process_set"], allowed)
        if not isinstance(given["compression"], str):
            check_compression(given["compression"])
        settings = Settings.of(given["options"], name, PlannedOptions, beside)
        return cls(settings=settings, **{name: given[name] for name in _NAMES if name in given})

    def taken_by(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Returns the arguments that `function` (Horovod's, say) accepts, as keyword arguments for it."""
        taken = {name: getattr(self, name) for name in _parameter_names(function) if name in _NAMES}
        options = taken.pop("options", {})
        return {**taken, **options}

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.compression, SparseCompressor)

    def parsed(self) -> Arguments:
        """Returns a copy whose compression is an object, made from text if a text was given."""
        if not isinstance(self.compression, str):
            return self
        return dataclasses.replace(self, compression=Compression.parse(self.compression))

    def checked(self) -> Arguments:
        """Returns a copy with num_groups merged into `groups`; raises on values that are not allowed."""
        if self.op == hvd.Adasum:
            raise UnsupportedError(
                "op=Adasum cannot be combined with a sparsifier: it combines whole updates, and a residual "
                "has no place in that. Use op=Average or op=Sum, or compression=Compression.none"
            )
        if self.op not in (hvd.Average, hvd.Sum):
            raise ArgumentError("op", self.op, "Average or Sum")
        factor = self.gradient_predivide_factor
        check_number("gradient_predivide_factor", factor, "a number above 0")
        if factor != 1.0 and self.op != hvd.Average:
            raise ArgumentError("gradient_predivide_factor", factor, "1.0, or op=Average")
        groups = self.num_groups or None if self.groups is None else self.groups
        allowed = "a number of 1 or more, or lists of variables"
        if isinstance(groups, list):
            if not all(isinstance(group, (list, tuple)) for group in groups):
                raise ArgumentError("groups", groups, allowed)
            for variable in (variable for group in groups for variable in group):
                checked_variable("groups", variable)
        elif groups is not None:
            check_count("groups", groups, allowed)
        return dataclasses.replace(self, groups=groups, num_groups=0)

    def raise_if_sparsifier_options(self) -> None:
        """Raises if options for sparsifiers were given, but no sparsifier as `compression`."""
        given = {**self.options, "every": self.every, "delay": self.delay}
        raise_if_no_sparsifier(given, self.compression)

    def synchronizer(self) -> GradientSynchronizer:
        """Returns the synchronizer of the sparsifier in `compression`; the first call makes it."""
        bound: GradientSynchronizer = self.compression.bind(
            process_set=self.process_set,
            average=self.op == hvd.Average,
            groups=self.groups,
            sparse_as_dense=self.sparse_as_dense,
            settings=self.settings,
        )
        bound.engine.given = bound.engine.given or self.declared()
        return bound

    def declared(self) -> dict[str, object]:
        """Returns, by name, the arguments that must be equal on all ranks, which compare them."""
        return {
            "op": {hvd.Average: "Average", hvd.Sum: "Sum"}.get(self.op, str(self.op)),
            "gradient_predivide_factor": float(self.gradient_predivide_factor),
            "backward_passes_per_step": self.backward_passes_per_step,
            "average_aggregated_gradients": self.average_aggregated_gradients,
            "sparse_as_dense": self.sparse_as_dense,
            "scale_local_gradients": self.scale_local_gradients,
            **self.settings.describe(),
        }


_NAMES = tuple(field.name for field in dataclasses.fields(Arguments))


@functools.cache
def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
