"""What others wrote, changed in a few places: an error by name, or something sound.

Messages, whose damage has a form, have tests of their own.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.errors import HorovodSparseError, StateMismatchError
from horovod_sparse.feedback import recipe
from horovod_sparse.planning.profile import Profile
from horovod_sparse.training.compression import recipe_of
from horovod_sparse.training.encoding import from_bytes, to_bytes
from horovod_sparse.training.state import check_entry, check_shapes, load_entry, saved_entry
from unit.training.test_calibration import PROFILE
from unit.training.test_checkpoint import same
from unit.training.test_engine import ONE, SHAPES, ArrayEngine, trained

NAMES = ("exdyna", "oktopk", "spardl", "sidco", "randomk")
RECIPES = {name: recipe(name, density=0.1) for name in NAMES}
RECIPES["dgc"] = recipe("dgc", density=0.1, feedback="momentum(momentum=0.9)")
ENTRIES = {name: saved_entry(trained(how, ONE, 2)[1]) for name, how in RECIPES.items()}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def others(value: Any) -> st.SearchStrategy[Any]:
    strange = [None, True, -1, 10**400, 2**63, 0.5, float("nan"), float("inf"), "nonsense", b"", [], {}, ()]
    strange += [object(), [value], {"it": value}, np.ones(3), np.array("text"), np.array([None])]
    found = st.sampled_from(strange) | st.integers(20, 2000).map(lambda depth: nested(value, depth))
    if isinstance(value, np.ndarray):
        bad = value.astype(np.float64)
        bad.reshape(-1)[-1] = np.nan
        kinds = [bad, np.full_like(bad, -np.inf), value[:-1], value[None], value.reshape(-1)[:, None]]
        kinds += [value.astype(kind) for kind in (np.float64, np.float16, np.complex64, str, object)]
        kinds += [value.astype(">f8")]
        found |= st.sampled_from(kinds)
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, dict[str, Any], tuple[Any, ...]]:
    name = draw(st.sampled_from(sorted(ENTRIES)))
    entry: Any = {"whole": copy.deepcopy(ENTRIES[name])}
    path = draw(st.sampled_from([*sorted(places(ENTRIES[name]), key=str), ()]))
    *outer, last = ("whole", *path)
    container = entry
    for key in outer:
        container = container[key]
    how = draw(st.sampled_from(["drop", "replace", "add", "rename"]))
    if how == "drop" and path:
        del container[last]
    elif how == "add" and isinstance(container[last], dict):
        container[last][draw(st.sampled_from(["more", 3, ("a", 1), None]))] = draw(others(None))
    elif how == "rename" and isinstance(container, dict) and path:
        container["other"] = container.pop(last)
    else:
        container[last] = draw(others(container[last]))
    return name, entry["whole"], path


@settings(max_examples=120, deadline=None)
@given(mutated())
def test_a_damaged_entry_is_refused_by_name_or_loads_the_same(drawn: Any) -> None:
    name, entry, path = drawn
    how, original = RECIPES[name], ENTRIES[name]
    engine = ArrayEngine(how, ONE, (1, 2))
    blank = saved_entry(engine)
    try:
        check_entry(entry, how, "{}")
        check_shapes(entry, SHAPES)
        load_entry(engine, entry, 1.0)
    except StateMismatchError as error:
        assert len(str(error)) < 2000
        assert same(saved_entry(engine), blank), "nothing may have been loaded"
        return
    if not same(saved_entry(engine), original):  # numbers that could be this state's, or of another run
        assert path[:1] and path[0] in ("rank", "size", "step", "plan", "resized", "buckets")


def test_the_error_names_the_residual() -> None:
    entry = copy.deepcopy(ENTRIES["exdyna"])
    entry["residuals"]["w"][0] = np.inf
    with pytest.raises(StateMismatchError, match=r"residuals\['w'\].*finite"):
        check_entry(entry, RECIPES["exdyna"], "{}")
    entry["residuals"]["w"] = entry["residuals"]["w"][:-1]
    with pytest.raises(StateMismatchError, match=r"w has shape \(4, 6\), the saved state has \(3, 6\)"):
        check_shapes(entry, SHAPES)


@pytest.mark.parametrize("forged", [{"size": 0}, {"rank": 2}, {"step": -1}, {"since": 99}], ids=str)
def test_a_number_that_no_training_can_go_on_with_is_refused(forged: dict[str, int]) -> None:
    entry = copy.deepcopy(ENTRIES["exdyna"])
    (entry["buckets"][0] if "since" in forged else entry).update(forged)
    with pytest.raises(StateMismatchError):
        check_entry(entry, RECIPES["exdyna"], "{}")


PIECES = ["(", "[" * 3000, "{", "1e999", "NaN", "null", '"', "\\", ",", "-", "=", "0" * 5000, "\xff"]
TEXTS = ["exdyna:density=0.001", "topk:density=0.1,feedback=momentum(momentum=0.9,clip_norm=1.0)"]
TEXTS += ["randomk:density=0.3,schedule=exponential(steps=8,start=0.5)", "none"]
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
        (recipe_of, TEXTS),
        (read_profile, [PROFILE.to_json()]),
        (lambda text: from_bytes(text.encode("latin-1")), [FILE]),
    ],
    ids=["recipe", "profile", "checkpoint"],
)
@given(data=st.data())
def test_damaged_text_is_an_error_by_name_or_something_sound(read: Any, texts: list[str], data: Any) -> None:
    with contextlib.suppress(HorovodSparseError):
        read(data.draw(changed(*texts)))
