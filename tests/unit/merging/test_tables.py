"""Layer tables: the published totals, and that the files are what their generator writes."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.merging import LAYER_TABLES, layer_table

ROOT = Path(__file__).resolve().parents[3]

# number of parameters as published, and tensors
PUBLISHED = {
    "bert_base": (109_482_240, 199),
    "gpt2_medium": (354_823_168, 292),
    "gpt2_small": (124_439_808, 148),
    "inception_v4": (42_679_816, 449),
    "llama_1b": (1_100_048_384, 201),
    "lstm_ptb": (66_034_000, 11),
    "resnet18": (11_689_512, 62),
    "resnet50": (25_557_032, 161),
    "vgg16_cifar": (14_728_266, 54),
    "vit_base": (86_567_656, 152),
    "xml_one_layer": (126_722_048, 1),
}


@pytest.mark.parametrize("name", LAYER_TABLES)
def test_totals_are_the_published_ones(name: str) -> None:
    table = layer_table(name)
    parameters = table.workload.parameters
    assert [parameter.num_elements for parameter in parameters] == list(map(math.prod, table.shapes))
    assert (sum(parameter.num_elements for parameter in parameters), len(parameters)) == PUBLISHED[name]
    assert min(table.workload.backward_seconds) > 0.0
    assert table.source
    # a third of the step is forward
    assert sum(table.workload.backward_seconds) == pytest.approx(2 * table.workload.forward_seconds, rel=1e-3)


def test_the_one_time_that_the_paper_gives() -> None:
    workload = layer_table("resnet50").workload
    assert workload.forward_seconds + sum(workload.backward_seconds) == pytest.approx(0.18, rel=1e-4)


@pytest.mark.parametrize("name", LAYER_TABLES)
def test_files_are_what_the_generator_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    from layer_tables_lib import write

    assert (write.FOLDER / f"{name}.json").read_text(encoding="utf-8") == write.content(name)


def test_an_unknown_table() -> None:
    with pytest.raises(UnknownNameError, match="resnet50"):
        layer_table("resnet")
