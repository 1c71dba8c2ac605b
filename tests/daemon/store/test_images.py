"""Images through a real daemon: uploading, committing a checkpoint, standing on a tree whose name is gone."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sandbox import Client, Sandbox
from sandbox.errors import Conflict, ImageNotFound, Invalid, Protocol
from sandbox.image.store import ImageStore
from sandbox.messages import ImageConfig
from sandbox.sdk.sources import context
from tests.support.daemon_host import TIMEOUT
from tests.support.registry import Registry


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of builds are the user's: here they are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    return tmp_path / ".cache/pagurus"


async def test_a_checkpoint_becomes_an_image(host: Client, sb) -> None:
    done = await sb.exec(
        "echo new > /srv/new; rm /etc/issue; rm -r /usr/share/doc; mkdir /usr/share/doc; chown 5:6 /srv/new"
    )
    await sb.captured(done)
    await sb.exec("echo later > /srv/later")
    config = ImageConfig(env={"COLOUR": "green"}, workdir="/srv")
    made = await host.images.commit(done.checkpoint, "committed", config=config)
    assert made.config == config and made.source == f"checkpoint {done.checkpoint}"
    with pytest.raises(Conflict):
        await host.images.commit(done.checkpoint, "committed")
    async with host.create("committed") as child:
        said = await child.exec("pwd; echo $COLOUR; ls; stat -c %u:%g new; ls /etc/issue; ls -A /usr/share/doc | wc -l")
        assert said.text.split() == ["/srv", "green", "new", "5:6", "0"]
        assert next(i for i in await host.images.list() if i.name == "committed").used_by == 1
        await host.images.remove("committed")
        with pytest.raises(ImageNotFound):
            await host.images.get("committed")
        # It goes on standing on the tree, and comes back on it.
        before = await child.checkpoint()
        await child.restore(before)
        (fork,) = await child.fork()
        assert (await fork.sandbox.exec("cat /srv/new")).text == "new\n"
        await fork.sandbox.remove()


async def test_an_image_does_not_name_the_sandbox_it_comes_from(
    host: Client, sb: Sandbox, daemon: Any, tmp_path: Path
) -> None:
    """Its line of /etc/hosts is neither in a committed image nor in what is copied from a stage."""
    await host.images.commit(await sb.checkpoint(), "nameless")
    images = ImageStore(daemon.state / "images")
    made, former = (images.resolve(name).tree / "etc/hosts" for name in ("nameless", "debian"))
    assert made.read_text() == former.read_text() and made.stat().st_mtime == former.stat().st_mtime
    assert made.parent.stat().st_mtime == former.parent.stat().st_mtime
    await sb.exec("echo 10.0.0.1 mine >> /etc/hosts")
    await host.images.commit(await sb.checkpoint(), "nameless", replace=True)
    made = images.resolve("nameless").tree / "etc/hosts"
    assert made.read_text() == f"{former.read_text()}10.0.0.1 mine\n"
    (tmp_path / "Dockerfile").write_text(
        "FROM debian AS one\nRUN true\nFROM scratch\nCOPY --from=one /etc/hosts /copied\n"
    )
    await host.images.build("nameless", tmp_path, replace=True)
    assert (images.resolve("nameless").tree / "copied").read_text() == former.read_text()
    for name in ("nameless", "scratch"):
        await host.images.remove(name)


async def test_a_named_context_replaces_a_stage(host: Client, tmp_path: Path, daemon: Any) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("of the context")
    (tmp_path / "Dockerfile").write_text(
        "FROM scratch AS one\nCOPY missing /file\nFROM scratch\nCOPY --from=one file /copied\n"
    )
    await host.images.build("replaced", tmp_path, contexts={"one": str(tmp_path / "other")})
    tree = ImageStore(daemon.state / "images").resolve("replaced").tree
    assert (tree / "copied").read_text() == "of the context"
    for name in ("replaced", "scratch"):
        await host.images.remove(name)


async def _tiny(host: Client, sb, directory: Path) -> tuple[Path, list[int]]:
    """An image with a shell and nothing else, as an archive and as the image ``tiny``."""
    archive = directory / "root.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("bin", "lib", "lib64"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(member)
        await sb.files.download("/usr/bin/dash", directory / "dash")
        tar.add(directory / "dash/dash", "usr/bin/sh")
        for library in ("/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"):
            data = await sb.files.read(library)
            (directory / "library").write_bytes(data)
            (directory / "library").chmod(0o755)
            tar.add(directory / "library", f"usr{library}")
    observed: list[int] = []
    made = await host.images.upload("tiny", archive, progress=observed.append)
    assert made.size > 100_000
    return archive, observed


async def test_an_archive_becomes_an_image(host: Client, sb, tmp_path: Path) -> None:
    archive, observed = await _tiny(host, sb, tmp_path)
    assert observed[-1] == archive.stat().st_size
    async with host.create("tiny") as child:
        assert (await child.exec("echo $((6 * 7))")).text == "42\n"
    with pytest.raises(Conflict):
        await host.images.upload("tiny", archive)
    (tmp_path / "bad").write_bytes(b"x" * 5000)
    with pytest.raises(Invalid):
        await host.images.upload("bad", tmp_path / "bad")
    assert [image.name for image in await host.images.list()] == ["debian", "tiny"]
    await host.images.remove("tiny")


# --------------------------------------------------------------------------- Dockerfiles


def _context(directory: Path) -> Path:
    (directory / "app/skip").mkdir(parents=True)
    (directory / "app/main.sh").write_text("#!/bin/sh\necho from $NAME\n")
    (directory / "app/main.sh").chmod(0o755)
    (directory / "app/skip/secret").write_text("secret")
    (directory / ".dockerignore").write_text("app/skip\n")
    with tarfile.open(directory / "data.tar", "w") as tar:
        tar.add(directory / "app/main.sh", "unpacked.sh")
    (directory / "Dockerfile").write_text(
        """ARG BASE=debian
FROM $BASE AS made
ARG TEXT=none
ENV NAME=stage
WORKDIR /work
COPY app .
RUN ./main.sh > said && echo $TEXT >> said && mkdir -p /out/sub && echo deep > /out/sub/deep
ADD data.tar /data
FROM made
COPY --chown=7:8 app/main.sh /bin/renamed
COPY --from=made /out /copied
COPY --from=made /work/said /copied/
RUN test "$(id -u)" = 0
USER nobody
RUN ["sh", "-c", "test $(id -u) = 65534"]
LABEL who="me too"
CMD renamed --fast
"""
    )
    return directory


async def test_a_dockerfile_is_built_in_sandboxes(host: Client, tmp_path: Path) -> None:
    said: list[str] = []
    before = {sandbox.id for sandbox in await host.sandboxes()}
    made = await host.images.build("built", _context(tmp_path), arguments={"TEXT": "given"}, output=said.append)
    assert {sandbox.id for sandbox in await host.sandboxes()} == before
    assert made.config.user == "nobody" and made.config.labels == {"who": "me too"}
    assert made.config.cmd == ["/bin/sh", "-c", "renamed --fast"] and made.config.workdir == "/work"
    assert "[4/14] COPY app ." in said and any(line.startswith("[4/14] took ") for line in said)
    async with host.create("built") as sandbox:
        result = await sandbox.exec(
            "cat said /copied/said /copied/sub/deep; stat -c %u:%g /bin/renamed; ls; ls /data; renamed; "
            "cat /work/skip/secret"
        )
        assert result.text.split("\n")[:5] == ["from stage", "given", "from stage", "given", "deep"]
        assert "7:8\nmain.sh\nsaid\nunpacked.sh\nfrom stage\n" in result.text
        assert b"No such file" in result.stderr
    await host.images.remove("built")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM debian\nRUN echo why; exit 3", "line 2: RUN failed: exit code 3\nwhy"),
        ("FROM debian\nCOPY none /x", "line 2: none is not in the context"),
        ("FROM debian\nCOPY ../x /x", "line 2: ../x is not in the context"),
        ("FROM debian\nCOPY link /x", "line 2: link is not in the context"),
        ("FROM debian\nUSER ghost\nRUN id", "line 3: no user 'ghost' in the sandbox's /etc/passwd"),
        ("FROM nothing", "line 1: no image 'nothing' on this host, and nothing:latest: "),
    ],
)
async def test_a_build_that_fails_leaves_nothing(host: Client, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "Dockerfile").write_text(text)
    images, sandboxes = await host.images.list(), await host.sandboxes()
    with pytest.raises((Invalid, ImageNotFound, Protocol), match=message):
        await host.images.build("broken", tmp_path)
    assert [image.name for image in await host.images.list()] == [image.name for image in images]
    assert await host.sandboxes() == sandboxes


async def test_an_equal_build_runs_nothing(host: Client, sb, tmp_path: Path) -> None:
    """Kept steps: found again by content, from the first change on carried out, gone with `prune`."""
    await _tiny(host, sb, tmp_path)
    directory = tmp_path / "context"
    (directory / "app").mkdir(parents=True)
    (directory / "app/main").write_text("main 1\n")
    text = """FROM tiny AS made
ARG TEXT=none
ENV NAME=stage
WORKDIR /work
COPY app .
RUN read line < main; echo "$NAME $TEXT $line" > said
FROM made
COPY --from=made /work/said /copied/
RUN echo done > /done
USER 65534:7
"""
    (directory / "Dockerfile").write_text(text)
    await host.images.prune()
    before = {sandbox.id for sandbox in await host.sandboxes()}

    async def build(**options: Any) -> tuple[str, list[str]]:
        said: list[str] = []
        made = await host.images.build("built", directory, output=said.append, replace=True, **options)
        assert {sandbox.id for sandbox in await host.sandboxes()} == before
        return made.digest, said

    first, said = await build(arguments={"TEXT": "given"})
    assert not any("kept" in line for line in said)
    retained = await host.images.steps()
    assert {step.title.split()[0] for step in retained} == {"WORKDIR", "COPY", "RUN"} and len(retained) == 5
    again, said = await build(arguments={"TEXT": "given"})
    assert again == first and said[-1] == "nothing was run: every step is kept from an earlier build"
    assert said[:2] == ["FROM made", "[6/8] COPY --from=made /work/said /copied/ (kept)"]
    async with host.create("built") as sandbox:
        shown = "read line < /copied/said; echo $line; read line < /done; echo $line"
        assert (await sandbox.exec(shown)).text == "stage given main 1\ndone\n"

    # What is copied changes: what stands before it is kept, what follows is carried out.
    (directory / "app/main").write_text("main 2\n")
    (directory / "Dockerfile").write_text(text + "WORKDIR /end\n")
    changed, said = await build(arguments={"TEXT": "given"})
    assert changed != first and "[3/9] WORKDIR /work (kept)" in said and sum("(kept)" in line for line in said) == 1
    async with host.create("built", user=0) as sandbox:
        assert (await sandbox.exec(shown)).text == "stage given main 2\ndone\n"
    # A stage of which nothing is missing is not begun.
    (directory / "Dockerfile").write_text(text + "USER root\nRUN echo later > /done\n")
    _, said = await build(arguments={"TEXT": "given"})
    assert "FROM tiny AS made" not in said and said[-2] == "[10/10] RUN echo later > /done"
    _, said = await build(target="made", cache=False)
    assert not any("kept" in line for line in said)

    gone = await host.images.prune()
    assert gone.steps >= 8 and gone.bytes > 0 and not await host.images.steps()
    assert not [info for info in await host.store.checkpoints() if (info.label or "").startswith("build")]
    _, said = await build(target="made")
    assert not any("kept" in line for line in said)
    await host.images.prune()
    await host.images.remove("built")
    await host.images.remove("tiny")


async def test_holes_of_a_checkpoint_cost_an_image_nothing(host: Client, sb: Sandbox, daemon: Any) -> None:
    await sb.captured(await sb.exec("truncate -s 1T /huge; printf end >> /huge; fallocate -l 64M -n /allocated"))
    made = await host.images.commit((await sb.checkpoint()).id, "sparse")
    result = (daemon.state / "images/.trees" / made.digest / "tree/huge").stat()
    assert result.st_size == (1 << 40) + 3 and result.st_blocks * 512 < 1 << 20
    async with host.create("sparse") as child:
        assert (await child.exec("tail -c 3 /huge")).text == "end"
    await host.images.remove("sparse")
    await sb.exec("truncate -s 17T /huge")
    try:
        await host.images.commit((await sb.checkpoint()).id, "larger")
    except Invalid as error:  # ext4 has none of more than 16 TiB, other file systems have
        assert "/huge of 18691697672192 bytes is larger than a file" in str(error) and "truncate" in error.hint
    else:
        await host.images.remove("larger")


async def test_an_image_of_a_checkpoint_is_made_once(host: Client, sb, daemon: Any) -> None:
    """The second name of it is a link: no file of the tree is copied or read again."""
    done = await sb.exec("echo new > /srv/new")
    await sb.captured(done)
    first = await host.images.commit(done.checkpoint, "first")
    names = {path.name for path in (daemon.state / "images/.trees").iterdir()}
    tree = daemon.state / "images/.trees" / first.digest / "tree"
    observed = (tree / "srv/new").stat()
    os.utime(tree / "srv", ns=(1, 1))  # who read the tree again would find another one
    second = await host.images.commit(done.checkpoint, "second", config=ImageConfig(user="nobody"))
    assert second.digest == first.digest and second.config.user == "nobody" and first.config.user == ""
    assert {path.name for path in (daemon.state / "images/.trees").iterdir()} == names
    assert (tree / "srv/new").stat() == observed
    await host.images.remove("first")
    await host.images.remove("second")  # the tree goes with its last name: the next commit makes it again
    third = await host.images.commit(done.checkpoint, "third")
    assert third.digest == first.digest
    await host.images.remove("third")


async def test_stages_that_one_copies_from_are_built_at_the_same_time(host: Client, tmp_path: Path) -> None:
    """Each waits until the other has begun; one that fails ends the other."""
    wait = "RUN echo waiting; until [ -e /srv/go ]; do sleep 0.05; done"
    text = f"FROM debian AS one\n{wait}\nFROM debian AS two\n{wait}; exit $(cat /srv/go)\nFROM scratch\n"
    (tmp_path / "Dockerfile").write_text(text + "COPY --from=one /srv/go /1\nCOPY --from=two /srv/go /2\n")
    before = {sandbox.id for sandbox in await host.sandboxes()}

    async def build(answer: str) -> None:
        both, said = asyncio.Event(), list[str]()

        def output(line: str) -> None:
            said.append(line)
            if said.count("waiting") == 2:
                both.set()

        async def answered() -> None:
            await both.wait()
            stages = {sandbox.id for sandbox in await host.sandboxes()} - before
            for sandbox in stages:
                await (await host.get(sandbox)).files.write("/srv/go", answer)

        async with asyncio.timeout(TIMEOUT):
            made = host.images.build("built", tmp_path, cache=False, output=output)
            await asyncio.gather(made, answered())

    await build("0")
    await host.images.remove("built")
    with pytest.raises(Invalid, match=r"line 4: .*exit code 3"):
        await build("3")
    assert {sandbox.id for sandbox in await host.sandboxes()} == before
    await host.images.prune()
    await host.images.remove("scratch")


COPIES = """FROM debian AS made
COPY --chown=daemon:7 --chmod=u=rwX,go=r app /new/dir/
COPY note /tmp
COPY --chmod=777 link /linked
COPY note /to
COPY --chown=5:6 . /all/
ADD packed.tar.gz zeros /got/
RUN ln -s /srv /way && mkdir -p /out/d && echo one > /out/d/one && ln /out/d/one /out/two && mkfifo /out/fifo \\
    && truncate -s 3G /out/sparse && printf end >> /out/sparse && ln -s nowhere /out/dangling && chown 8:9 /out/d \\
    && cp /bin/true /out/able && setcap cap_net_raw+ep /out/able; python3 -c \\
    'import os; os.setxattr("/out/able", "security.capability", bytes.fromhex("CAPABLE"))'
COPY note /way
FROM scratch
COPY --from=made --chmod=0755 /out/d/one /one
COPY --from=made /out /out
COPY --from=made /way/ /behind/
"""
CAPABLE = "0100000200200000000000000000000000000000"


async def test_copies_are_what_the_sources_were(host: Client, daemon: Any, tmp_path: Path) -> None:
    """Owners, modes, links on either side, holes, hard links, capabilities, archives."""
    (tmp_path / "app/sub").mkdir(parents=True)
    (tmp_path / "app/tool").write_text("tool")
    (tmp_path / "app/tool").chmod(0o755)
    (tmp_path / "app/away").symlink_to("/etc/passwd")
    (tmp_path / "note").write_text("note")
    os.utime(tmp_path / "note", (1000, 1000))
    (tmp_path / "link").symlink_to("note")
    (tmp_path / "zeros").write_bytes(bytes(20_000))
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("sub/file")
        member.uid, member.gid, member.mode = 3, 4, 0o4755
        tar.addfile(member)
    (tmp_path / ".dockerignore").write_text("*\n!app\n!note\n!link\n!zeros\n!packed.tar.gz\napp/sub\n")
    (tmp_path / "Dockerfile").write_text(COPIES.replace("CAPABLE", CAPABLE))
    made = await host.images.build("made", tmp_path, target="made")
    tree = daemon.state / "images/.trees" / made.digest / "tree"

    def about(path: str) -> tuple[str, int, int]:
        result = (tree / path).lstat()
        return oct(result.st_mode)[2:], result.st_uid, result.st_gid

    assert about("new") == about("new/dir") == ("40755", 1, 7)
    assert about("new/dir/tool") == ("100744", 1, 7) and about("new/dir/away") == ("120777", 1, 7)
    assert about("etc/passwd") == ("100644", 0, 0) and not (tree / "new/dir/sub").exists()
    assert (tree / "tmp/note").lstat().st_mtime == 1000 and (tree / "to").read_text() == "note"
    assert about("linked") == ("100777", 0, 0) and about("all/note") == ("100644", 5, 6)
    assert sorted(os.listdir(tree / "all")) == ["app", "link", "note", "packed.tar.gz", "zeros"]
    assert about("got/sub/file") == ("104755", 3, 4) and (tree / "got/zeros").read_bytes() == bytes(20_000)
    assert (tree / "srv/note").exists() and (tree / "way").is_symlink()

    made = await host.images.build("copied", tmp_path)
    tree = daemon.state / "images/.trees" / made.digest / "tree"
    assert about("one") == ("100755", 0, 0) and about("out/d") == ("40755", 8, 9)
    assert (tree / "out/d/one").stat().st_ino == (tree / "out/two").stat().st_ino
    assert (tree / "out/sparse").stat().st_size == (3 << 30) + 3 and (tree / "out/sparse").stat().st_blocks < 64
    assert os.getxattr(tree / "out/able", "security.capability").hex() == CAPABLE
    assert (tree / "out/fifo").is_fifo() and os.readlink(tree / "out/dangling") == "nowhere"
    assert (tree / "behind/note").exists()
    for name in ("made", "copied"):
        await host.images.remove(name)
    await host.images.prune()


WEB = b"from the web\n"


@pytest.fixture
async def web_server() -> AsyncIterator[tuple[TestServer, list[str]]]:
    """A server on the web, and what it was asked for."""
    requested: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        requested.append(request.path)
        if request.path != "/files/note.txt":
            return web.Response(status=404)
        return web.Response(body=WEB, headers={"Last-Modified": "Mon, 12 Jan 1970 13:46:40 GMT"})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield server, requested


async def test_here_documents_caches_secrets_and_addresses(
    host: Client, tmp_path: Path, own_cache: Path, web_server: tuple[TestServer, list[str]]
) -> None:
    directory, (server, requested) = tmp_path / "context", web_server
    directory.mkdir()
    checksum = f"sha256:{hashlib.sha256(WEB).hexdigest()}"
    text = f"""FROM debian
ENV NAME=crab
RUN mkdir -p /var/cache/tool && echo under > /var/cache/tool/under
RUN <<EOF
set -e
echo "$NAME" > /said
EOF
RUN <<'EOF'
#!/usr/bin/env python3
open("/said", "a").write("python\\n")
EOF
COPY --chmod=0640 <<note <<'other' /notes/
$NAME
note
$NAME
other
ADD --checksum={checksum} {server.make_url("/files/note.txt")} /got/
ADD {server.make_url("/files/note.txt")} /named
RUN --mount=type=cache,target=/var/cache/tool [ ! -e /var/cache/tool/under ] && echo x >> /var/cache/tool/count
RUN --mount=type=cache,target=/var/cache/tool --mount=type=secret,id=token --mount=type=secret,id=token,env=TOKEN \\
    test "$(cat /run/secrets/token)" = s3cret && test "$TOKEN" = s3cret && wc -l < /var/cache/tool/count > /counted
"""
    (directory / "Dockerfile").write_text(text.replace("\\\\", "\\"))

    async def build(**options: Any) -> list[str]:
        said: list[str] = []
        secrets = {"token": b"s3cret"}
        await host.images.build("built", directory, replace=True, output=said.append, secrets=secrets, **options)
        return said

    await build()
    show = (
        "cat /said /notes/note /notes/other /got/note.txt /named /counted /var/cache/tool/under; stat -c %a /notes/note"
        " /named; stat -c %Y /got/note.txt;"
        " ls /run/secrets /var/cache/tool/count; grep -rl s3cret /run /root /var/cache; ls -A / | grep pagurus-"
    )
    async with host.create("built") as sandbox:
        result = await sandbox.exec(show)
    assert result.text == "crab\npython\ncrab\n$NAME\nfrom the web\nfrom the web\n1\nunder\n640\n600\n1000000\n"
    # The one without a checksum is asked for again, to see whether it has changed.
    requested.clear()
    assert (await build())[-1].startswith("nothing was run") and requested == ["/files/note.txt"]
    # A cache outlives builds; a secret is in no key.
    await build(cache=False)
    async with host.create("built") as sandbox:
        assert (await sandbox.exec("cat /counted")).text == "2\n"
    await host.images.prune()

    for line, message in (
        ("ADD --checksum=sha256:" + "0" * 64 + f" {server.make_url('/files/note.txt')} /x", "has the checksum"),
        (f"ADD {server.make_url('/nowhere')} /x", "line 2: .* answers 404"),
        ("RUN --mount=type=secret,id=none,required true", "line 2: the secret none is required"),
        ("RUN --mount=type=secret,id=none test ! -e /run/secrets/none; exit 5", "exit code 5"),
    ):
        (directory / "Dockerfile").write_text(f"FROM debian\n{line}\n")
        with pytest.raises(Invalid, match=message):
            await host.images.build("broken", directory)
    await host.images.remove("built")


async def test_output_comes_in_lines_and_a_failure_hints_at_the_network(host: Client, tmp_path: Path) -> None:
    lines = "i=0; while [ $i -lt 3000 ]; do echo a line of some length that is $i; i=$((i+1)); done; printf 'no end'"
    lost = "echo 'curl: (6) Could not resolve host: pypi.org' >&2; exit 6"
    (tmp_path / "Dockerfile").write_text(f"FROM debian\nRUN {lines}\nRUN {lost}\n")
    said: list[str] = []
    with pytest.raises(Invalid) as caught:
        await host.images.build("broken", tmp_path, output=said.append)
    shown = [line for line in said if line.startswith("a line")]
    assert shown == [f"a line of some length that is {i}" for i in range(3000)] and "no end" in said
    assert caught.value.message == "line 3: RUN failed: exit code 6" and "--network open" in caught.value.hint
    with pytest.raises(Invalid, match="Could not resolve"):  # who is shown nothing else is told the end of it
        await host.images.build("broken", tmp_path)
    await host.images.prune()


async def test_a_build_begins_with_an_image_of_a_registry(host: Client, tmp_path: Path) -> None:
    if not shutil.which("skopeo"):
        pytest.skip("needs skopeo")
    with Registry() as there:
        name = f"{there.host}/team/base:1"
        there.push("team/base", "1", [{"etc/": b"", "etc/base": b"base\n"}], config={"Env": ["A=b"]})
        (tmp_path / "Dockerfile").write_text(f"FROM {name}\nCOPY <<note /note\n$A\nnote\n")
        said: list[str] = []
        made = await host.images.build("built", tmp_path, output=said.append)
        assert f"pull {name}" in said and made.config.env["A"] == "b"
        assert (await host.images.get(name)).source.startswith(f"{there.host}/team/base@sha256:")
        there.requested.clear()
        await host.images.build("built", tmp_path, replace=True)
        assert not there.requested  # it is here
        assert (await host.images.pull(name)).digest == (await host.images.get(name)).digest
        reported: list[tuple[int, int]] = []
        made = await host.images.pull(name, "base", progress=lambda done, total: reported.append((done, total)))
        assert made.name == "base" and reported[-1][0] == reported[-1][1] > 0
        assert len(there.blobs_requested()) == 1  # the configuration, which skopeo reads each time
        with pytest.raises(ImageNotFound, match="name and tag"):
            await host.images.pull(f"{there.host}/team/nothing")
        with pytest.raises(ImageNotFound, match="name and tag"):
            (tmp_path / "Dockerfile").write_text(f"FROM {there.host}/team/nothing")
            await host.images.build("broken", tmp_path)
    for item in ("built", "base", name):
        await host.images.remove(item)
    await host.images.prune()


def test_a_file_is_hashed_again_only_when_it_may_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "file", list[Path]()
    hashed = context._hashed
    monkeypatch.setattr(context, "_hashed", lambda root, path: read.append(Path(path)) or hashed(root, path))

    def digest(hashes: context.Hashes) -> str:
        return context.BuildContext.of(tmp_path).select(["file"], 1).digest(hashes)

    file.write_bytes(b"one")
    young = context.Hashes(tmp_path / "known")
    first = digest(young)
    young.save()
    assert not (tmp_path / "known").exists()  # it was changed a moment ago: it may change again within a tick
    monkeypatch.setattr(context, "_YOUNG", 0)
    old = context.Hashes(tmp_path / "known")
    assert digest(old) == first and len(read) == 2
    old.save()
    again = context.Hashes(tmp_path / "known")
    assert digest(again) == first and len(read) == 2
    stamp = file.stat()
    file.write_bytes(b"two")  # the same size, and the time set back: the kernel's own time tells
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    changed = context.Hashes(tmp_path / "known")
    assert digest(changed) != first and len(read) == 3
    (tmp_path / "known").write_bytes(b"damaged")
    assert digest(context.Hashes(tmp_path / "known")) == digest(changed)
