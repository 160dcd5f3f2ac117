"""What a rank sends in every round of SparDL, as declared."""

from __future__ import annotations

from collections.abc import Callable

from horovod_sparse.collectives import AllGather, Exchange
from horovod_sparse.sparsifiers.base import BucketInfo, Traffic
from horovod_sparse.sparsifiers.bruck import bruck_bags
from horovod_sparse.sparsifiers.mail import mail_words
from horovod_sparse.sparsifiers.spardl_layout import Layout
from horovod_sparse.sparsifiers.windows import equal_part
from horovod_sparse.wire import WireFormat

__all__ = ["spardl_traffic"]


def spardl_traffic(
    info: BucketInfo, layout: Layout, wire: WireFormat, recursive: bool, notes_travel: bool
) -> tuple[Traffic, ...]:
    """All rounds of a step for one rank.

    Args:
        info: the facts of the bucket.
        layout: of the step.
        wire: how elements are written.
        recursive: whether the sum between teams is R-SAG.
        notes_travel: whether the last phase is Bruck's within the team.
    """
    team, position = layout.place(info.rank)
    d, quota = layout.teams, layout.quota(position)
    # of a block, B-SAG may leave as few elements as one team gives
    exact = d == 1 or recursive

    def ends(words_of: Callable[[int], int], count: int) -> tuple[int, int]:
        return words_of(count if exact else -(-count // d)), words_of(count)

    def declared(kind: type, ranges: list[tuple[int, int]]) -> Traffic:
        low, high = 4 * sum(low for low, _ in ranges), 4 * sum(high for _, high in ranges)
        return Traffic(kind, low, None if exact else high)

    rounds = []
    for stage in reversed(range(layout.num_stages)):
        count = sum(layout.quota(block) for block in layout.bag(position, stage))
        rounds.append(Traffic(Exchange, 4 * mail_words(count, 0, info, wire)))
    if recursive:
        rounds += [
            Traffic(Exchange, 4 * mail_words(quota, (1 << stage) * notes_travel, info, wire))
            for stage in range(d.bit_length() - 1)
        ]
    else:
        given = ends(lambda count: 1 + mail_words(count, int(notes_travel), info, wire), quota)
        rounds += [declared(Exchange, [given] * num_sent) for num_sent in bruck_bags(d)]
    if not notes_travel:

        def part_words(count: int) -> int:
            start, stop = equal_part(count, d, team)
            return mail_words(stop - start, 0, info, wire)

        return (*rounds, declared(AllGather, [ends(part_words, quota)]))
    for num_sent in bruck_bags(layout.team_size):
        blocks = [(position + offset) % layout.team_size for offset in range(num_sent)]
        rounds.append(
            declared(
                Exchange,
                [
                    ends(lambda count: 1 + mail_words(count, d, info, wire), layout.quota(block))
                    for block in blocks
                ],
            )
        )
    return tuple(rounds)
