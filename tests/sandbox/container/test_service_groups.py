"""Groups of services below those of a sandbox, on this host's hierarchies."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.container import limits
from sandbox.container.cgroup import Cgroup
from sandbox.container.service_groups import UNIFIED, ServiceGroups, limited
from sandbox.messages import Composition, Limits, Service
from sandbox.messages.services import ServiceLimits
from tests.support.daemon_host import missing
from tests.support.programs import Program

SANDBOX = Limits(cpus=1.0, memory="256MiB", processes=100)


def composed(**own: ServiceLimits) -> Composition:
    services = {name: Service(image="debian", limits=one) for name, one in own.items()}
    return Composition(services=services, main=next(iter(services), ""))


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    if reason := missing():
        pytest.skip(reason)
    made = Cgroup(f"test-{secrets.token_hex(4)}")
    made.create()
    made.apply(SANDBOX)
    try:
        yield made
    finally:
        for place in (made.path, *made.v1.values()):
            for group, _, _ in os.walk(place, topdown=False):
                Path(group).rmdir()


V1 = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}
V2 = ("memory.max", "cpu.max", "pids.max")


def read(groups: dict[str, Path]) -> list[str]:
    """Limits of memory, processors and processes; "max": none."""
    if UNIFIED in groups:
        return [(groups[UNIFIED] / file).read_text().split()[0] for file in V2]
    result = [(groups[controller] / file).read_text().strip() for controller, file in V1.items()]
    return ["max" if value == "-1" or int(value) > 1 << 60 else value for value in result[:2]] + result[2:]


def test_services_with_limits_have_groups(cgroup: Cgroup) -> None:
    own = ServiceLimits(cpus=0.5, memory="64MiB", processes=10)
    composition = composed(plain=ServiceLimits(), own=own, greedy=ServiceLimits(cpus=8.0))
    assert set(limited(composition)) == {"own", "greedy"} and limited(None) == {}
    groups = ServiceGroups(cgroup, None)
    assert groups.of("own") == {}
    groups.make(composition)
    groups.divide(SANDBOX)
    assert groups.of("plain") == {} and set(groups.paths()) == {"own", "greedy"}
    target = [str(64 << 20), "50000", "10"]
    assert read(groups.of("own")) == target
    assert read(groups.of("greedy"))[1] == "100000"  # no more than the sandbox
    groups.lift()
    assert read(groups.of("own")) == ["max"] * 3
    groups.apply(SANDBOX)
    assert read(groups.of("own")) == target


def test_groups_go_with_their_services(cgroup: Cgroup) -> None:
    one = ServiceLimits(processes=5)
    groups = ServiceGroups(cgroup, None)
    groups.make(composed(a=one, b=one))
    places = [*groups.of("a").values(), *groups.of("b").values()]
    groups.make(composed(a=ServiceLimits(), b=one))
    assert groups.of("a") == {} and set(groups.of("b").values()) < set(places)
    assert [path.is_dir() for path in places] == ["service-b" in path.name for path in places]
    again = ServiceGroups(cgroup, composed(b=one))  # of another daemon
    assert again.of("b") == groups.of("b") != {}


def test_a_process_joins_by_what_is_opened(cgroup: Cgroup) -> None:
    groups = ServiceGroups(cgroup, None)
    groups.make(composed(a=ServiceLimits(processes=5)))
    groups.divide(SANDBOX)
    for root in ("", "/elsewhere", "/services/b"):
        with groups.opened(root) as opened:
            assert opened == []
    with groups.opened("/services/a") as opened:
        if not (child := os.fork()):
            try:
                for descriptor in opened:
                    os.write(descriptor, b"0")
                lines = Path("/proc/self/cgroup").read_text().split()
                os._exit(sum("/service-a" in line for line in lines) != len(opened))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_on_v2_what_is_there_moves_below(cgroup: Cgroup) -> None:
    """A process, and what it starts, are in the sandbox's group until that is divided; main has its limits."""
    if not cgroup.pure:
        pytest.skip("the leaves of pure v2: this host has v1 controllers; `make test-hosts` has an act for them")
    groups = ServiceGroups(cgroup, None)
    with Program(["sh", "-c", "while :; do sleep 0.01; done"]) as program:
        cgroup.join(program.pid)
        assert not groups.divided and groups.onward() is None
        groups.make(composed(a=ServiceLimits(processes=5)))
        groups.divide(SANDBOX)
        assert (cgroup.path / "cgroup.procs").read_text() == "" and program.pid in cgroup.pids()
        assert groups.divided and read({UNIFIED: cgroup.leaf}) == [str(256 << 20), "100000", "max"]
        assert cgroup.tasks() >= 1  # of all below it
    while cgroup.pids():
        time.sleep(0.01)
    groups.gather()
    with Program(["sleep", "100"]) as program:  # it may begin there again
        limits.write(cgroup.path / "cgroup.procs", program.pid)
        groups.divide(SANDBOX)
        assert (cgroup.leaf / "cgroup.procs").read_text().split() == [str(program.pid)]
        assert read(groups.of("a"))[2] == "5"


def test_kills_of_the_oom_killer_are_counted_by_service(cgroup: Cgroup) -> None:
    groups = ServiceGroups(cgroup, None)
    groups.make(composed(a=ServiceLimits(memory="20MiB"), b=ServiceLimits(memory="20MiB")))
    groups.divide(SANDBOX)
    with groups.opened("/services/a") as opened:
        if not (child := os.fork()):
            for descriptor in opened:
                os.write(descriptor, b"0")
            os._exit(len(bytes(60 << 20).replace(b"\0", b"a")) == 0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (groups.oom_kills("a"), groups.oom_kills("b"), groups.oom_kills("c")) == (1, 0, None)
    assert cgroup.oom_kills() == 1
