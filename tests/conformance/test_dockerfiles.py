"""The same Dockerfile here and by `docker build` with BuildKit: trees, configurations and refusals are the same.

`make test-images` sets the reference up and runs the corpus against it. A few of the cases are part of `make test`:
what the reference made of them is recorded.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client
from sandbox.errors import PagurusError
from sandbox.image.store import ImageStore
from tests.conformance.dockerfiles import builds, instructions, projects, reports
from tests.conformance.dockerfiles.cases import DERIVED, Case, write_base, write_context
from tests.conformance.dockerfiles.differences import RECORDED, REMOTE_DIFFERENCES, reason
from tests.support import reference_docker
from tests.support.daemon_host import Daemon, missing
from tests.support.git_server import GitServer
from tests.support.image_facts import differences, docker_config, our_config, tree_facts
from tests.support.reference_docker import ReferenceDocker

CORPUS = [*instructions.CASES, *builds.CASES, *projects.CASES, *reports.CASES]
BY_NAME = {case.name: case for case in CORPUS}
FILE = Path(__file__).parent / "dockerfiles/recorded.json"
Built = dict[str, Any]  # "tree" and "config", or neither where it was refused


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceDocker]:
    if not reference_docker.TREE:
        pytest.skip("needs Docker and BuildKit: run `make test-images`")
    made = ReferenceDocker(tmp_path_factory.mktemp("docker"))
    try:
        write_base(made.root / "plain.tar", None)
        write_base(made.root / "box.tar", Path(reference_docker.TREE, "usr/bin/busybox"))
        for name in ("plain", "box"):
            made.bring(made.root / f"{name}.tar", name)
        for name, text in DERIVED.items():
            (made.root / name).mkdir()
            (made.root / name / "Dockerfile").write_text(text)
            assert not made.build(made.root / name, name)
            done = made.run("save", "-o", made.inside(made.root / f"{name}.tar"), name)
            assert done.returncode == 0, done.stderr
        yield made
    finally:
        made.close()


@pytest.fixture
async def equipped(host: Client, reference: ReferenceDocker) -> AsyncIterator[Client]:
    """The daemon, with the images that the corpus begins with."""
    there = {image.name for image in await host.images.list()}
    for name in {"plain", "box", *DERIVED} - there:
        await host.images.upload(name, reference.root / f"{name}.tar")
    yield host


def by_reference(docker: ReferenceDocker, directory: Path, case: Case) -> tuple[Built, str]:
    options = [f"--build-arg={name}={value}" for name, value in case.arguments.items()]
    options += [f"--target={case.target}"] if case.target else []
    options += [f"--build-context={name}={docker.inside(directory / place)}" for name, place in case.contexts.items()]
    for name, value in case.secrets.items():
        (docker.root / "secret").write_text(value)
        options.append(f"--secret=id={name},src={docker.inside(docker.root / 'secret')}")
    if why := docker.build(directory, "built", *options):
        return {}, why
    with docker.tree("built") as tree:
        result = {"tree": tree_facts(tree), "config": docker_config(docker.inspect("built"))}
    docker.run("image", "rm", "built")
    return result, ""


async def by_us(host: Client, daemon: Daemon, directory: Path, case: Case) -> tuple[Built, str]:
    try:
        made = await host.images.build(
            "built",
            directory,
            arguments=case.arguments,
            target=case.target or None,
            contexts={name: str(directory / place) for name, place in case.contexts.items()},
            secrets={name: value.encode() for name, value in case.secrets.items()},
            replace=True,
        )
    except PagurusError as error:
        return {}, str(error)
    tree = ImageStore(daemon.state / "images").resolve("built").tree
    return {"tree": tree_facts(tree), "config": our_config(made.config)}, ""


def fresh_context(reference: ReferenceDocker) -> Path:
    """An empty directory. BuildKit keeps what it was sent of a context by the name of its directory, and leaves the
    times of directories that it has: under one name the result would depend on the builds before.
    """
    return Path(tempfile.mkdtemp(prefix="context-", dir=reference.root))


def compared(reference: Built, ours: Built) -> list[str]:
    result = differences(reference["config"], ours["config"], ())
    return result + differences(reference["tree"], ours["tree"])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of builds are the user's: here they are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))


@pytest.mark.long
@pytest.mark.parametrize("name", BY_NAME)
async def test_builds_as_docker_does(
    reference: ReferenceDocker, equipped: Client, daemon: Daemon, name: str, request: pytest.FixtureRequest
) -> None:
    case = BY_NAME[name]
    directory = fresh_context(reference)
    try:
        write_context(directory, case)
        theirs, their_refusal = by_reference(reference, directory, case)
        ours, our_refusal = await by_us(equipped, daemon, directory, case)
    finally:
        shutil.rmtree(directory)
    if os.environ.get("PAGURUS_RECORD") and name in RECORDED:
        existing = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**existing, name: theirs}, indent=1, sort_keys=True) + "\n")
    result = [f"reference: {their_refusal or 'built'}", f"here: {our_refusal or 'built'}"]
    if bool(theirs) == bool(ours):
        result = compared(theirs, ours) if ours else []
    if why := reason(case):
        assert result, f"there is no difference any more: {why}"
    else:
        assert not result, "\n".join(["", case.text, str(case.files.get(".dockerignore", "")), *result[:12]])


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("name", RECORDED)
async def test_builds_what_docker_built(host: Client, daemon: Daemon, tmp_path: Path, name: str) -> None:
    """The same against what the reference made, for every run of the tests."""
    if "plain" not in {image.name for image in await host.images.list()}:
        write_base(tmp_path / "plain.tar", None)
        await host.images.upload("plain", tmp_path / "plain.tar")
    (tmp_path / "context").mkdir()
    write_context(tmp_path / "context", BY_NAME[name])
    ours, refusal = await by_us(host, daemon, tmp_path / "context", BY_NAME[name])
    theirs = json.loads(FILE.read_text())[name]
    assert bool(ours) == bool(theirs), refusal
    assert not ours or not compared(theirs, ours)


WHO = ("", "root", "0", "0:0", "root:staff", "app", "100", "100:200", "app:staff", "nobody", "1234", ":staff", "root:")
ASKED = "id -u; id -g; grep Groups /proc/self/status; echo $HOME"


@pytest.mark.long
async def test_everybody_has_the_groups_that_docker_gives(
    reference: ReferenceDocker, equipped: Client, tmp_path: Path
) -> None:
    """`docker run -u`, `docker exec -u` here; what RUN has is part of the corpus."""
    case = Case(builds.IN_GROUPS)
    directory = fresh_context(reference)
    try:
        write_context(directory, case)
        assert not reference.build(directory, "built")
        await equipped.images.build("built", directory, replace=True)
    finally:
        shutil.rmtree(directory)
    async with equipped.create("built") as sb:
        for who in WHO:
            user = ["-u", who] if who else []
            theirs = reference.run("run", "--rm", "--network=none", *user, "built", "sh", "-c", ASKED)
            assert theirs.returncode == 0, theirs.stderr
            assert (await sb.exec(ASKED, user=who or None, ends_turn=False)).stdout == theirs.stdout, who


REMOTE = (
    "ADD {git} /x/",
    "ADD {git}#old /x",
    "ADD {git}#v1:sub /x/y/",
    "ADD {git}#{commit}:sub/deep /x",
    "ADD {git}#nosuch /x",
    "ADD {git}#main:nosuch /x",
    "ADD --chown=5:6 --chmod=700 {git} /x/",
    "ADD --checksum={commit} {git}#v1 /x",
    "ADD --checksum={tag} {git}#v1 /x",
    "ADD --checksum={commit} {git} /x",
    "ADD {file} /x/",
    "ADD {file} /x/named",
    "ADD --chown=5:6 --chmod=755 {file} /x/",
    "ADD --checksum=sha256:{digest} {file} /x/",
    "ADD --checksum=sha256:00{digest} {file} /x/",
    "ADD {file}/none/ /x",
    "ADD {file} note /x/",
    "ADD {top}/ /x/",
    "ADD {top} /x/",
    "ADD {top}/files/timeless?a=b#c /x/",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    with GitServer(tmp_path_factory.mktemp("git")) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("text", REMOTE)
async def test_fetches_as_docker_does(
    reference: ReferenceDocker, equipped: Client, daemon: Daemon, server: GitServer, text: str
) -> None:
    known = {"git": server.address, "file": server.file, "commit": server.commits[0], "digest": server.digest}
    known |= {"tag": server.tag, "top": server.top}
    case = Case("FROM plain\n" + text.format(**known))
    folder = fresh_context(reference)
    reference.run("builder", "prune", "--all", "--force")  # a commit that it has, it takes for any address's
    try:
        write_context(folder, case)
        theirs, their_refusal = by_reference(reference, folder, case)
        ours, our_refusal = await by_us(equipped, daemon, folder, case)
    finally:
        shutil.rmtree(folder)
    result = [f"reference: {their_refusal or 'built'}", f"here: {our_refusal or 'built'}"]
    if bool(theirs) == bool(ours):
        result = compared(theirs, ours) if ours else []
    if text in REMOTE_DIFFERENCES:
        assert result, f"there is no difference any more: {REMOTE_DIFFERENCES[text]}"
    else:
        assert not result, "\n".join(result[:12])


@pytest.mark.long
def test_the_corpus_is_large() -> None:
    assert len(CORPUS) == len(BY_NAME) >= 250, [case.name for case in CORPUS if BY_NAME[case.name] is not case]
    assert sum(bool(reason(case)) for case in CORPUS) < 30
