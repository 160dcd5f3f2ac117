"""Finds the factor by which `torch.amp.GradScaler` has multiplied the loss of the present backward pass.

Residuals outlive a scale, so a gradient has to be divided by it before error feedback takes it in, which is
while backward goes on. A scaler does not publish its scale. So, once a sparsifier is in use, two methods of
`torch.amp.GradScaler` are wrapped, also for trainers that call them (Lightning, Accelerate):

* `scale` marks the scaled loss, so that its backward pass, and no other, is known to be scaled;
* `unscale_`, which `step` calls too, has one of our optimizers synchronize first: what is unscaled, looked
  at, clipped and applied is then the sum over ranks, and every rank finds the same overflow.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch


class _ScaledPass:
    """A backward pass of a scaled loss: it is alive while PyTorch keeps its callback, until the pass ends."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler

    def end(self) -> None:
        """Called by PyTorch after a pass that has not failed; removes the pass from `scaled_passes`."""
        scaled_passes[:] = [one for one in scaled_passes if one() not in (None, self)]


#: weak references to passes in progress, the innermost last; dead for failed ones
scaled_passes: list[weakref.ref[_ScaledPass]] = []


def watch_scalers() -> None:
    """Wraps `scale` and `unscale_` of GradScaler once, so that hooks know each pass's scaler."""
    kind = torch.amp.GradScaler
    if hasattr(kind.scale, "horovod_sparse"):
        return
    scaled, unscaled = kind.scale, kind.unscale_

    @functools.wraps(scaled)
    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        found = scaled(self, outputs)
        return _mark_scaled(self, found) if self.is_enabled() else found

    @functools.wraps(unscaled)
    def unscale_(self: torch.amp.GradScaler, optimizer: Any) -> None:
        synchronize = getattr(optimizer, "_synchronize_for_scaler", None)
        if synchronize is not None and self.is_enabled():
            synchronize(self)
        unscaled(self, optimizer)

    scale.horovod_sparse = True  # type: ignore[attr-defined]
    kind.scale, kind.unscale_ = scale, unscale_


def scaled_by() -> torch.amp.GradScaler | None:
    """Returns the GradScaler whose scaled loss runs backward now; None if the loss is not scaled."""
    alive = [one.scaler for one in (reference() for reference in scaled_passes) if one is not None]
    return alive[-1] if alive else None


class ScaleOfStep:
    """Holds one step's loss scale, read once, in the first of its backward passes."""

    def __init__(self) -> None:
        #: scaler of this step, or of the last one; None if losses are not scaled
        self.scaler: torch.amp.GradScaler | None = None
        self.value = 1.0

    def read(self) -> None:
        """Reads the loss scale at a step's first gradient; only once, since it may be on a GPU."""
        self.scaler = scaled_by()
        self.value = 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def set_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Sets the scaler (or None) whose scale counts if no backward pass runs before the next step."""
        self.scaler, self.value = scaler, 1.0

    def read_without_pass(self) -> None:
        """Reads the scale of `set_scaler`'s or the last scaler, for a step without gradients on this rank."""
        if self.scaler is not None:
            self.value = float(self.scaler.get_scale())


def _mark_scaled(scaler: torch.amp.GradScaler, scaled: Any) -> Any:
    if isinstance(scaled, torch.Tensor):
        if scaled.requires_grad:
            scaled.register_hook(lambda gradient: _record_pass(scaler))
        return scaled
    if isinstance(scaled, (list, tuple)):
        for item in scaled:
            _mark_scaled(scaler, item)
        return scaled
    return map(functools.partial(_mark_scaled, scaler), scaled) if isinstance(scaled, Iterable) else scaled


def _record_pass(scaler: torch.amp.GradScaler) -> None:
    """Hook at a scaled loss: records that its backward pass begins, before parameters' hooks run."""
    begun = _ScaledPass(scaler)
    scaled_passes.append(weakref.ref(begun))
    # at the end of this pass; not at that of a pass within it (checkpointing)
    torch.autograd.Variable._execution_engine.queue_callback(begun.end)
