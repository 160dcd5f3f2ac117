"""Two levels, dense within hosts and sparse between them, with every engine that has them."""

import copy
from typing import Any

import numpy as np
import pytest

from conformance.engine import SHAPES, ZEROS, Engine, Ledger, Simulated, given, replicas_agree, run
from conformance.failures import refused
from conformance.promises import resume
from horovod_sparse.errors import NonFiniteGradientError, UnknownNameError
from horovod_sparse.topology import Topology
from support.cases import on_ranks
from support.sampling import rows_by


@pytest.mark.hosts
@pytest.mark.needs("levels")
@pytest.mark.parametrize("case", on_ranks("topk", "exdyna", "cltk-values=bfloat16", "oktopk", "qsgd"))
def test_two_levels_equal_the_simulators(engine: Engine, case: Any, hosts: Topology) -> None:
    recipe = case.at(0.1)
    training = engine.train(recipe, levels="host")
    simulated = Simulated(engine, recipe, topology=hosts)
    for step in range(4):
        run(training, engine, [step])
        simulated.step(training, [given(rank, step) for rank in range(engine.size)])
    simulated.check_held(training, engine.rank)
    assert replicas_agree(engine, training)
    assert training.telemetry.last.bytes_inside > 0


@pytest.mark.hosts
@pytest.mark.needs("levels")
@rows_by(
    "way,feedback",
    [("flat", "host"), ("host", "flat"), ("host", "host")],
    ["error", "momentum(momentum=0.5)"],
    ids="-".join,
)
def test_what_was_saved_loads_at_other_levels(
    engine: Engine, way: Any, feedback: str, hosts: Topology
) -> None:
    text = f"topk:density=0.05,feedback={feedback}"
    before, after = (engine.train(text, levels=levels) for levels in way)
    ledger = Ledger(engine)
    for step in range(3):
        ledger.enter(given(engine.rank, step))
        run(before, engine, [step])
    after.load(before.saved())
    after.step(ZEROS)
    if feedback == "error":
        ledger.balance(after)
    assert replicas_agree(engine, after)


@pytest.mark.hosts
@pytest.mark.needs("levels")
@pytest.mark.parametrize("text", ["exdyna:density=0.1", "topk:density=0.1,feedback=momentum(momentum=0.5)"])
def test_resume_on_the_same_hosts_is_invisible(engine: Engine, text: str, hosts: Topology) -> None:
    """States of sparsifiers are of shards: the entry says which hosts they were for, until ranks agree."""
    resume(engine, text, levels="host")


@pytest.mark.hosts
@pytest.mark.needs("levels")
def test_entries_that_ranks_of_a_host_swap_lose_nothing(engine: Engine, hosts: Topology) -> None:
    """All start anew then, and what waits stays with whose shard it is."""
    before, after = (engine.train("exdyna:density=0.05", levels="host") for _ in range(2))
    ledger = Ledger(engine)
    for step in range(3):
        ledger.enter(given(engine.rank, step))
        run(before, engine, [step])
    everyone = engine.everyone(before.saved())
    after.step(ZEROS)
    after.load(everyone[{0: 1, 1: 0}.get(engine.rank, engine.rank)])
    after.step(ZEROS)
    ledger.balance(after)
    assert replicas_agree(engine, after)


@pytest.mark.needs("levels", "absent")
@pytest.mark.parametrize("levels", ["flat", pytest.param("host", marks=pytest.mark.hosts)])
def test_what_waits_for_a_parameter_outlasts_steps_without_it(
    engine: Engine, levels: str, hosts: Topology
) -> None:
    training, ledger = engine.train("topk:density=0.1", levels=levels, absent=True), Ledger(engine)
    for step in range(6):
        gradients = given(engine.rank, step)
        if step in (1, 2, 4):
            del gradients["second"]
        ledger.enter(gradients)
        training.step(gradients)
    ledger.balance(training)
    assert replicas_agree(engine, training)


@pytest.mark.hosts
@pytest.mark.needs("levels")
@pytest.mark.parametrize("where", ["first", "one"])
def test_a_bad_rank_of_a_host_is_an_error_on_all(engine: Engine, where: str, hosts: Topology) -> None:
    training = engine.train("exdyna:density=0.2", levels="host")
    run(training, engine, [0])
    before, sick, last_host = copy.deepcopy(training.held()), given(engine.rank, 1), set(hosts.hosts[-1])
    if engine.rank == engine.size - 1:
        sick[where] = np.full(SHAPES[where], np.nan)
    with pytest.raises(NonFiniteGradientError) as caught:
        training.step(sick)
    assert set(caught.value.where) == last_host and set(caught.value.where.values()) == {where}
    for name, values in training.held().items():  # all gradients are dropped, in all buckets
        np.testing.assert_allclose(values, before[name], rtol=0, atol=1e-6)
    run(training, engine, range(2, 4))
    assert replicas_agree(engine, training)


@pytest.mark.hosts
@pytest.mark.needs("levels")
def test_levels_are_those_of_all_ranks(engine: Engine, hosts: Topology) -> None:
    refused(
        engine,
        engine.train("topk:density=0.1", levels="host" if engine.rank else "flat"),
        "levels differs",
    )
    with pytest.raises(UnknownNameError, match=r"levels 'auto': the known ones are flat, host"):
        engine.train("topk:density=0.1", levels="auto").step(given(engine.rank, 0))
