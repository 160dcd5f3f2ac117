"""The pages of docs/appendix: titles, a line on how to read each table, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "PERFORMANCE", "PLANS", "Section", "page"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "appendix"
_FIRST = (
    "This page is written whole by `scripts/report` from the JSON files in "
    "[measurements](../measurements): do not edit it."
)


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        note: how its tables are to be read.
        names: of the tables, in order.
        command: what measures them again, where the tables do not say it.
    """

    title: str
    note: str
    names: tuple[str, ...]
    command: str = ""


def page(title: str, about: str, sections: Sequence[Section], tables: Mapping[str, str]) -> str:
    """A page, all of it.

    Args:
        title: its heading.
        about: what is said before the first section.
        sections: what is on it.
        tables: in Markdown, by name; one that is missing is said to be.
    """
    blocks = [_FIRST, f"# {title}", about]
    for section in sections:
        blocks += [f"## {section.title}", section.note]
        if section.command:
            blocks.append(f"`{section.command}`")
        for name in section.names:
            blocks.append(tables.get(name, "Not measured yet.").strip("\n"))
            if (FOLDER.parent / "measurements" / f"{name}.json").exists():
                blocks.append(f"[{name}.json](../measurements/{name}.json)")
    return "\n\n".join(block for block in blocks if block) + "\n"


PERFORMANCE = (
    Section(
        "A rank's own work",
        "One rank, one thread, all but the network, beside one copy of the gradient in the same minute.",
        ("local",),
        "scripts/bench local",
    ),
    Section(
        "TensorFlow beside PyTorch",
        "The same step through both front ends; then what a tape inside `tf.function` adds to backward, "
        "local work and collectives. The collectives alone are carried out eagerly, one by one, so what is "
        "left may be below 0.",
        ("frameworks", "tape"),
        "scripts/bench frameworks, scripts/bench tape",
    ),
    Section(
        "Comparing replicas",
        "Comparing parameters and optimizer state of all ranks, beside a step without forward and backward "
        "pass.",
        ("drift",),
        "scripts/bench drift",
    ),
    Section(
        "One synchronization",
        "From the first rank's start to the last rank's end, and its parts on an average rank. CPU: of the "
        "whole process; own CPU: of the thread that synchronizes. By expected: bytes that left the "
        "interface over those that formulas and Horovod's own traffic make. Union: density of what all "
        "ranks selected together. Naive: `torch.topk` and two allgathers. Gradients are drawn "
        "independently, so build-up is at its largest.",
        ("sync_gloo", "sync_mpi", "ddp_sync"),
    ),
    Section(
        "Messages whose lengths repeat",
        "Lengths as they are (`capacity=exact`, as all are today) beside padded ones. Methods of one "
        "launch take turns: compare within a table.",
        ("rounds_gloo", "rounds_mpi"),
    ),
    Section(
        "Messages between pairs of ranks",
        'Rounds by Horovod beside messages from each rank to each ("pairs"). Over Gloo those went through '
        "ZeroMQ.",
        ("rounds_pairs", "rounds_pairs_mpi", "rounds_4_hosts", "train_pairs"),
    ),
    Section(
        "Two levels",
        "Gradients summed within hosts of two ranks, by messages over the loopback device, and sparsified "
        "between hosts.",
        ("levels_gloo",),
    ),
    Section(
        "Sparse all-reduces",
        "Communication: the messages of a step sent once more, with no work between them. Step: selection, "
        "messages and sums of eight ranks on two cores. Ok-Topk finds its thresholds anew every four steps.",
        ("sparse_allreduce",),
        "scripts/bench allreduce",
    ),
    Section(
        "Where the time of a small round goes",
        "A rank's own stamps beside Horovod's timeline, in ms on rank 0: until Horovod's cycle takes the "
        "request and the waiting thread wakes up; until the last rank has asked; negotiation; transfer. "
        "Fast way: the share of rounds that Horovod's response cache knew.",
        ("account",),
    ),
    Section(
        "A small model on one machine",
        "The CNN of `examples/pytorch_mnist.py`, 180,000 parameters. By default: nothing said of buckets, "
        "so all stays dense.",
        ("digits",),
    ),
    Section("Cost against the number of ranks", "The same elements on 2, 4 and 8 hosts.", ("growth",)),
    Section(
        "Quantizers, and dense decoding",
        "`signsgd` and `qsgd` send every element; densely: each message is scattered into n zeros and added.",
        ("local_quantizers", "quantizers", "train_parts"),
    ),
    Section("Formats of messages", "Values and indices in fewer bits.", ("wire",)),
    Section(
        "Whole iterations",
        "ResNet-50's layer table; computing times are slept through, everything else is real. Alone: "
        "without synchronization.",
        ("bandwidth", "train"),
    ),
    Section(
        "All budgets",
        "Of one rank's work, and of 8 hosts at 1 Gbit/s with 25.6 million parameters at density 0.001. The "
        "best dense: the fastest dense allreduce of all, whatever carried it.",
        ("budgets",),
    ),
    Section(
        "Later goals",
        "What was asked for later. Of two ways to send rounds the better one counts.",
        ("goals",),
    ),
)

PLANS = (
    Section(
        "Plans on four hosts",
        "ResNet-50's layer table at a quarter of its sizes and times, top-k at density 0.01, 1 Gbit/s, "
        "Gloo. One launch measures in its warm-up, its profile predicts all plans, and every plan has a "
        "launch of its own.",
        ("merging_hosts",),
        "scripts/bench merging --hosts 4 --rate 1gbit",
    ),
    Section(
        "The same after 300 other names",
        "Horovod keeps every name that it has seen in its response cache.",
        ("merging_names",),
        "scripts/bench merging --hosts 4 --rate 1gbit --names 300",
    ),
    Section(
        "The same with two levels",
        "Four hosts of two ranks. Measured when a correction shortened backward and forward, too; not "
        "repeated since.",
        ("levels_merging",),
        "scripts/bench merging --hosts 4 --ranks-per-host 2 --sparsifier topk --methods single,optimal "
        "--repeat 6 --iterations 4",
    ),
    Section(
        "By formulas",
        "First random inputs: sizes from 100 to 3 million elements, backward times exponential, constants "
        "over two decades. Then the models and constants of the OMGS-SGD paper for 16 ranks, and how much "
        "longer the greedy plan's step is than the best one's (buckets of both). All times are predictions.",
        ("merging",),
        "scripts/bench plans",
    ),
)
