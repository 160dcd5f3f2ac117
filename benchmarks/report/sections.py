"""The pages of docs/appendix: sections, and how to read their tables."""

from benchmarks.common.pages import Section

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
        ("sync_gloo", "sync_mpi"),
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
        "By formulas",
        "First random inputs: sizes from 100 to 3 million elements, backward times exponential, constants "
        "over two decades. Then the models and constants of the OMGS-SGD paper for 16 ranks, and how much "
        "longer the greedy plan's step is than the best one's (buckets of both). All times are predictions.",
        ("merging",),
        "scripts/bench plans",
    ),
)

RESULTS = (
    Section(
        "Accuracy of every sparsifier",
        "A CNN of 0.18 million parameters on digits, two real ranks, 8 epochs of 62 steps, density 0.01 "
        "after one epoch that begins at 0.25, momentum SGD with a cosine to 0, three seeds; 1,000 test "
        "digits, of which one is 0.1 points. Union: mean density that is applied. DDP: "
        "DistributedDataParallel. Messages of exdyna, micro, dgc, sidco and oktopk were padded then, but in "
        "rows with other optimizers and schedules, and without warm-up.",
        ("convergence",),
        "scripts/study convergence",
    ),
    Section(
        "AdamW whose steps are sparsified",
        "The GPT of `examples/gpt_text.py` at width 96 (0.48 million parameters), 400 steps, 16 pieces of "
        "128 bytes per step in all, beta2 0.99, decay 0.1, rate rising for 40 steps and falling to 0 by a "
        "cosine; ranks simulated in one process. `error` is AdamW behind error feedback, with the sum "
        "clipped to norm 1, as for dense, fp16, qsgd and PowerSGD, which is PyTorch's hook. That is dense "
        "for 40 steps, 1-bit Adam for 80; bytes are means of all steps. Each row at the rate that was best "
        "with the first seed, among those tried, as mean of its seeds, beside dense training with the same "
        "ones; training: mean of the last tenth of the steps, of text that is new to the model. 5 M: 1,500 "
        "steps of 8 pieces of 64 bytes.",
        ("adamw",),
        "scripts/study adamw",
    ),
    Section(
        "Local steps",
        "The GPT at width 128, 3,000 steps on 4 simulated ranks of 2 pieces of 64 bytes, AdamW at the "
        "best rate of the first seed, rising for 300 steps, then a cosine, clipping to norm 1; training: "
        "mean of the last 300.",
        ("local_steps",),
        "scripts/study local",
    ),
    Section(
        "Passes on real ranks",
        "Over torch.distributed. GPT of 0.12 million parameters, 600 passes of 8 pieces of 64 bytes a rank, "
        "AdamW, bits per byte; CNN with batch norm and ResNet-20 on digits, 300 passes of 16 images a rank, "
        "momentum 0.9, test accuracy. All methods at the rate that is best for dense; then at P = 4 each at "
        "its own, where that was measured.",
        ("passes",),
        "scripts/study passes",
    ),
    Section(
        "Twenty seconds over 100 Mbit/s",
        "The GPT at width 128 on four emulated hosts that share two cores, 2 pieces of 64 bytes per pass and "
        "host; AdamW at rate 0.003, which follows the clock; one seed. Sparse: 0.3 % in 2 bits with gaps, "
        "`feedback=adam`; local steps: `sparseloco`. PowerSGD is PyTorch's hook from the 2nd step. Bytes: "
        "all that left a host, by dense. Predicted: a pass alone, and the cost model's part.",
        ("demo",),
        "scripts/demo --json docs/measurements/demo.json",
    ),
    Section(
        "Time to accuracy",
        "Accuracy of a CNN of 4.3 million parameters on digits after equally many steps on two real ranks, "
        "three seeds, times the median iteration on two emulated hosts that share two cores. Density 0.01 "
        "from the first step; PowerSGD is PyTorch's hook of rank 4 from the 2nd step. In parentheses: times "
        "sooner than dense.",
        ("time_to_accuracy",),
        "scripts/study time_to_accuracy",
    ),
    Section(
        "Slow links",
        "A GPT with AdamW at rate 0.003, rising for a tenth of the steps, then a cosine, 2 "
        "pieces of 64 bytes per step and host, one seed. On two hosts 0.95 million parameters (two layers"
        " of width 192), 1,500 steps; on four 0.83 (four of 128), 3,000. Bits: mean of the last tenth of "
        "the steps, of text new to the model. Seconds: until the mean of as many steps is within 0.02 "
        "bits of dense's; a step takes a thirtieth of the median time of 30 in a row. Two hosts at 1 Gbit/s "
        "were alone on the machine. All else had its highest priority beside other programs: at 100 Mbit/s "
        "samples of 40 to 60 s of dense and `sparseloco`, whose trainings had no priority. Local steps: "
        '`combine="senders"`. PowerSGD: the same hook. Computing, as share of the '
        "time: by telemetry, and by how much longer steps with an exchange take than the median of others.",
        ("slow_links",),
        "scripts/study slow_links",
    ),
    Section(
        "Schedules and optimizers",
        "A perceptron of 3,850 parameters on digits, two simulated ranks, 240 steps at density 0.01 without "
        "a warm-up of it, three seeds; in parentheses points to dense training of the same row; best: "
        "`feedback=best`.",
        ("schedules",),
        "scripts/study schedules",
    ),
    Section(
        "Two levels",
        "The CNN on four real ranks, three seeds; 4 x 1: every rank is a host of its own.",
        ("levels_accuracy",),
        "scripts/study levels",
    ),
    Section(
        "Thresholds",
        "A CNN on digits and an LSTM on source text, 4 simulated ranks, 500 steps, density 0.01 after a "
        "warm-up over 100, the learning rate falling to a tenth at step 301. Error: of the union by what "
        "was asked. Settled: the first of ten steps in a row within 10 %.",
        ("threshold",),
        "scripts/study threshold",
    ),
)

PAPERS = (
    Section(
        "Sixteen simulated ranks, and encoding",
        "A CNN on digits, density 0.01, the learning rate falling to a tenth at step 110. Encoding: fold "
        "and selection of one gradient on one core that other work shared, density 0.001.",
        ("papers",),
        "scripts/study papers",
    ),
    Section(
        "ExDyna on 2 to 16 ranks",
        "All share out the same 64 samples of a step; one seed.",
        ("paper_ranks",),
        "scripts/study paper_ranks",
    ),
    Section(
        "SparDL's residuals in teams",
        "14 simulated workers, density 0.01, 120 steps of plain SGD.",
        ("paper_teams",),
        "scripts/study paper_teams",
    ),
    Section(
        "Counted and predicted",
        "Words that the busiest of simulated ranks receives (an element is two words), and the time at 50 "
        "microseconds and 1 Gbit/s for 25.6 million elements, density 0.01; then every number of teams; "
        "then OMGS's rule with nothing selected, beside its sparse plans, with the paper's constants for 16 "
        "GPUs.",
        ("paper_counts",),
        "scripts/study paper_counts",
    ),
    Section(
        "SparDL on 5 to 14 hosts",
        "Communication alone of 6.4 million elements at density 0.01, 1 Gbit/s, MPI. Up to fourteen ranks "
        "share two cores.",
        ("paper_workers",),
        "scripts/bench allreduce --mpi --rate 1gbit --elements 6400000 --density 0.01 --hosts 5,8,11,14",
    ),
    Section(
        "SparDL by density",
        "Communication alone of 6.4 million elements on eight hosts, 1 Gbit/s, MPI.",
        ("paper_densities",),
        "scripts/bench allreduce --mpi --rate 1gbit --hosts 8 --elements 6400000 --density D --add",
    ),
    Section(
        "OMGS-SGD's other models on hosts",
        "Sizes and times at a quarter, four hosts at 1 Gbit/s. The others are in "
        "[merging_inception_v4.json](../measurements/merging_inception_v4.json) and "
        "[merging_lstm_ptb.json](../measurements/merging_lstm_ptb.json).",
        ("merging_vgg16_cifar",),
        "scripts/bench merging --hosts 4 --rate 1gbit --model MODEL",
    ),
    Section(
        "DRAGONN's parts one by one",
        "ResNet-50's gradients on four hosts at 1 Gbit/s, density 0.001. Last column: how many times as "
        "fast the part above computing is as DGC's with dense decoding.",
        ("train_parts",),
        "scripts/bench train --hosts 4 --rate 1gbit --gloo --model resnet50 --baselines alone,dense "
        "--sparsifiers dgc,dragonn --by-default --densely",
    ),
)
