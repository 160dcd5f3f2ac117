"""How many teams: SparDL's cost on a network, by the formulas of its paper."""

from __future__ import annotations

import math

from horovod_sparse.sparsifiers.mail import ceil_log2

__all__ = ["cheapest_teams", "is_power_of_two", "spardl_cost", "teams_by_cost"]


def is_power_of_two(number: int) -> bool:
    """Whether a number from 1 is 2**m."""
    return number & (number - 1) == 0


def spardl_cost(size: int, teams: int, between: str) -> tuple[int, float, float]:
    """Rounds, and elements received as a share of k: Eqs. (4), (7) and (10) of the paper.

    Args:
        size: P.
        teams: d.
        between: "recursive" (R-SAG) or "bruck" (B-SAG).

    Returns:
        Rounds, and the least and the most elements that a rank receives, divided by k (they differ for
        B-SAG only). The least is that of the three phases together; the paper's Eq. (10) leaves out the
        first one there.

    Example:
        >>> spardl_cost(14, 1, "recursive")
        (8, 1.857..., 1.857...)
        >>> spardl_cost(14, 7, "bruck")
        (5, 1.0, 4.0)
    """
    num_blocks = size // teams
    rounds = 2 * ceil_log2(num_blocks) + ceil_log2(teams)
    within = (size - teams) / size
    if between == "recursive":
        both = 2 * within + teams / size * math.log2(teams)
        return rounds, both, both
    least = within + (teams - 1) / size + within / teams
    return rounds, least, 2 * within + teams * (teams - 1) / size


def teams_by_cost(
    size: int, bytes_of_union: float, latency_seconds: float, seconds_per_byte: float, between: str = "auto"
) -> list[tuple[int, float]]:
    """Every divisor d of P with its predicted time, the least first, the smaller of equals.

    Args:
        size: P.
        bytes_of_union: k elements as they are written.
        latency_seconds: of one round.
        seconds_per_byte: the inverse of the bandwidth.
        between: which way between teams; "auto" is R-SAG for powers of two, else B-SAG. For B-SAG the
            middle of its range counts.

    Returns:
        (d, seconds).
    """

    def seconds(teams: int) -> float:
        way = between
        if way == "auto":
            way = "recursive" if is_power_of_two(teams) else "bruck"
        rounds, least, most = spardl_cost(size, teams, way)
        return rounds * latency_seconds + bytes_of_union * (least + most) / 2 * seconds_per_byte

    divisors = [teams for teams in range(1, size + 1) if size % teams == 0]
    if between == "recursive":
        divisors = [teams for teams in divisors if is_power_of_two(teams)]
    return sorted(((teams, seconds(teams)) for teams in divisors), key=lambda pair: pair[1])


def cheapest_teams(
    size: int, bytes_of_union: float, latency_seconds: float, seconds_per_byte: float, between: str = "auto"
) -> int:
    """The divisor d of P with the least predicted time; see `teams_by_cost`.

    Example:
        >>> [cheapest_teams(16, 1e6, latency, 8e-9) for latency in (1e-6, 1.0)]
        [2, 16]
    """
    return teams_by_cost(size, bytes_of_union, latency_seconds, seconds_per_byte, between)[0][0]
