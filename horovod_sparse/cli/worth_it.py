"""`horovod-sparse worth-it`: yes or no, how much, what to paste, and from which bandwidth on dense wins."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod_sparse.checks import check_count
from horovod_sparse.cli.console import console as make_console
from horovod_sparse.cli.console import show
from horovod_sparse.cli.model import FORMAT, add_step, read_model, updating_seconds
from horovod_sparse.cli.options import Source, add_network, network_from, selection_from, source_of
from horovod_sparse.cost import HOST_NETWORK, AffineTime, AlphaBeta, Profile, assumed_profile
from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe, parse_recipe
from horovod_sparse.merging import LAYER_TABLES, ParameterFacts, Plan, Workload, predict
from horovod_sparse.merging.optimal import search_plan
from horovod_sparse.merging.plan import MAX_BUCKET_ELEMENTS

#: what is tried, denser first: of two that take equally long the denser one is advised
CANDIDATES = ("exdyna:density=0.01", "topk:density=0.01", "exdyna:density=0.001", "topk:density=0.001")
#: a sparser one has to be this much faster
_MARGIN = 1.05
#: bytes of an element in a dense allreduce
GRADIENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: of a step's computing, where nothing else is known: backward is two of three multiplications
_FORWARD_SHARE = 1 / 3
#: equal pieces of a model of which only the number of parameters is known
_PIECES = 48
#: that are looked at for the crossing, bit/s
_LOWEST, _HIGHEST = 1e6, 1e13


@dataclass(frozen=True)
class Verdict:
    """What is said.

    Attributes:
        recipe: the best of the candidates.
        dense_seconds: an iteration with dense gradients, overlapped and fused as Horovod does.
        sparse_seconds: one with the recipe, its buckets merged as `optimal` does, but for its proof.
        computing_seconds: of forward, backward and the optimizer's update alone.
        dense_wins_from: bit/s; 0 where dense wins everywhere, infinite where it wins nowhere looked at.
    """

    recipe: Recipe
    dense_seconds: float
    sparse_seconds: float
    computing_seconds: float
    dense_wins_from: float

    @property
    def speedup(self) -> float:
        """Dense by sparse."""
        return self.dense_seconds / self.sparse_seconds

    @property
    def answer(self) -> str:
        """In a word or two."""
        return "yes" if self.speedup >= _MARGIN else "hardly" if self.speedup > 1.0 else "no"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments.

    Args:
        parser: of the subcommand.
    """
    add = parser.add_argument
    add("--params", type=float, metavar="N", help="parameters of the model, as in 124e6; needs --step-ms")
    tables = ", ".join(LAYER_TABLES)
    add("--model", metavar="TABLE|FILE", help=f"instead of it: {tables}; or a file .json: {FORMAT}")
    text = "forward and backward on one worker, in ms; a table's own times are scaled to it"
    add("--step-ms", type=float, metavar="MS", help=text)
    add_step(parser)
    add("--nodes", type=int, required=True, metavar="N", help="hosts")
    add("--per-node", type=int, default=1, metavar="N", help="workers of a host (default: %(default)s)")
    text = "of dense gradients: the best that dense training could do (default: %(default)s)"
    add("--gradient-dtype", choices=tuple(GRADIENT_BYTES), default="float16", help=text)
    text = "what horovod-sparse calibrate wrote on this cluster; without it formulas are used"
    add("--profile", metavar="FILE", help=text)
    add_network(parser)
    add("--json", action="store_true", help="print numbers instead")


def run(options: argparse.Namespace) -> int:
    """Computes and prints.

    Args:
        options: of the command line.

    Returns:
        The exit code, 0 also where the answer is no.

    Raises:
        HorovodSparseError: naming the argument that is wrong.
    """
    check_count("--nodes", options.nodes)
    check_count("--per-node", options.per_node)
    size = options.nodes * options.per_node
    if size < 2:
        raise ArgumentError("--nodes", options.nodes, "two workers or more: one alone communicates nothing")
    options.ranks, options.framework = size, None
    if options.nodes == 1 and options.profile is None:  # all there is to communicate by is inside the host
        options.bandwidth = options.bandwidth or 8.0 / HOST_NETWORK.beta_seconds
        options.latency = options.latency or HOST_NETWORK.alpha_seconds
    source = source_of(options)
    workload, origin = _workload(options, source.measured)
    network = None if options.profile else network_from(options)
    recipes = [parse_recipe(text) for text in CANDIDATES]
    share = GRADIENT_BYTES[options.gradient_dtype] / 4
    verdict = verdict_of(workload, source.profile, recipes, share)
    if network is not None:
        selection = selection_from(options)

        def at(bandwidth: float) -> Verdict:
            profile = assumed_profile(
                AlphaBeta(network.alpha_seconds, 8.0 / bandwidth), size, selection=selection
            )
            return verdict_of(workload, profile, recipes, share)

        verdict = dataclasses.replace(verdict, dense_wins_from=crossing(at))
    console = make_console(to_stderr=options.json)
    for warning in source.warnings:
        show(console, f"warning: {warning}", "yellow")
    if options.json:
        print(json.dumps(_numbers(verdict, size), indent=1))
        return 0
    levels = options.nodes > 1 and options.per_node > 1
    sure = how_sure(source, size, options.gradient_dtype)
    for line in sentences(verdict, options.gradient_dtype, source.words, origin, sure=sure, levels=levels):
        show(console, line)
    return 0


def verdict_of(
    workload: Workload, profile: Profile, recipes: Sequence[Recipe], gradient_share: float = 1.0
) -> Verdict:
    """Dense beside the best of some recipes, at the profile's number of ranks.

    Args:
        workload: a rank's step.
        profile: of the cluster.
        recipes: to choose from, denser ones first.
        gradient_share: bytes of a dense gradient by those in float32.

    Example:
        >>> workload = Workload((ParameterFacts("all", 25_000_000),), (0.1,))
        >>> gigabit = assumed_profile(AlphaBeta(50e-6, 8e-9), 8)
        >>> verdict_of(workload, gigabit, [parse_recipe("topk:density=0.001")]).answer
        'yes'
    """
    computing = workload.step_seconds + workload.update_seconds
    every = workload.with_dense([parameter.name for parameter in workload.parameters])
    best: tuple[float, Recipe] | None = None
    for recipe in recipes:
        cost = profile.cost(recipe.sparsifier)
        plan = search_plan(workload, cost, quick=True)
        seconds = predict(workload, plan, cost).iteration_seconds
        if best is None or seconds * _MARGIN < best[0]:
            best = seconds, recipe
    if best is None:
        raise ArgumentError("recipes", recipes, "one or more")
    alone = profile.dense_cost()
    fixed = alone.dense.fixed_seconds
    allreduce = AffineTime(fixed, (alone.dense.seconds(1e9) - fixed) * 1e-9 * gradient_share)
    alone = dataclasses.replace(alone, dense=allreduce)
    dense = predict(every, Plan((), every.dense_names), alone).iteration_seconds
    return Verdict(best[1], dense, best[0], computing, math.nan)


def crossing(at: Callable[[float], Verdict]) -> float:
    """The bandwidth from which on dense wins, in bit/s, by bisection: sparse loses as networks get faster.

    Args:
        at: the verdict at a bandwidth.

    Returns:
        0 where dense wins on the slowest network looked at (1 Mbit/s), infinity where it wins on none.
    """
    if at(_LOWEST).speedup <= 1.0:
        return 0.0
    if at(_HIGHEST).speedup > 1.0:
        return math.inf
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if at(math.exp(middle)).speedup > 1.0 else (low, middle)
    return math.exp(high)


def how_sure(source: Source, size: int, dtype: str) -> str:
    """What the times are worth, in words.

    Args:
        source: of the times.
        size: P.
        dtype: of dense gradients.
    """
    if source.measured is None:
        return (
            "by formulas, without Horovod's own cost and the optimizer's: horovod-sparse calibrate measures "
            "them, for --profile"
        )
    if source.measured.size != size:
        return f"measured with {source.measured.size} ranks, and converted by formulas"
    tried = "of 16 such predictions 15 were within 15 % (docs/performance.md)"
    if dtype != "float32":
        tried += f"; what {dtype} saves of a dense allreduce is a formula's"
    return f"times are measured on this cluster: {tried}"


def sentences(
    verdict: Verdict,
    dtype: str,
    words: str,
    origin: str = "as given",
    *,
    sure: str,
    levels: bool = False,
) -> list[str]:
    """Five lines.

    Args:
        verdict: what came out.
        dtype: of dense gradients.
        words: on which cluster, and by what.
        origin: where the step's time is from.
        sure: see `how_sure`.
        levels: whether there are several hosts of several workers: summing within a host first may pay then.
    """
    sparse, dense, alone = (
        f"{1e3 * seconds:,.1f} ms"
        for seconds in (verdict.sparse_seconds, verdict.dense_seconds, verdict.computing_seconds)
    )
    times = f"{verdict.speedup:.1f} times faster" if verdict.speedup >= _MARGIN else "no gain to speak of"
    name, _, arguments = verdict.recipe.describe().partition(":")
    paste = f'compression=hvd.Compression.{name}({arguments}), merging="optimal"'
    if levels:
        paste += ', levels="auto"'
    if not verdict.speedup > 1.0:
        paste = (
            "compression=hvd.Compression.fp16" if dtype == "float16" else f"nothing: train dense, in {dtype}"
        )
    limit = verdict.dense_wins_from
    if math.isnan(limit):
        border = "at another bandwidth: leave --profile out and give --bandwidth"
    elif math.isinf(limit):
        border = "on no network that was looked at, up to 10 Tbit/s"
    elif limit == 0.0:
        border = "everywhere: the model is small for its step, or selection is slow"
    else:
        border = f"from {_bandwidth(limit)} on"
    return [
        f"worth it: {verdict.answer}, {times} ({words})",
        f"iteration: {sparse} sparse, {dense} dense ({dtype}, overlapped and fused), {alone} computing alone",
        f"paste: {paste}",
        f"dense wins: {border}",
        f"how sure: {sure}; time of the step: {origin.rstrip('.')}",
    ]


def _bandwidth(bits: float) -> str:
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits:.0f} bit/s"


def _workload(options: argparse.Namespace, profile: Profile | None) -> tuple[Workload, str]:
    """The step of `--model`, or one of `--params` in equal pieces, and where its time is from.

    Raises:
        ArgumentError: if there are neither or both, or a time is missing.
    """
    milliseconds = options.step_ms
    if milliseconds is not None and not 0.0 < milliseconds < math.inf:
        raise ArgumentError("--step-ms", milliseconds, "a time in milliseconds above 0")
    if milliseconds is not None and options.step_seconds is not None:
        raise ArgumentError("--step-ms", milliseconds, "either it or --step-seconds")
    given = options.step_seconds if milliseconds is None else milliseconds / 1e3
    if (options.params is None) == (options.model is None):
        raise ArgumentError("--params", options.params, "either this or --model, and not both")
    if options.model is not None:
        model = read_model(options.model).on(options.gpu, given)
        update = updating_seconds(model.parameters, profile, options.update)
        known = profile if model.backward_seconds is None else None
        return model.workload(known, update_seconds=update), model.source or "of the file"
    if options.gpu is not None:
        raise ArgumentError("--gpu", options.gpu, "--model too: tables have times by device")
    if not 1.0 <= options.params <= 1e12:
        raise ArgumentError("--params", options.params, "a number of parameters, from 1 to 1e12")
    if given is None:
        raise ArgumentError("--step-ms", None, "the time of forward and backward beside --params")
    num_elements, seconds = int(options.params), given
    pieces = min(num_elements, max(_PIECES, -(-num_elements // MAX_BUCKET_ELEMENTS)))
    bounds = [num_elements * number // pieces for number in range(pieces + 1)]
    facts = tuple(
        ParameterFacts(f"piece{number}", stop - start)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    times = ((1 - _FORWARD_SHARE) * seconds / pieces,) * pieces
    update = updating_seconds(facts, profile, options.update)
    return Workload(facts, times, _FORWARD_SHARE * seconds, update_seconds=update), "as given"


def _numbers(verdict: Verdict, size: int) -> dict[str, object]:
    limit = verdict.dense_wins_from
    return {
        "worth_it": verdict.answer,
        "ranks": size,
        "recipe": verdict.recipe.describe(),
        "speedup": verdict.speedup,
        "sparse_seconds": verdict.sparse_seconds,
        "dense_seconds": verdict.dense_seconds,
        "computing_seconds": verdict.computing_seconds,
        "dense_wins_from_bits_per_second": limit if math.isfinite(limit) else None,
    }
