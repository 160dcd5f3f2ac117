"""`DistributedOptimizer`: Horovod's, with sparse synchronization where a sparsifier is given."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.checks import check_number
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.torch.compression import Compression, SparseCompressor
from horovod_sparse.torch.driver import (
    HorovodOptimizer,
    claim_for_horovod,
    construction_errors,
    hvd,
    pass_new_optimizers_to,
)
from horovod_sparse.torch.synchronizer import Methods, clip_gradients
from horovod_sparse.training.collective_errors import raise_if_second_binding
from horovod_sparse.training.compression import check_compression, check_momentum
from horovod_sparse.training.settings import Settings, SettingsOptions, raise_if_no_sparsifier

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: the arguments of `DistributedOptimizer` that Horovod's has
_ARGUMENTS = tuple(inspect.signature(hvd.DistributedOptimizer).parameters)
#: our methods in place of Horovod's. __module__ stays Horovod's:
#: hvd.broadcast_optimizer_state knows distributed optimizers by it, and would step any other.
_METHODS = {name: item for name, item in vars(Methods).items() if name[:2] != "__"}


def __getattr__(name: str) -> Any:
    """Returns other names of Horovod's module that this module replaces."""
    return getattr(sys.modules[HorovodOptimizer.__module__], name)


@construction_errors.publishing_errors
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    every: int = 1,
    delay: int = 0,
    **options: Unpack[SettingsOptions],
) -> Any:
    """Wraps an optimizer, so that it synchronizes gradients over ranks, sparsely.

    Arguments and their order are those of ``horovod.torch.DistributedOptimizer``; so are `synchronize`,
    `skip_synchronize`, `set_backward_passes_per_step` and the assertions. Buckets are synchronized while
    backward goes on. With a `compression` that is no sparsifier, Horovod's own optimizer is returned.

    Departures, where a sparsifier is given:

    * a closure's gradients are synchronized before the optimizer uses them (Horovod synchronizes before the
      closure runs); LBFGS gets its losses over all ranks;
    * parameters that join later (`add_param_group`, a layer that is thawed) are synchronized from their first
      step on; they join on all ranks before the same step;
    * step hooks run once per step, after synchronization, and `defaults` are those of `optimizer`;
    * sums are taken in float32 or float64, so `gradient_predivide_factor` changes nothing but rounding;
    * sparse (COO) gradients are refused, or with ``sparse_as_dense=True`` sparsified and dense afterwards;
      SparseAdam, which takes no others, is refused;
    * `hvd.join()` is an error on the ranks that still train: every rank needs as many batches;
    * a NaN or Inf on any rank raises `NonFiniteGradientError` on every rank, and nothing is applied, unless
      `on_nonfinite` asks for something else. With a `torch.amp.GradScaler` gradients are Inf on every rank
      instead, and the scaler skips the step. ``scaler.unscale_(optimizer)`` synchronizes first;
    * gradients must not be changed between backward and `synchronize` or `step`: that raises
      `EditedGradientError` on every rank. Clip after `synchronize`, and step within `skip_synchronize`, or
      see `synchronize_at` and `max_grad_norm`.

    Making the optimizer needs no other rank. In the first step ranks agree on their arguments, on their
    models being the same, and on the plan, which is rank 0's: a rank that does not take that step leaves the
    others waiting. Each parameter belongs to the optimizer that was made last for it; one that had it before
    raises an error in its next step.

    Args:
        optimizer: an optimizer of PyTorch, whose parameter groups are shared.
        named_parameters: as from ``model.named_parameters()``; checkpoints, errors and plans use the names.
        compression: a sparsifier (``Compression.exdyna(density=0.001)``), text for `Compression.parse`,
            or one of Horovod's compressors.
        backward_passes_per_step: passes whose gradients are accumulated before they are synchronized.
        op: Average or Sum.
        gradient_predivide_factor: see above; with Average alone.
        num_groups: old name of an integer `groups`.
        groups: number of buckets, or lists of parameters that form one each.
        sparse_as_dense: see above.
        process_set: the ranks that take part.
        every: steps from one exchange to the next, with "best" alone: see `horovod_sparse.training.steps`.
        delay: exchanges after which a mean is applied, with "best" alone.
        **options: settings of the training: see `horovod_sparse.training.settings.Settings`, all of which
            are taken.

    Returns:
        An optimizer of a class derived from that of `optimizer`; it also has `telemetry`, `plan`, `decision`
        and `replan`. With "best", "adam", "rmsprop" or "sgd" as feedback `optimizer` itself, whose own steps
        are exchanged: gradients stay on their ranks, and may be accumulated and clipped before `step`.

    Raises:
        ArgumentError: for arguments that exclude each other, or are not allowed.
        ProfileMismatchError: with one rank, if a profile cannot be read or applied. With more that is raised
            by the first step, on every rank alike, and so is `StateMismatchError` for different models.
        UnsupportedError: for op=Adasum, or parameters whose dtype or device cannot be synchronized.
        ValueError: as Horovod raises it, for wrong `named_parameters` or `groups`.

    Example:
        >>> import horovod_sparse.torch as hvd; hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = hvd.DistributedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     named_parameters=model.named_parameters(),
        ...     compression=hvd.Compression.topk(density=0.5),
        ... )
        >>> loss = model(torch.ones(1, 2)).sum()
        >>> loss.backward()
        >>> _ = optimizer.step()
    """
    settings = Settings.of(options, "horovod_sparse.torch.DistributedOptimizer", SettingsOptions, _ARGUMENTS)
    if isinstance(compression, str):
        compression = Compression.parse(compression)
    check_compression(compression)
    _check_arguments(optimizer, op, backward_passes_per_step, groups, process_set)
    sparse = isinstance(compression, SparseCompressor)
    if sparse:
        _check_sparse(optimizer, compression.recipe, op, gradient_predivide_factor)
    else:
        raise_if_no_sparsifier({**options, "every": every, "delay": delay}, compression)
    if not sparse or not process_set.included():  # a rank outside of the process set trains alone
        if not process_set.included():
            raise_if_second_binding(hvd, process_set)
        given = named_parameters, Compression.none if sparse else compression, backward_passes_per_step, op
        more = gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set
        dense = hvd.DistributedOptimizer(optimizer, *given, *more)
        claim_for_horovod(dense)
        if settings.max_grad_norm is not None:
            norm = settings.max_grad_norm
            dense.register_step_pre_hook(lambda *_: clip_gradients(dense.param_groups, norm))
        # so that scripts work with any compression, and on ranks outside of the process set
        dense.telemetry, dense.plan, dense.decision = Telemetry(), None, None
        dense.replan = lambda plan: None
        return dense
    if num_groups != 0:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = None if named_parameters is None else list(named_parameters)
    from horovod_sparse.training.schedules import Schedule  # an optimizer of Horovod's own needs none

    recipe, schedule = compression.recipe, Schedule(every, delay)
    schedule.check(recipe, settings)
    if recipe.feedback.applies_rate:
        from horovod_sparse.torch.steps import StepSynchronizer  # only some optimizers need it

        optimizer.process_set = process_set
        return StepSynchronizer(optimizer, names, recipe, settings, schedule, groups).optimizer
    cls = type(type(optimizer).__name__, (type(optimizer),), {**vars(HorovodOptimizer), **_METHODS})
    rest = gradient_predivide_factor, groups, sparse_as_dense, process_set
    wrapped = cls(optimizer.param_groups, names, compression, backward_passes_per_step, op, *rest)
    wrapped.defaults = dict(optimizer.defaults)
    wrapped._make_synchronizer(recipe, names or None, settings)
    return wrapped


@construction_errors.publishing_errors
def _replace_methods(optimizer: Any) -> None:
    """Puts this package's methods into an optimizer that Horovod's own `DistributedOptimizer` made."""
    recipe, own = optimizer._compression.recipe, type(optimizer)  # a class of its own, made from the user's
    _check_sparse(optimizer, recipe, getattr(optimizer, "op", hvd.Adasum))  # Horovod's class for it has no op
    settings = Settings(bucket_bytes=1)
    if recipe.feedback.applies_rate:
        from horovod_sparse.torch.steps import StepSynchronizer
        from horovod_sparse.training.schedules import Schedule

        del own.step  # that of the user's class is taken
        names = [(name, one) for one, name in optimizer._parameter_names.items()]
        StepSynchronizer(optimizer, names, recipe, settings, Schedule())
        return
    for name, item in _METHODS.items():
        setattr(own, name, item)
    optimizer._groups = None  # every parameter is a bucket
    optimizer._make_synchronizer(recipe, None, settings)
    # COO gradients, which Horovod's own would gather, are sparsified like any other
    optimizer._synchronizer.takes_coo = True


def _adopt_if_sparse(optimizer: Any) -> bool:
    """Called with each optimizer that Horovod makes; False if it has no sparsifier, so stays Horovod's."""
    if sparse := isinstance(optimizer._compression, SparseCompressor):
        _replace_methods(optimizer)
    return sparse


pass_new_optimizers_to(_adopt_if_sparse)


def _check_arguments(optimizer: Any, op: Any, passes: Any, groups: Any, process_set: Any) -> None:
    """Raises errors that name the wrong argument, where Horovod's own would not."""
    if hasattr(optimizer, "_allreduce_delay"):
        raise ArgumentError(
            "optimizer", type(optimizer), "one of PyTorch: this one is made by DistributedOptimizer already"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError("optimizer", optimizer, "one of PyTorch, as torch.optim.SGD(...)")
    if hasattr(optimizer, "_local_hooks"):
        raise ArgumentError("optimizer", "one of LocalSteps", "a new one, without LocalSteps")
    if getattr(process_set, "process_set_id", None) is None:
        raise ArgumentError(
            "process_set", process_set, "one that hvd.init() or hvd.add_process_set() has set up"
        )
    if op not in (hvd.Average, hvd.Sum, hvd.Adasum):
        raise ArgumentError("op", op, "Average or Sum")
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, a whole number: {passes!r}")
    if groups is not None and not isinstance(groups, (int, list)):
        raise ArgumentError("groups", groups, "a number of buckets, or lists of parameters")


def _check_sparse(optimizer: Any, recipe: Recipe, op: Any, predivide: float = 1.0) -> None:
    if op == hvd.Adasum:
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier: it combines whole parameter updates, and a "
            "residual has no place in that. Use op=Average or op=Sum, or compression=Compression.none"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        allowed = "torch.optim.Adam: exchanged gradients are dense, and SparseAdam takes none"
        raise ArgumentError("optimizer", "SparseAdam", allowed)
    allowed = "a finite number above 0"
    check_number("gradient_predivide_factor", predivide, allowed, "(0, inf)")
    if predivide != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if recipe.feedback.applies_rate and op != hvd.Average:
        raise ArgumentError("op", op, "Average, or feedback='error': own steps are averaged")
    check_momentum(recipe, lambda: optimizer.param_groups, adopts=True)
