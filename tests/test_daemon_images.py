"""Images through a real daemon: uploading, committing a checkpoint, standing on a tree whose name is gone."""

from __future__ import annotations

import tarfile
from pathlib import Path

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


async def test_an_archive_becomes_an_image(host: Client, sb, tmp_path: Path) -> None:
    archive = tmp_path / "root.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("bin", "lib", "lib64"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(member)
        await sb.files.download("/usr/bin/dash", tmp_path / "dash")
        tar.add(tmp_path / "dash/dash", "usr/bin/sh")
        for library in ("/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"):
            data = await sb.files.read(library)
            (tmp_path / "library").write_bytes(data)
            (tmp_path / "library").chmod(0o755)
            tar.add(tmp_path / "library", f"usr{library}")
    seen: list[int] = []
    made = await host.images.upload("tiny", archive, progress=seen.append)
    assert seen[-1] == archive.stat().st_size and made.size > 100_000
    async with host.create("tiny") as child:
        assert (await child.exec("echo $((6 * 7))")).text == "42\n"
    with pytest.raises(Conflict):
        await host.images.upload("tiny", archive)
    (tmp_path / "bad").write_bytes(b"x" * 5000)
    with pytest.raises(Invalid):
        await host.images.upload("bad", tmp_path / "bad")
    assert [image.name for image in await host.images.list()] == ["debian", "tiny"]
    await host.images.remove("tiny")
