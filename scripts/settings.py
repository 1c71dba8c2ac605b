"""Every setting of a run as a page: ``python scripts/settings.py --write`` makes docs/settings.md from the structs.

A setting's description is the comment behind its field.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """# Settings of a run

Made by `python scripts/settings.py --write` from `trainer/config.py`. Each setting is a key of the TOML file, in the table that its path names, and `key=value` on the command line; those in no table are options too (`--held-out 64`, `--stream`):

```sh
pagurus train plan.toml objective.preset=dapo objective.clip.high=0.28 optimiser.rate=1e-6 sampling.temperature=0.8
```

Where no default stands, the objective's preset decides, or the setting is off. Time-outs are in seconds. `--dry-run` prints every setting of a run and its resolved objective; the run directory has them in `plan.json`.
"""  # noqa: E501


def page() -> str:
    from trainer.config import TrainConfig

    tables: dict[str, list[str]] = {}
    for path, kind, default, said in rows(TrainConfig):
        table, _, _ = path.rpartition(".")
        name = f"{path}={default}" if default else path
        tables.setdefault(table, []).append(f"- `{name}`{f' ({kind})' if kind else ''}{f': {said}' if said else ''}\n")
    first = "".join(["\n", *tables.pop("", [])])
    return HEAD + first + "".join(f"\n## `[{table}]`\n\n{''.join(lines)}" for table, lines in tables.items())


def rows(kind: Any, path: str = "", default: Any = None) -> Iterator[tuple[str, str, str, str]]:
    from trainer.settings import descriptions, tables

    reported = descriptions(kind)
    inner = tables(kind)
    for field in msgspec.structs.fields(kind):
        value = getattr(default, field.name) if default is not None else _default(field)
        if inner[field.name] is not None and isinstance(value, msgspec.Struct):
            yield from rows(inner[field.name], f"{path}{field.name}.", value)
        else:
            said = reported.get(field.name, "")
            kind_text = "" if isinstance(value, bool) else _type(msgspec.inspect.type_info(field.type))
            yield f"{path}{field.name}", kind_text, _shown(value), said


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.required else field.default


def _shown(value: Any) -> str:
    if value is None or value in ("", [], {}, ()):
        return ""
    if isinstance(value, msgspec.Struct):
        return "a table"
    return msgspec.json.encode(value, enc_hook=str).decode()


def _type(kind: msgspec.inspect.Type) -> str:
    if isinstance(kind, msgspec.inspect.UnionType):
        return " or ".join(_type(item) for item in kind.types if not isinstance(item, msgspec.inspect.NoneType))
    if isinstance(kind, msgspec.inspect.LiteralType):
        return ", ".join(map(str, kind.values))
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        bounds = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
        name = "integer" if isinstance(kind, msgspec.inspect.IntType) else "number"
        return " ".join([name, *(f"{sign}{bound:g}" for sign, bound in bounds if bound is not None)])
    names = {"BoolType": "boolean", "StrType": "text", "CustomType": "path", "DictType": "table"}
    return names.get(type(kind).__name__, "table" if hasattr(kind, "cls") else "list")


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1]))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
