"""`network_share` with a clock of our own: what is chosen, whether it comes true, and a link that changes."""

import dataclasses
import itertools
import logging
import math

import pytest

from horovod_sparse.cost import AlphaBeta, assumed_profile
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.merging import ParameterFacts, Workload, predict
from horovod_sparse.planning import plan_request
from horovod_sparse.planning.share import PERIOD, Following
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.training.settings import Settings

FACTS = [ParameterFacts(f"p{number}", 400_000) for number in range(5)]
STEP = Workload(tuple(FACTS), (20e-3,) * 5, 100e-3)
RECIPE = parse_recipe("topk:density=auto(least=0.001,most=0.1)")
SIZE, MBIT, GBIT = 4, 1e6, 1e9


def link(bits: float):
    return dataclasses.replace(assumed_profile(AlphaBeta(5e-5, 8.0 / bits), SIZE), framework="torch")


class Fake:
    """A training whose steps take what the model says of a link; rank 0 of four that are alike."""

    rank = 0

    def __init__(self, share: float, bits: float, told: float) -> None:
        self.bits, self.clock, self.step, self.changes = bits, 0.0, 0, []
        request, _ = plan_request(
            profile=link(told), density=RECIPE.auto, network_share=share, recipe=RECIPE, merging="optimal"
        )
        self.plan = request.first_plan(FACTS)
        self.following = Following(request, FACTS, RECIPE.sparsifier, self)

    def now(self):
        return self.clock

    def seconds_between(self, start, stop):
        return stop - start

    def decided(self, parameters, topology, decide):
        ranks = [decide(ClusterFacts(rank, SIZE, "torch", "formulas", 0.0)) for rank in range(SIZE)]
        first, *others = run_lockstep(ranks)
        assert all(other.plan == first.plan for other in others)
        return first

    @property
    def share(self) -> float:
        """Of an iteration under the plan in use, in truth."""
        return 1.0 - STEP.step_seconds / self.seconds

    @property
    def seconds(self) -> float:
        density = self.plan.density or RECIPE.auto.least
        cost = link(self.bits).cost(dataclasses.replace(RECIPE.sparsifier, density=density), fuse_sparse=True)
        return predict(STEP.with_dense(self.plan.dense), self.plan, cost).iteration_seconds

    def train(self, steps: int) -> None:
        for _ in range(steps):
            begun, self.step = self.clock, self.step + 1
            self.clock += STEP.forward_seconds
            for fact, seconds in zip(STEP.backward, STEP.backward_seconds, strict=True):
                self.clock += seconds
                self.following.arrived(fact.name, self.clock, self.clock)
            self.clock = begun + self.seconds
            if (plan := self.following.after_step(self.plan, self.step)) is not None:
                self.changes.append(self.step)
                self.plan = plan


@pytest.mark.parametrize("told", [0.2, 1.0, 5.0], ids=lambda factor: f"profile-off-by-{factor:g}")
@pytest.mark.parametrize("bits", [2 * MBIT, 100 * MBIT, 1 * GBIT, 10 * GBIT, 1000 * GBIT])
def test_the_share_is_kept_or_it_is_said_what_would_keep_it(bits, told, caplog):
    caplog.set_level(logging.INFO, "horovod_sparse")
    fake = Fake(0.05, bits, told * bits)
    assert not fake.plan.buckets, "dense until times are known"
    fake.train(7 + 5 * PERIOD)
    words = str(fake.following.decision)
    if "too much" in words:
        assert "LocalSteps(every=" in words and fake.plan.density < 1.5 * RECIPE.auto.least
    else:
        assert fake.share <= 0.05 * 1.5
        assert not fake.plan.buckets or fake.share >= 0.02 or fake.plan.density == RECIPE.auto.most
    assert fake.following.decision.measured == pytest.approx(fake.share, abs=1e-6)
    assert len(fake.changes) <= 2, "and it stays"
    first = next(one.getMessage() for one in caplog.records if "network_share=0.05" in one.getMessage())
    lines = first.splitlines()[-3:]
    assert "network_share=0.05: " in lines[0] and lines[1].startswith("predicted: ")
    assert lines[2].startswith("accuracy: ")
    assert any("points to the prediction" in one.getMessage() for one in caplog.records)


def test_a_link_that_falls_and_comes_back_is_followed():
    fake = Fake(0.05, 1 * GBIT, 1 * GBIT)
    fake.train(7 + 2 * PERIOD)
    at_first, share = fake.plan.density, fake.share
    assert at_first is not None and share <= 0.075
    fake.bits = 0.1 * GBIT
    assert fake.share > 0.1
    fake.train(50)
    assert fake.share <= 0.075 and fake.plan.density < at_first / 3
    fake.bits = 1 * GBIT
    fake.train(150)
    assert fake.plan.density > at_first / 3 and fake.share <= 0.075
    assert all(later - sooner >= PERIOD for sooner, later in itertools.pairwise(fake.changes))


def test_what_the_share_may_be():
    assert Settings(network_share="auto").network_share == 0.05
    for wrong in (0.0, 1.0, "much", math.nan):
        with pytest.raises(ArgumentError, match="network_share"):
            Settings(network_share=wrong)
