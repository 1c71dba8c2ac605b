"""``pagurus net``: what a sandbox may reach, what it did, what it was refused; and changing it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import Json, SandboxName, call
from sandbox.errors import Invalid

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages import Network, NetworkStatus

verbs = typer.Typer()

Mode = Annotated[str | None, typer.Option("--network", help="none, allow or open.", metavar="MODE")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", help="A name, *.name, address or network, perhaps with :ports. May be repeated.", metavar="WHAT"
    ),
]
CredentialNames = Annotated[
    list[str] | None,
    typer.Option("--credential", help="Of `pagurus credential put`. May be repeated.", metavar="NAME"),
]


def policy(mode: str | None, allow: list[str] | None, credentials: list[str] | None = None) -> Network | None:
    """The policy that the options describe; None when there are none. ``--allow`` or ``--credential`` alone mean mode
    allow."""
    from sandbox.messages import Network

    if mode is None and not allow and not credentials:
        return None
    if mode not in (None, "none", "allow", "open"):
        raise Invalid(f"there is no network {mode}", hint="--network is none, allow or open")
    named = [item for item in allow or () if not is_address(item)]
    cidrs = [item for item in allow or () if is_address(item)]
    if mode == "none" and not allow and not credentials:
        return Network.none()
    if mode == "open" and not named:
        return Network.open(cidrs=cidrs, credentials=credentials or ())
    if mode in (None, "allow"):
        return Network.allow(names=named, cidrs=cidrs, credentials=credentials or ())
    raise Invalid(f"--network {mode} does not go with this", hint="use none alone, allow or open; open takes networks")


def is_address(text: str) -> bool:
    """Whether an entry is an address or network, not a name."""
    return re.match(r"\d+\.\d+\.\d+\.\d+(/\d+)?(:|$)", text) is not None


@verbs.command()
def net(
    sandbox: SandboxName,
    network: Mode = None,
    allow: Allow = None,
    credential: CredentialNames = None,
    json: Json = False,
) -> None:
    """Show the network of a sandbox, or change its policy. Also while it runs."""
    target = policy(network, allow, credential)

    async def work(host: Client) -> NetworkStatus:
        facet = (await host.get(sandbox)).network
        return await (facet.status() if target is None else facet.set(target))

    status = call(work)
    if json:
        output.as_json(status)
        return
    reach, counted = status.network, status.counters
    everything = "everything public" if reach.mode == "open" else "nothing"
    output.table(
        ("network", reach.mode),
        [
            ("address", status.address),
            ("may reach", " ".join((*reach.names, *reach.cidrs)) or everything),
            *([("credentials", " ".join(reach.credentials))] if reach.credentials else []),
            ("packets", f"{counted.packets_out} out, {counted.packets_in} in, {counted.packets_refused} refused"),
            ("bytes", f"{output.size(counted.bytes_out)} out, {output.size(counted.bytes_in)} in"),
            ("names", f"{counted.names_allowed} asked for, {counted.names_refused} refused"),
        ],
    )
    if status.refusals:
        output.table(
            ("refused", "times", "last", "why"),
            [(item.what, item.count, output.when(item.at), item.why) for item in status.refusals],
        )
