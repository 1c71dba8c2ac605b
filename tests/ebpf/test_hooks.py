"""Each hook of the inspector against the types of the running kernel: its target exists, and gives what it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ebpf import btf, libbpf, probe
from ebpf.inspector import Inspector
from sandbox import libc, paths
from tests.support.daemon_host import until

SOURCES = Path(probe.__file__).parent
HOOK = re.compile(r'^SEC\("tp_btf/(\w+)"\)\nint BPF_PROG\((\w+)(?:, ([^)]*))?\)', re.MULTILINE)
HOOKS = [result for path in sorted(SOURCES.glob("*.[ch]")) for result in HOOK.findall(path.read_text())]

pytestmark = [
    pytest.mark.skipif(not probe.BTF.exists(), reason="this kernel has no BTF"),
    pytest.mark.skipif(not paths.inspector_object().exists(), reason="run `make setup`"),
]


def declared(arguments: str) -> list[str]:
    """Types of a list of declarations. Example: ``int a, struct inode *b`` -> ``["int", "struct inode *"]``."""
    result = []
    for one in filter(None, (part.strip() for part in arguments.split(","))):
        kind, star, _ = one.replace("const ", "").rpartition("*")
        result.append(f"{kind.strip()} *" if star else one.rpartition(" ")[0])
    return result


def agree(ours: str, kernels: str) -> bool:
    """A pointer must be to the same structure; of numbers, any may be taken by any."""
    return ours == kernels or ("*" not in ours and "*" not in kernels)


def test_all_programs_are_checked() -> None:
    candidate = libbpf.Object(paths.inspector_object())
    programs = set(candidate.programs)
    candidate.close()
    assert {name for _, name, _ in HOOKS} == programs - {"sweep", "tell", "tell_mappings"}


@pytest.mark.parametrize(("target", "program", "arguments"), HOOKS, ids=[name for _, name, _ in HOOKS])
def test_the_kernel_gives_what_a_hook_takes(target: str, program: str, arguments: str) -> None:
    given = btf.of_tracepoint(target)
    if given is None and program in probe.OPTIONAL:
        pytest.skip(f"this kernel has no {target}: {probe.OPTIONAL[program][1]}")
    assert given is not None, f"there is no {target}"
    taken = declared(arguments)
    assert len(taken) <= len(given)
    for ours, kernels in zip(taken, given, strict=False):
        assert agree(ours, kernels), f"{program} takes {ours}, {target} gives {kernels}"


def test_a_hook_that_takes_something_else_would_be_found() -> None:
    given = btf.of_tracepoint("sched_switch")
    assert given is not None
    assert not agree("struct inode *", given[1])
    assert not agree("int", given[1])
    assert agree("bool", given[0])
    assert btf.of_tracepoint("no_such_tracepoint") is None


def hooks() -> int:
    """Programs that this process holds attached."""
    result = 0
    for path in Path("/proc/self/fdinfo").iterdir():
        try:
            text = path.read_text()
        except FileNotFoundError:  # that of the directory itself
            continue
        result += "link_type:\ttracing" in text or "link_type:\traw_tracepoint" in text
    return result


async def test_a_host_without_a_sandbox_has_no_hooks() -> None:
    before = hooks()
    with Inspector.load(linger=0.01) as inspector:
        assert hooks() == before
        for _ in range(2):
            inspector.watch(1 << 60)
            inspector.watch(2 << 60)
            assert hooks() - before >= len(HOOKS) - len(probe.OPTIONAL)
            inspector.unwatch(1 << 60)
            assert hooks() > before
            inspector.unwatch(2 << 60)
            inspector.unwatch(2 << 60)
            await until(lambda: hooks() == before)
    assert hooks() == before


def test_hooks_stay_for_the_next_sandbox() -> None:
    before = hooks()
    with Inspector.load(linger=3600) as inspector:
        for _ in range(2):
            inspector.watch(1 << 60)
            inspector.unwatch(1 << 60)
            assert hooks() > before
    assert hooks() == before


def test_a_file_system_is_loaded_by_its_name() -> None:
    assert libc.load_file_system("btrfs") and libc.load_file_system("overlay")
    assert not libc.load_file_system("no-such-file-system")


def test_tracepoints_of_btrfs_are_found_in_the_kernel_or_in_its_module() -> None:
    assert libc.load_file_system("btrfs")
    assert btf.of_tracepoint("btrfs_inode_new", "btrfs") == ("struct inode *",)
    assert btf.of_tracepoint("no_such_tracepoint", "btrfs") is None
