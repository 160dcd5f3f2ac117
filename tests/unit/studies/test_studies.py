"""The studies themselves, at tiny sizes; and what their committed measurements promise."""

import itertools
import statistics

import pytest
import torch

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")

from benchmarks.report.main import PICTURES, STUDIES
from benchmarks.studies import adamw, convergence, lengths, local, networks, sizes
from benchmarks.studies.baselines import BASELINES
from benchmarks.studies.papers import sixteen, trainings
from benchmarks.studies.study import load
from benchmarks.studies.tasks import Task, digits_task, gpt_task
from horovod_sparse.cli.main import bits_per_second
from horovod_sparse.cli.worth_it import Case, recommended_row, rows_of


@pytest.mark.nightly
def test_every_study_measures_at_a_toy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = {"density": 0.1, "size": 2, "num_steps": 6, "warmup_steps": 2}
    cell = sizes.CELLS[sizes.SIMULATED]._replace(steps=6)
    monkeypatch.setitem(sizes.CELLS, sizes.SIMULATED, cell)
    sent = {
        method: sizes.measure(f"GPT 0.12 M, P=2/{method}/rate 0.01/seed 0")["bytes_per_step"]
        for method in ("topk 1 %", "topk 1 % in all", "exdyna 1 %", "exdyna P %")
    }
    assert sent["topk 1 %"] == pytest.approx(2 * sent["topk 1 % in all"], rel=0.01)
    assert sent["exdyna P %"] == pytest.approx(2 * sent["exdyna 1 %"], rel=0.1)
    for method in ("dense", lengths.NO_MOMENT, lengths.ALL, "1 %"):
        assert lengths.measure(f"LSTM 0.11 M, 10 steps/{method}/rate 0.01/seed 0")["bits"] < 8
    setting |= {"width": 4, "samples": 4, "batch_size": 1, "rate": 0.1, "score_every": 3}
    trainings.on_ranks("exdyna/2", setting)
    assert len(trainings.in_teams("2/global/seed 0", {**setting, "size": 4})["scores"]) == 3


def test_every_run_has_a_name_that_its_study_knows() -> None:
    for study in STUDIES:
        result = load(study.file)
        assert study.table(result), study.name
        assert result["command"] == f"scripts/study {study.name}"
        unknown = set(result.get("runs", {})) - set(study.names())
        assert not unknown, (study.name, unknown)


def test_tasks_end_with_the_steps_that_they_are_asked_for() -> None:
    assert len([*digits_task(width=4).batches(1, 2, 130, 0)]) == 130


def test_baselines_bring_what_all_ranks_mean() -> None:
    # as many coefficients, and as high a rank, as the matrix has: nothing is left out
    setting = {"num_steps": 20, "warmup": 0.1, "clip_norm": 100.0, "beta2": 0.9}
    shapes = [torch.Size((4, 4)), torch.Size((3,))]
    generator = torch.Generator().manual_seed(0)
    ranks = [torch.randn(19, generator=generator) for _ in range(2)]
    mean = (ranks[0] + ranks[1]) / 2
    dense = {"dense": 4, "fp16": 2, "powersgd rank 1": 4, "powersgd rank 4": 4, "1-bit adam": 4, "demo": 6}
    for name, baseline in BASELINES.items():
        exchange = baseline.make(shapes, setting)
        steps = [exchange(ranks, step, 0.1) for step in range(1500 if name == "1-bit adam" else 3)]
        expected = mean.sign() if name in ("1-bit adam", "demo") else mean
        assert steps[0][1] == dense[name] * 19
        torch.testing.assert_close(steps[0][0], expected, rtol=1e-2, atol=1e-2)
        if name == "1-bit adam":  # in time everything arrives that its signs hold back
            assert steps[-1][1] == 19 / 8 * 1.5 + 16
            sent = torch.stack([step[0] for step in steps[500:]]).mean(0) * mean.abs()
            torch.testing.assert_close(sent, mean, rtol=0.05, atol=0.05)
        elif name != "powersgd rank 1":
            torch.testing.assert_close(steps[2][0], expected, rtol=1e-2, atol=1e-2)


def test_committed_numbers_can_be_drawn() -> None:
    for read, make in PICTURES.values():
        assert make(read()).axes


def test_what_was_promised_was_measured() -> None:
    runs = load(sixteen.STUDY.file)["runs"]
    for name in ("exdyna", "exdyna, rebalance=paper", "micro (parts stay)"):
        assert sixteen.facts(runs[name])["union"] == pytest.approx(1.0, abs=0.03), name
    facts = convergence.summary(load(convergence.STUDY.file))
    for row, fact in facts.items():
        if "," not in row and row not in convergence.UNPROMISING:
            assert fact["mean"] >= facts["none"]["mean"] - 0.01, row


def test_simulated_ranks_of_local_steps_have_parameters_of_their_own():
    """After the first exchange they were views of one vector, and trained one model by turns."""
    setting = local.SETTING | {"num_steps": 4, "width": 8, "length": 8}
    losses = local.measure(local.Method(2, lr=0.0), 0.1, 0, setting)["losses"]
    torch.manual_seed(0)
    task = gpt_task(width=8, batch_size=2, length=8)
    model = task.make_model()
    third = [list(task.batches(rank, 4, 4, 0))[2] for rank in range(4)]
    expected = [task.loss(model, *batch).item() for batch in third]
    assert losses[2] == pytest.approx(sum(expected) / 4, rel=1e-3)


def test_simulated_ranks_decay_what_the_optimizer_decays() -> None:
    """Biases and norms decayed too, and long sparse trainings ended behind dense ones for that alone."""
    net = torch.nn.Linear(2, 1)
    weight, bias = (parameter.detach().clone() for parameter in net.parameters())
    task = Task(
        lambda: net,
        lambda *_: itertools.repeat((weight, bias)),
        lambda model, *_: 0.0 * (model.weight.sum() + model.bias.sum()),
        lambda *_: (0.0, 1),
    )
    setting = {**adamw.SETTING, "num_steps": 2, "warmup": 0.5, "weight_decay": 0.5}
    adamw.trained(task, adamw.Method(1, "topk:density=1,feedback=adam"), setting, 0.1, 0)
    torch.testing.assert_close(net.weight.detach(), weight * 0.95 * 0.95)
    torch.testing.assert_close(net.bias.detach(), bias)


def test_worth_it_says_a_schedule_within_10_percent_of_the_best_in_eleven_networks_of_twelve() -> None:
    runs, right = load(networks.STUDY.file)["runs"], 0
    found = networks.seconds_to_dense(runs)
    near = [runs[network] for network in found if network.endswith(" 0ms")]
    alone = statistics.median(runs[network][networks.ALONE]["seconds"] for network in found)
    # four ranks share two cores: what an exchange adds to a pass, where nothing travels for long
    often, rare = (f"best, every={every}, delay=1" for every in (1, 15))
    work = statistics.median(speed[often]["seconds"] - speed[rare]["seconds"] for speed in near)
    dense = runs["10gbit, 0ms"][networks.DENSE]["seconds"] - alone
    for network, seconds in found.items():
        rate, latency = network.split(", ")
        delay = max(5e-5, float(latency.removesuffix("ms")) / 1e3)
        sent = runs[network]["best, every=1, delay=0"]["bytes"] / (networks.SIZE - 1) / 834_304
        case = Case(834_304, alone, networks.SIZE, bits_per_second(rate), delay, sent, work, dense)
        rows = [row for row in rows_of(case) if latency != "0ms" or "every" not in row.name]
        name = recommended_row(case, rows).name.replace("sparse", "best")
        whole = {"best": "best, every=1, delay=0", "best, delay=1": "best, every=1, delay=1"}.get(name, name)
        right += seconds[whole] <= 1.1 * min(seconds.values())
    assert len(found) == 12 and right >= 11
