"""The image of a composition: the trees of its services side by side, of hard links to their images' files.

Guarantee: equal compositions of equal images have one tree, which takes no space but for its directories (where the
images lie on the same disk).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

import msgspec
from blake3 import blake3

from sandbox.container import services
from sandbox.errors import ImageNotFound, Invalid, NotFound
from sandbox.image.store import COMPOSED, ImageStore, StoredImage, Used
from sandbox.messages import Composition, Service
from sandbox.tree import copy
from sandbox.tree.copy_into import canonical
from sandbox.tree.safe_path import directory, make_parents, opened

RETAINED = 32  # of them that no sandbox uses
_VERSION = 2  # of what is made of the same images
_MODES = {"/proc": 0o555, "/sys": 0o555}


def resolved(composition: Composition, bases: dict[str, StoredImage]) -> Composition:
    """The composition with every place of a service as it is once the links of its image are followed.

    Raises Invalid for one that is no directory.
    """
    made = {}
    for name, service in composition.services.items():
        with directory(bases[name].tree) as root:

            def real(target: str, root: int = root, name: str = name) -> str:
                try:
                    path = "/" + canonical(root, target, missing=True).lstrip("/")
                    with contextlib.suppress(NotFound), opened(root, path, os.O_RDONLY | os.O_DIRECTORY):
                        pass
                except (Invalid, OSError) as error:
                    raise Invalid(
                        f"service {name}: nothing can be mounted at {target}: {error}", hint="use another directory"
                    ) from error
                taken = next((place for place in (*services.SHARED, "/") if path == place), None)
                if taken is not None:
                    raise Invalid(f"service {name}: nothing can be mounted at {taken}", hint="use another directory")
                return path

            made[name] = msgspec.structs.replace(
                service,
                volumes=[msgspec.structs.replace(volume, target=real(volume.target)) for volume in service.volumes],
                mounts=[msgspec.structs.replace(mount, target=real(mount.target)) for mount in service.mounts],
                tmpfs=[real(target) for target in service.tmpfs],
            )
            _need_apart(name, made[name])
    return msgspec.structs.replace(composition, services=made)


def _need_apart(name: str, service: Service) -> None:
    """Raise Invalid where something has no place in what it lies in, or would be emptied with it."""
    if (pair := services.overlap(service, reserved=services.SHARED)) is not None:
        raise Invalid(
            f"service {name}: what is mounted at {pair[0]} and {pair[1]} overlaps",
            hint="use directories next to each other",
        )
    for target in _places(service):
        source, inner = services.mount_point(service, target)
        if any(mount.source == source for mount in service.mounts) and not os.path.isdir(source + inner):
            raise Invalid(
                f"service {name}: nothing can be mounted at {target}: the host has no directory {source}{inner}",
                hint="make it, or copy the host's directory into the service (--copy-binds)",
            )


def images(store: ImageStore, composition: Composition) -> dict[str, StoredImage]:
    """The image of each service. Raises ImageNotFound."""
    return {name: store.resolve(service.image) for name, service in composition.services.items()}


def imported(store: ImageStore, digest: str, composition: Composition | None, used: Used) -> StoredImage:
    """The image of a checkpoint from another host; that of a composition is made of those of its services.

    What programs of the sandbox have added to it lies in the sandbox's own files. Raises ImageNotFound where one is not
    here. Blocks.
    """
    try:
        return store.image(digest)
    except ImageNotFound:
        if composition is None:
            raise
    own = {name: one for name, one in composition.services.items() if not one.container}
    composition = msgspec.structs.replace(composition, services=own)
    bases = {name: store.image(one.image_digest, one.image) for name, one in composition.services.items()}
    if _digest(composition, bases) == digest:
        image(store, composition, bases, used)
    return store.image(digest)


def image(store: ImageStore, composition: Composition, bases: dict[str, StoredImage], used: Used) -> str:
    """The name of the image of a composition whose places are `resolved`; made when it is missing.

    `used`: as for :meth:`ImageStore.remove`. Blocks: some seconds for 50,000 files, once.
    """
    digest = _digest(composition, bases)
    name = COMPOSED + digest[:16]
    if name not in store.list() or store.resolve(name).digest != digest:

        def fill(tree: Path) -> None:
            for service, image in bases.items():
                _add_service(tree, service, image.tree, composition)
            _add_volumes(tree, composition, bases)

        store.build(name, fill, f"composition of {', '.join(bases)}", replace=True, identity=(digest, 0))
        _forget_old(store, used)
    return name


def _forget_old(store: ImageStore, used: Used) -> None:
    made = [store.info(name) for name in store.list() if name.startswith(COMPOSED)]
    idle = [info for info in made if info.digest not in used()]
    for info in sorted(idle, key=lambda info: -info.created_at)[RETAINED:]:
        with contextlib.suppress(ImageNotFound):
            store.remove(info.name, used)


def _places(service: Service) -> list[str]:
    return [
        *services.SHARED,
        *(volume.target for volume in service.volumes),
        *(mount.target for mount in service.mounts),
        *service.tmpfs,
    ]


def _digest(composition: Composition, bases: dict[str, StoredImage]) -> str:
    said = [(name, image.digest, _places(composition.services[name])) for name, image in bases.items()]
    volumes = [
        (name, volume.name, volume.target) for name, one in composition.services.items() for volume in one.volumes
    ]
    content = msgspec.json.encode((_VERSION, said, volumes))
    return blake3(content, derive_key_context="pagurus 2026 composition").hexdigest()


def _add_service(tree: Path, name: str, image: Path, composition: Composition) -> None:
    place = tree / services.root(name).lstrip("/")
    place.mkdir(parents=True)
    _bring(image, place)
    with directory(place) as root:
        for target in _places(composition.services[name]):
            make_parents(root, PurePosixPath(target), _MODES.get(target, 0o755))
        for target in composition.services[name].tmpfs:
            with opened(root, target, os.O_RDONLY | os.O_DIRECTORY) as own:  # whatever the image has there
                os.fchmod(own, 0o1777)


def _add_volumes(tree: Path, composition: Composition, bases: dict[str, StoredImage]) -> None:
    """A new volume has what the image of the first service that names it has there."""
    for name, service in composition.services.items():
        for volume in service.volumes:
            place = tree / services.volume(volume.name).lstrip("/")
            if place.exists():
                continue
            place.mkdir(parents=True)
            source = bases[name].tree / volume.target.lstrip("/")
            if source.is_dir() and not source.is_symlink():
                _bring(source, place)
    with directory(tree) as root:
        for service in composition.services.values():
            for target in _places(service):
                outer, inner = services.mount_point(service, target)
                if outer.startswith(services.VOLUMES):
                    make_parents(root, PurePosixPath(outer + inner))


def _bring(source: Path, target: Path) -> None:
    """Hard links; copies of an image that lies in another store, on another disk."""
    if source.stat().st_dev == target.stat().st_dev:
        copy.link(source, target)
    else:
        copy.copy(source, target)
