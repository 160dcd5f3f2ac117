"""SparDL seen from above: all ranks at once, dense arrays, one phase after the other, as the paper has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["ReferenceStep", "reference_step", "top"]


def top(values: np.ndarray, k: int) -> np.ndarray:
    """Which elements are the k largest magnitudes; of equal ones the first."""
    chosen = np.zeros(values.size, bool)
    chosen[np.argsort(-np.abs(values), kind="stable")[:k]] = True
    return chosen


@dataclass
class ReferenceStep:
    """What a step ends in.

    Attributes:
        final: [n], the synchronized gradient.
        chosen: bool [n], its indices.
        residuals: mode -> [P, n].
        num_after: per position, elements of the union over teams before it is cut.
    """

    final: np.ndarray
    chosen: np.ndarray
    residuals: dict[str, np.ndarray]
    num_after: list[int]


def reference_step(
    accumulators: np.ndarray,
    teams: int,
    windows: list[tuple[int, int]],
    quotas: list[int],
    num_between: list[int] | None,
) -> ReferenceStep:
    """One step of Algorithm 1 on [P, n]; between teams B-SAG (h per position: `num_between`) or R-SAG."""
    size, n = accumulators.shape
    num_blocks = size // teams
    held = accumulators.copy()  # G, summed up in place
    sent = np.zeros((size, n), bool)  # what a rank has taken for sending or keeping
    left = np.zeros((size, n))  # xi: what remained where something was taken

    def sparsify(rank: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = windows[block]
        chosen = np.zeros(n, bool)
        chosen[start:stop] = top(held[rank, start:stop], quotas[block])
        left[rank, start:stop] = np.where(chosen, 0.0, held[rank])[start:stop]
        sent[rank] |= chosen
        return np.where(chosen, held[rank], 0.0), chosen

    # Spar-Reduce-Scatter
    num_steps = int(np.ceil(np.log2(num_blocks))) if num_blocks > 1 else 0
    for i in range(1, num_steps + 1):
        distance, bag = 2 ** (num_steps - i), num_steps - i + 1
        messages = []
        for rank in range(size):
            team, w = divmod(rank, num_blocks)
            blocks = [
                (w + offset) % num_blocks for offset in range(2 ** (bag - 1), 2**bag) if offset < num_blocks
            ]
            target = team * num_blocks + (w + distance) % num_blocks
            messages.append((target, sum(sparsify(rank, block)[0] for block in blocks)))
        for target, message in messages:
            held[target] += message

    # every rank's own block, then the sum over teams
    own = [sparsify(rank, rank % num_blocks) for rank in range(size)]
    values, masks = [value for value, _ in own], [mask for _, mask in own]
    num_after = []
    for position in range(num_blocks):
        column = [team * num_blocks + position for team in range(teams)]
        quota = quotas[position]

        def reduce(group: list[int], givers: list[int], quota: int = quota) -> int:
            """Adds what the givers hold; all of the group keep the same, and share what they drop."""
            total = np.sum([values[rank] for rank in givers], axis=0)
            mask = np.any([masks[rank] for rank in givers], axis=0)
            keep = kept_of(total, mask, quota)
            for rank in group:
                left[rank] += np.where(mask & ~keep, total, 0.0) / len(group)
                masks[rank], values[rank] = keep, np.where(keep, total, 0.0)
            return int(mask.sum())

        if num_between is not None:
            for rank in column:
                reduce([rank], [rank], num_between[position])
            num_after.append(reduce(column, column))
        else:
            groups = [[rank] for rank in column]
            while len(groups) > 1:
                pairs = [(groups[i], groups[i + 1]) for i in range(0, len(groups), 2)]
                groups = [one + other for one, other in pairs]
                for one, other in pairs:
                    reduce(one + other, [one[0], other[0]])

    chosen = np.any(masks[:num_blocks], axis=0)
    residuals = {
        # lines 11 to 13: the copy, with xi where the final sum has an element
        "global": np.where(chosen, left, accumulators),
        "partial": np.where(sent & chosen, 0.0, accumulators),
        "local": np.where(sent, 0.0, accumulators),
    }
    return ReferenceStep(np.sum(values[:num_blocks], axis=0), chosen, residuals, num_after)


def kept_of(values: np.ndarray, mask: np.ndarray, k: int) -> np.ndarray:
    """The k largest of the masked elements."""
    where = np.flatnonzero(mask)
    keep = np.zeros(values.size, bool)
    keep[where[top(values[where], k)]] = True
    return keep
