"""``pagurus gateway``: models behind the gateway, and what agents said to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import Json, SandboxName, call

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages import Exchange, ExchangeInfo, TokenInfo

application = typer.Typer(help="Models behind the gateway, and what agents said to them.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name of an upstream.", metavar="NAME")]


@application.command("ls")
def list_upstreams(json: Json = False) -> None:
    """The upstreams of this host, without their keys."""
    result = call(lambda host: host.gateway.upstreams())
    if json:
        output.as_json(result)
        return
    output.table(
        ("name", "url", "key", "headers", "in flight"),
        [(u.name, u.url, "yes" if u.has_key else "", ", ".join(u.headers), u.in_flight) for u in result],
    )


@application.command("set")
def set_upstream(
    name: Name,
    url: Annotated[str, typer.Argument(help="What comes before /v1.")],
    key_file: Annotated[Path | None, typer.Option(help="File on the host that holds the key.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a whole answer.")] = 600.0,
) -> None:
    """Make or change an upstream."""
    from sandbox.messages import Upstream

    key = None if key_file is None else str(key_file.absolute())
    call(lambda host: host.gateway.put(name, Upstream(url=url, key_file=key, timeout=timeout)))


@application.command("rm")
def drop_upstream(name: Name) -> None:
    """Remove an upstream that no sandbox uses."""
    call(lambda host: host.gateway.drop(name))


@application.command("token")
def token(sandbox: SandboxName, json: Json = False) -> None:
    """A new token for an agent outside; the one before ends."""

    async def made(host: Client) -> TokenInfo:
        return await (await host.get(sandbox)).gateway.token()

    info = call(made)
    if json:
        output.as_json(info)
    else:
        print(info.token)


@application.command("log")
def log(
    sandbox: SandboxName,
    exchange: Annotated[int | None, typer.Argument(help="Print this exchange whole.", metavar="[EXCHANGE]")] = None,
    json: Json = False,
) -> None:
    """What the agent of a sandbox and its model said to each other."""
    if exchange is None:
        _list(sandbox, json)
        return

    async def read(host: Client) -> Exchange:
        return await (await host.get(sandbox)).gateway.exchange(exchange)

    result = call(read)
    if json:
        output.as_json(result)
        return
    print(output.printable(result.request.decode("utf-8", "replace")))
    print(output.printable(result.response.decode("utf-8", "replace")))


def _list(sandbox: str, json: bool) -> None:
    async def read(host: Client) -> list[ExchangeInfo]:
        return await (await host.get(sandbox)).gateway.exchanges()

    result = call(read)
    if json:
        output.as_json(result)
        return
    output.table(
        ("exchange", "after", "turn", "checkpoint", "path", "state", "requested", "last_seen", "record", "bytes"),
        [
            (
                e.id,
                e.parent if e.parent is not None else "",
                e.turn if e.main else "alongside",
                e.checkpoint or "",
                e.path,
                f"{e.state} {e.status}" if e.status else e.state,
                e.requested,
                e.answered,
                e.from_record,
                output.size(e.request_bytes + e.response_bytes),
            )
            for e in result
        ],
    )
