"""Pictures of measurements: that they are drawn, from results of every kind."""

import pytest

pytest.importorskip("matplotlib")

from benchmarks.common.plot import plot_growth, plot_parts


def _result(parts):
    def launch(ranks):
        results = [
            {
                "method": name,
                "parts": parts,
                "own_cpu_seconds": {"median": 0.01},
                "facts": {"density_union": 0.001 * ranks},
            }
            for name in ("dense", "topk")
        ]
        return {"ranks": ranks, "rate": "1gbit", "network": "gloo", "results": results}

    return {"density": 0.001, "launches": [launch(2), launch(4)]}


@pytest.mark.parametrize("draw", [plot_parts, plot_growth])
@pytest.mark.parametrize("parts", [{"fold": 0.1, "exchange": 0.2}, {"forward": 0.1, "step": 0.0}])
def test_pictures_are_drawn(tmp_path, draw, parts):
    for ending, sign in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        target = tmp_path / f"picture.{ending}"
        draw(_result(parts), target)
        assert target.read_bytes().startswith(sign)


def test_every_method_and_part_is_named(tmp_path):
    target = tmp_path / "picture.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_parts(_result({"fold": 0.1, "exchange": 0.2}), target)
    text = target.read_text()
    for word in ("dense", "topk", "fold", "exchange", "2 hosts, 1gbit, gloo", "4 hosts, 1gbit, gloo"):
        assert word in text
    assert ">apply<" not in text
