"""What root does with files that a sandbox or an image has filled: downloads, ``pagurus cp``, builds of Dockerfiles.

The attacker prepared the tree; who copies it out, or builds upon it, is the host's root.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from sandbox import PagurusError
from sandbox.messages import CopyRequest
from tests.hostile.api import ApiScene, act, daemon_pid, member_of, rss, run_program, tar_of

HOLE = 1 << 40  # bytes
COPIES = 1000  # of one file; some hundred hit where nothing stops them
TIMEOUT = 300.0  # seconds after which something is held to have no end
GROWTH_LIMIT = 200 << 20  # bytes by which the daemon may grow for an upload: its buffers


@contextlib.contextmanager
def bait() -> Iterator[Path]:
    """A directory of the host that nothing may be written to."""
    with tempfile.TemporaryDirectory(prefix="pagurus-bait-") as made:
        directory = Path(made)
        (directory / "victim").write_text("precious")
        yield directory


def touched(directory: Path) -> str:
    """What was done to the bait."""
    names = sorted(path.name for path in directory.iterdir())
    content = (directory / "victim").read_text()
    return "" if (names, content) == (["victim"], "precious") else f"the host's directory has {names}: {content[:40]!r}"


@contextlib.asynccontextmanager
async def built(scene: ApiScene, dockerfile: str, **more: str) -> AsyncIterator[str]:
    """Build a Dockerfile whose context has these other files; what the build was refused with, "" if it was not."""
    name = f"act-{secrets.token_hex(6)}"
    with tempfile.TemporaryDirectory() as made:
        context = Path(made)
        (context / "Dockerfile").write_text(dockerfile)
        for path, content in more.items():
            (context / path).write_text(content)
        try:
            await scene.host.images.build(name, context, cache=False)
            said = ""
        except PagurusError as error:
            said = str(error)
        try:
            yield said
        finally:
            if not said:
                await scene.host.images.remove(name)


@act("a Dockerfile that copies from above a stage's root")
async def _upwards(scene: ApiScene) -> str:
    image = scene.attacker.info.image
    with bait() as directory:
        leaf = directory / "brought"
        up = "../" * 12 + str(leaf).lstrip("/")
        text = f"FROM {image} AS a\nRUN mkdir -p {leaf} && echo x > {leaf}/file\nFROM {image}\nCOPY --from=a {up} /x/\n"
        async with built(scene, text) as said:
            return touched(directory) or ("" if "/" in said or not said else f"was not tried: {said}")


@act("a Dockerfile whose second copy leads through a link that its first one has brought")
async def _second_source(scene: ApiScene) -> str:
    image = scene.attacker.info.image
    with bait() as directory:
        text = (
            f"FROM {image} AS a\nRUN mkdir -p /a {directory} && ln -s {directory} /a/link"
            f" && echo x > {directory}/victim && echo y > {directory}/brought\n"
            f"FROM {image}\nCOPY --from=a /a /a/link/victim /a/link/brought /x/\n"
        )
        async with built(scene, text):
            return touched(directory)


async def _linked(scene: ApiScene, name: str) -> str:
    image = scene.attacker.info.image
    with tempfile.TemporaryDirectory() as made:
        context = Path(made)
        for item in ("Dockerfile", ".dockerignore"):
            (context / item).write_text(f"FROM {image}\n" if item == "Dockerfile" else "")
        (context / name).unlink()
        (context / name).symlink_to(scene.secret)
        try:
            await scene.host.images.build(f"act-{secrets.token_hex(6)}", context, cache=False)
        except PagurusError as error:
            if "link" not in str(error):
                return f"it was read: {error}"
            return ""
        return "it was read"


@act("a Dockerfile that is a link to a file of the host")
async def _linked_dockerfile(scene: ApiScene) -> str:
    return await _linked(scene, "Dockerfile")


@act("a .dockerignore that is a link to a file of the host")
async def _linked_ignore(scene: ApiScene) -> str:
    scene.secret.write_bytes(b"sec[ret\x00")
    try:
        with tempfile.TemporaryDirectory() as made:
            (Path(made) / "Dockerfile").write_text(f"FROM {scene.attacker.info.image}\nCOPY . /x/\n")
            (Path(made) / ".dockerignore").symlink_to(scene.secret)
            try:
                await scene.host.images.build(f"act-{secrets.token_hex(6)}", Path(made), cache=False)
            except PagurusError as error:
                return "" if "link" in str(error) and "ret" not in str(error) else f"it was read: {error}"
            return "it was read"
    finally:
        scene.secret.write_bytes(b"secret")


@act("a FIFO where a Dockerfile copies a file")
async def _fifo_in_context(scene: ApiScene) -> str:
    """It becomes a FIFO of the image, as with BuildKit; nobody opens it, on either side."""
    name = f"act-{secrets.token_hex(6)}"
    code = (
        "import asyncio, sys\nfrom sandbox import Client\n"
        "async def main():\n async with Client(sys.argv[1]) as host:\n"
        "  await host.images.build(sys.argv[2], sys.argv[3], cache=False)\n"
        "asyncio.run(main())"
    )
    with tempfile.TemporaryDirectory() as made:
        os.mkfifo(Path(made) / "pipe")
        (Path(made) / "Dockerfile").write_text(f"FROM {scene.attacker.info.image}\nCOPY pipe /x\n")
        argv = [sys.executable, "-c", code, str(scene.run / "pagurus.sock"), name, made]
        try:
            done = await run_program(argv, scene, timeout=60)
        except subprocess.TimeoutExpired:
            return "the build waits for it"
    if done.returncode:
        return f"was not tried: {done.stderr[-200:]!r}"
    try:
        async with await scene.host.create(name) as made_of_it:
            result = await made_of_it.exec(["stat", "-c", "%F", "/x"])
            return "" if result.stdout == b"fifo\n" else f"/x of the image is {result.stdout + result.stderr!r}"
    finally:
        await scene.host.images.remove(name)


@act("pagurus cp through a link that an earlier pagurus cp has brought")
async def _cp_through_link(scene: ApiScene) -> str:
    me = scene.attacker.id
    with bait() as directory, tempfile.TemporaryDirectory() as here:
        said = await scene.tried(
            f"import os; os.makedirs('/one'); os.symlink('{directory}', '/one/two'); os.makedirs('/two')\n"
            "open('/two/victim', 'w').write('mine'); open('/two/new', 'w').write('mine'); os.mkdir('/two/sub')"
        )
        copies = [
            ([f"{me}:/one", here], True),
            ([f"{me}:/two", f"{here}/one"], False),  # a directory that is to be `one/two`
            ([f"{me}:/two/.", f"{here}/one/two"], False),  # likewise, by its name
            ([f"{me}:/two/new", f"{here}/one/two"], False),  # a file into it
        ]
        for arguments, works in copies:
            done = await run_program([sys.executable, "-m", "pagurus", "cp", *arguments], scene)
            if harm := touched(directory):
                return f"{arguments[0]}: {harm}"
            if works != (done.returncode == 0):
                return f"was not tried: {arguments}: {done.stderr[-200:]!r}"
    return said


@act("a download through a link that an earlier download has brought")
async def _download_through_link(scene: ApiScene) -> str:
    with bait() as directory, tempfile.TemporaryDirectory() as here:
        said = await scene.tried(
            f"import os; os.makedirs('/one'); os.symlink('{directory}', '/one/two'); os.makedirs('/three/two')\n"
            "open('/three/two/victim', 'w').write('mine'); open('/three/two/new', 'w').write('mine')"
        )
        files = scene.attacker.files
        await files.download("/one", here)
        for path, local, below in (
            ("/three", here, ""),
            ("/three/two", f"{here}/two", ""),
            ("/three/two", here, "two"),
            ("/three/two/new", here, "two/below"),
        ):
            try:
                await files.download(path, local, below=below)
                refused = False
            except PagurusError:
                refused = True
            if harm := touched(directory):
                return harm
            if not refused:
                return f"was not tried: {path} went to {local} {below}"
    return said


@act("a set-id program in a downloaded tree")
async def _set_id(scene: ApiScene) -> str:
    said = await scene.tried(
        "import os, shutil; os.makedirs('/out/d'); shutil.copy('/bin/cat', '/out/d/suid')\n"
        "os.chmod('/out/d/suid', 0o6755); os.chmod('/out/d', 0o7777); os.chmod('/out', 0o2755)"
    )
    with tempfile.TemporaryDirectory() as here:
        await scene.attacker.files.download("/out", f"{here}/tree")
        await scene.attacker.files.download("/out/d/suid", here)
        return said or _special_modes(Path(here))


def _special_modes(directory: Path) -> str:
    for path in directory.rglob("*"):
        if (mode := path.lstat().st_mode) & 0o7000 and not path.is_symlink():
            return f"{path.relative_to(directory)} has the mode {stat.filemode(mode)}"
    return "" if (directory / "suid").is_file() else "was not tried"


@act("have a download write a hole of a tebibyte as zeros")
async def _downloaded_hole(scene: ApiScene) -> str:
    said = await scene.tried(
        "import os; os.makedirs('/out'); f = open('/out/hole', 'wb'); f.truncate(1 << 40)\n"
        "f.seek(1 << 39); f.write(b'here'); f.close()"
    )
    with tempfile.TemporaryDirectory() as here:
        try:
            await scene.attacker.files.download("/out", here, limit=1 << 30)
        except PagurusError as error:
            return f"it was refused: {error}"
        result = (Path(here) / "hole").stat()
        if result.st_size != HOLE or result.st_blocks > 2048:
            return f"a file of {result.st_size} bytes takes {result.st_blocks * 512}"
        with (Path(here) / "hole").open("rb") as file:
            file.seek(HOLE >> 1)
            if file.read(4) != b"here":
                return "its content is another one"
    return said


EXCHANGE = """
import ctypes, os
libc, made = ctypes.CDLL(None), os.makedirs('/race')
os.symlink({target!r}, '/race/link'); root = os.open('/race', os.O_RDONLY); print('ready', flush=True)
while True: libc.syscall(316, root, b'f', root, b'link', 2)
"""


async def _exchanged(scene: ApiScene, request: CopyRequest, archive: bytes = b"") -> str:
    """Have root copy to a name of the attacker's that changes places with a link to a file of the host."""
    scene.secret.chmod(0o600)
    code = EXCHANGE.format(target=str(scene.secret))
    start = 'setsid python3 -c "$1" >/ready 2>&1 & until grep -q ready /ready; do sleep 0.01; done'
    done = await scene.attacker.exec(["sh", "-c", start, "sh", code], timeout=30)
    if done.exit_code:
        return f"was not tried: {done.stderr[-200:]!r}"
    head = msgspec.msgpack.encode(request)
    body = len(head).to_bytes(4, "big") + head + archive
    copied = 0
    for _ in range(COPIES):
        try:
            await scene.host.raw("PUT", f"/v1/sandboxes/{scene.attacker.id}/copy", body, "application/octet-stream")
            copied += 1
        except PagurusError:
            continue  # it was a link just then
        if (mode := stat.S_IMODE(scene.secret.stat().st_mode)) != 0o600:
            scene.secret.chmod(0o600)
            return f"the host's file has the mode {mode:o}"
    return scene.unharmed() or ("" if copied else "was not tried: every copy was refused")


@act("exchange a file for a link while COPY sets its mode")
async def _exchanged_copy(scene: ApiScene) -> str:
    image = scene.attacker.info.image
    request = CopyRequest(sources=["/etc/debian_version"], image=image, target="/race/f", mode="4777")
    return await _exchanged(scene, request)


@act("exchange a file for a link while ADD unpacks it with its mode")
async def _exchanged_add(scene: ApiScene) -> str:
    entry = member_of("f", tarfile.REGTYPE)
    entry.mode = 0o4777
    inner = member_of("inner.tar", tarfile.REGTYPE)
    request = CopyRequest(sources=["inner.tar"], target="/race/", unpack=True)
    return await _exchanged(scene, request, tar_of((inner, tar_of((entry, b"brought")))))


# ------------------------------------------------------------------ images


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", content: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    return member_of(name, kind, target), content


async def _uploaded(scene: ApiScene, archive: bytes) -> str:
    """Import an archive as an image; the refusal, "" if it was taken."""
    name = f"act-{secrets.token_hex(6)}"
    with tempfile.NamedTemporaryFile() as file:
        file.write(archive)
        file.flush()
        try:
            async with asyncio.timeout(TIMEOUT):
                await scene.host.images.upload(name, file.name)
        except PagurusError as error:
            return str(error)
    await scene.host.images.remove(name)
    return ""


@act("plant a FIFO where a commit, or an import, writes to the tree")
async def _fifo_hosts(scene: ApiScene) -> str:
    said = await scene.tried(
        "import os, shutil\nfor path in ('/etc/hosts', '/.dockerenv'):\n"
        " os.path.lexists(path) and os.unlink(path); os.mkfifo(path)"
    )
    after = await scene.attacker.checkpoint()
    name = f"act-{secrets.token_hex(6)}"
    try:
        async with asyncio.timeout(TIMEOUT):
            await scene.host.images.commit(after, name)
            await scene.host.images.remove(name)
        refused = await _uploaded(scene, tar_of(member("etc", tarfile.DIRTYPE), member("etc/hosts", tarfile.FIFOTYPE)))
    except TimeoutError:
        return "it never ends"
    return said or refused


@act("a compressed header of a gibibyte in an image")
async def _header_bomb(scene: ApiScene) -> str:
    size = 1 << 30
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, size
    squeezed = zlib.compressobj(9, wbits=31)
    bomb = squeezed.compress(header.tobuf(tarfile.USTAR_FORMAT))
    zeros = bytes(1 << 20)
    for _ in range(size >> 20):
        bomb += squeezed.compress(zeros)
    bomb += squeezed.flush()
    keeper = daemon_pid(scene)
    before, limit = rss(keeper), 0
    importing = asyncio.ensure_future(_uploaded(scene, bomb))
    while not importing.done():
        await asyncio.wait([importing], timeout=0.02)
        limit = max(limit, rss(keeper))
    refused = await importing
    if limit - before > GROWTH_LIMIT:
        return f"the daemon grew by {(limit - before) >> 20} MiB"
    return "" if "header" in refused else f"was not refused for its header: {refused}"


@act("an image whose layout leads to files of the host")
async def _layout_links(scene: ApiScene) -> str:
    config = member("config.json", tarfile.SYMTYPE, str(scene.secret))
    layer = member("layer.tar", tarfile.SYMTYPE, "../" * 20 + str(scene.secret).lstrip("/"))
    manifest = b'[{"Config": "config.json", "Layers": ["layer.tar"]}]'
    loop = member("config.json", tarfile.SYMTYPE, "config.json")
    for members in ((config, layer), (loop, layer)):
        refused = await _uploaded(scene, tar_of(member("manifest.json", content=manifest), *members))
        if not refused or "secret" in refused.replace(str(scene.secret), ""):
            return f"it was read: {refused}"
        if "config.json" not in refused:
            return f"was refused otherwise: {refused}"
    return scene.unharmed()


@act("an archive of a root file system that leaves it in nine ways")
async def _archive_escapes(scene: ApiScene) -> str:
    secret = str(scene.secret)
    directory = str(scene.secret.parent)
    up = "../" * 24
    ways = [
        [member(up + secret.lstrip("/"), content=b"out")],
        [member(secret, content=b"out")],
        [member("d", tarfile.SYMTYPE, directory), member("d/secret", content=b"out")],
        [member("d", tarfile.SYMTYPE, up + directory.lstrip("/")), member("d/secret", content=b"out")],
        [member("f", tarfile.SYMTYPE, secret), member("f", content=b"out")],
        [member("h", tarfile.LNKTYPE, secret), member("h", content=b"out")],
        [member("l", tarfile.SYMTYPE, secret), member("h", tarfile.LNKTYPE, "l"), member("h", content=b"out")],
        [member("p", tarfile.SYMTYPE, f"/proc/self/root{directory}"), member("p/secret", content=b"out")],
        [member("a"), member("a/../../../secret", content=b"out"), member("b", tarfile.LNKTYPE, "a/../" + up)],
    ]
    for number, members in enumerate(ways):
        await _uploaded(scene, tar_of(*members))
        if harm := scene.unharmed():
            return f"way {number}: {harm}"
        if scene.secret.stat().st_nlink != 1:
            return f"way {number}: the host's file has another name"
    return ""
