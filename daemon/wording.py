"""What the decoder says of bad input, in the words of who sent it.

Pure.
"""

from __future__ import annotations

import ast
import re

#: What text of each pattern in :mod:`sandbox.messages` and of the routes looks like.
FORMS = {
    r"^[0-9a-f]{32}$": "32 hexadecimal digits, as the SDK makes them",
    r"^[0-9a-f]{64}$": "64 hexadecimal digits",
    r"^[\x20-\x7e]+\Z": "printable ASCII characters in one line",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z": "1 to 100 letters, digits, dots, dashes and underscores, beginning with a "
    "letter or digit",
    r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}\Z": "the name of an HTTP header, such as Authorization",
    r"^[a-zA-Z0-9._-]{1,64}$": "1 to 64 letters, digits, dots, dashes and underscores",
    r"^[a-z0-9][a-z0-9._-]*$": "small letters, digits, dots, dashes and underscores, beginning with a letter or digit",
    r"^[a-z0-9][A-Za-z0-9._:/@-]*$": "the name of an image, such as debian or ghcr.io/someone/tools:1.2",
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "small letters, digits, dots, dashes and underscores, at most 63",
    r"^s-[0-9a-f]{10}$": "the whole id of a sandbox, such as s-4f1c00aa12",
    r"^[^\0]*$": "text without NUL characters",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "letters, digits, dots, dashes and underscores, at most 64",
    r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,62})?$": "letters, digits, dots, dashes and underscores, at most 63, or empty",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$": "letters, digits, dots, dashes and underscores, at most 63",
    r"^https?://[^\s/]+(/[^\s]*)?$": "an address that begins with http:// or https://",
    r"^https://[^\s/]+$": "an address such as https://host, without a path",
    r"^/[^\0]*$": "a path from the root on",
    r"^[0-7]{1,4}$": "permissions in octal digits, such as 644",
}
#: What a field may be that takes a few words only, by its name.
CHOICES = {
    "agent": "inside or outside",
    "at_end": "stop or remove",
    "condition": "service_started, service_healthy or service_completed_successfully",
    "hold": "captured or durable",
    "mode": "none, allow or open",
    "protocol": "tcp",
    "restart": "no, always, on-failure or unless-stopped",
    "scope": "read, exec, monitor or admin",
    "wait": "captured or durable",
}
_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
    "bytes": "bytes",
}
_EXPECTED = re.compile(r"Expected `(?P<kind>[^`]+)`(?P<rest>.*)", re.DOTALL)
_BOUND = re.compile(r" (?P<sign><=|>=|<|>) (?P<number>\S+)$")
_LENGTH = re.compile(r" of length (?P<sign><=|>=|==) (?P<number>\d+)$")
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than", "==": "exactly"}


def plain(error: Exception) -> str:
    """What is wrong with which field.

    >>> plain(ValueError("Expected `int` >= 1 - at `$.limits.processes`"))
    'limits.processes must be at least 1'
    """
    what, _, where = str(error).partition(" - at ")
    field = _field(where)
    match = _EXPECTED.fullmatch(what)
    if match is None:
        said = what.replace("`", "").replace("Object contains unknown field", "there is no field")
        said = re.sub(r"^Object missing required field (.*)", r"the field \1 is missing", said)
        if (value := re.fullmatch(r"Invalid enum value (.*)", said)) is not None:
            return f"{field} must be {CHOICES.get(field.rpartition('.')[2], 'one of a few words')}, not {value[1]}"
        return f"{field}: {said}" if field else said
    return f"{field or 'it'} must be {_expected(match['kind'], match['rest'])}"


def _field(where: str) -> str:
    """Where it is, such as `limits.cpus`."""
    path = where.replace("`", "").removeprefix("key in ")
    return path.removeprefix("$").removeprefix(".").replace("[...]", "")


def _expected(kind: str, rest: str) -> str:
    if (pattern := rest.removeprefix(" matching regex ")) != rest:
        return FORMS.get(ast.literal_eval(pattern), "text of another form")
    if (length := _LENGTH.fullmatch(rest)) is not None:
        unit = "characters" if kind == "str" else "bytes" if kind == "bytes" else "entries"
        return f"{_BOUNDS[length['sign']]} {length['number']} {unit} long"
    if (bound := _BOUND.fullmatch(rest)) is not None:
        return f"{_BOUNDS[bound['sign']]} {bound['number']}"
    target = " or ".join(_TYPES.get(item, item) for item in kind.split(" | "))
    got = re.fullmatch(r", got `([^`]+)`", rest)
    return f"{target}, not {_TYPES.get(got[1], got[1])}" if got is not None else target
