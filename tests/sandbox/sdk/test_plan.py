"""Keys of build steps, what a context holds, which kept steps are given up. No sandboxes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.catalogue import KeptStep
from daemon.store.build_cache import surplus
from sandbox.image.dockerfile import Instruction, parse
from sandbox.messages import ImageConfig, Limits, Network
from sandbox.sdk import context
from sandbox.sdk.plan import BuildStep, StageState, step_key

STATE = StageState(env={"A": "1"}, workdir=PurePosixPath("/w"))
RUN = Instruction("RUN", 3, ("make",), shell=True)
COPY = Instruction("COPY", 4, ("a", "b", "/to/"))


def key(
    instruction: Instruction = RUN,
    state: StageState = STATE,
    *,
    parent: str = "p",
    content: str = "",
    network: Network | None = None,
    limits: Limits | None = None,
) -> str:
    return step_key(
        parent, instruction, state, content=content, network=network or Network.none(), limits=limits or Limits()
    )


def test_what_a_command_runs_with_is_in_its_key() -> None:
    others = [
        key(parent="q"),
        key(replace(RUN, words=("make all",))),
        key(replace(RUN, shell=False)),
        key(replace(RUN, kind="COPY")),
        key(state=replace(STATE, env={"A": "2"})),
        key(state=replace(STATE, env={"A": "1", "B": ""})),
        key(state=replace(STATE, arguments={"V": "1"})),
        key(state=replace(STATE, workdir=PurePosixPath("/x"))),
        key(state=replace(STATE, user="nobody")),
        key(state=replace(STATE, shell=("/bin/bash", "-c"))),
        key(network=Network.open()),
        key(limits=Limits(cpus=2)),
    ]
    assert len({key(), *others}) == 1 + len(others)
    assert key() == key(replace(RUN, line=77))  # where it stands does not matter
    assert key() == key(state=replace(STATE, labels={"a": "b"}, cmd=["x"], entrypoint=["y"]))


def test_what_is_copied_and_how_is_in_the_key_of_a_copy() -> None:
    others = [
        key(COPY, content="1"),
        key(COPY, content="2"),
        key(replace(COPY, kind="ADD"), content="1"),
        key(replace(COPY, words=("a", "b", "/other/")), content="1"),
        key(replace(COPY, flags={"chown": "7"}), content="1"),
        key(COPY, replace(STATE, workdir=PurePosixPath("/x")), content="1"),
    ]
    assert len(set(others)) == len(others)
    assert key(COPY, content="1") == key(COPY, replace(STATE, env={"Z": "9"}, user="x"), content="1")


def test_instructions_set_what_follows_them() -> None:
    text = 'FROM x\nARG V=1\nENV A=2\nWORKDIR d\nWORKDIR e\nUSER me\nSHELL ["/bin/bash", "-c"]\nLABEL l=3\nCMD go\n'
    state = StageState.of(ImageConfig(env={"P": "0"}, workdir="/srv", cmd=["old"]))
    for instruction in parse(text + "RUN it")[0].instructions:
        state = state.after(instruction)
    assert state.variables == {"V": "1", "P": "0", "A": "2"}
    config = state.config()
    assert (config.workdir, config.user, config.cmd, config.labels) == (
        "/srv/d/e",
        "me",
        ["/bin/bash", "-c", "go"],
        {"l": "3"},
    )
    assert state.after(Instruction("ENTRYPOINT", 1, ("e",))).config().cmd == []
    assert BuildStep(Instruction("ENV", 1, pairs={"A": "2"}), state, None).title == "ENV A=2"


def test_a_digest_is_of_what_is_copied(tmp_path: Path) -> None:
    root = tmp_path / "context"
    (root / "app/sub").mkdir(parents=True)
    (root / "app/file").write_text("text")
    (root / "app/link").symlink_to("file")
    (root / "app/skipped").write_text("secret")
    (root / ".dockerignore").write_text("app/skipped\n")

    def digest() -> str:
        left_out = context.ignored(root)
        return context.digest(root, context.matching(root, ["app"], left_out, COPY), left_out)

    first = digest()
    os.utime(root / "app/file", (1, 1))
    (root / "app/skipped").write_text("another secret")
    (root / "beside").write_text("not copied")
    os.mkfifo(root / "app/fifo")  # never opened
    assert digest() == first
    changes = [
        lambda: (root / "app/file").write_text("texts"),
        lambda: (root / "app/file").chmod(0o755),
        lambda: (root / "app/file").rename(root / "app/other"),
        lambda: (root / "app/empty").mkdir(),
        lambda: ((root / "app/link").unlink(), (root / "app/link").symlink_to("other")),
        lambda: (root / "app/sub").rmdir(),
    ]
    seen = {first}
    for change in changes:
        change()
        seen.add(digest())
    assert len(seen) == 1 + len(changes)
    assert context.gather(root / "app", root, context.ignored(root), tmp_path / "out") == ["empty", "link", "other"]


_STEPS = st.lists(
    st.builds(KeptStep, key=st.uuids().map(str), size=st.integers(0, 9), used_at=st.floats(0, 100)), max_size=12
)


@given(_STEPS, st.integers(0, 12), st.integers(0, 40), st.floats(0, 120))
def test_what_is_given_up_is_what_was_used_longest_ago(steps: list[KeptStep], most: int, size: int, age: float) -> None:
    gone = surplus(steps, 100.0, most=most, size=size, unused=age)
    kept = [step for step in steps if step.key not in gone]
    assert len(kept) <= most and sum(step.size for step in kept) <= size
    assert all(100.0 - step.used_at <= age for step in kept)
    if kept and gone:
        newest_gone = max(step.used_at for step in steps if step.key in gone)
        assert newest_gone <= min(step.used_at for step in kept)
    assert surplus(kept, 100.0, most=most, size=size, unused=age) == set()
    assert not surplus(steps, 100.0, most=len(steps), size=200, unused=100.0)


@pytest.mark.parametrize("wrong", ["..", "none", "app/../../x"])
def test_sources_stay_in_the_context(tmp_path: Path, wrong: str) -> None:
    from sandbox.errors import Invalid

    with pytest.raises(Invalid, match="line 4"):
        context.matching(tmp_path, [wrong], lambda path: False, COPY)
