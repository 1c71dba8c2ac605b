"""``pagurus token``: the tokens that callers over TCP show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pagurus import output
from pagurus.common import Json, call

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages.tokens import ApiToken

application = typer.Typer(help="Tokens that callers over TCP show.", no_args_is_help=True)


@application.command("create")
def create(
    name: Annotated[str, typer.Argument(help="For people: whom or what it is for.")],
    scope: Annotated[
        Literal["monitor", "read", "exec", "admin"], typer.Option(help="monitor (totals only), read, exec or admin.")
    ] = "exec",
    owner: Annotated[str | None, typer.Option(help="Share sandboxes with all tokens of this owner.")] = None,
    days: Annotated[float | None, typer.Option(help="Days until it expires; never when left out.")] = None,
    sandboxes: Annotated[int | None, typer.Option(help="Sandboxes at once.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Cores of all its sandboxes together.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of all its sandboxes, such as 64GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk of all its sandboxes, such as 64GiB.")] = None,
    requests: Annotated[float | None, typer.Option(help="Requests per second.")] = None,
    execs: Annotated[int | None, typer.Option(help="Calls that act, at the same time.")] = None,
    e2b: Annotated[bool, typer.Option("--e2b", help="Print it as clients of E2B accept it.")] = False,
    json: Json = False,
) -> None:
    """Make a token. It is printed this once and kept nowhere."""
    from daemon.auth.access import e2b_spelling
    from sandbox.container.cgroup import parse_bytes
    from sandbox.messages.tokens import NewToken, TokenQuota, TokenRequest

    request = TokenRequest(
        name=name,
        scope=scope,
        owner=owner,
        lifetime=None if days is None else days * 86_400,
        quota=TokenQuota(
            sandboxes=sandboxes,
            cpus=cpus,
            memory=None if memory is None else parse_bytes(memory),
            disk=None if disk is None else parse_bytes(disk),
            requests_per_s=requests,
            execs=execs,
        ),
    )
    made = call(lambda host: host.call("POST", "/v1/tokens", NewToken, request))
    if e2b:
        made.text = e2b_spelling(made.text)
    if json:
        output.as_json(made)
    else:
        print(made.text)


@application.command("ls")
def list_tokens(json: Json = False) -> None:
    """The tokens of this host."""
    from sandbox.messages.tokens import ApiToken

    result = call(lambda host: host.call("GET", "/v1/tokens", list[ApiToken]))
    if json:
        output.as_json(result)
        return
    output.table(
        ("token", "name", "scope", "owner", "created", "expires", "revoked", "quota"),
        [
            (t.id, t.name, t.scope, t.owner, _when(t.created_at), _when(t.expires_at), _when(t.revoked_at), _quota(t))
            for t in result
        ],
    )


@application.command("revoke")
def revoke(tokens: Annotated[list[str], typer.Argument(help="Ids as listed.", metavar="TOKEN...")]) -> None:
    """Refuse tokens from now on. Their sandboxes stay."""

    from sandbox.messages.tokens import ApiToken

    async def work(host: Client) -> None:
        for item in tokens:
            await host.call("DELETE", f"/v1/tokens/{item}", ApiToken)

    call(work)


def _when(moment: float | None) -> str:
    return "" if moment is None else output.when(moment)


def _quota(result: ApiToken) -> str:
    values = {name: getattr(result.quota, name) for name in result.quota.__struct_fields__}
    shown = {name: output.size if name in ("memory", "disk") else "{:g}".format for name in values}
    return ", ".join(f"{name} {shown[name](value)}" for name, value in values.items() if value is not None)
