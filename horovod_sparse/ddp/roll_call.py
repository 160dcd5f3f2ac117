"""What ranks of a group tell each other beside its collectives: who is there, and who could not attach."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator

import torch.distributed as dist

from horovod_sparse.errors import DeadlineError
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.deadline import Deadline

_log = logging.getLogger("horovod_sparse")

#: after which the log says for whom this rank waits, and how often it looks for them
_QUIET_SECONDS, _LOOK_SECONDS = 5.0, 0.05

#: by name of a group: how many have attached here, and how many of these have come to their first step
_attached: Counter[str] = Counter()
_begun: Counter[str] = Counter()
_errors: dict[str, ConstructionErrors] = {}


class GroupStore:
    """The store that a group was made with, as `horovod_sparse.training.deadline.asked_store`.

    Example:
        >>> store = GroupStore(dist.HashStore())
        >>> store("notes", "0", b"here"), store("notes", "0"), store("notes", "1")
        (None, b'here', None)
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("horovod_sparse.notes", store)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupStore:
        """That of a group."""
        return cls(dist.distributed_c10d._get_process_group_store(group))

    def __call__(self, scope: str, key: str, value: bytes | None = None) -> bytes | None:
        name = f"{scope}/{key}"
        with contextlib.suppress(RuntimeError):  # whoever keeps the store has gone
            if value is not None:
                self._store.set(name, value)
                self._store.add(f"{name}/there", 1)
            elif self._store.add(f"{name}/there", 0):  # `get` waits for what is not there
                found: bytes = self._store.get(name)
                return found
        return None


def _errors_of(group: dist.ProcessGroup) -> ConstructionErrors:
    place = dist.get_rank(group), list(range(dist.get_world_size(group)))
    made = ConstructionErrors(lambda _: place, GroupStore.of(group))
    return _errors.setdefault(group.group_name, made)


@contextlib.contextmanager
def told_to_others(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Has the others hear of errors of this rank, where there are others."""
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    try:
        yield
    except Exception as error:
        if group is not None:
            _errors_of(group).tell(error, None)
        raise
    if group is not None:
        _errors_of(group).got_over()


def say_attached(group: dist.ProcessGroup | None) -> None:
    """This rank has attached one more."""
    if dist.is_initialized():
        group = group or dist.group.WORLD
        GroupStore.of(group)("attached", f"{_attached[group.group_name]}.{dist.get_rank(group)}", b"yes")
        _attached[group.group_name] += 1


def call_roll(group: dist.ProcessGroup, deadline_seconds: float | None) -> Deadline:
    """Waits until all ranks have come to the first step; what they wait with from then on.

    Raises:
        HorovodSparseError: that of a rank which could not attach.
        DeadlineError: with the ranks that have not come, and whether they have attached.
    """
    rank, size, store = dist.get_rank(group), dist.get_world_size(group), GroupStore.of(group)
    number, look = _begun[group.group_name], _errors_of(group).looking(None)
    deadline = Deadline(deadline_seconds, lambda: (rank, list(range(size))), store)
    store("came", f"{number}.{rank}", b"yes")
    missing, since, said = list(range(size)), time.monotonic(), False
    while missing := [one for one in missing if store("came", f"{number}.{one}") is None]:
        look()
        waited = time.monotonic() - since
        if waited > min(_QUIET_SECONDS, deadline.seconds) and not said:
            said = True
            _log.warning("waiting for %s", _words(missing, number, store))
        if waited > deadline.seconds:
            what = f"the first step ({_words(missing, number, store)})"
            raise DeadlineError(what, 0, deadline.seconds, dict.fromkeys(missing, ""))
        time.sleep(_LOOK_SECONDS)
    _begun[group.group_name] += 1
    return deadline


def _words(missing: list[int], number: int, store: GroupStore) -> str:
    absent = [one for one in missing if store("attached", f"{number}.{one}") is None]
    if absent:
        return f"ranks {absent}, which have not attached: all ranks call horovod_sparse.ddp.attach"
    return f"ranks {missing}, which have not come to the end of their first backward pass"
