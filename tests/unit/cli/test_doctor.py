"""`horovod-sparse doctor`: what it makes of facts, without a launch."""

import pytest

from horovod_sparse.cli import doctor
from horovod_sparse.cli.doctor import examine, local_facts
from horovod_sparse.cli.main import main


def facts(**changes) -> dict:
    usual = {
        "python": "3.11.2",
        "packages": {"horovod": "0.28.1", "torch": "2.13.0", "numba": "0.60.0"},
        "bindings": {"torch": True, "tensorflow": False},
        "launcher": "horovod",
        "settings": {},
        "cores": list(range(8)),
        "host": "a",
        "kernels": "",
        "threads": 2,
        "size": 4,
        "controller": "mpi",
    }
    return {**usual, **changes}


def levels(*everyone: dict, asked: str | None = None) -> dict[str, str]:
    order = ["problem", "advice", "good"]
    worst: dict[str, str] = {}
    for finding in examine(everyone, asked):
        known = worst.get(finding.topic, "good")
        worst[finding.topic] = min(known, finding.level, key=order.index)
    return worst


def settings(**values: str) -> dict:
    return facts(settings={f"HOROVOD_{name}": value for name, value in values.items()})


def test_a_healthy_launch_has_no_problem():
    healthy = settings(STALL_SHUTDOWN_TIME_SECONDS="300", CYCLE_TIME="0.1")
    assert set(levels(*[healthy] * 4).values()) == {"good"}


@pytest.mark.parametrize(
    ("known", "topic", "level"),
    [
        (facts(packages={}), "Horovod", "problem"),
        (facts(bindings={"torch": False, "tensorflow": False}), "Horovod", "problem"),
        (facts(bindings={"torch": True, "tensorflow": True}), "Horovod", "advice"),
        (facts(packages={"horovod": "0.27.0", "torch": "2"}), "Horovod", "advice"),
        (facts(kernels="ImportError: no"), "kernels", "problem"),
        (facts(size=1), "launch", "advice"),
        (settings(AUTOTUNE="1"), "settings", "advice"),
        (settings(CYCLE_TIME="0"), "settings", "problem"),
        (settings(CYCLE_TIME="fast"), "settings", "problem"),
        (settings(CYCLE_TIME="1"), "cycle time", "advice"),
        (settings(), "cycle time", "advice"),
        (settings(STALL_SHUTDOWN_TIME_SECONDS="0"), "settings", "advice"),
        (settings(SPARSE_DEADLINE_SECOND="9"), "settings", "advice"),
        (settings(STALL_CHECK_DISABLE="1", STALL_SHUTDOWN_TIME_SECONDS="9"), "settings", "advice"),
    ],
)
def test_facts_and_settings_that_are_wrong_are_found(known, topic, level):
    assert levels(known)[topic] == level


def test_a_folder_that_an_installation_has_left_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "broken-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "numpy" in doctor.local_facts()["packages"]


def test_pytorch_alone_is_an_install_that_works():
    alone = facts(launcher="", size=1, controller="", bindings={"torch": False, "tensorflow": False})
    alone |= {"packages": {"torch": "2.13.0", "numba": "0.60.0"}}
    found = levels(alone)
    assert found["Horovod"] == "advice" and "problem" not in found.values()
    assert levels(alone, asked="torch")["Horovod"] == "problem"
    assert levels({**alone, "launcher": "horovod"})["Horovod"] == "problem"
    assert "Horovod" not in levels({**alone, "launcher": "torchrun"})


def test_threads_are_counted_against_the_cores_of_a_host():
    def judged(*ranks: dict) -> str:
        return levels(*[facts(**changes) for changes in ranks]).get("threads", "good")

    assert judged({}, {}, {}, {}) == "good"  # 4 ranks of 2 threads on 8 cores
    assert judged(*[{}] * 5) == "advice"
    assert judged({"threads": 8}) == "good"
    bound = [{"cores": [core], "threads": 1} for core in range(2)]
    assert judged(*bound) == "good"  # each has a core of its own
    assert judged(*bound, *bound) == "advice"
    elsewhere = [{**one, "host": "b"} for one in bound]
    assert judged(*bound, *elsewhere) == "good"
    crowded = [{"cores": [0], "threads": 1, "host": "b"}] * 2
    assert judged(*bound, *crowded) == "advice"


def differing(*everyone: dict) -> list[tuple[str, str]]:
    return [(one.level, one.what) for one in examine(everyone) if one.topic == "ranks differ"]


def test_ranks_that_differ_are_told_apart():
    same = [facts() for _ in range(3)]
    assert not differing(*same)
    same[2] = facts(packages={**same[0]["packages"], "torch": "2.12.0"}, cores=[0, 1, 2, 3])
    text = dict(differing(*same))
    assert text["problem"] == "torch: 2.13.0 on rank 0, 1; 2.12.0 on rank 2"
    assert text["advice"] == "cores: 8 on rank 0, 1; 4 on rank 2"
    assert [level for level, _ in differing(settings(CACHE_CAPACITY="0"), facts())] == ["problem"]
    told = "HOROVOD_SPARSE_TRANSPORT: pairs on rank 0; auto on rank 1"
    assert differing(settings(SPARSE_TRANSPORT="pairs"), facts()) == [("problem", told)]
    assert not differing(settings(SPARSE_TRANSPORT="auto"), facts())
    assert [level for level, _ in differing(settings(CYCLE_TIME="5"), facts())] == ["advice"]


@pytest.fixture
def alone(monkeypatch):
    ranks = "HOROVOD_RANK OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK RANK"
    for name in (*ranks.split(), "HOROVOD_CYCLE_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "usable_framework", lambda asked: "errors")  # a module that is there
    monkeypatch.setattr(doctor, "local_facts", lambda: facts(launcher="", size=1, controller=""))


def test_the_facts_of_this_process_are_those_that_are_checked():
    assert set(local_facts()) == set(facts())
    assert local_facts()["kernels"] == ""  # they run


def test_the_command_ends_with_1_only_for_problems(alone, capsys, monkeypatch):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "not launched" in text
    assert "problem" not in text
    known = settings(CYCLE_TIME="0") | {"launcher": ""}
    monkeypatch.setattr(doctor, "local_facts", lambda: known)
    assert main(["doctor"]) == 1
    assert "HOROVOD_CYCLE_TIME=0" in capsys.readouterr().out
