"""Bytes that others wrote, with a few of them changed: a named error, or something sound.

Messages and entries of checkpoints, whose damage has a form, have tests of their own.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.errors import HorovodSparseError
from horovod_sparse.planning.model import Fit
from horovod_sparse.planning.profile import Profile
from horovod_sparse.training.compression import recipe_of
from horovod_sparse.training.encoding import from_bytes, to_bytes

PIECES = ["(", "[" * 3000, "{", "1e999", "NaN", "null", '"', "\\", ",", "-", "=", "0" * 5000, "\xff"]
RECIPES = ["exdyna:density=0.001", "topk:density=0.1,feedback=momentum(momentum=0.9,clip_norm=1.0)"]
RECIPES += ["randomk:density=0.3,schedule=exponential(steps=8,start=0.5)", "none"]
_FITS = {"collectives": {"allgather": Fit(1e-3, 1e-8, num_points=9), "allreduce": Fit(2e-3, 3e-8)}}
_FITS |= {"selection": {"topk": Fit(1e-4, 1e-9, 1e-8)}, "decoding": {"topk": Fit(1e-5, 0.0, 2e-8)}}
PROFILE = Profile(4, "torch", "gloo", 0.001, **_FITS, backward_seconds={"w": 0.25}, forward_seconds=0.125)
FILE = to_bytes({"format": 2, "step": 3, "plan": {"buckets": [["w"]]}, "leans": [0.0]}).decode("latin-1")


@st.composite
def changed(draw: st.DrawFn, *texts: str) -> str:
    """One of these texts, with characters cut, doubled or replaced in up to four places."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = start + draw(st.integers(0, 40))
        put = draw(st.sampled_from([*PIECES, text[start:stop] * 2]) | st.characters(max_codepoint=255))
        text = text[:start] + put + text[stop:]
    return text


def read_profile(text: str) -> None:
    found = Profile.from_json(text)
    assert Profile.from_json(found.to_json()).digest() == found.digest()


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (recipe_of, RECIPES),
        (read_profile, [PROFILE.to_json()]),
        (lambda text: from_bytes(text.encode("latin-1")), [FILE]),
    ],
    ids=["recipe", "profile", "checkpoint"],
)
@given(data=st.data())
def test_damaged_text_is_an_error_by_name_or_something_sound(read: Any, texts: list[str], data: Any) -> None:
    with contextlib.suppress(HorovodSparseError):
        read(data.draw(changed(*texts)))
