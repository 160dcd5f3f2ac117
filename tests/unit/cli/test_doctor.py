"""`horovod-sparse doctor`: what it makes of facts, without a launch."""

import pytest

from horovod_sparse.cli import doctor
from horovod_sparse.cli.doctor import local_facts
from horovod_sparse.cli.doctor_checks import Case, examine
from horovod_sparse.cli.main import main
from horovod_sparse.feedback import parse_recipe


def facts(**changes) -> dict:
    usual = {
        "python": "3.11.2",
        "packages": {"horovod": "0.28.1", "torch": "2.13.0", "numba": "0.60.0"},
        "bindings": {"torch": True, "tensorflow": False},
        "launched": True,
        "settings": {},
        "gives_up": 330,
        "affinity": list(range(8)),
        "host": "a",
        "kernels": "",
        "triton": False,
        "rank": 0,
        "size": 4,
        "local_size": 4,
        "framework": "torch",
        "framework_threads": 2,
        "controller": "mpi",
        "built": dict.fromkeys(("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm"), False) | {"mpi": True},
        "mpi_threads": True,
        "thread_level": "multiple",
        "cuda": None,
        "latency_seconds": 0.0011,
    }
    return {**usual, **changes}


EXDYNA = parse_recipe("exdyna")


def levels(*everyone: dict, **case) -> dict[str, str]:
    """The worst level of every topic."""
    order = ["problem", "advice", "good"]
    worst: dict[str, str] = {}
    for finding in examine(Case(everyone, **case)):
        known = worst.get(finding.topic, "good")
        worst[finding.topic] = min(known, finding.level, key=order.index)
    return worst


def settings(**values: str) -> dict:
    return facts(settings={f"HOROVOD_{name}": value for name, value in values.items()})


def test_a_healthy_launch_has_no_problem():
    healthy = settings(STALL_SHUTDOWN_TIME_SECONDS="300", CYCLE_TIME="0.1")
    assert set(levels(*[healthy] * 4, recipe=EXDYNA).values()) == {"good"}


@pytest.mark.parametrize(
    ("known", "topic", "level"),
    [
        (facts(packages={}), "Horovod", "problem"),
        (facts(bindings={"torch": False, "tensorflow": False}), "Horovod", "problem"),
        (facts(bindings={"torch": True, "tensorflow": True}), "Horovod", "advice"),
        (facts(packages={"horovod": "0.27.0", "torch": "2"}), "Horovod", "advice"),
        (facts(kernels="ImportError: no"), "kernels", "problem"),
        (facts(cuda="a GPU", triton=True), "operations", "advice"),
        (facts(cuda="a GPU"), "kernels", "advice"),
        (facts(thread_level="funneled"), "pairs of ranks", "advice"),
        (facts(mpi_threads=False), "pairs of ranks", "advice"),
        (facts(controller="gloo", thread_level=None), "pairs of ranks", "good"),
        (settings(SPARSE_TRANSPORT=" pairs ") | {"controller": "gloo"}, "pairs of ranks", "problem"),
        (settings(SPARSE_TRANSPORT="alltoall "), "pairs of ranks", "advice"),
        (facts(size=1), "launch", "advice"),
        (settings(AUTOTUNE="1"), "autotune", "advice"),
        (settings(CYCLE_TIME="0"), "cycle time", "problem"),
        (settings(CYCLE_TIME="fast"), "cycle time", "problem"),
        (settings(CYCLE_TIME="1"), "cycle time", "advice"),
        (settings(), "stall check", "good"),
        (settings(STALL_SHUTDOWN_TIME_SECONDS="0"), "stall check", "advice"),
        (settings(SPARSE_DEADLINE_SECOND="9"), "settings", "advice"),
        (settings(STALL_CHECK_DISABLE="1", STALL_SHUTDOWN_TIME_SECONDS="9"), "stall check", "advice"),
        (settings(SPARSE_TRANSPORT="tcp"), "settings", "problem"),
        (settings(SPARSE_CHECK_EVERY="often"), "settings", "problem"),
        (settings(SPARSE_ON_DRIFT="ignore"), "settings", "problem"),
        (settings(SPARSE_RANKS_PER_HOST="0"), "settings", "problem"),
        (settings(CYCLETIME="0.1"), "settings", "advice"),
    ],
)
def test_facts_and_settings_that_are_wrong_are_found(known, topic, level):
    assert levels(known, recipe=EXDYNA)[topic] == level


def test_pytorch_alone_is_an_install_that_works():
    """`pip install horovod_sparse[torch]` with torchrun needs no Horovod; a launch by Horovod does."""
    alone = settings(CYCLE_TIME="0.1") | {"launched": False, "size": 1, "built": {}, "controller": None}
    alone |= {"packages": {"torch": "2.13.0", "numba": "0.60.0"}, "bindings": {"torch": 0, "tensorflow": 0}}
    found = levels(alone)
    assert found["Horovod"] == "advice" and "problem" not in found.values()
    assert "launch" not in found
    assert levels(alone, asked="torch")["Horovod"] == "problem"
    assert levels({**alone, "launched": True})["Horovod"] == "problem"


def test_threads_are_counted_against_the_cores_of_a_host():
    def judged(*ranks: dict) -> str:
        return levels(*[facts(**changes) for changes in ranks])["threads"]

    assert judged({}, {}, {}, {}) == "good"  # 4 ranks of 2 threads on 8 cores
    assert judged(*[{}] * 5) == "advice"
    assert judged({"framework_threads": 8}) == "good"
    bound = [{"affinity": [core], "framework_threads": 1} for core in range(2)]
    assert judged(*bound) == "good"  # each has a core of its own
    assert judged(*bound, *bound) == "advice"
    elsewhere = [{**one, "host": "b"} for one in bound]
    assert judged(*bound, *elsewhere) == "good"
    crowded = [{"affinity": [0], "framework_threads": 1, "host": "b"}] * 2
    assert judged(*bound, *crowded) == "advice"


def differing(*everyone: dict) -> list[tuple[str, str]]:
    found = examine(Case(everyone))
    return [(one.level, one.what) for one in found if one.topic == "ranks differ"]


def test_ranks_that_differ_are_told_apart():
    same = [facts(rank=rank) for rank in range(3)]
    assert [level for level, _ in differing(*same)] == ["good"]
    same[2] = facts(packages={**same[0]["packages"], "torch": "2.12.0"}, affinity=[0, 1, 2, 3])
    text = dict(differing(*same))
    assert text["problem"] == "torch: 2.13.0 on ranks 0, 1; 2.12.0 on rank 2"
    assert text["advice"] == "cores: 8 on ranks 0, 1; 4 on rank 2"
    assert [level for level, _ in differing(settings(CACHE_CAPACITY="0"), facts())] == ["problem"]
    told = "HOROVOD_SPARSE_TRANSPORT: pairs on rank 0; auto on rank 1"
    assert differing(settings(SPARSE_TRANSPORT="pairs"), facts()) == [("problem", told)]
    for changed, level in (({"SPARSE_TRANSPORT": " auto "}, "good"), ({"CYCLE_TIME": "5"}, "advice")):
        assert [found for found, _ in differing(settings(**changed), facts())] == [level]


def test_the_facts_of_this_process_are_those_that_are_checked():
    assert set(local_facts()) == set(facts())
    assert local_facts()["kernels"] == ""  # they run


@pytest.fixture
def alone(monkeypatch):
    """No launch, whatever this test runs under."""
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    known = facts(launched=False, size=1, local_size=1, controller=None, latency_seconds=None)
    monkeypatch.setattr(doctor, "build_facts", lambda framework: known)
    monkeypatch.setattr(doctor, "usable_framework", lambda asked: "torch")


def test_the_command_ends_with_1_only_for_problems(alone, capsys, monkeypatch):
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "not launched" in text
    assert "0 problems" in text
    known = settings(CYCLE_TIME="0")
    monkeypatch.setattr(doctor, "build_facts", lambda framework: known)
    assert main(["doctor"]) == 1
    assert "HOROVOD_CYCLE_TIME=0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "asked", "level"),
    [
        ("aabb", "flat", "advice"),
        ("aaaa", "flat", None),
        ("aaab", "host", "problem"),
        ("aabb", "host", "good"),
    ],
)
def test_hosts_of_several_ranks_are_found(hosts, asked, level):
    everyone = [facts(host=host) for host in hosts]
    assert levels(*everyone, levels=asked).get("levels") == level
