"""Nothing but sandbox/tree/safe_path.py opens what a sandbox may change, nobody walks a tree by path strings.

Nothing but sandbox/tree/host_files.py writes to the host what a sandbox or an image has chosen.

Read from the source by syntax.
"""

from __future__ import annotations

import ast
import re

import pytest

from scripts.rooms import Module, modules

PRODUCT = [item for item in modules() if item.name.split(".")[0] in ("sandbox", "daemon", "ebpf", "pagurus")]
OWNER = "sandbox.tree.safe_path"
EVERYWHERE = [item for item in modules() if item.name.split(".")[0] not in ("tests", "bench", "scripts")]

#: Roots of the host's own programs, of which nothing below a sandbox's root is resolved, by who names them.
MOUNTS = {
    "sandbox.criu.restore": "where a waiting CRIU has its images and the sandbox's mount: the device is asked for",
}
#: Trees that no sandbox writes: ours, the user's on the other side of the SDK.
OWN_TREES = {
    "daemon.checkpoints.capture",
    "daemon.doctor",
    "daemon.startup",
    "daemon.store.imports",
    "sandbox.container.container",
    "sandbox.container.layer",
    "sandbox.criu.bases",
    "sandbox.criu.checkpointer",
    "sandbox.criu.dump",
    "sandbox.criu.recent",
    "sandbox.criu.tracking.tracker",
    "sandbox.testing.files",
    "sandbox.testing.wire",
    "pagurus.integrations.tinker_cookbook",  # the user's own task
    "pagurus.sandboxes.cp",
}
#: Trees that are being made, which nobody else reaches yet.
UNREACHED = {"daemon.store.imports", "sandbox.image.store"}
CHANGES = ("chmod", "setxattr", "utime", "chown", "getxattr", "listxattr")  # of what lies at a path
WALKS = {("os", "walk"), ("os", "fwalk"), ("shutil", "rmtree"), ("shutil", "copytree"), ("shutil", "move")}


def literal(node: ast.JoinedStr) -> str:
    """An f-string, with {} for what is filled in."""
    parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return "".join(str(part) for part in parts)


def strings(module: Module) -> list[str]:
    return [literal(node) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr)]


def walks(module: Module) -> set[str]:
    """What of a module walks a tree by path strings."""
    result = set()
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if (of, node.func.attr) in WALKS or node.func.attr == "rglob":
            result.add(f"{of}.{node.func.attr}")
    return result


def follows(module: Module) -> list[str]:
    """Calls that change what an entry of a directory is named, or what it leads to if that has become a link."""
    result = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {f"os.{name}" for name in CHANGES}:
            continue
        named = {key.arg: ast.unparse(key.value) for key in node.keywords}
        path = ast.unparse(node.args[0]) if node.args else ""
        by_name = "dir_fd" in named or path.startswith("named(") or re.match(r"f'/proc/self/fd/\{.*\}/", path)
        if by_name and named.get("follow_symlinks") != "False":
            result.append(ast.unparse(node))
    return result


def into_upper(module: Module) -> list[str]:
    """Path strings that lead into an upper layer: ``{tree}/upper/...`` or ``... / "upper" / ...``."""
    result = [text for text in strings(module) if re.search(r"upper(/|\{\})", text)]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.BinOp) and ast.unparse(node.left).endswith("/ 'upper'"):
            result.append(ast.unparse(node))
    return result


@pytest.mark.parametrize("module", PRODUCT, ids=lambda module: module.name)
def test_one_module_opens_what_a_sandbox_may_change(module: Module) -> None:
    if module.name == OWNER:
        return
    roots = [text for text in strings(module) if re.search(r"/proc/\{\}/root", text)]
    assert not roots or module.name in MOUNTS, f"{roots}: go from `container.inside` or safe_path.root_of"
    assert not into_upper(module), "open the top by safe_path.directory, and go on by descriptors"
    assert not walks(module) or module.name in OWN_TREES, "walk by sandbox/tree/walk.py"
    assert not follows(module) or module.name in UNREACHED, f"{follows(module)}: by safe_path.pinned"


def test_the_test_would_see_one() -> None:
    code = """
def look(pid, tree, path):
    os.stat(f"/proc/{pid}/root{path}"); os.lstat(f"{tree}/upper{path}"); shutil.rmtree(tree); tree.rglob("*")
    os.chmod(path, 0, dir_fd=tree); os.setxattr(f"/proc/self/fd/{tree}/{path}", "user.x", b"")
    os.utime(named(tree, path))
    os.chown(path, 0, 0, dir_fd=tree, follow_symlinks=False); os.chmod(path, 0)
    return tree / "upper" / path
"""
    observed = Module("x", "x.py", code, False)
    assert strings(observed) == ["/proc/{}/root{}", "{}/upper{}", "/proc/self/fd/{}/{}"]
    assert len(into_upper(observed)) == 2
    assert walks(observed) == {"shutil.rmtree", "tree.rglob"}
    assert len(follows(observed)) == 3


def test_the_exceptions_are_still_needed() -> None:
    named = {module.name: module for module in PRODUCT}
    assert all(walks(named[name]) for name in OWN_TREES), "take those out that walk no tree any more"
    assert all(follows(named[name]) for name in UNREACHED), "take those out that follow no link any more"
    assert all(any("/root" in text for text in strings(named[name])) for name in MOUNTS)


# ------------------------------------------------------------------ strangers' files on the host

#: What unpacks an archive by path strings, whatever is in it.
UNPACKING = {"extract", "extractall", "unpack_archive"}
#: Who reads or writes tar otherwise than by sandbox/tree/tar.py, and why.
TAR = {
    "sandbox.image.export": "it writes archives alone",
    "sandbox.tree.tar": "it is the one",
    "sandbox.tree.archive": "writes them",
    "sandbox.image.oci": "names its errors",
    "sandbox.sdk.build": "writes an empty one",
    "sandbox.sdk.sources.context": "writes one of what the user named",
    "sandbox.tree.compressed": "only asks whether a file is one",
}
#: Who unpacks into what, by sandbox.tree.archive itself.
UNPACKS = {
    "sandbox.tree.host_files": "the host, by its rules",
    "sandbox.image.oci": "the tree of an image, as a layer",
    "daemon.api.files": "the tree of a sandbox",
    "daemon.docker.archives": "the tree of a sandbox",
    "daemon.api.copies": "a fresh directory, as root's, for copy_into",
    "sandbox.tree.copy_into": "the tree of a sandbox",
    "sandbox.testing.file_routes": "the tree of a fake sandbox",
}
#: Who downloads from a sandbox, and into which path.
DOWNLOADS = {
    "pagurus.integrations.harbor": "a directory that Harbor has made",
    "pagurus.sandboxes.cp": "what the user typed, and below it what the sandbox has chosen",
}
#: Who makes a directory or file of a fresh name, which nothing of a stranger's is unpacked into or named after.
FRESH = {
    "daemon.api.files": "a file without a name",
    "daemon.e2b.content": "a file without a name",
    "daemon.api.images": "the archive as it came",
    "pagurus.integrations.harbor": "what a compose file of the user's task is merged with",
    "pagurus.integrations.inspect": "a compose file of the user's task",
    "sandbox.sdk.compose": "a Dockerfile of the user's compose file",
    "daemon.e2b.templates": "archives as they came, under their hashes, and links to them",
    "daemon.doctor": "its own attempts",
    "examples.fit": "weights",
    "coordinator.jobs.trainer_host": "the state of a trainer's ranks",
    "pagurus.training.serve": "the state of an engine",
    "pagurus.training.weights": "weights",
    "rollout.played": "the state of a daemon",
    "rollout.weights.export": "weights",
    "sandbox.container.layer": "links, devices and scripts of our own",
    "trainer.models.served": "the home of an engine",
    "trainer.models.verify": "the first layers of a model",
    "sandbox.image.registry": "what skopeo writes",
    "sandbox.image.sources": "the archive of a Docker Engine",
    "sandbox.sdk.build": "an empty archive",
    "sandbox.testing.host": "the tree of a fake sandbox",
    "sandbox.tree.host_files": "it is the one",
}


def methods(module: Module) -> list[tuple[str, str]]:
    """(of what, which attribute) for all that are named, called or not: ``a.b.c`` is ("a.b", "c")."""
    return [(ast.unparse(node.value), node.attr) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]


def imported(module: Module) -> set[str]:
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def strangers(module: Module) -> set[str]:
    """By which means a module could write a stranger's files or names to the host: keys of `REASONS`."""
    called, result = methods(module), set()
    names = imported(module)
    if any(method in UNPACKING for _, method in called) or "zipfile" in names:
        result.add("unpacking")
    if "tarfile" in names:
        result.add("tar")
    if ("archive", "unpack") in called:
        result.add("unpacks")
    if any(method == "download" for _, method in called):
        result.add("downloads")
    if "tempfile" in names:
        result.add("fresh")
    return result


REASONS: dict[str, dict[str, str]] = {
    "unpacking": {},
    "tar": TAR,
    "unpacks": UNPACKS,
    "downloads": DOWNLOADS,
    "fresh": FRESH,
}


@pytest.mark.parametrize("module", EVERYWHERE, ids=lambda module: module.name)
def test_one_module_writes_strangers_files_to_the_host(module: Module) -> None:
    unreasoned = {item for item in strangers(module) if module.name not in REASONS[item]}
    assert not unreasoned, "go by sandbox/tree/host_files.py; where no name and no byte is a stranger's, say why above"


def test_strangers_files_would_be_seen() -> None:
    code = """
import tarfile, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder:
    await sandbox.files.download("/a", folder); archive.unpack(stream, fd, limit=1); tarfile.open(x).extractall(folder)
"""
    assert strangers(Module("x", "x.py", code, False)) == set(REASONS)


def test_the_reasons_are_still_needed() -> None:
    named = {module.name: module for module in EVERYWHERE}
    for which, reasons in REASONS.items():
        assert [name for name in reasons if which not in strangers(named[name])] == [], which
