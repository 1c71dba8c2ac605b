"""Images: how long an unchanged build takes, and how fast a registry is read.

A context of `--size` MiB is built by the program `pagurus image build` (once cold, then unchanged), and so is a
Dockerfile that sets one variable (`ENV`) of an image, to another value each time. An image of `--layers` MiB is pushed
to a registry on loopback (Debian's `docker-registry`, which must be installed) and pulled in turns by skopeo alone and
by us into empty directories.

`cached_build_s`, `env_build_s`: medians of the whole program, its start and its imports with it; `env_build_sdk_s`: the
latter in a Python program that has a client open and has built before. `pull_mb_s`: manifest and layers, as
`pagurus image pull` fetches and checks them, unpacking aside; `skopeo_mb_s`: a bare `skopeo copy` of the same;
`pull_ratio`: the one over the other, median of pairs. `pull_again_mb`: bytes of layers fetched for another image that
shares all but the last one; `pull_image_s`: a whole pull, unpacked and hashed.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from bench.harness import aftermath, command
from bench.harness.own_daemon import BenchHost, image
from sandbox import Client
from sandbox.image import reference, registry
from sandbox.image.store import ImageStore
from trainer.machine import processor

MIB = 1 << 20
FILE = 10 * MIB
LAYERS = 4
PROGRAM = (sys.executable, "-m", "pagurus")
TYPES = "application/vnd.oci.image."


def builds(directory: Path, size: int, rounds: int) -> dict[str, Any]:
    """Cold and unchanged builds of `size` MiB."""
    context = directory / "context"
    (context / "data").mkdir(parents=True)
    for number in range(max(1, size * MIB // FILE)):
        (context / "data" / str(number)).write_bytes(os.urandom(FILE))
    (context / "Dockerfile").write_text("FROM bench\nCOPY data /data\nRUN ls /data | wc -l > /counted\n")
    host = BenchHost(directory / "host", image("debian"))
    existing = {**os.environ, "PAGURUS_HOST": str(host.socket), "XDG_CACHE_HOME": str(directory / "cache")}
    existing.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled modules are kept, as they are where it is installed
    try:
        host.start()
        time.sleep(2.1)  # a file that has just been written is not remembered
        taken = [timed_build(context, existing)]
        taken += [timed_build(context, existing, "nothing was run") for _ in range(rounds + 1)]
        small = directory / "small"
        small.mkdir()
        by_program = []
        for number in range(rounds + 1):
            (small / "Dockerfile").write_text(f"FROM bench\nENV NUMBER={number}\n")
            by_program.append(timed_build(small, existing))
        by_sdk = asyncio.run(builds_by_sdk(host, small, rounds + 1))
    finally:
        host.clean()
    return {
        "context_mib": size,
        "cold_build_s": round(taken[0], 2),
        "first_cached_build_s": round(taken[1], 2),
        "cached_build_s": round(statistics.median(taken[2:]), 2),
        "env_build_s": round(statistics.median(by_program[1:]), 3),
        "env_build_sdk_s": round(statistics.median(by_sdk[1:]), 4),
    }


def timed_build(context: Path, environment: dict[str, str], says: str = "") -> float:
    """Seconds of the program that builds a context, and says this."""
    began = time.monotonic()
    command = [*PROGRAM, "image", "build", "built", str(context), "--replace"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert says in done.stderr, done.stderr
    return time.monotonic() - began


async def builds_by_sdk(host: BenchHost, context: Path, rounds: int) -> list[float]:
    """Seconds of builds that change a variable, by one client."""
    taken = []
    async with Client(host.socket) as client:
        for number in range(rounds):
            (context / "Dockerfile").write_text(f"FROM bench\nENV NUMBER=sdk-{number}\n")
            began = time.monotonic()
            await client.images.build("built", context, replace=True)
            taken.append(time.monotonic() - began)
    return taken


# ---------------------------------------------------------------------------- pulls


def layout(directory: Path, sizes: list[int], seeds: list[int]) -> None:
    """An OCI layout whose layers hold these bytes, each a function of its seed."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"mediaType": TYPES + kind, "digest": f"sha256:{name}", "size": len(data)}

    layers, plain = [], []
    for size, seed in zip(sizes, seeds, strict=True):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            member = tarfile.TarInfo(f"file-{seed}")
            member.size = size
            tar.addfile(member, io.BytesIO(hashlib.shake_256(str(seed).encode()).digest(size)))
        plain.append(f"sha256:{hashlib.sha256(out.getvalue()).hexdigest()}")
        layers.append(blob(gzip.compress(out.getvalue(), compresslevel=1, mtime=0), "layer.v1.tar+gzip"))
    about = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": plain}}
    config = blob(json.dumps(about).encode(), "config.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": f"{TYPES}manifest.v1+json", "config": config, "layers": layers}
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def serve(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Debian's registry over a directory, as soon as it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    configuration = directory / "registry.yml"
    configuration.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {directory}/registry}}}}\n"
        f"http: {{addr: {address}}}\n"
    )
    with (directory / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(configuration)], stdout=log, stderr=log)
    host, _, port = address.rpartition(":")
    for _ in range(200):
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return process, address
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"the registry does not listen: {(directory / 'registry.log').read_text()}")


def bare(address: str, directory: Path) -> float:
    """Seconds of a copy by skopeo alone."""
    began = time.monotonic()
    command = ["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{address}", f"oci:{directory}:image"]
    subprocess.run(command, check=True)
    return time.monotonic() - began


def ours(address: str, directory: Path) -> float:
    """Seconds of the same as a pull does it: the manifest is read and checked first."""
    (directory / "layout").mkdir(parents=True)
    blobs = directory / "blobs"
    (blobs / "sha256").mkdir(parents=True)
    (directory / "layout/blobs").symlink_to(blobs)
    began = time.monotonic()
    result = registry.manifest(reference.parse(address))
    registry.copy(result, directory / "layout", blobs, lambda done, total: None)
    return time.monotonic() - began


def pulls(directory: Path, size: int, rounds: int) -> dict[str, Any]:
    """Ours and skopeo's, in turns."""
    item = size * MIB // LAYERS
    layout(directory / "one", [item] * LAYERS, [*range(LAYERS)])
    layout(directory / "two", [item] * LAYERS, [*range(LAYERS - 1), LAYERS])
    process, address = serve(directory)
    try:
        for tag in ("one", "two"):
            target = f"docker://{address}/bench:{tag}"
            push = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{directory / tag}:image", target]
            subprocess.run(push, check=True)
        pairs = []
        for number in range(rounds + 1):
            first, second = (bare, ours) if number % 2 else (ours, bare)
            took = {way: way(f"{address}/bench:one", directory / f"{way.__name__}-{number}") for way in (first, second)}
            pairs.append((took[ours], took[bare]))
            for way in (ours, bare):
                shutil.rmtree(directory / f"{way.__name__}-{number}")
        pairs = pairs[1:]  # the first has the registry's files read from the disk
        store = ImageStore(directory / "images")
        began = time.monotonic()
        store.pull(f"{address}/bench:one")
        complete = time.monotonic() - began
        before = {path.name for path in (store.layers / "blobs/sha256").iterdir()}
        store.pull(f"{address}/bench:two")
        new = [path for path in (store.layers / "blobs/sha256").iterdir() if path.name not in before]
    finally:
        process.terminate()
        process.wait()
    return {
        "layers_mib": size,
        "pull_mb_s": round(size * MIB / 1e6 / statistics.median(mine for mine, _ in pairs), 1),
        "skopeo_mb_s": round(size * MIB / 1e6 / statistics.median(theirs for _, theirs in pairs), 1),
        "pull_ratio": round(statistics.median(theirs / mine for mine, theirs in pairs), 3),
        "pull_image_s": round(complete, 2),
        "pull_again_mb": round(sum(path.stat().st_size for path in new) / 1e6, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--size", type=int, default=900, help="MiB of the context (default: 900)")
    parser.add_argument("--layers", type=int, default=256, help="MiB of the image that is pulled (default: 256)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    for program, package in (("skopeo", "skopeo"), ("docker-registry", "docker-registry")):
        if shutil.which(program) is None:
            print(f"{program} is missing: apt-get install {package}", file=sys.stderr)
            return 1
    result: dict[str, Any] = {"cpu": processor(), "load": [round(os.getloadavg()[0], 1)]}
    with aftermath.TemporaryDirectory("pagurus-image-", "/var/tmp") as directory:
        (Path(directory) / "builds").mkdir()
        (Path(directory) / "pulls/images").mkdir(parents=True)
        result |= builds(Path(directory) / "builds", options.size, options.rounds)
        result |= pulls(Path(directory) / "pulls", options.layers, options.rounds)
    result["load"].append(round(os.getloadavg()[0], 1))
    command.show(result, options)
    return 0
