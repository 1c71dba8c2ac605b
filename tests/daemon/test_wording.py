"""Refusals of bad input: in words, for every pattern that a body or query may be held to."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from daemon.api import routes
from daemon.wording import CHOICES, FORMS, plain
from sandbox.messages import CommitRequest, CreateRequest, ForkRequest

KINDS = [kind for route in routes() for kind in (route.body, route.query) if kind not in (None, bytes)]


def patterns(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(patterns, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["pattern"]} if isinstance(schema.get("pattern"), str) else set()
    return own.union(*map(patterns, schema.values()))


def test_every_pattern_has_words() -> None:
    existing = patterns(msgspec.json.schema_components(KINDS)[1])
    assert existing and existing <= FORMS.keys()


def test_every_choice_has_words() -> None:
    parts = msgspec.json.schema_components(KINDS, ref_template="{name}")[1]
    existing: dict[str, set[str]] = {}
    for part in parts.values():
        for name, item in part.get("properties", {}).items():
            for kind in (item, parts.get(item.get("$ref"), {}), *item.get("anyOf", ())):
                if "enum" in kind:
                    existing.setdefault(name, set()).update(word for word in kind["enum"] if word is not None)
    by_people = {
        name: words for name, words in existing.items() if name not in ("state", "verdict")
    }  # daemons send these
    assert {name: set(re.split(", | or ", words)) for name, words in CHOICES.items()} == by_people


@pytest.mark.parametrize(
    ("kind", "sent", "said"),
    [
        (CreateRequest, b"{}", "the field image is missing"),
        (CreateRequest, b'{"image":3}', "image must be text, not a whole number"),
        (CreateRequest, b'{"image":"d","limits":{"cpus":0}}', "limits.cpus must be at least 0.01"),
        (CreateRequest, b'{"image":"d","limits":{"mem":1}}', "limits: there is no field mem"),
        (CreateRequest, b'{"image":"d","user":"a\\u0000"}', "user must be text without NUL characters"),
        (CreateRequest, b'{"image":"d","mounts":[{"target":1}]}', "mounts[0].target must be text, not a whole number"),
        (CreateRequest, b'{"image":"d","at_end":"x"}', "at_end must be stop or remove, not 'x'"),
        (CreateRequest, b'{"image":"d","network":{"mode":"x"}}', "network.mode must be none, allow or open, not 'x'"),
        (ForkRequest, b'{"count":null}', "count must be a whole number, not null"),
        (
            CommitRequest,
            b'{"name":"A"}',
            "name must be the name of an image, such as ",
        ),
    ],
)
def test_refusals_are_in_words(kind: type, sent: bytes, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(sent, type=kind)
    assert plain(refused.value).startswith(said)
    assert not {"`", "$", "^"} & set(plain(refused.value))
