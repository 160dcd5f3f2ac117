"""How a model comes to be synchronized sparsely; DistributedDataParallel's hooks, and what they keep."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.ddp.collectives import Communicator
from horovod_sparse.ddp.distributed_engine import BucketParameters, plan_of, told_to_others
from horovod_sparse.ddp.step import Synchronizer, after_backward, throw
from horovod_sparse.ddp.steps import Synchronized, group_of, silence, wrappers_of
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe, recipe_for
from horovod_sparse.tensors.binding import unwrapped
from horovod_sparse.tensors.loss_scale import pass_number
from horovod_sparse.training.compression import recipe_of
from horovod_sparse.training.settings import Settings, WaitingOptions
from horovod_sparse.training.steps import Schedule

if TYPE_CHECKING:  # only a model of FSDP2 has use for a mesh
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


_log = logging.getLogger("horovod_sparse")

#: steps in a row that have the same buckets before these are taken as the plan: DistributedDataParallel makes
#: new ones after the first iteration, with a static graph after the second
_SETTLED = 3


class State(Synchronizer):
    """What a communication hook keeps: see `attach`, which makes one, and `hook`.

    DistributedDataParallel changes its buckets after the first iteration. So residuals belong to parameters:
    the buckets of the first iteration go on until the new ones have come three times, which then take the
    residuals over; sparsifiers start anew there, as with every change of plan. Then a bucket is synchronized
    as soon as it is complete, while backward goes on, in the order in which DistributedDataParallel gives
    them out.

    Errors are raised at the end of ``backward()``, on all ranks alike; gradients are zeros then, and training
    may go on. Where the loss was scaled by a `torch.amp.GradScaler` a gradient that is not finite raises
    nothing: gradients are Inf on all ranks, and the scaler skips the step.

    Args:
        compression: a sparsifier, as text (``"exdyna:density=0.001"``) or as a recipe.
        optimizer: of all the model's parameters, if it shall tell learning rates.
        named_parameters: names for checkpoints and messages, as from ``module.named_parameters()``. Without
            them parameters are called by their place in the first iteration's buckets.
        process_group: of the model; all ranks if left out.
        **options: as of `attach`.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnknownNameError: for a misspelt algorithm or argument.

    Example:
        >>> State("topk:density=0.01").telemetry.summary()
        'no step yet'
    """

    def __init__(
        self,
        compression: str | Recipe | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[WaitingOptions],
    ) -> None:
        settings = Settings.of(options, "horovod_sparse.ddp", WaitingOptions)
        super().__init__(compression, optimizer, settings, named_parameters, process_group)
        #: whether DistributedDataParallel may leave gradients out that exist; it does not tell a hook
        self.finds_unused = True
        #: whether means are those over ranks that have not joined, which it does not tell either
        self.counts_joined: Callable[[], bool] = lambda: False
        self._layout: list[tuple[torch.Tensor, ...]] = []  # the buckets of this step
        self._last_layout: list[tuple[int, ...]] = []  # by address: tensors have no single truth value
        self._watched: Any = None
        self._num_alike = 0  # steps with the same buckets, up to now
        self._results: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A model that is copied, or saved whole, has no hook there: DistributedDataParallel drops it."""
        _log.warning(
            "a copy of a model, or a model that is saved whole, is not synchronized sparsely: attach it. "
            "What is held back is saved by state_dict()"
        )
        return type(None), ()

    def on_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """A bucket is complete on this rank. Waits for other ranks with the last one only."""
        buffer, parameters = bucket.buffer(), tuple(bucket.parameters())
        self._check(buffer, parameters)
        future = torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        if not self._results:
            self._begin()
        self._results.append((future, buffer))
        self._layout.append(parameters)
        pieces = [pair for pair in zip(parameters, bucket.gradients(), strict=True) if pair[0].numel()]
        if self.is_agreed:
            self._take(pieces)
        else:
            self._keep(pieces)
        if bucket.is_last():
            self._complete_step()
        return future

    def _prepare(self, layout: BucketParameters) -> None:
        super()._prepare(layout)
        if self._watched is None:
            first = layout[0][0]
            self._watched = first.register_post_accumulate_grad_hook(
                partial(_refuse_other_types, _accumulator_of(first))
            )

    def _check(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        if buffer.is_sparse:
            raise UnsupportedError(
                "the model has gradients in sparse (COO) form: make the layer with sparse=False"
            )
        if buffer.dtype != parameters[0].dtype:
            raise UnsupportedError(
                f"a bucket of {buffer.dtype} has parameters of {parameters[0].dtype}: another hook has "
                "changed it, as fp16_compress_wrapper does. Register horovod_sparse.ddp.hook alone; a wire "
                "format (values=float16) makes messages smaller"
            )

    def _complete_step(self) -> None:
        """The last bucket of a step has come."""
        before, failure = self.step, self._finish(self._layout)
        results, self._results = self._results, []
        for future, buffer in results:
            future.set_result(buffer)
        layout, self._layout = self._layout, []
        if failure is not None:
            after_backward(partial(throw, failure))
        if self.step == before:  # given up: as if it had not been
            return
        seen = [tuple(map(id, bucket)) for bucket in layout]
        self._num_alike = self._num_alike + 1 if seen == self._last_layout else 1
        self._last_layout = seen
        if self._num_alike == _SETTLED and self.settings.plan is None:
            wanted = plan_of(layout, self.facts)
            if wanted != self.plan:
                self.replan(wanted)

    def _zero(self) -> None:
        for _, buffer in self._results:
            buffer.zero_()

    def _num_dividing(self, communicator: Communicator) -> float:
        if not self.counts_joined():
            return super()._num_dividing(communicator)
        return _num_running(communicator)

    def _check_drift(self, communicator: Communicator) -> None:
        if _num_running(communicator) < self.size:
            # a rank that has joined steps no more, and gets the last one's parameters in the end
            self.drift.postpone(self.step)
        else:
            super()._check_drift(communicator)

    def _overflow(self) -> None:
        self._results[0][1].fill_(torch.inf)

    def _skip(self) -> None:
        after_backward(self._leave_no_gradients)

    def _leave_no_gradients(self) -> None:
        """PyTorch's optimizers pass over parameters without one: not even momentum moves them."""
        for _, parameter in self.facts.values():
            parameter.grad = None

    def _give_out(self) -> None:
        if pass_number() != -1:
            pieces = [piece for gradient in self._gradients for piece in gradient.pieces()]
            after_backward(partial(self._give_to_unused, pieces))

    def _give_to_unused(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """What was held back for parameters that no rank has used in this step becomes their gradient.

        DistributedDataParallel leaves those as they are; what the sum has for them would be lost.
        """
        for parameter, piece in pieces:
            if parameter.grad is None:
                if piece.any():
                    parameter.grad = piece.detach().clone()
            elif self.finds_unused and not torch.equal(parameter.grad, piece):
                parameter.grad.copy_(piece)


def _accumulator_of(parameter: torch.Tensor) -> Any:
    """What autograd calls with a parameter's gradients, and DistributedDataParallel has its hook on."""
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
        return node.next_functions[0][0]


def _refuse_other_types(accumulator: Any, parameter: torch.Tensor) -> None:
    """After another type or device PyTorch has new accumulators, without the hooks: nothing is synchronized.

    So `model.half().float()` ends DistributedDataParallel, with and without a communication hook.
    """
    if _accumulator_of(parameter) is not accumulator:
        raise UnsupportedError(
            "the model's type or device was changed after DistributedDataParallel had wrapped it "
            "(model.half(), model.to(...)), so PyTorch synchronizes no gradient of it any more. Change it "
            "before it is wrapped; or wrap it again, attach again, and load what sync.state_dict() gives"
        )


def _num_running(communicator: Communicator) -> float:
    """Ranks that have not joined; all ranks ask together."""
    return float(communicator.run("joined", _sum(float(pass_number() != -1))))


def _sum(number: float) -> Synchronization[float]:
    total = yield AllReduce(np.array([number]))
    return float(total[0])


def hook(state: Any, bucket: Any) -> Any:
    """The communication hook: ``model.register_comm_hook(horovod_sparse.ddp.State(...), hook)``.

    Args:
        state: a `State`.
        bucket: of DistributedDataParallel, with this rank's gradients.

    Returns:
        A future of the bucket's mean over ranks.

    Raises:
        UnsupportedError: for what is no bucket: a compiled DistributedDataParallel calls hooks with single
            gradients; or for a bucket that cannot be sparsified.
        ArgumentError: if `state` is something else.
    """
    if not isinstance(state, State):
        raise ArgumentError("state", state, "a horovod_sparse.ddp.State(...)")
    if not isinstance(bucket, dist.GradBucket):
        raise UnsupportedError(
            "the hook was called with something that is no bucket: DistributedDataParallel compiled by its "
            "'python_reducer' gives hooks single gradients. Set torch._dynamo.config.optimize_ddp to "
            "'ddp_optimizer', or compile the module inside: DistributedDataParallel(torch.compile(module))"
        )
    return state.on_bucket(bucket)


# DistributedDataParallel compares them with these very classes, not with their names
hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def attach(
    model: torch.nn.Module,
    compression: str | Recipe | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 1,
    delay: int = 0,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    **options: Unpack[WaitingOptions],
) -> Synchronizer | Synchronized:
    """Synchronizes a model sparsely from now on. All ranks do it, in the same way.

    With "best", or the feedback "adam", "rmsprop" or "sgd", ranks exchange their own steps in
    ``optimizer.step()``, and gradients stay as they are: see `horovod_sparse.training.steps`. With any other
    feedback gradients are exchanged during the backward pass.

    Args:
        model: a `DistributedDataParallel` without a communication hook; with "best" any module; or, with
            `replicas`, what `fully_shard` has sharded over the ranks of a host alone.
        compression: a sparsifier, as text (``"exdyna:density=0.001"``) or as a recipe.
        optimizer: of all its parameters; tells learning rates, which a hook does not see. Without it,
            parameters of all groups share buckets, and a residual does not follow the learning rate
            (``scale_residual``).
        every: steps from one exchange to the next, 1 or more; with "best" alone, like `delay`.
        delay: exchanges after which a mean is applied; 1 hides an exchange behind the next pass.
        replicas: the ranks that have the same shards as this one, one on each host: a mesh of one dimension,
            or a process group.
        **options: settings of the training, see `horovod_sparse.training.settings.Settings`: `plan` (that of
            DistributedDataParallel's buckets, or of FSDP's, if left out), `on_nonfinite`, `check_every`,
            `levels` and `deadline_seconds`; with `replicas` `plan` and
            `deadline_seconds` alone, and ranks never compare their parameters.

    Returns:
        What has the telemetry, and is saved and loaded.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for a model that cannot be synchronized this way.
    """
    # those that wait in the first step hear of errors of other ranks here
    with told_to_others(getattr(model, "process_group", None)):
        schedule = Schedule(every, delay)
        recipe = recipe_of(compression) if isinstance(compression, str) else compression
        if isinstance(recipe, Recipe) and recipe.feedback.applies_rate:
            return _attached_steps(model, recipe, optimizer, replicas, schedule, options)
        if schedule != Schedule():
            allowed = 'every=1, delay=0 where gradients are exchanged: "best" exchanges steps'
            raise ArgumentError("compression", compression, allowed)
        return _attached(model, compression, optimizer, replicas, options)


def _attached_steps(
    model: torch.nn.Module,
    recipe: Recipe,
    optimizer: Any,
    replicas: DeviceMesh | dist.ProcessGroup | None,
    schedule: Schedule,
    options: WaitingOptions,
) -> Synchronized:
    settings = Settings.of(options, "horovod_sparse.ddp.attach", WaitingOptions)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError("model", type(model).__name__, "the module whose parameters the optimizer trains")
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        allowed = 'the one that trains the model: attach(model, "best", optimizer)'
        raise ArgumentError("optimizer", optimizer, allowed)
    recipe = recipe_for(optimizer, recipe)
    wrappers = wrappers_of(model)
    group = group_of(model, wrappers, replicas)
    made = Synchronized(model, recipe, optimizer, group, settings, schedule)
    silence(wrappers)
    return made


def _attached(
    model: torch.nn.Module,
    compression: str | Recipe | None,
    optimizer: torch.optim.Optimizer | None,
    replicas: DeviceMesh | dist.ProcessGroup | None,
    options: WaitingOptions,
) -> Synchronizer:
    if isinstance(model, DistributedDataParallel):
        if replicas is not None:
            raise ArgumentError("replicas", replicas, "none with DistributedDataParallel: it has a group")
        return _attach_buckets(model, compression, optimizer, options)
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        allowed = "the DistributedDataParallel that was compiled: attach to model._orig_mod"
        raise ArgumentError("model", type(model).__name__, allowed)
    settings = Settings.of(options, "horovod_sparse.ddp.attach", WaitingOptions)
    for name, value in options.items():
        if name not in ("plan", "deadline_seconds") and value not in (None, "raise", "flat"):
            allowed = "nothing with replicas: it is for DistributedDataParallel"
            raise ArgumentError(name, value, allowed)
    try:
        from torch.distributed.device_mesh import DeviceMesh

        from horovod_sparse.ddp.shards import FSDPModule, ShardedState
    except ImportError as error:
        raise ArgumentError(
            "model", type(model).__name__, "a DistributedDataParallel; fully_shard takes PyTorch 2.13"
        ) from error
    if not isinstance(model, FSDPModule):
        allowed = "a DistributedDataParallel, or a module after fully_shard"
        raise ArgumentError("model", type(model).__name__, allowed)
    group = replicas if isinstance(replicas, dist.ProcessGroup) else None
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        group = replicas.get_group()
    if group is None:
        allowed = 'the ranks with the same shards, as a process group or a mesh: mesh["replicate"]'
        raise ArgumentError("replicas", replicas, allowed)
    return ShardedState(model, compression, optimizer, group, settings)


def _attach_buckets(
    model: DistributedDataParallel,
    compression: str | Recipe | None,
    optimizer: torch.optim.Optimizer | None,
    options: WaitingOptions,
) -> State:
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) registers a communication hook of its own: leave "
            "it out and use torch.autocast, or a wire format (values=float16) for smaller messages"
        )
    if not model.require_backward_grad_sync:
        raise UnsupportedError("the model synchronizes no gradients: LocalSteps has it, or no_sync()")
    # a copy lists those of its model, without a state, and has none of them
    if any(one is not hook or state is not None for one, state in model._comm_hooks):
        raise UnsupportedError("the model has a communication hook already, and can have only one")
    named, group = model.module.named_parameters(), model.process_group
    state = State(compression, optimizer, named_parameters=named, process_group=group, **options)
    state.finds_unused = model.find_unused_parameters or model.static_graph
    state.counts_joined = partial(_counts_joined, weakref.ref(model))
    model.register_comm_hook(state, hook)
    return state


def _counts_joined(model: Callable[[], DistributedDataParallel | None]) -> bool:
    """Whether a model is within `join(divide_by_initial_world_size=False)`."""
    found = model()
    return found is not None and found._join_config.enable and not found._divide_by_initial_world_size
