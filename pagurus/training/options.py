"""Options of a command that are settings of a tree: made from its structs, so that none is written here."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
from typer.core import TyperCommand, TyperOption

GIVEN = "settings given as options"  # in the context of a command


def given(context: Any) -> dict[str, Any]:
    """The settings that the command line named as options. Example: ``{"held_out": 64}``"""
    result: dict[str, Any] = context.meta.get(GIVEN, {})
    return result


def settings_command(module: str, name: str, *, excluded: tuple[str, ...] = ()) -> type[TyperCommand]:
    """A class of commands whose options include the settings of the struct `name` of `module`, which is imported when
    the command is called. `excluded`: settings that the command has in another way."""

    class SettingsCommand(TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            own = super().get_params(ctx)
            try:
                tree = getattr(importlib.import_module(module), name)
                return [*own, *_options(tree, {*excluded, *(str(item.name) for item in own)})]
            except ModuleNotFoundError:  # training is not installed, which the command says
                return own

    return SettingsCommand


def _options(tree: type[msgspec.Struct], excluded: set[str]) -> list[TyperOption]:
    from trainer.settings import descriptions

    return [
        _option(field.name, kind, text)
        for field, text in zip(msgspec.structs.fields(tree), descriptions(tree).values(), strict=True)
        if field.name not in excluded and _in_no_table(kind := msgspec.inspect.type_info(field.type))
    ]


def _in_no_table(kind: msgspec.inspect.Type) -> bool:
    """One word can be its value. A table with a preset has one too: the preset's name."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return all(_in_no_table(item) for item in kind.types)
    if isinstance(kind, msgspec.inspect.StructType):
        return any(field.name == "preset" for field in kind.fields)
    tables = (msgspec.inspect.DictType, msgspec.inspect.ListType, msgspec.inspect.VarTupleType)
    return not isinstance(kind, tables)


def _option(name: str, kind: msgspec.inspect.Type, text: str) -> TyperOption:
    from trainer.settings import parsed

    flag, number = isinstance(kind, msgspec.inspect.BoolType), _is_number(kind)

    def keep(ctx: Any, _: object, value: Any) -> None:
        if value is not None:
            ctx.meta.setdefault(GIVEN, {})[name] = parsed(value) if number else value

    word = name.replace("_", "-")
    return TyperOption(
        param_decls=[name, f"--{word}/--no-{word}" if flag else f"--{word}"],
        type=bool if flag else str,
        is_flag=flag,
        metavar=None if flag else "<number>" if number else "<text>",
        help=text[:1].upper() + text[1:],
        expose_value=False,
        callback=keep,
    )


def _is_number(kind: msgspec.inspect.Type) -> bool:
    """Or a word where it may also be one."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(_is_number(item) for item in kind.types)
    return isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType)
