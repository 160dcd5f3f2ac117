"""Histories of calls that accumulators come through like plain arrays, bit for bit."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from horovod_sparse.arrays import FoldRule, GradientParts, HostAccumulator
from horovod_sparse.tensors.accumulator import TorchAccumulator
from support import reference
from support.drawing import KINDS, SEEDS, SIZES, make, spoil
from support.gradients import DTYPES, as_gradient
from support.reference import Plain

History = dict[str, Any]
#: rules that may follow one another: what they keep beside the values is the same
RULES = (
    [*map(FoldRule, (1.0, 0.9, 0.0, 10.0, -0.5))],
    [
        FoldRule(decay, momentum, nesterov, masking=momentum != 1.0)
        for decay in (1.0, 0.9, 0.0)
        for momentum in (0.9, 0.0, 1.0)
        for nesterov in (True, False)
    ],
    [
        FoldRule(0.9, moment=0.99, rate=0.1),
        FoldRule(moment=0.5, rate=0.0, count=3),
        FoldRule(moment=0.5, count=2, eps=0.0, floor=0.5),
    ],
)
CHANGES = ("clear", "add", "put", "mask", "look", "look", "abandon", "take", "assign")


@st.composite
def histories(draw: st.DrawFn, max_elements: int = 10_000) -> History:
    """Of any type, size, kind of numbers and rule, some of them not finite."""
    rules = draw(st.sampled_from(RULES))
    step = st.tuples(st.sampled_from(rules), st.lists(st.sampled_from(CHANGES), max_size=6))
    return {
        "n": draw(SIZES.map(lambda n: min(n, max_elements))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "density": draw(st.sampled_from([0.001, 0.02, 0.2, 0.6])),
        "companions": draw(st.integers(int(rules is not RULES[0]), 2)),
        "kind": draw(st.sampled_from(KINDS)),
        "share": draw(st.sampled_from([0.0, 0.0, 0.001, 0.3])),
        "seed": draw(SEEDS),
        "form": draw(st.sampled_from(["whole", "parts", "strided", "odd address", "matrix"])),
        "steps": draw(st.lists(step, min_size=1, max_size=3)),
    }


def as_array(values: Any) -> np.ndarray:
    return values.cpu().numpy() if hasattr(values, "cpu") else values


def as_tensor(gradient: np.ndarray, dtype: str, device: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(gradient.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(gradient.copy()).to(device)


def bits_of(values: Any) -> bytes:
    is_half = getattr(values, "dtype", None) == torch.bfloat16
    return as_array(values.view(torch.int16) if is_half else values).tobytes()


def formed(gradient: np.ndarray, form: str) -> tuple[Any, list[np.ndarray]]:
    """A gradient as users' gradients lie in memory, and this memory."""
    memory, given = [gradient.copy()], None
    if form == "parts" and gradient.size:
        cuts = sorted({0, *(gradient.size * cut // 7 for cut in (1, 2, 6)), gradient.size})
        memory = [gradient[low:high].copy() for low, high in itertools.pairwise(cuts)]
        given = GradientParts(memory)
    elif form == "strided":
        memory = [np.repeat(gradient, 3)]
        given = memory[0][1::3]
    elif form == "odd address":
        memory = [np.frombuffer(b"x" + gradient.tobytes(), np.uint8).copy()]
        given = memory[0][1:].view(gradient.dtype)
    elif form == "matrix" and gradient.size % 2 == 0:
        given = np.asfortranarray(gradient.reshape(2, -1))
        memory = [given]
    return memory[0] if given is None else given, memory


def play(history: History, device: str | None = None, **more: Any) -> None:
    """The host's accumulator does what plain arrays do, and a tensor's, if a device is named."""
    sizes = {name: history[name] for name in ("density", "companions")}
    shape = history["n"], "float64" if history["dtype"] == "float64" else "float32"
    ours: list[Any] = [HostAccumulator(*shape, **sizes)]
    if device is not None:
        ours.append(TorchAccumulator(*shape, device=device, **sizes, **more))
    plain = Plain(*shape, sizes["companions"])
    n, generator = history["n"], np.random.default_rng(history["seed"])

    def check_state() -> float:
        for number, expected in enumerate(plain.arrays):
            found = [as_array((one.values(), *one.companions)[number]) for one in ours]
            np.testing.assert_array_equal(found[0], expected)
            np.testing.assert_array_equal(found[-1], expected)
            np.testing.assert_array_equal(*(np.signbit(found[at]) for at in (0, -1)))
        with np.errstate(over="ignore"):
            norm = float(np.sum(np.square(plain.values, dtype=np.float64)))
        for one in ours if np.isfinite(norm) else []:
            assert one.square_norm == pytest.approx(norm, rel=1e-5, abs=1e-5 * (1 + scale))
        return norm

    scale = 0.0
    for number, (rule, changes) in enumerate(history["steps"]):
        with np.errstate(all="ignore"):
            kind, seed = history["kind"], history["seed"] + number
            values = spoil(make(kind, n, seed, np.float64), generator, history["share"])
            gradient = as_gradient(values, history["dtype"])
            expected, carried = plain.fold(gradient.copy(), rule)
        bad = expected.nonfinite
        for one in ours:
            own, memory = formed(gradient, history.get("form", "whole"))
            if one is not ours[0]:
                own = as_tensor(gradient, history["dtype"], device)
                memory = [own]
            before = [bits_of(part) for part in memory]
            found = one.fold(own, rule)
            assert [bits_of(part) for part in memory] == before, "it is left alone"
            first = (found.num_nonfinite, found.first_nonfinite)
            assert first == (bad.size, bad[0] if bad.size else -1)
            for norm, wanted, least in (
                (found.square_norm, expected.square_norm, 0.0),
                (found.carried_square_norm, carried, 1e-4 * scale),
            ):
                assert not np.isfinite(wanted) or norm == pytest.approx(wanted, rel=1e-5, abs=least)
        scale = expected.square_norm
        check_state()
        for change in [*changes, "look"]:
            if change == "look":
                seed = int(generator.integers(2**32))
                for one in ours:
                    check_alike(one, plain.values, np.random.default_rng(seed))
                continue
            share = generator.choice([0.001, 0.1, 0.9])
            arguments: list[Any] = [np.flatnonzero(generator.random(n) < share).astype(np.int32)]
            if change in ("add", "put"):
                arguments.append(
                    (generator.standard_normal(arguments[0].size) * 3).astype(plain.values.dtype)
                )
            if change in ("abandon", "assign"):
                arguments = [plain.values[::-1].copy()] * (change == "assign")
            answers = [getattr(one, change)(*arguments) for one in ours]
            wanted = plain.change(change, *arguments)
            for answer in answers if change == "take" else []:
                np.testing.assert_array_equal(answer, wanted)
            scale = max(scale, check_state())  # a value that is cleared leaves its rounding in the norm


def check_alike(ours: Any, values: np.ndarray, generator: np.random.Generator) -> None:
    """An accumulator of these values gives the answers of plain arrays."""
    n, sizes = values.size, np.abs(values)
    for low, high in ((0, n), sorted(generator.integers(0, n + 1, 2).tolist())):
        # first what is content with upper bounds of the maxima: the others make them exact
        threshold = float(np.sort(sizes)[-int(generator.integers(1, min(n, 30) + 1))]) if n else 1.0
        found = ours.at_least(threshold, low, high)
        np.testing.assert_array_equal(found, reference.at_least(values, threshold, low, high))
        # few enough that the maxima of the blocks bound the k-th; and more
        length = high - low
        k = int(generator.integers(0, generator.choice([length // 64, min(length, 700), length]) + 1))
        largest = ours.largest(k, low, high)
        np.testing.assert_array_equal(largest, reference.largest(values, k, low, high))
        assert found.dtype == largest.dtype == np.int32
        assert not k or ours.kth_magnitude(k, low, high) == np.sort(sizes[low:high])[-k]
        chunk = int(generator.choice([1, 5, 64, 100, 4096]))
        lengths = np.minimum(chunk, n - np.arange(0, n, chunk))
        quotas = np.rint(generator.choice([0.0, 0.003, 0.02, 0.4, 1.0], lengths.size) * lengths).astype(
            np.int64
        )
        if n:
            pairs = zip(range(0, n, chunk), quotas.tolist(), strict=True)
            each = [reference.largest(values, k, start, start + chunk) for start, k in pairs]
            np.testing.assert_array_equal(ours.largest_of_each(chunk, quotas), np.concatenate(each))
    stride, offset = int(generator.integers(1, 9)), int(generator.integers(0, 9))
    np.testing.assert_array_equal(ours.sample_magnitudes(stride, offset), sizes[offset::stride])
