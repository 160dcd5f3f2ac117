"""What a bucket did in one step, and which parameters it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Member:
    """A parameter's place in a bucket: elements [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass
class BucketStep:
    """What a bucket did in one step, for telemetry.

    Attributes:
        bucket: name.
        num_elements: n.
        num_target: k, what was asked for.
        num_selected: elements this rank selected; with two levels, its host.
        num_received: elements that came back, duplicates of different ranks counted each.
        bytes_sent: payload bytes this rank put into collectives; with two levels, in those among hosts.
        bytes_by_round: both, round by round.
        kinds_by_round: names of the requests.
        bytes_inside: payload bytes that this rank put into collectives within its host, besides.
        residual_norm: L2 norm of what this rank holds back after this step: ||e_{i,t+1}|| in ExDyna's
            Algorithm 1. Without error feedback, of what is lost.
        global_error: ExDyna, Eq. (1), ``||e_t|| = mean over ranks of ||e_{i,t}||``: of what the ranks
            held back when this step began (0 in the first; the norms after it travel with the next
            step's messages). NaN where the messages do not carry norms.
        fold_seconds: of the fused pass.
        select_seconds: of everything else done on this rank between collectives.
        facts: the algorithm's own (threshold, imbalance, density_error, ...).
    """

    bucket: str
    num_elements: int
    num_target: int = 0
    num_selected: int = 0
    num_received: int = 0
    bytes_sent: int = 0
    bytes_by_round: list[int] = field(default_factory=list)
    kinds_by_round: list[str] = field(default_factory=list)
    bytes_inside: int = 0
    residual_norm: float = 0.0
    global_error: float = math.nan
    fold_seconds: float = 0.0
    select_seconds: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)
