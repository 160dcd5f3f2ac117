"""Arguments of measurements across hosts, memory, and made-up gradients."""

import numpy as np
import pytest

from benchmarks.common.gradients import GradientSource, random_layers
from benchmarks.common.hosts import BenchmarkError
from benchmarks.common.options import baselines, command_line, named_sparsifiers
from benchmarks.sync import main as bench_sync
from benchmarks.sync.main import split_for_memory
from benchmarks.train import main as bench_train
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import parse_recipe
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer


def test_every_sparsifier_that_there_is_can_be_measured():
    options = bench_sync.parser().parse_args([])
    for text in named_sparsifiers(options.sparsifiers, 0.01).values():
        sparsifier = parse_recipe(text).sparsifier
        assert sparsifier.density == (1.0 if isinstance(sparsifier, Quantizer) else 0.01)


def test_a_density_that_is_given_stays():
    found = named_sparsifiers("topk:density=0.5,indices=gaps micro", 0.01)
    assert parse_recipe(found["topk:density=0.5,indices=gaps"]).sparsifier.density == 0.5
    assert parse_recipe(found["micro"]).sparsifier.density == 0.01


def test_misspelt_names_are_met_before_anything_is_launched(capsys):
    with pytest.raises(UnknownNameError, match="topq"):
        named_sparsifiers("topq", 0.01)
    with pytest.raises(ArgumentError, match="naif"):
        baselines("dense,naif", ("dense", "naive"))
    assert bench_sync.main(["--sparsifiers", "topq"]) == 1
    assert "topq" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--hosts", "1"], ["--density", "0"], ["--elements", "0"]])
def test_impossible_numbers_are_refused(arguments):
    with pytest.raises(SystemExit):
        bench_sync.parser().parse_args(arguments)


def test_a_framework_that_cannot_be_measured_yet_is_named(monkeypatch, capsys):
    monkeypatch.setitem(bench_train.FRAMEWORKS, "tensorflow", "benchmarks.no_such_module")
    assert bench_train.main(["--framework", "tensorflow"]) == 1
    assert "--framework tensorflow" in capsys.readouterr().err


def test_launches_are_split_where_memory_is_short():
    names = [f"s{number}" for number in range(7)]
    assert split_for_memory(names, 8, 1_000_000, 10**12) == [names]
    parts = split_for_memory(names, 8, 25_600_000, 20 * 2**30)
    assert len(parts) > 1
    assert [name for part in parts for name in part] == names
    assert split_for_memory([], 2, 1000, 10**12) == [[]]
    with pytest.raises(BenchmarkError, match="GiB"):
        split_for_memory(names, 8, 25_600_000, 4 * 2**30)


def test_the_command_is_kept_without_its_files():
    assert command_line("sync", ["--json", "--mpi", "--plot", "a b.png"]) == "scripts/bench sync --mpi"
    assert command_line("train", ["--json=x", "--model", "cnn"]) == "scripts/bench train --model cnn"


def test_gradients_are_new_in_every_step_and_on_every_rank():
    sizes = [5000, 20_000]
    sources = [GradientSource(sizes, rank) for rank in range(2)]
    drawn = [np.empty(25_000, np.float32) for _ in range(3)]
    sources[0].fill(drawn[0])
    sources[0].fill(drawn[1])
    sources[1].fill(drawn[2])
    for one, other in ((0, 1), (0, 2)):
        assert abs(np.corrcoef(drawn[one][:5000], drawn[other][:5000])[0, 1]) < 0.1
    # the layers have scales of their own, the same on all ranks
    first, second = (np.array([item[:5000].std(), item[5000:].std()]) for item in (drawn[0], drawn[2]))
    assert first == pytest.approx(second, rel=0.1)
    assert abs(np.log(first[0] / first[1])) > 0.1


def test_layers_add_up():
    for elements in (1, 999, 3_000_000):
        assert sum(random_layers(elements)) == elements
        assert min(random_layers(elements)) > 0
