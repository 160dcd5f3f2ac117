"""Laws of local steps, on ranks that are threads of one process and meet in every collective."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from horovod_sparse.errors import (
    ArgumentError,
    DriftError,
    NonFiniteGradientError,
    StateMismatchError,
    UnsupportedError,
)
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.tensors.local_steps import stepping_optimizer
from support.memories import choose_memory
from support.threads import MODELS, SIZE, Meeting, Rank, equal, half_of, on_ranks, sgd, trained

TOPK = "topk:density=0.1"
RECIPES = [None, "sparseloco", "topk:density=0.1", "oktopk:density=0.1", "qsgd", "randomk:density=0.2"]


@pytest.mark.parametrize(
    "compression", [None, "topk:density=1.0", "chunk_topk:density=1.0,indices=gaps", "randomk:density=1.0"]
)
def test_one_step_of_sgd_is_data_parallel_training(compression):
    found = on_ranks(lambda one: trained(one, 6).vector(), inner=sgd, every=1, compression=compression)
    model = Rank(0, Meeting(1), inner=sgd)
    others = [Rank(rank, Meeting(1), inner=sgd) for rank in range(SIZE)]
    for _ in range(6):
        for other in others:
            other.model.load_state_dict(model.model.state_dict())
            other.gradients()
        for parameter, *theirs in zip(*(m.model.parameters() for m in (model, *others)), strict=True):
            parameter.data -= 0.1 * sum(one.grad for one in theirs) / SIZE
    assert equal(found)
    torch.testing.assert_close(found[0], model.vector(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("every", "num_steps"), [(1, 4), (3, 12)])
def test_everything_by_nesterov_is_diloco_bit_for_bit(every, num_steps):
    """The paper's algorithm 1: AdamW on each worker, outside PyTorch's SGD with Nesterov's momentum."""
    found = on_ranks(lambda one: trained(one, num_steps).vector(), every=every, outer="nesterov")
    workers = [Rank(rank, Meeting(1), every=10**6) for rank in range(SIZE)]
    shared = nn.Parameter(workers[0].vector())
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(num_steps // every):
        moved = []
        for worker in workers:
            nn.utils.vector_to_parameters(shared.data.clone(), worker.model.parameters())
            worker.train(every)
            moved.append(shared.data - worker.vector())
        shared.grad = sum(moved[1:], moved[0]) * (1.0 / SIZE)
        outer.step()
    assert all(torch.equal(one, shared.data) for one in found)


@pytest.mark.parametrize(
    "given",
    [
        *({"compression": compression} for compression in RECIPES),
        *({"compression": compression, "combine": "ranks"} for compression in (None, "sparseloco")),
    ],
    ids=str,
)
def test_replicas_are_equal_after_every_exchange(given):
    def body(one):
        seen = []
        for _ in range(5):
            one.train(2)
            apart = one.vector()
            one.train(1)
            seen.append((apart, one.vector()))
        return seen

    for rounds in zip(*on_ranks(body, **given), strict=True):
        assert not equal([apart for apart, _ in rounds])
        assert equal([together for _, together in rounds])


@pytest.mark.parametrize("combine", ["ranks", "senders"])
@pytest.mark.parametrize(("decay", "delay"), [(1.0, 2), (0.5, 0)])
def test_nothing_is_lost_but_what_decays(decay, delay, combine):
    """``mean of (decay e + displacement - e') = theta - theta'``, over all ranks or each element's senders.

    What is learned meanwhile comes next.
    """
    text = f"chunk_topk:density=0.1,chunk=64,values=2bit,feedback=error(decay={decay})"

    def body(one):
        rounds, residual, start = [], torch.zeros_like(one.vector()), one.vector()
        for number in range(4):
            one.train(3 if number == 0 else 3 - delay)
            moved, one.moved = -one.moved, torch.zeros_like(start)
            one.train(delay)
            after, now = one.kept("residuals"), one.kept("start")
            rounds.append((decay * residual + moved - after, start - now))
            residual, start = after, now
            torch.testing.assert_close(one.vector() - start, one.moved, rtol=1e-4, atol=1e-6)
        return rounds

    for rounds in zip(*on_ranks(body, compression=text, delay=delay, combine=combine), strict=True):
        sent, stepped = (torch.stack(item) for item in zip(*rounds, strict=True))
        senders = SIZE if combine == "ranks" else (sent.abs() > 1e-5).sum(0).clamp(min=1)
        torch.testing.assert_close(sent.sum(0) / senders, stepped.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "given", [{"compression": "sparseloco"}, {"outer": "nesterov"}, {"delay": 2}], ids=str
)
def test_resume_in_the_middle_of_a_round_is_invisible(given):
    def body(one):
        one.train(7)
        saved = [item.state_dict() for item in (one.model, one.optimizer, one.local)]
        saved = copy.deepcopy(saved)
        one.train(7)
        again = Rank(one.rank, one.meeting, seed=1, **given)
        for item, entry in zip((again.model, again.optimizer, again.local), saved, strict=True):
            item.load_state_dict(entry)
        again.steps = 7
        again.train(7)
        assert torch.equal(one.vector(), again.vector())
        assert torch.equal(one.kept("start"), again.kept("start"))
        with pytest.raises(StateMismatchError, match="not one of LocalSteps"):
            again.local.load_state_dict({name: item for name, item in saved[2].items() if name != "local"})
        again.local.finish()
        again.local.load_state_dict(None)
        again.local.agree()
        assert not again.kept("velocity").any()

    on_ranks(body, **given)


def test_ranks_whose_common_parameters_differ_are_refused():
    def body(one):
        one.train(3)
        if one.rank == 0:
            with torch.no_grad():
                one.local.parts[0].moves.start[0] += 1.0
        one.local.engine.start_of = "the second start"
        with pytest.raises(DriftError, match=r"ranks \[0\]"):
            one.train(1)

    on_ranks(body, 2, compression=TOPK)


@pytest.mark.parametrize(("delay", "healthy"), [(0, 4), (2, 4), (2, 5)])
@pytest.mark.parametrize("compression", [None, "topk:density=0.1"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_rank_that_has_diverged_spoils_no_other(policy, compression, delay, healthy):
    """Nor any later exchange, by the moments of its own optimizer."""

    def body(one):
        one.train(healthy)
        held = one.kept("residuals") if healthy == 5 else None
        one.gradients()
        if one.rank == 1:
            one.model[2].bias.grad[0] = torch.nan
        raises = policy == "raise"
        with pytest.raises(NonFiniteGradientError) if raises else contextlib.nullcontext():
            one.optimizer.step()
            one.train(5 - healthy + delay)
        assert raises or one.local.telemetry.num_skipped == 1
        if held is not None:  # what was sent has left it, though its rank has gone on
            torch.testing.assert_close(one.kept("residuals"), held)
        middle = one.kept("start")
        one.steps = 6 + delay
        one.train(3)
        assert one.vector().isfinite().all()
        return middle, one.kept("start")

    found = on_ranks(body, compression=compression, on_nonfinite=policy, delay=delay)
    for vectors in zip(*found, strict=True):
        assert equal(list(vectors))
        assert vectors[0].isfinite().all()


def test_accumulated_passes_and_skipped_steps_do_not_count():
    def body(one):
        one.gradients()
        one.gradients()  # accumulated
        one.optimizer.found_inf = torch.ones(())  # what a GradScaler tells a fused optimizer
        one.optimizer.step()
        del one.optimizer.found_inf
        assert (one.local.taken, one.local.step) == (0, 0)
        one.train(1)
        assert (one.local.taken, one.local.step) == (1, 0)
        one.train(1)
        assert (one.local.taken, one.local.step) == (0, 1)

    on_ranks(body, 2, every=2, inner=lambda parameters: torch.optim.AdamW(parameters, fused=True))


@pytest.mark.parametrize("memory", ["host", "device"])
def test_gradients_of_a_device_and_half_types_follow_the_same_law(memory, monkeypatch):
    choose_memory(monkeypatch, memory)
    assert equal(on_ranks(lambda one: trained(one, 6).vector(), 2, compression="sparseloco"))
    assert equal(on_ranks(lambda one: trained(one, 3).vector(), 2, inner=half_of, compression=TOPK))

    def body(one):
        one.train(3)
        one.model.float()
        one.train(2)  # the exchange under way ends
        one.local.finish()
        return one.vector()

    assert equal(on_ranks(body, 2, inner=lambda some: half_of(some, sgd), compression=TOPK, delay=2))


@pytest.mark.parametrize("delay", [0, 1])
def test_the_rounding_of_half_types_is_no_displacement(delay):
    """Where the rate is 0, `start` moves by what residuals give out, and by nothing else."""

    def body(one):
        one.train(4)
        for group in one.optimizer.param_groups:
            group["lr"] = 0.0
        found = []
        for num_steps in (2, 20):
            one.train(num_steps)
            found.append((one.kept("residuals"), one.kept("start")))
        return [before - after for before, after in zip(*found, strict=True)]

    given = {"compression": "topk:density=0.02", "combine": "ranks", "delay": delay}
    found = on_ranks(body, 2, inner=half_of, every=1, **given)
    given_out, moved = (torch.stack(item).mean(0) for item in zip(*found, strict=True))
    torch.testing.assert_close(given_out, moved, rtol=0, atol=1e-6)


def test_a_state_that_all_ranks_load_in_the_midst_of_a_round_is_what_they_go_on_from():
    def body(one):
        one.train(4)
        before, loaded = one.vector(), nn.utils.parameters_to_vector(MODELS[1].parameters())
        one.model.load_state_dict(MODELS[1].state_dict())
        assert copy.deepcopy(one.model).load_state_dict(MODELS[1].state_dict())
        one.train(2)
        assert (one.local.step, one.local.taken) == (1, 2)
        one.train(1)
        assert (one.vector() - loaded).norm() < 0.3 * (before - loaded).norm()
        common = one.vector()
        if one.rank == 0:
            one.model.load_state_dict(MODELS[2].state_dict())
        with pytest.raises(StateMismatchError, match=r"only ranks \[0\] have loaded"):
            one.train(3)
        return common

    assert equal(on_ranks(body, 2, compression=TOPK))


def test_an_evaluation_of_common_parameters_changes_nothing():
    def body(one):
        for _ in range(4):
            one.train(2)
            if one.rank == 0:
                own, start = copy.deepcopy(one.model.state_dict()), one.kept("start")
                with one.local.common():
                    assert torch.equal(one.vector(), start)
                one.model.load_state_dict(MODELS[1].state_dict())
                one.model.load_state_dict(own)
        return one.vector()

    plain = on_ranks(lambda one: trained(one, 8).vector(), 2, compression=TOPK)
    assert all(map(torch.equal, on_ranks(body, 2, compression=TOPK), plain))


class SharpnessAware(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        self.base_optimizer = sgd(parameters)
        super().__init__(self.base_optimizer.param_groups, {})

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_steps_of_a_wrapped_optimizer_count_and_none_is_an_error():
    def body(one):
        outer = SharpnessAware(one.model.parameters())
        local = one.binding(stepping_optimizer(outer, one.model))
        for _ in range(4):
            one.gradients()
            outer.second_step()
        assert (local.step, local.taken) == (1, 1)
        unseen = one.binding(torch.optim.SGD(one.model.parameters()))
        with pytest.raises(UnsupportedError, match=r"no step\(\) of SGD"):
            unseen.finish()

    on_ranks(body, 2)


@pytest.mark.parametrize("how", ["add_param_group", "requires_grad_"])
def test_parameters_that_are_trained_later_are_refused(how):
    def body(one):
        later = nn.Parameter(torch.zeros(7), requires_grad=how == "add_param_group")
        one.train(1)
        one.optimizer.add_param_group({"params": [later]})
        if how == "requires_grad_":
            one.train(2)
            later.requires_grad_(True)
        with pytest.raises(UnsupportedError, match=r"of shapes \[\[7\]\]"):
            one.train(3)

    on_ranks(body, 2, inner=lambda every: sgd(list(every)[:4]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compression": "sparseloco", "outer": "nesterov"}, "a residual is a momentum already"),
        ({"compression": "dgc:density=0.1,feedback=momentum"}, "moments already"),
        ({"compression": "oktopk:density=0.1", "combine": "senders"}, "combine='senders'"),
        ({"every": 3, "delay": 4}, "delay=4"),
        ({"every": 0}, "every=0"),
        ({"outer": "adam"}, "unknown outer 'adam'"),
        ({"compression": 3}, "compression=3"),
    ],
)
def test_local_steps_refuse_what_cannot_be_by_name(given, words):
    with pytest.raises(ArgumentError, match=words):
        Rank(0, Meeting(1), **given)


def test_sparseloco_sends_194_times_fewer_bytes():
    n = 4096 * 256
    cluster = SimulatedCluster(parse_recipe("sparseloco"), n, size=2)
    cluster.synchronize([np.random.default_rng(0).laplace(size=n).astype(np.float32)] * 2)
    assert 4 * n / sum(sent[0] for sent in cluster.recorder.bytes_sent) > 194
