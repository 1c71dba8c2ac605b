"""One path in two states of a sandbox's files: what the page shows of a change."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from sandbox import Client, Sandbox
from sandbox.errors import Invalid, NotFound
from sandbox.messages import Change, FileVersions
from sandbox.messages.files import FileVersion
from sandbox.tree.diff import MAX_SHOWN
from tests.support.daemon_host import IMAGE


async def versions(host: Client, sandbox: Sandbox, path: str, **states: str) -> FileVersions:
    query = urlencode({"path": path, **states})
    return await host.call("GET", f"/v1/sandboxes/{sandbox.id}/diff/file?{query}", FileVersions)


async def test_a_path_is_shown_as_it_was_and_as_it_is(host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        await sandbox.exec(
            "mkdir /srv/d /srv/old; echo one > /srv/d/file; ln -s /etc/shadow /srv/link; echo x > /srv/old/x"
        )
        first = await sandbox.checkpoint()
        await sandbox.exec(
            "echo two > /srv/d/file; chmod 600 /srv/d/file; rm -r /srv/old; mkdir /srv/old; rm /etc/hostname;"
            "rm -r /usr/share/base-files; mkdir /usr/share/base-files; ln -sf / /srv/up; mkfifo /srv/fifo;"
            f"truncate -s 1G /srv/large; head -c {MAX_SHOWN} /dev/zero | tr '\\0' a 1<> /srv/large"
        )
        second = await sandbox.checkpoint()
        await sandbox.exec("echo three > /srv/d/file")
        since = {"checkpoint": first.id}
        file = await versions(host, sandbox, "/srv/d/file", **since)
        assert file.before == FileVersion(kind="file", size=4, mode=0o644, data=b"one\n")
        assert file.after == FileVersion(kind="file", size=6, mode=0o600, data=b"three\n")
        assert (await versions(host, sandbox, "/srv/d/file", **since, to=second.id)).after.data == b"two\n"
        gone = await versions(host, sandbox, "/etc/hostname", **since)
        assert (gone.before.kind, gone.after.kind) == ("file", "absent") and gone.before.data
        hidden = await versions(host, sandbox, "/usr/share/base-files/motd", **since)  # behind an opaque directory
        assert (hidden.before.kind, hidden.after.kind) == ("file", "absent")
        assert (await versions(host, sandbox, "/srv/old/x", **since)).after.kind == "absent"
        assert (await versions(host, sandbox, "/srv/link", **since)).after == FileVersion(
            kind="symlink", data=b"/etc/shadow"
        )
        assert (await versions(host, sandbox, "/srv/fifo", **since)).after.kind == "other"
        assert (await versions(host, sandbox, "/srv", **since)).after.kind == "directory"
        large = (await versions(host, sandbox, "/srv/large", **since)).after
        assert large.size == 1 << 30 and large.data == b"a" * MAX_SHOWN
        assert (
            await versions(host, sandbox, "/srv/up/etc/passwd", **since)
        ).after.kind == "absent"  # no link is followed
        assert (await versions(host, sandbox, "/srv/d/file/below", **since)).after.kind == "absent"


async def test_paths_that_no_change_has_are_refused(host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        first = await sandbox.checkpoint()
        for path in ("/", "/srv/../../etc/passwd", "/./etc", "/" + "n" * 300):
            with pytest.raises(Invalid):
                await versions(host, sandbox, path, checkpoint=first.id)
        with pytest.raises(NotFound):
            await versions(host, sandbox, "/etc/passwd", checkpoint="c-000000000000")


async def test_two_checkpoints_are_compared_without_the_present(host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        first = await sandbox.checkpoint()
        await sandbox.exec("echo one > /srv/file")
        second = await sandbox.checkpoint()
        await sandbox.exec("rm /srv/file; echo two > /srv/later")
        query = urlencode({"checkpoint": first.id, "to": second.id})
        found = await host.call("GET", f"/v1/sandboxes/{sandbox.id}/diff?{query}", list[Change])
        assert [item for item in found if item.path.startswith("/srv")] == [Change(path="/srv/file", kind="added")]
        (new,) = await host.fork(first.id)  # of other sandboxes' states, too: a fork has those that it descends from
        assert new.sandbox is not None
        assert (await versions(host, new.sandbox, "/srv/file", checkpoint=first.id)).after.kind == "absent"
        await new.sandbox.remove()
