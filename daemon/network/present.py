"""Which tables and chains there are in this network namespace, as netlink lists them.

The program ``nft`` is not used: before it lists anything it reads what there is, and dies over a table that a newer one
made with what it does not know. Nothing here reads the content of a table that is not ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandbox.errors import Unsupported

FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
INET = 1
FORWARD = 2  # the hook's number, of inet, ip, ip6 and bridge
HOOKED = ("inet", "ip", "ip6", "bridge")
DROP = 0


@dataclass(frozen=True)
class Chain:
    """A chain. `forward`: it judges what the host passes on; `drops`: what none of its rules takes."""

    family: str
    table: str
    name: str
    forward: bool = False
    drops: bool = False


def tables() -> list[tuple[str, str]]:
    """Family and name of each."""
    from pyroute2.netlink.nfnetlink import nftsocket

    result = _listed(nftsocket.nft_table_msg(), nftsocket.NFT_MSG_GETTABLE)
    return [(_family(item), item.get_attr("NFTA_TABLE_NAME")) for item in result]


def chains() -> list[Chain]:
    """All of them."""
    from pyroute2.netlink.nfnetlink import nftsocket

    return [_chain(item) for item in _listed(nftsocket.nft_chain_msg(), nftsocket.NFT_MSG_GETCHAIN)]


def has_set(table: str, name: str) -> bool:
    """Whether the inet table by this name has such a set."""
    from pyroute2.netlink.nfnetlink import nftsocket

    request = nftsocket.nft_set_msg()
    request["attrs"] = [("NFTA_SET_TABLE", table)]
    result = _listed(request, nftsocket.NFT_MSG_GETSET, INET)
    return any((item.get_attr("NFTA_SET_TABLE"), item.get_attr("NFTA_SET_NAME")) == (table, name) for item in result)


def _listed(request: Any, kind: int, family: int = 0) -> Iterator[Any]:
    from pyroute2.netlink import NLM_F_DUMP, NLM_F_REQUEST
    from pyroute2.netlink.exceptions import NetlinkError
    from pyroute2.netlink.nfnetlink import nftsocket

    try:
        with nftsocket.NFTSocket(nfgen_family=family) as reader:
            yield from reader.request_get(request, kind, msg_flags=NLM_F_REQUEST | NLM_F_DUMP)
    except NetlinkError as error:
        raise Unsupported(f"nf_tables: {os.strerror(error.code)}", hint="see `pagurus doctor`") from None


def _family(message: Any) -> str:
    number = message["nfgen_family"]
    return FAMILIES.get(number, f"family {number}")


def _chain(message: Any) -> Chain:
    family = _family(message)
    hook = message.get_nested("NFTA_CHAIN_HOOK", "NFTA_HOOK_HOOKNUM")
    return Chain(
        family,
        message.get_attr("NFTA_CHAIN_TABLE"),
        message.get_attr("NFTA_CHAIN_NAME"),
        forward=hook == FORWARD and family in HOOKED,
        drops=message.get_attr("NFTA_CHAIN_POLICY") == DROP,
    )
