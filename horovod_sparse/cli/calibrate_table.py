"""A profile as tables: what was fitted, and how well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from horovod_sparse.cli.main_console import plain_table
from horovod_sparse.cost import Fit, Profile, profile_at

__all__ = ["collective_table", "growth_table", "notes_of", "sparsifier_table"]

_QUALITY = ("points", "R2", "error", "largest")


def collective_table(profile: Profile) -> Table:
    """alpha and beta of every kind.

    Args:
        profile: as measured.
    """
    columns = ("of", "alpha ms", "beta ns/byte", "bytes/s", *_QUALITY)
    table = plain_table(
        f"Collectives of {profile.size} ranks, through Horovod, by the bytes that a rank puts in",
        columns,
        "error: of the fitted time, in the median and at most, over the sizes measured",
    )
    for kind, fit in profile.collectives.items():
        beta = fit.seconds_per_unit
        table.add_row(
            kind,
            f"{fit.fixed_seconds * 1e3:.3f}",
            f"{beta * 1e9:.4g}",
            _rate(1.0 / beta) if beta > 0.0 else "-",
            *_quality(fit),
        )
    return table


def sparsifier_table(profile: Profile) -> Table:
    """Selection and decoding of every sparsifier.

    Args:
        profile: as measured.
    """
    columns = ("of", "what", "fixed us", "ns per element", "ns per selected", *_QUALITY)
    table = plain_table(
        f"Selection and decoding on {profile.device}",
        columns,
        "fold and selection; decoding and scattering, by what all ranks selected",
    )
    for name in profile.selection:
        for what, fits in (("selection", profile.selection), ("decoding", profile.decoding)):
            if name not in fits:
                continue
            fit = fits[name]
            table.add_row(
                name if what == "selection" else "",
                what,
                f"{fit.fixed_seconds * 1e6:.1f}",
                f"{fit.seconds_per_unit * 1e9:.3g}",
                f"{fit.seconds_per_selected * 1e9:.3g}",
                *_quality(fit),
            )
    return table


def growth_table(profile: Profile, measured: Mapping[int, Profile], sizes: Sequence[int]) -> Table:
    """How the start-up time of collectives grows with P.

    Args:
        profile: of all ranks.
        measured: of some of them, by their number.
        sizes: more numbers of ranks, for which there are formulas alone.
    """
    kinds = list(profile.collectives)
    every = sorted({*measured, profile.size, *sizes})
    table = plain_table(
        "alpha in ms by the number of ranks",
        ("of", *(f"P = {size}" for size in every)),
        f"by the formulas of profile_at from P = {profile.size}; in brackets what was measured",
    )
    for kind in kinds:
        cells = []
        for size in every:
            text = f"{profile_at(profile, size).collectives[kind].fixed_seconds * 1e3:.3f}"
            if size in measured and kind in measured[size].collectives:
                text += f" ({measured[size].collectives[kind].fixed_seconds * 1e3:.3f})"
            cells.append(text)
        table.add_row(kind, *cells)
    return table


def notes_of(profile: Profile) -> list[str]:
    """What fits have to say (slopes cut off at 0), and which of them are bad."""
    notes: list[str] = []
    for what, fits in (
        ("", profile.collectives),
        ("selection of ", profile.selection),
        ("decoding of ", profile.decoding),
    ):
        for name, fit in fits.items():
            notes += fit.notes
            if fit.median_error > 0.3:
                notes.append(
                    f"{what}{name}: the model is off by {fit.median_error:.0%} in the median. Was the "
                    "machine busy? Repeat with more --repetitions"
                )
    return notes


def _quality(fit: Fit) -> tuple[str, ...]:
    return (
        str(fit.num_points),
        f"{fit.r_squared:.4f}",
        f"{fit.median_error:.1%}",
        f"{fit.largest_error:.1%}",
    )


def _rate(bytes_per_second: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_per_second >= unit:
            return f"{bytes_per_second / unit:.3g} {name}"
    return f"{bytes_per_second:.3g} B"
