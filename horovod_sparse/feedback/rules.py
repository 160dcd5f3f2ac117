"""Which parameters are not treated like the others: dense ones, and ones of another density."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from horovod_sparse.checks import check_count, check_density
from horovod_sparse.errors import ArgumentError

__all__ = ["ParameterRules"]

_log = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class ParameterRules:
    """What holds for single parameters, by size and by name.

    Patterns are those of shells: ``*`` is any text, ``?`` any letter, ``[ab]`` one of these, and they
    are compared with the whole name, as ``model.named_parameters()`` gives it. The first of these that
    holds decides: a pattern of `densities` (in their order), a pattern of `dense`, then `dense_below`.

    Args:
        dense_below: parameters of fewer elements are sent whole, by a plain allreduce.
        dense: patterns of names whose parameters are sent whole.
        densities: density by pattern, instead of the sparsifier's own (and without its schedule).

    Raises:
        ArgumentError: something is of another form.

    Example:
        >>> rules = ParameterRules(dense_below=100, dense=("*.bias",), densities={"embedding.*": 0.01})
        >>> [rules.density_of(name, 4096) for name in ("fc.bias", "embedding.weight", "fc.weight")]
        [1.0, 0.01, None]
    """

    dense_below: int = 0
    dense: tuple[str, ...] = ()
    densities: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        check_count("dense_below", self.dense_below, "a number of elements, 0 or more", low=0)
        dense: Any = self.dense
        dense = (dense,) if isinstance(dense, str) else dense
        dense = tuple(dense) if isinstance(dense, Iterable) else (None,)
        if not all(isinstance(pattern, str) for pattern in dense):
            raise ArgumentError("dense", self.dense, 'patterns of names, as ("*.bias", "*.norm.*")')
        object.__setattr__(self, "dense", dense)
        pairs: Any = self.densities
        pairs = tuple(pairs.items()) if isinstance(pairs, Mapping) else pairs
        allowed = 'densities by pattern, as {"embedding.*": 0.01}'
        if not isinstance(pairs, Iterable) or isinstance(pairs, str):
            raise ArgumentError("densities", self.densities, allowed)
        pairs = tuple(tuple(pair) if isinstance(pair, (list, tuple)) else pair for pair in pairs)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise ArgumentError("densities", self.densities, allowed)
            check_density(f"densities[{pair[0]!r}]", pair[1], "a kept fraction in (0, 1]")
        object.__setattr__(self, "densities", pairs)

    def __bool__(self) -> bool:
        return self != ParameterRules()

    def density_of(self, name: str, num_elements: int) -> float | None:
        """The density of a parameter: 1 where it is sent whole, None where it is the sparsifier's own.

        Args:
            name: of the parameter.
            num_elements: n.
        """
        for pattern, density in self.densities:
            if fnmatchcase(name, pattern):
                return density
        if num_elements < self.dense_below or any(fnmatchcase(name, pattern) for pattern in self.dense):
            return 1.0
        return None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Patterns that fit no name: misspelt, most likely."""
        known = list(names)
        patterns = [*self.dense, *(pattern for pattern, _ in self.densities)]
        return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]

    def hint(self, names: Iterable[str]) -> None:
        """Logs patterns that fit no name.

        Args:
            names: of all parameters.
        """
        known = sorted(names)
        if missed := self.unmatched(known):
            _log.warning(
                "no parameter has a name like %s; names are %s",
                ", ".join(map(repr, missed)),
                ", ".join(known[:8]) + (", ..." if len(known) > 8 else ""),
            )

    def arguments(self) -> dict[str, Any]:
        """What differs from the default, as arguments of a recipe."""
        changed = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if getattr(self, item.name) != item.default
        }
        if "densities" in changed:
            changed["densities"] = dict(changed["densities"])
        return changed
