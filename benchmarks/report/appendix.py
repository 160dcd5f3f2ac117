"""The pages of docs/appendix about time and bytes: sections, and how to read their tables."""

from benchmarks.common.pages import Section

__all__ = ["PERFORMANCE", "PLANS"]

PERFORMANCE = (
    Section(
        "A rank's own work",
        "One rank, one thread, all but the network, beside one copy of the gradient in the same minute.",
        ("local",),
        "scripts/bench local",
    ),
    Section(
        "TensorFlow beside PyTorch",
        "The same step through both front ends.",
        ("frameworks",),
        "scripts/bench frameworks",
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
        "Messages between pairs of ranks",
        'Rounds by Horovod beside messages from each rank to each over MPI ("pairs").',
        ("rounds_pairs_mpi",),
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
