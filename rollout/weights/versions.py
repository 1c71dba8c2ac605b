"""What a version of the weights is made of: references, the manifest, its digests.

Guarantee: a reference names its content (blake3), so a holder of the reference of a manifest holds all of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from blake3 import blake3

from rollout.weights.layout import Layout
from sandbox.errors import EngineFailed

PIECE_DIGEST = 16  # bytes
Content = bytes | bytearray  # of a chunk, never written to
Way = Literal["step", "complete"]  # into a version: from the one before, or from nothing


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Content, by the hash of its bytes."""

    digest: str
    size: int


class VersionRef(msgspec.Struct, frozen=True):
    """store -> everybody: version number `version` is what this manifest says; `ways` into it are still kept."""

    version: int
    manifest: Ref
    ways: tuple[Way, ...] = ("step", "complete")


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """publisher -> readers. `steps` and `complete` have an entry for each segment of the layout, in its order."""

    version: int
    layout: Ref
    base: str | None  # digest of the manifest that `steps` start from
    steps: list[Ref | None] | None  # None in it: that segment did not change
    complete: list[Ref] | None
    digests: bytes  # of each piece after this version, in the order of the layout, 16 bytes of blake3 each
    files: dict[str, Ref] = {}  # config.json, the tokenizer: what makes a loadable directory of it
    generation: int = 0  # of the publisher
    created: float = 0.0  # seconds since the epoch

    @property
    def step_bytes(self) -> int | None:
        return None if self.steps is None else sum(ref.size for ref in self.steps if ref is not None)

    @property
    def total_bytes(self) -> int | None:
        return None if self.complete is None else sum(ref.size for ref in self.complete)

    def refs(self) -> set[str]:
        """Digests of everything that belongs to it."""
        result = {self.layout.digest, *(ref.digest for ref in self.files.values())}
        result |= {ref.digest for ref in self.steps or [] if ref is not None}
        return result | {ref.digest for ref in self.complete or []}


def digest(content: Content) -> str:
    return blake3(content).hexdigest()


def ref_of(content: Content) -> Ref:
    return Ref(digest(content), len(content))


def piece_digest(content: memoryview | bytes) -> bytes:
    return blake3(content).digest(length=PIECE_DIGEST)


def decode_manifest(raw: Content) -> VersionManifest:
    try:
        return msgspec.msgpack.decode(raw, type=VersionManifest)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"a manifest of weights cannot be read: {error}", hint="publish again") from None


def decode_layout(raw: Content) -> Layout:
    try:
        return msgspec.msgpack.decode(raw, type=Layout)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"a layout of weights cannot be read: {error}", hint="publish again") from None
