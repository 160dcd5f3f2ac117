"""Real text for the examples: the source of the Python standard library, which is on every machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

#: bytes that stand for themselves; everything else reads as 0
VOCABULARY = 128


@cache
def load(num_bytes: int = 2_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Modules at the top level of the standard library, one behind the other, as int64 tokens.

    Args:
        num_bytes: where to stop reading.

    Returns:
        The first nine tenths to train on, and the rest to test with.
    """
    folder, read, texts = Path(sysconfig.get_path("stdlib")), 0, []
    for path in sorted(folder.glob("*.py")):
        texts.append(path.read_bytes())
        read += len(texts[-1])
        if read >= num_bytes:
            break
    tokens = np.frombuffer(b"".join(texts)[:num_bytes], np.uint8).astype(np.int64)
    tokens[tokens >= VOCABULARY] = 0
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def batches(
    tokens: np.ndarray, rank: int, size: int, batch_size: int, length: int, num_steps: int, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields random pieces of the text, others on every rank: tokens [batch, length], and the next ones."""
    generator = np.random.default_rng([seed, rank, size])
    for _ in range(num_steps):
        starts = generator.integers(len(tokens) - length - 1, size=batch_size)
        pieces = tokens[starts[:, None] + np.arange(length + 1)]
        yield pieces[:, :-1], pieces[:, 1:]
