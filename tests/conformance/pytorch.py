"""Scalers of a loss, by every engine of PyTorch; loops of users are in tests/loops."""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from conformance.engine import Engine, given, replicas_agree, same
from support.sampling import rows_by


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64, copy=True).numpy()


class TorchTraining:
    """What trainings of all these engines have in common: a model's own parameters, which begin at 1.

    Attributes:
        net: has the parameters.
        optimizer: steps.
        keeper: has the engine's state.
        parts: the engine's own record of buckets and dense parameters.
        loss: of given gradients.
    """

    net: torch.nn.Module
    optimizer: Any
    keeper: Any
    parts: Any
    loss: Callable[..., torch.Tensor]

    @property
    def telemetry(self) -> Any:
        return self.keeper.telemetry

    def steps(self) -> set[int]:
        """That the sparsifiers' states have counted."""
        return {part.bucket.state.step for part in self.parts}

    def step(self, gradients: Mapping[str, np.ndarray], scaler: Any = None, how: str = "step") -> None:
        """Backward in the order of the gradients, and a step; what fails leaves no gradient behind."""
        loss = self.loss(gradients)
        try:
            if scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scaler.scale(loss).backward()
                if how == "synchronize":  # as Horovod's documentation has it
                    self.optimizer.synchronize()
                if how != "step":
                    scaler.unscale_(self.optimizer)
                skips = how == "synchronize"
                with self.optimizer.skip_synchronize() if skips else contextlib.nullcontext():
                    scaler.step(self.optimizer)
                scaler.update()
        except BaseException:
            self.net.zero_grad()  # Horovod's own optimizer forbids its own after a step that was refused
            raise
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: numpy_of(parameter) for name, parameter in self.net.named_parameters()}

    def held(self) -> dict[str, np.ndarray]:
        """What this rank holds back of every parameter; nothing of dense ones."""
        entry = self.keeper.state_dict()
        residuals = entry.get("horovod_sparse", entry)["residuals"]
        return {name: numpy_of(torch.as_tensor(values)) for name, values in residuals.items()}

    def change(self, name: str) -> None:
        """Adds a little to one weight of this rank alone."""
        with torch.no_grad():
            self.net.get_parameter(name).view(-1)[-1] += 1e-3

    def saved(self) -> Any:
        return copy.deepcopy((self.net.state_dict(), self.keeper.state_dict()))

    def load(self, saved: Any) -> None:
        self.net.load_state_dict(saved[0])
        self.load_state(saved)

    def load_state(self, saved: Any) -> None:
        """Of what was saved the engine's state alone."""
        self.keeper.load_state_dict(saved[1])


#: of steps that a scaler takes
WAYS = ["step", "unscale_", "synchronize"]
#: that grow and fall at the ends of steps
SCALES = [2.0**10, 2.0**11, 2.0**9, 2.0**16, 2.0**8, 2.0**9]


@pytest.mark.needs("scaler")
@rows_by("text,how", ["topk:density=0.1", "hard_threshold:threshold=0.5", "micro:density=0.1"], WAYS, each=2)
def test_a_scale_changes_nothing_and_an_overflow_skips_on_all(engine: Engine, text: str, how: str) -> None:
    plain, scaled = engine.train(text), engine.train(text)
    if how == "synchronize" and not hasattr(scaled.optimizer, how):
        pytest.skip("of Horovod's optimizers")
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALES[0], growth_interval=1000)
    for step, scale in enumerate(SCALES):
        if step:
            scaler.update(scale)
        plain.step(given(engine.rank, step))
        if step == 4:
            bad = given(engine.rank, step)
            if engine.rank == 0:
                bad["one"][0] = np.inf
            scaled.step(bad, scaler, how)
            assert scaler.get_scale() == scale / 2
        scaled.step(given(engine.rank, step), scaler, how)
    assert same(plain, scaled)
    assert plain.steps() == scaled.steps() == {6}
    assert replicas_agree(engine, scaled)
