"""What `build` of a service says."""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path

import msgspec

from sandbox.compose.project import ServiceBuild
from sandbox.compose.read import read_text
from sandbox.compose.resources import Resources, located
from sandbox.compose.values import Value
from sandbox.image.stages import is_repository
from sandbox.messages.images import ImageName

_READ = (
    *("context", "dockerfile", "dockerfile_inline", "args", "target", "additional_contexts", "network", "no_cache"),
    "secrets",
)
_WITHOUT_EFFECT = (
    *("pull", "platforms", "labels", "cache_from", "cache_to", "shm_size", "tags", "ulimits", "provenance", "sbom"),
)


def service_build(family: str, build: Value, image: str | None, resources: Resources) -> ServiceBuild:
    """The build of a service. `image`: the name that the file gives to what is built. Raises Invalid."""
    build.only(*_READ, *_WITHOUT_EFFECT)
    said = build.get("context")
    context = said.name() if said is not None else "."
    remote = is_repository(context)
    if not remote:
        context = located((said or build).place, context)
        if not Path(context).is_dir():
            raise (said or build).refuse(f"{context} is no directory", "correct `context`")
    file, inline = build.get("dockerfile"), build.get("dockerfile_inline")
    target, network, no_cache = (build.get(name) for name in ("target", "network", "no_cache"))
    if file is not None and inline is not None:
        raise inline.refuse("it excludes `dockerfile`", "remove one of the two")
    dockerfile = None if file is None else file.name() if remote else str(Path(context, file.name()))
    if network is not None and network.text() not in ("none", "default"):
        raise network.refuse(f"{network.text()} is no network of a build", "there are default and none")
    arguments = _arguments(build, resources)
    text, stage = inline.text() if inline is not None else "", target.name() if target is not None else None
    digest = blake2b(repr((context, dockerfile, text, sorted(arguments.items()), stage)).encode(), digest_size=5)
    title = re.sub(r"[^a-z0-9-]+", "-", f"{resources.title}-{family}".lower()).strip("-")[:80]
    return ServiceBuild(
        image=image or f"compose-{title}-{digest.hexdigest()}",
        context=context,
        dockerfile=dockerfile,
        inline=text,
        arguments=arguments,
        target=stage,
        contexts=_contexts(build),
        secrets=_secrets(build, resources),
        network=network is None or network.text() != "none",
        cache=no_cache is None or not no_cache.flag(),
    )


def _arguments(build: Value, resources: Resources) -> dict[str, str]:
    """Those with a value, and those whose value the environment has."""
    said = build.get("args")
    given, outer = said.pairs() if said is not None else {}, resources.scope.values
    filled = {name: outer.get(name) if value is None else value for name, value in given.items()}
    return {name: value for name, value in filled.items() if value is not None}


def _contexts(build: Value) -> dict[str, str]:
    said = build.get("additional_contexts")
    result = {}
    for name, value in said.map().items() if said is not None else ():
        text = value.name()
        if text.startswith("service:"):
            raise value.refuse("the image of another service is not supported", "name an image: docker-image://...")
        result[name] = text if "://" in text or is_repository(text) else located(value.place, text)
    return result


def _secrets(build: Value, resources: Resources) -> dict[str, bytes]:
    said = build.get("secrets")
    result = {}
    for item in said.items() if said is not None else []:
        source = item if isinstance(item.data, str) else item.map().get("source", item)
        target = source if isinstance(item.data, str) else item.map().get("target", source)
        made = resources.content("secrets", item, source.name())
        content = made.content if made.source is None else read_text(made.source, "secret").encode()
        result[target.name()] = content
    return result


def image_name(value: Value) -> str:
    """The name of an image. Raises Invalid."""
    try:
        return msgspec.convert(value.name(), ImageName)
    except msgspec.ValidationError:
        raise value.refuse(f"{value.text()!r} is no name of an image", "[registry/]name[:tag][@digest]") from None
