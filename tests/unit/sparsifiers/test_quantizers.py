"""SignSGD and QSGD: values of any scale, the lemma of QSGD's paper over many steps, damaged messages."""

import numpy as np
import pytest

from horovod_sparse.arrays import FoldReport
from horovod_sparse.errors import MessageError
from horovod_sparse.feedback import recipe
from horovod_sparse.kernels.quantization import Quantization, decode_sum, encode
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import WholeSum
from horovod_sparse.sparsifiers.rounds.quantized import HEADER, blank_message, sum_quantized
from support.gradients import gaussian
from support.sampling import rows_by


@rows_by("exponent,code", [-900, -100, 100, 1018], [(0, 0), (7, 0)])
def test_no_unit_overflows_or_vanishes(exponent: int, code: tuple[int, int]) -> None:
    """Values that are all scaled by a power of two are sent in the same bits, but for the unit."""
    how, found = Quantization(*code), []
    for values in (plain := np.array([0.5, -1.0, 0.25, 0.0, 0.75] * 9), np.ldexp(plain, exponent)):
        words, sent = np.full(how.num_words(45, values.dtype), -1, np.int32), np.empty_like(values)
        rest = encode(values, how, 5, words)
        decode_sum(words[None], how, sent)
        np.testing.assert_array_equal(rest, values - sent)
        found.append((words[2:], sent))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(np.ldexp(found[0][1], exponent), found[1][1])


@pytest.mark.parametrize("levels", [1, 7])
def test_qsgd_is_unbiased(levels: int) -> None:
    """Lemma 3.1: its mean is the gradient, the variance within min(d / s^2, sqrt(d) / s) of its square."""
    gradient = gaussian(np.random.default_rng(4), 96).astype(np.float32)
    made = recipe("qsgd", levels=levels, group=96, feedback="none")
    cluster, total, spread, steps = SimulatedCluster(made, 96, 1), np.zeros(96), 0.0, 1500
    for _ in range(steps):
        sent = cluster.step([gradient.copy()])
        total += sent
        spread += float(np.square(sent - gradient, dtype=np.float64).sum())
    square = float(np.square(gradient, dtype=np.float64).sum())
    unit = np.abs(gradient).max() / levels
    assert np.abs(total / steps - gradient).max() < 5 * 0.5 * unit / np.sqrt(steps)
    assert spread / steps <= min(96 / levels**2, np.sqrt(96) / levels) * square


def _message(code: Quantization, num_elements: int = 100) -> np.ndarray:
    message = blank_message(code, num_elements, np.float32, FoldReport())
    encode(np.ones(num_elements, np.float32), code, 0, message[HEADER:])
    return message


def test_the_words_of_a_message_are_those_worked_out_by_hand() -> None:
    # minus the length, n = 4, health 0, norm 2, step 35, projection -1.5, the tag: n above 128 + 3 levels;
    # the unit 3 / 3; then of 3, -2, 0 and 1, the first in the lowest bit, signs, lower bits and upper bits
    code, report = Quantization(levels=3), FoldReport(carried_square_norm=4.0, step=35, projection=-1.5)
    message = blank_message(code, 4, np.float32, report)
    encode(np.array([3, -2, 0, 1], np.float32), code, 0, message[HEADER:])
    header = [2**32 - 11, 4, 0, 0x40000000, 35, 0xBFC00000, 4 << 8 | 131]
    assert message.view(np.uint32).tolist() == [*header, 0x3F800000, 0b0010, 0b1001, 0b0011]


def test_messages_of_another_length_code_or_unit_are_refused() -> None:
    code, one = Quantization(), _message(Quantization())
    found, _ = sum_quantized(np.concatenate([one, one]), 2, code, 100, np.float32)
    assert found.tolist() == [2.0] * 100
    for wrong in (
        one[:-1],
        np.concatenate([one, one[:3]]),
        np.concatenate([one, _message(Quantization(levels=7))]),
        np.concatenate([one, _message(Quantization(), 99)]),
        np.concatenate([one, np.full_like(one, 7)]),
    ):
        with pytest.raises(MessageError, match="same"):
            sum_quantized(wrong, 2, code, 100, np.float32)
    for unit in (-1.0, np.nan):
        bad = one.copy()
        bad[HEADER : HEADER + 1].view(np.float32)[0] = unit
        with pytest.raises(MessageError, match="unit"):
            sum_quantized(np.concatenate([one, bad]), 2, code, 100, np.float32)


def test_a_whole_sum_makes_no_indices_until_asked() -> None:
    cluster = SimulatedCluster(recipe("qsgd"), 1000, 2)
    sum_ = cluster.synchronize([*np.ones((2, 1000), np.float32)])[0]
    assert isinstance(sum_, WholeSum) and sum_.whole and "indices" not in vars(sum_)
    assert sum_.indices.tolist() == list(range(1000))
