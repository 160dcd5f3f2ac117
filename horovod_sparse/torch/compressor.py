"""A sparsifier behind Horovod's `compression=` argument."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import (
    ArgumentError,
    UnsupportedError,
)
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.telemetry import BucketReport, Telemetry
from horovod_sparse.tensors.flat_gradient import memory_of
from horovod_sparse.tensors.layout import dtype_name
from horovod_sparse.tensors.loss_scale import ScaleOfStep, watch_scalers
from horovod_sparse.tensors.parameter_buckets import NamedParameters, ParameterBuckets
from horovod_sparse.tensors.replicas import shared_entries
from horovod_sparse.torch._horovod import holder_of, hvd, present_start
from horovod_sparse.torch.driver import HorovodDriver, carry_out_together
from horovod_sparse.torch.pending import PendingGradient, probes
from horovod_sparse.torch.stock import (
    StockOptimizer,
    before_synchronizing,
    calling_optimizer,
    compare_with_ranks,
    refuse_adasum,
    settings_of,
)
from horovod_sparse.torch.transport import transport_words
from horovod_sparse.training.agreement import agreed_status, compared
from horovod_sparse.training.collective_errors import tell_edits
from horovod_sparse.training.compression import describe_recipe
from horovod_sparse.training.drift import DriftCheck
from horovod_sparse.training.momentum import refuse_double_momentum, refuse_later_momentum
from horovod_sparse.training.outcome import NonFinitePolicy, Outcome
from horovod_sparse.training.settings import RAISE, Settings

#: parked gradients that a hook looks at in vain; collectives end nearly in the order they were started in
_PATIENCE = 4


class SparseCompressor(hvd.compression.Compressor):
    """A recipe, and what it remembers of every parameter. Made by `Compression.topk(...)` and the like.

    In ``horovod_sparse.torch.DistributedOptimizer(optimizer, compression=...)`` only `recipe` is used.

    In stock ``horovod.torch.DistributedOptimizer(optimizer, named_parameters=..., compression=...)``
    it really sends sparse data, though that optimizer knows nothing of it: `compress` folds the gradient
    into the parameter's residual, starts the sparsifier's collectives under the parameter's name (after
    Horovod's start in `decompress`, when all ranks have compared their states), and hands Horovod one
    number, 1, to allreduce. `decompress` waits, writes
    the sparse sum into the gradient, and scales it with what has become of that number, divided by the
    number of ranks: so Average, Sum and gradient_predivide_factor act as on a dense gradient. Density
    applies to every parameter for itself. Gradients without elements or of an integer type stay dense.
    With one rank stock Horovod never calls a compressor: gradients stay as they are, so the optimizer trains
    without the momentum that momentum correction was to apply. ``horovod_sparse.torch.DistributedOptimizer``
    does with one rank what it does with many.

    One compressor belongs to one optimizer. It may be pickled before `hvd.init()`: the recipe travels,
    residuals and parameters do not.

    Args:
        recipe: sparsifier and feedback.
        named_parameters: names of the parameters, for messages and checkpoints. Not needed in Horovod's
            `DistributedOptimizer`, whose own names are used; needed where something else calls `compress`.
        process_set: the ranks that take part; those of the stock optimizer, or all, if left out.

    Attributes:
        telemetry: what happened in the last step, and on average.
    """

    def __init__(
        self,
        recipe: Recipe,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: Any = None,
    ) -> None:
        self.recipe = recipe
        self.process_set = process_set
        self.parameters = None if named_parameters is None else NamedParameters(named_parameters)
        self.telemetry = Telemetry()
        self.drift = DriftCheck(Settings(), self.telemetry)
        self._buckets = ParameterBuckets(recipe)
        self._stock: weakref.WeakKeyDictionary[Any, StockOptimizer] = weakref.WeakKeyDictionary()
        self._driver: HorovodDriver | None = None
        self._pending: dict[str, PendingGradient] = {}
        #: of the losses whose gradients these are
        self.loss_scale = ScaleOfStep()
        watch_scalers()
        #: by parameter, what Horovod gets in its gradient's place, and who holds it besides; see `handles`
        self._dummies: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._pending_under: Any = None  # the start of Horovod in which they were asked for
        self._settled = True  # whether all that is pending has ended well
        self._agreed_under: Any = None  # the start in which all ranks agreed what their states are
        self._num_steps = 0  # of the training, as all ranks count them
        self._reports: list[BucketReport] = []
        self._idle_before = 0.0
        # autograd runs the hooks of each device in a thread of its own
        self._hooks = threading.Lock()

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Starts a gradient's synchronization; does not wait.

        Args:
            tensor: the `.grad` of a parameter.

        Returns:
            One float64 for Horovod to allreduce, and what `decompress` needs. A gradient that stays
            dense comes back as it is, with None.

        Raises:
            UnsupportedError: for Adasum, for a tensor that is no parameter's gradient, and for a
                parameter whose last synchronization has not ended.
        """
        if dtype_name(tensor) is None or tensor.numel() == 0 or tensor.is_sparse:
            return tensor, None
        optimizer = calling_optimizer()
        refuse_adasum(optimizer, tensor)
        with self._hooks:
            return self._start(tensor, optimizer)

    def _start(self, tensor: torch.Tensor, optimizer: Any | None) -> tuple[torch.Tensor, Any]:
        stock = self._known(optimizer)
        owner = self._owner(tensor, stock)
        if owner is None:
            return tensor, None
        name, parameter = owner
        driver = self._driver_for(stock)
        self._forget_what_is_over()
        self._forget(name, driver)
        rate = stock.learning_rate(parameter) if stock is not None else None
        if not self._pending:
            self._reports, self._idle_before = [], driver.idle_seconds
            self.loss_scale.note()
        driver.advance(_PATIENCE)  # backward is going on: the moment for rounds that are due
        self._buckets.take_up(name, parameter, tensor, _place_in(driver))
        memory = memory_of(tensor.device, name)
        pending = PendingGradient(
            name,
            tensor,
            memory,
            memory.streams(),
            rate,
            stock,
            weakref.ref(parameter),
            loss_scale=self.loss_scale.value,
            version=tensor._version,
            address=tensor.data_ptr(),
            seen=probes(tensor),
        )
        if pending.streams is not None:
            pending.streams.note()
        self._pending[name], self._pending_under, self._settled = pending, present_start(), False
        if driver.process_set.size() == 1:
            self._agree(driver)  # with itself
        if self._agreed_under is present_start():
            pending.begin(self._bucket_of(pending, driver), driver)
        if name not in self._dummies:
            self._dummies[name] = _held_dummy()
        dummy, _ = self._dummies[name]
        return dummy.fill_(1.0), pending

    def _bucket_of(self, pending: PendingGradient, driver: HorovodDriver) -> Bucket:
        parameter = pending.parameter()
        if parameter is None:
            raise UnsupportedError(f"{pending.name} was freed while its gradient was synchronized")
        return self._buckets.get(pending.name, parameter, pending.gradient, _place_in(driver))

    def compare(self, optimizer: Any) -> None:
        """All ranks together, before Horovod's optimizer waits for any of them: whether they do the same.

        And every so many steps, whether the last one has left them equal.
        """
        driver = self._driver
        if driver is None or driver.process_set.size() == 1:
            return
        if self._agreed_under is present_start():
            self._check_drift(optimizer, driver)
            return
        stock, rules = self._stock[optimizer], self.recipe.rules
        parameters = [
            ParameterFacts(
                name,
                tensor.numel(),
                str(dtype_name(tensor)),
                density=rules.density_of(name, tensor.numel()) or 0.0,
                shape=tuple(tensor.shape),
            )
            for name, tensor in zip(stock.parameters.names, stock.parameters.tensors, strict=True)
        ]
        given = settings_of(optimizer, self.recipe, "horovod.torch with a sparsifier")
        try:
            compare_with_ranks(compared(given, parameters), driver.process_set, optimizer)
        except BaseException:
            self.reset()
            raise

    def _check_drift(self, optimizer: Any, driver: HorovodDriver) -> None:
        if self._num_steps < self.drift.next_step:
            return
        parameters = self._stock[optimizer].parameters
        named = dict(zip(parameters.names, parameters.tensors, strict=True))
        check = self.drift.run(self._num_steps, _place_in(driver)[0], shared_entries(named, optimizer))
        try:
            carry_out_together(check, driver.process_set, "horovod_sparse.drift")
        except BaseException:
            self.reset()
            raise

    def _agree(self, driver: HorovodDriver) -> None:
        """All ranks together, before anything is sent after a start of Horovod, or after a load."""
        if self._agreed_under is present_start():
            return
        under, place = present_start(), _place_in(driver)
        status = self._buckets.status(place)
        start = carry_out_together(agreed_status(status), driver.process_set, "horovod_sparse.dropin")
        if start.anew:
            self._buckets.start_anew(start, place)
        self._agreed_under, self._num_steps = under, start.step
        self.drift.restart(start.step)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Waits for a gradient's synchronization, and gives the dense gradient.

        All gradients under way are waited for, so that either all of a step are applied, or none.

        Args:
            tensor: what Horovod has made of what `compress` gave it.
            ctx: from `compress`; with None the tensor comes back as it is.

        Returns:
            The synchronized gradient, in the memory of the gradient that `compress` got, where that is
            contiguous.

        Raises:
            NonFiniteGradientError: on every rank, if a gradient was NaN or Inf on some rank. Nothing of
                this step is applied, gradients are 0, and the next backward pass may begin.
            HorovodInternalError: if Horovod failed.
        """
        if not isinstance(ctx, PendingGradient):
            return tensor
        driver = self._driver
        if driver is None or self._pending.get(ctx.name) is not ctx:
            raise UnsupportedError(f"the synchronization of {ctx.name} was given up, or is done already")
        if not self._settled:
            self._settle(driver)
        if ctx.overflow:
            del self._pending[ctx.name]
            return ctx.gradient.fill_(torch.inf)
        gradient, report = ctx.finish(float(tensor.item()))
        self._reports.append(report)
        del self._pending[ctx.name]
        if not self._pending:
            self._num_steps += 1
            self.telemetry.transport = transport_words(driver.process_set)
            steps = self.telemetry.last.step + 1 if self.telemetry.last else 1
            self.telemetry.record(int(steps), self._reports, driver.idle_seconds - self._idle_before)
        return gradient

    def reset(self) -> None:
        """Gives up what is under way (Horovod failed, or starts again); residuals stay complete.

        Needs no call in elastic training: it happens where Horovod's failure is met.
        """
        if self._driver is not None:
            self._driver.clear()
        self._settled = True
        for pending in self._pending.values():
            pending.abandon()
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank needs: residuals differ from rank to rank, so save one per rank.

        Returns:
            Tensors, numbers and strings in nested dicts, by parameter name.

        Raises:
            UnsupportedError: in the middle of a step.
        """
        self._forget_what_is_over()
        if self._pending:
            raise UnsupportedError("a compressor is saved between steps: call optimizer.step() first")
        return self._buckets.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave on this rank, at the same number of ranks.

        All ranks load between the same two steps, or any before the first: in the next step they compare what
        they have. Where that is not of one step and one run, sparsifiers start anew on all of them.

        Raises:
            StateMismatchError: if it belongs to another algorithm, model or number of ranks. For
                parameters whose first gradient is still to come that is found out then.
        """
        self.reset()
        self._buckets.load_state_dict(state, self.parameters.names if self.parameters else None)
        self._agreed_under = None

    def __repr__(self) -> str:
        return describe_recipe(self.recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SparseCompressor, (self.recipe,))

    def _known(self, optimizer: Any | None) -> StockOptimizer | None:
        if optimizer is None:
            return None
        if optimizer not in self._stock:
            refuse_double_momentum(self.recipe, lambda: optimizer.param_groups)
            self._stock[optimizer] = StockOptimizer(optimizer)
            before_synchronizing(optimizer, _weakly(weakref.ref(self)))
            self.recipe.rules.hint(self._stock[optimizer].parameters.names)
        elif not self._pending:
            refuse_later_momentum(self.recipe, optimizer.param_groups)
        return self._stock[optimizer]

    def _owner(self, gradient: torch.Tensor, stock: StockOptimizer | None) -> tuple[str, torch.Tensor] | None:
        """Name and parameter; None for a copy (sparse_as_dense), which stays dense."""
        parameters = self.parameters or (stock.parameters if stock is not None else None)
        if parameters is None:
            raise UnsupportedError(
                "compress() was called by something else than horovod.torch.DistributedOptimizer, so names "
                "of parameters are not known: pass named_parameters=model.named_parameters() to the "
                "compressor"
            )
        return parameters.owner_or_copy(gradient)

    def _driver_for(self, stock: StockOptimizer | None) -> HorovodDriver:
        theirs = stock.process_set if stock is not None else None
        process_set = self.process_set or theirs or hvd.global_process_set
        if theirs is not None and theirs is not process_set:
            raise ArgumentError(
                "process_set", self.process_set, f"the same as to DistributedOptimizer, {theirs}, or none"
            )
        if self._driver is None or self._driver.process_set is not process_set:
            if self._pending:
                raise UnsupportedError("one compressor serves one optimizer; this one got two process sets")
            self._driver = HorovodDriver(process_set)
        return self._driver

    def _forget(self, name: str, driver: HorovodDriver) -> None:
        """Takes back a step that its optimizer has given up between `compress` and `decompress`."""
        if name in self._pending:
            driver.advance()
            task = self._pending[name].task
            if task is None or task.done:
                self._pending.pop(name).abandon()

    def _forget_what_is_over(self) -> None:
        """Takes back a step that was under way when Horovod was started again."""
        if self._pending and self._pending_under is not present_start():
            self.reset()

    def _settle(self, driver: HorovodDriver) -> None:
        """Waits for all that is pending; gives all of it up where something failed."""
        edits = None
        if all(pending.stock is not None for pending in self._pending.values()):
            edited = [name for name, pending in self._pending.items() if pending.edited]
            rank, size = driver.process_set.rank(), driver.process_set.size()
            edits = driver.start("horovod_sparse.edited", tell_edits(sorted(edited), rank, size))
        try:
            self._agree(driver)
            for pending in self._pending.values():
                if pending.task is None:
                    pending.begin(self._bucket_of(pending, driver), driver)
            driver.wait()
        except BaseException:
            self.reset()
            raise
        errors = [pending.task.error for pending in self._pending.values() if pending.task is not None]
        errors += [edits.error] if edits is not None else []
        if any(error is not None for error in errors):
            self._give_up([error for error in errors if error is not None], _place_in(driver)[0])
        self._settled = True

    def _give_up(self, errors: Sequence[BaseException], rank: int) -> None:
        """No rank applies this step: every rank sees the same errors, since all tasks have ended."""
        given_up = sorted(self._pending.values(), key=lambda pending: pending.name)
        policy = NonFinitePolicy(RAISE, self.telemetry)
        verdict = policy.judge(errors, [rank], scaled=self.loss_scale.scaler is not None)
        for pending in given_up:
            pending.give_up(drop=verdict.drop)
        if verdict.outcome is Outcome.OVERFLOW:
            for pending in given_up:
                pending.overflow = True
            return
        self._pending.clear()
        for stock in {pending.stock for pending in given_up if pending.stock is not None}:
            stock.forget_step()
        assert verdict.error is not None  # there are errors
        raise verdict.error


def _weakly(compressor: weakref.ref[SparseCompressor]) -> Callable[[Any], None]:
    """Has a compressor compare before an optimizer synchronizes, as long as it lives."""

    def compare(optimizer: Any) -> None:
        if (alive := compressor()) is not None:
            alive.compare(optimizer)

    return compare


def _place_in(driver: HorovodDriver) -> tuple[int, int]:
    """(rank, size) of this process within the driver's process set."""
    return int(driver.process_set.rank()), int(driver.process_set.size())


def _held_dummy() -> tuple[torch.Tensor, torch.Tensor]:
    dummy = torch.ones(1, dtype=torch.float64)
    return dummy, holder_of(dummy)
