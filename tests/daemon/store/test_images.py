"""Images through a real daemon: uploading, committing a checkpoint, standing on a tree whose name is gone."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from sandbox import Client
from sandbox.errors import Conflict, ImageNotFound, Invalid
from sandbox.messages import ImageConfig


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


async def _tiny(host: Client, sb, folder: Path) -> tuple[Path, list[int]]:
    """An image with a shell and nothing else, as an archive and as the image ``tiny``."""
    archive = folder / "root.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("bin", "lib", "lib64"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(member)
        await sb.files.download("/usr/bin/dash", folder / "dash")
        tar.add(folder / "dash/dash", "usr/bin/sh")
        for library in ("/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"):
            data = await sb.files.read(library)
            (folder / "library").write_bytes(data)
            (folder / "library").chmod(0o755)
            tar.add(folder / "library", f"usr{library}")
    seen: list[int] = []
    made = await host.images.upload("tiny", archive, progress=seen.append)
    assert made.size > 100_000
    return archive, seen


async def test_an_archive_becomes_an_image(host: Client, sb, tmp_path: Path) -> None:
    archive, seen = await _tiny(host, sb, tmp_path)
    assert seen[-1] == archive.stat().st_size
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


def _context(folder: Path) -> Path:
    (folder / "app/skip").mkdir(parents=True)
    (folder / "app/main.sh").write_text("#!/bin/sh\necho from $NAME\n")
    (folder / "app/main.sh").chmod(0o755)
    (folder / "app/skip/secret").write_text("secret")
    (folder / ".dockerignore").write_text("app/skip\n")
    with tarfile.open(folder / "data.tar", "w") as tar:
        tar.add(folder / "app/main.sh", "unpacked.sh")
    (folder / "Dockerfile").write_text(
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
    return folder


async def test_a_dockerfile_is_built_in_sandboxes(host: Client, tmp_path: Path) -> None:
    said: list[str] = []
    before = {sandbox.id for sandbox in await host.sandboxes()}
    made = await host.images.build("built", _context(tmp_path), arguments={"TEXT": "given"}, output=said.append)
    assert {sandbox.id for sandbox in await host.sandboxes()} == before
    assert made.config.user == "nobody" and made.config.labels == {"who": "me too"}
    assert made.config.cmd == ["/bin/sh", "-c", "renamed --fast"] and made.config.workdir == "/work"
    assert any(line.startswith("COPY app") for line in said)
    async with host.create("built") as sandbox:
        found = await sandbox.exec(
            "cat said /copied/said /copied/sub/deep; stat -c %u:%g /bin/renamed; ls; ls /data; renamed; "
            "cat /work/skip/secret"
        )
        assert found.text.split("\n")[:5] == ["from stage", "given", "from stage", "given", "deep"]
        assert "7:8\nmain.sh\nsaid\nunpacked.sh\nfrom stage\n" in found.text
        assert b"No such file" in found.stderr
    await host.images.remove("built")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM debian\nRUN echo why; exit 3", "line 2: RUN failed: exit code 3\nwhy"),
        ("FROM debian\nCOPY none /x", "line 2: none is not in the context"),
        ("FROM debian\nCOPY ../x /x", "outside the context"),
        ("FROM debian\nCOPY link /x", "leads out of the context"),
        ("FROM debian\nUSER ghost\nRUN id", "line 3: no user 'ghost' in the sandbox's /etc/passwd"),
        ("FROM nothing", "no image"),
    ],
)
async def test_a_build_that_fails_leaves_nothing(host: Client, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "Dockerfile").write_text(text)
    images, sandboxes = await host.images.list(), await host.sandboxes()
    with pytest.raises((Invalid, ImageNotFound), match=message):
        await host.images.build("broken", tmp_path)
    assert [image.name for image in await host.images.list()] == [image.name for image in images]
    assert await host.sandboxes() == sandboxes


async def test_an_equal_build_runs_nothing(host: Client, sb, tmp_path: Path) -> None:
    """Kept steps: found again by content, from the first change on carried out, gone with `prune`."""
    await _tiny(host, sb, tmp_path)
    folder = tmp_path / "context"
    (folder / "app").mkdir(parents=True)
    (folder / "app/main").write_text("main 1\n")
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
    (folder / "Dockerfile").write_text(text)
    await host.images.prune()
    before = {sandbox.id for sandbox in await host.sandboxes()}

    async def build(**options: Any) -> tuple[str, list[str]]:
        said: list[str] = []
        made = await host.images.build("built", folder, output=said.append, replace=True, **options)
        assert {sandbox.id for sandbox in await host.sandboxes()} == before
        return made.digest, said

    first, said = await build(arguments={"TEXT": "given"})
    assert not any("kept" in line for line in said)
    kept = await host.images.steps()
    assert {step.title.split()[0] for step in kept} == {"WORKDIR", "COPY", "RUN"} and len(kept) == 5
    again, said = await build(arguments={"TEXT": "given"})
    assert again == first and said[-1] == "nothing was run: every step is kept from an earlier build"
    assert said[:2] == ["FROM made", "COPY /work/said /copied/ (kept)"]
    async with host.create("built") as sandbox:
        shown = "read line < /copied/said; echo $line; read line < /done; echo $line"
        assert (await sandbox.exec(shown)).text == "stage given main 1\ndone\n"

    # What is copied changes: what stands before it is kept, what follows is carried out.
    (folder / "app/main").write_text("main 2\n")
    (folder / "Dockerfile").write_text(text + "WORKDIR /end\n")
    changed, said = await build(arguments={"TEXT": "given"})
    assert changed != first and "WORKDIR /work (kept)" in said and sum("(kept)" in line for line in said) == 1
    async with host.create("built", user=0) as sandbox:
        assert (await sandbox.exec(shown)).text == "stage given main 2\ndone\n"
    # A stage of which nothing is missing is not begun.
    (folder / "Dockerfile").write_text(text + "USER root\nRUN echo later > /done\n")
    _, said = await build(arguments={"TEXT": "given"})
    assert "FROM tiny AS made" not in said and said[-1] == "RUN echo later > /done"
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
