"""Pulls an image in a process of its own: ``python -m sandbox.image.pull IMAGES REFERENCE [NAME]``.

A pull reads and unpacks gigabytes, so the daemon starts one process for each, and ends it when the caller has left.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from sandbox.errors import ErrorBody, PagurusError
from sandbox.image import unpacking
from sandbox.image.store import ImageStore

EVERY = 0.25  # seconds between two lines


class ImagePullProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the process prints."""

    done: int = 0  # bytes
    total: int = 0
    name: str = ""  # at the end
    error: ErrorBody | None = None


def say(line: ImagePullProgress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main(images: str, reference: str, name: str = "") -> int:
    unpacking.bound_process()  # and skopeo ends with it
    said = 0.0

    def report(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said >= EVERY or done == total:
            said = time.monotonic()
            say(ImagePullProgress(done=done, total=total))

    try:
        say(ImagePullProgress(name=ImageStore(Path(images)).pull(reference, name or None, report=report)))
    except PagurusError as error:
        say(ImagePullProgress(error=error.body()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
