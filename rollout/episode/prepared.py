"""`PreparedStates`: what a reset leaves, made once and forked for every episode that begins there.

Guarantee: a fork is compared with its checkpoint before it runs; who waits for a state that could not be made makes it
himself, so that a failure is one member's; a state is found again by whatever its reset depends on: the environment's
source files and attributes, image, limits, network, seed.

::

    name ─▶ in the book? ──yes──▶ fork (verified) ─▶ episode
              │ no                   ▲
              └▶ create ─▶ reset ─▶ checkpoint ─▶ end its processes ─▶ book
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollout.decide import reuse
from rollout.environments.base import Environment, Observation
from sandbox import Sandbox, durable
from sandbox.errors import (
    CheckpointFailed,
    Conflict,
    NoSpace,
    NotEqual,
    NotFound,
    PagurusError,
    RestoreFailed,
    Unsupported,
)

log = logging.getLogger("pagurus.rollout")

MAX_STATES = 64  # states in the book
GONE = ".gone"  # behind the name of a state that was forgotten: an empty file that remembers it
MAX_FORKS_FAILED = 3  # forks of an environment that were not equal, until its resets are not shared


class PreparedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state in which episodes begin."""

    name: str
    sandbox: str  # holds the checkpoint; nothing runs in it
    checkpoint: str
    state: bytes  # of the environment, as `Environment.snapshot` returned it
    first: Observation
    made: float = 0.0  # seconds since the epoch
    again: bool = False  # it was made before, and forgotten


class ForkingHost(Protocol):
    """What prepared states need of a host: `rollout.labels.LabellingClient`."""

    async def fork(self, checkpoint: str) -> Any:
        """One verified child, labelled as this run's."""

    async def image_digest(self, name: str) -> str: ...

    async def keep_prepared(self, sandbox: Sandbox, name: str, ledger: Path) -> None:
        """From now on the sandbox is no run's but that of the book in this directory."""

    async def drop_prepared(self, name: str) -> None:
        """Remove the sandboxes of this name."""


# Creates and resets a sandbox: it, the first observation, and what the environment keeps.
Make = Callable[[], Awaitable[tuple[Any, Observation, bytes | None]]]


class NotShared(Exception):
    """This reset cannot be shared. Says why."""


class PreparedStates:
    """Example: ``PreparedStates(host, Path("runs/.prepared"))``; runs that name one directory share their states."""

    def __init__(self, host: ForkingHost, directory: Path, *, limit: int = MAX_STATES):
        self._host, self._directory, self._limit = host, directory.absolute(), limit
        self._making: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._alone: dict[str, str] = {}  # environments whose resets are not shared, and why
        self._failed: Counter[str] = Counter()  # forks that were not equal
        self._digests: dict[str, str] = {}  # of images; an image that is replaced since counts in the next run
        self.made = self.forked = 0

    async def begin(self, env: Environment, seed: int, make: Make) -> tuple[Any, PreparedState] | None:
        """A fork of the state that `env` begins `seed` in. None: this environment resets every sandbox itself, or has
        none.

        Raises what `make` raises, and PagurusError where the fork fails.
        """
        kind = f"{type(env).__module__}.{type(env).__qualname__}"
        if not (env.shares_reset and env.sandboxed) or kind in self._alone:
            return None
        try:
            return await self._fork(await self._name(env, kind, seed), kind, make)
        except NotShared as reason:
            self._end_sharing(kind, str(reason))
            return None
        except (NotEqual, RestoreFailed) as error:  # what a refusing host says is no fault of the state
            self._failed[kind] += 1
            if self._failed[kind] >= MAX_FORKS_FAILED:
                self._end_sharing(kind, str(error))
            raise

    def _end_sharing(self, kind: str, why: str) -> None:
        if kind not in self._alone:
            log.warning("resets of %s are not shared from now on: %s", kind, why)
            self._alone[kind] = why

    async def _fork(self, name: str, kind: str, make: Make) -> tuple[Any, PreparedState]:
        for again in (True, False):
            ready = await self._get(name, kind, make)
            try:
                child = await self._host.fork(ready.checkpoint)
                self.forked += 1
                return child, ready
            except (NotFound, Conflict):  # another run, or a user by hand, has removed it
                await asyncio.to_thread(self._path(name).unlink, missing_ok=True)
                if not again:
                    raise
        raise AssertionError("unreachable")

    async def _get(self, name: str, kind: str, make: Make) -> PreparedState:
        async with self._making.setdefault(name, asyncio.Lock()):
            if kind in self._alone:  # found out while this one waited
                raise NotShared(self._alone[kind])
            ready = await asyncio.to_thread(self._read, name)
            if ready is None:
                await self._host.drop_prepared(name)  # of a process that was killed before it wrote the state down
                ready = await self._make(name, make)
                await self._trim()
            return ready

    async def _make(
        self, name: str, make: Callable[[], Awaitable[tuple[Any, Observation, bytes | None]]]
    ) -> PreparedState:
        sandbox, first, state = await make()
        try:
            if state is None:
                raise NotShared("its attributes are no plain values, and it has no `snapshot` of its own")
            try:
                point = await sandbox.checkpoint("prepared")
                existing = await asyncio.to_thread(self._path(name + GONE).exists)
                ready = PreparedState(
                    name=name,
                    sandbox=sandbox.id,
                    checkpoint=point.id,
                    state=state,
                    first=first,
                    made=time.time(),
                    again=existing,
                )
                content = msgspec.msgpack.encode(ready)
            except (CheckpointFailed, Unsupported, TypeError) as error:
                raise NotShared(str(error)) from error
            await sandbox.kill()
            await self._host.keep_prepared(sandbox, name, self._directory)
            await asyncio.to_thread(self._write, name, content)
        except BaseException:
            await asyncio.shield(_remove(sandbox))
            raise
        self.made += 1
        return ready

    async def _trim(self) -> None:
        """Forget states that are too many. Episodes that began in them continue."""
        for name in await asyncio.to_thread(self._forget):
            await self._host.drop_prepared(name)

    async def _name(self, env: Environment, kind: str, seed: int) -> str:
        digest = "" if env.compose is None else env.compose.digest
        if env.compose is None:
            if env.image not in self._digests:
                self._digests[env.image] = await self._host.image_digest(env.image)
            digest = self._digests[env.image]
        source = await asyncio.to_thread(_source, type(env))
        said = (kind, source, digest, env.limits, env.network, vars(env), seed)
        try:
            return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).hexdigest()
        except (TypeError, OverflowError):
            raise NotShared("what it was made with are no plain values, so two cannot be compared") from None

    # ----------------------------------------------------------------- the book

    def _path(self, name: str) -> Path:
        return self._directory / name

    def _read(self, name: str) -> PreparedState | None:
        try:
            ready = msgspec.msgpack.decode(self._path(name).read_bytes(), type=PreparedState)
            os.utime(self._path(name))  # it is used
            return ready
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            durable.publish(self._path(name), content)
            self._path(name + GONE).unlink(missing_ok=True)
        except OSError as error:
            raise NoSpace(f"{self._directory} cannot be written: {error.strerror}", hint="make room there") from error

    def _forget(self) -> list[str]:
        """Take what is too much out of the book: the names that went."""
        states, gone = [], []
        for path in self._directory.iterdir():
            try:
                if path.name.endswith(GONE):
                    gone.append((path.stat().st_mtime, path.name))
                    continue
                ready = msgspec.msgpack.decode(path.read_bytes(), type=PreparedState)
                states.append(reuse.PreparedStateUse(path.name, ready.made, path.stat().st_mtime, ready.again))
            except (FileNotFoundError, msgspec.MsgspecError):
                continue  # another run has forgotten it since
        went = reuse.to_forget(states, self._limit)
        for name in went:
            self._path(name + GONE).touch()
            self._path(name).unlink(missing_ok=True)
        for _, name in gone:
            if name not in reuse.remembered(gone, self._limit):
                self._path(name).unlink(missing_ok=True)
        return went


def _source(kind: type[Environment]) -> str:
    """A digest of the files that say what a reset does: the environment's own, or all of its directory."""
    try:
        file = Path(inspect.getfile(kind))
        files = sorted(file.parent.rglob("*.py")) if (file.parent / "__init__.py").exists() else [file]
        digest = hashlib.blake2b(digest_size=16)
        for item in files:
            content = item.read_bytes()
            digest.update(f"{item.relative_to(file.parent)} {len(content)}\n".encode() + content)
        return digest.hexdigest()
    except (OSError, TypeError) as error:
        raise NotShared(f"its source cannot be read: {error}") from None


async def _remove(sandbox: Sandbox) -> None:
    try:
        await sandbox.remove()
    except PagurusError as error:  # the run's sweep finds it by its label
        log.warning("%s was not removed: %s", sandbox.id, error)
