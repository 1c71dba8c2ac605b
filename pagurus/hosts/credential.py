"""``pagurus credential``: headers that requests of sandboxes get on their way out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import Json, call
from sandbox.errors import Invalid

if TYPE_CHECKING:
    from sandbox.messages import CredentialInfo

application = typer.Typer(help="Headers that requests of sandboxes get on their way out.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="By which policies name it.")]


@application.command("put")
def put(
    name: Name,
    host: Annotated[list[str], typer.Option("--host", help="HOST, *.HOST or HOST:PORT. May be repeated.")],
    basic: Annotated[str | None, typer.Option(help="The secret is the password of this user.", metavar="USER")] = None,
    header: Annotated[str | None, typer.Option(help="The secret is the value of this header.", metavar="NAME")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the secret from here, not from stdin.")] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificates (PEM) of a private authority.", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """Make or change a credential; its secret is read from stdin.

    It is a bearer token, unless options say otherwise.
    """
    from sandbox.messages import Credential

    if basic is not None and header is not None:
        raise Invalid("--basic and --header say two things of one secret", hint="use one of them")
    secret = (sys.stdin.read() if file is None else file.read_text()).strip()
    if not secret:
        raise Invalid("the secret is empty", hint="pagurus credential put NAME --host HOST < FILE")
    trusted = "" if ca is None else ca.read_text()
    if header is not None:
        target = Credential(hosts=tuple(host), header=header, value=secret, ca=trusted)
    elif basic is not None:
        target = Credential.basic(basic, secret, hosts=host, ca=trusted)
    else:
        target = Credential.bearer(secret, hosts=host, ca=trusted)
    _show([call(lambda api: api.credentials.put(name, target))], json)


@application.command("ls")
def list_credentials(json: Json = False) -> None:
    """The credentials that sandboxes of yours can have."""
    _show(call(lambda api: api.credentials.list()), json)


@application.command("rm")
def remove(name: Name) -> None:
    """Remove a credential: no request gets it any more."""
    call(lambda api: api.credentials.remove(name))


def _show(result: list[CredentialInfo], json: bool) -> None:
    if json:
        output.as_json(result)
        return
    output.table(
        ("credential", "hosts", "header", "changed", "requests"),
        [(c.name, " ".join(c.hosts), c.header, output.when(c.changed_at), c.requests) for c in result],
    )
