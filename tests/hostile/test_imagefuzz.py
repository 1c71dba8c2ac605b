"""The fuzzer of images: its watcher sees what it must, its changes can be repeated, and nothing escapes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.criu import image_files
from sandbox.paths import CHECKOUT
from tests.hostile.mutate_images import Mutator
from tests.hostile.watched_host import WatchedHost
from tests.support.container_support import base_image
from tests.support.programs import END_TIMEOUT, Program


@pytest.fixture
def host() -> Iterator[WatchedHost]:
    if os.geteuid() != 0:
        pytest.skip("fanotify on a file system needs root")
    made = WatchedHost()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("script", ["rm victim.txt", "echo >> open.txt", "rmdir empty", "mkdir new", "chmod 777 dir"])
def test_every_change_of_the_bait_is_seen(host: WatchedHost, script: str) -> None:
    assert host.findings(set()) == []
    subprocess.run(["sh", "-c", script], cwd=host.bait, check=True)
    result = host.findings(set())
    assert any(line.startswith("event") for line in result) and any(line.startswith("the bait") for line in result)
    assert host.findings(set()) == []


def test_what_a_known_process_does_elsewhere_is_seen(host: WatchedHost) -> None:
    aside = Path("/var/tmp") / f"aside-{host.bait.name}"
    with Program(["sh", "-c", f"echo x > {aside}; rm {aside}"]) as child:
        assert child.wait(END_TIMEOUT) == 0
    assert any(line.endswith(f"by process {child.pid}") for line in host.findings({child.pid}))


def test_changes_are_made_again_from_their_seed_and_leave_the_original() -> None:
    kinds = image_files.messages()
    place = kinds.fs_entry(cwd_id=2, root_id=3, umask=18)
    files = {"fs-1.img": image_files.new("FS", place).content(), "pages-1.img": bytes(4096)}
    before = dict(files)
    first, again = (Mutator(random.Random(5), ["/x"]) for _ in range(2))
    made = [first.changed(files) for _ in range(200)]
    assert made == [again.changed(files) for _ in range(200)]
    assert files == before and sum(one != before for one in made) > 150


@pytest.mark.parametrize(("mutations", "restores"), [(250, 2), pytest.param(750, 4, marks=pytest.mark.long)])
def test_nothing_escapes(host: WatchedHost, mutations: int, restores: int) -> None:
    seed = random.randrange(1 << 30)
    command = [sys.executable, "-m", "pagurus", "bench", "imagefuzz", "--json", "--seconds", "200"]
    command += [
        "--mutations",
        str(mutations),
        "--seed",
        str(seed),
        "--programs",
        "ghosts,unix",
        "--image",
        str(base_image()),
    ]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, (seed, done.returncode, done.stderr[-2000:])
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["escapes"], result["crashes"]) == ([], []), (seed, result)
    assert result["mutations"] == mutations and result["refused"] and result["passed"]
    assert result["restores"] >= restores and result["open"] >= restores // 2
    assert result["restored"] or restores == 2  # of two, both may be of images that CRIU refuses
