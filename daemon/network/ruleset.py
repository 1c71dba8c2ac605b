"""The nftables table of one daemon, as text: everything that does not depend on a single sandbox.

Owns: chains, rules and the declarations of the sets. Does not own: their elements (:mod:`daemon.network.table`).
Pure. What is said of one sandbox is an element of a set or map, found by a hash of its address, so a packet costs
the same among one sandbox and a thousand; and elements can be changed together in one atomic batch.

::

    prerouting raw   guard     from a sandbox's link: its own address, or dropped
                               to the host itself, link-local, multicast, another sandbox: refused
    forward          out       under the policy of today already? pass. Too many connections? refuse.
                               else the policy's mode decides ▸ allow | open ▸ pass | refuse
                     in        replies under the policy of today, nothing else
    input                      nothing (guard has refused it already)
    postrouting      nat       masquerade

A connection carries the generation of the policy that accepted it as its mark. A changed policy has another
generation, so its connections are judged again, and nothing has to be searched for.
"""

from __future__ import annotations

import hashlib

from daemon.network.policy import METADATA, NEVER, PRIVATE

FLOWS_MOST = 1024  # connections of one sandbox that the host keeps in mind
EXPLAINED = 5  # refused packets of one sandbox per second that are explained; all are counted
SNAP = 64  # bytes of a refused packet that are looked at

_TABLE = """
table inet {table} {{
    set {version} {{ type ipv4_addr; }}

    set bound {{ type ifname . ipv4_addr; }}
    map modes {{ type ipv4_addr : verdict; }}
    map generations {{ type ipv4_addr : mark; }}
    set current {{ type ipv4_addr . mark; }}
    set cidrs {{ type ipv4_addr . ipv4_addr; flags interval; }}
    set cidr_ports {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service; flags interval; }}
    set names {{ type ipv4_addr . ipv4_addr; flags timeout; }}
    set name_ports {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service; flags timeout; }}
    set refused {{ type ipv4_addr; counter; }}

    set never {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {never} }}; }}
    set private {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {private} }}; }}
    set flows {{ type ipv4_addr; flags dynamic; size 65535; }}
    set explained {{ type ipv4_addr; flags dynamic; size 65535; }}

    chain guard {{
        type filter hook prerouting priority raw; policy accept;
        iifname != "{prefix}*" accept
        meta nfproto != ipv4 counter drop
        iifname . ip saddr != @bound counter drop
        ip daddr @never goto refuse
        fib daddr type {{ local, broadcast, multicast }} goto refuse
    }}
    chain input {{
        type filter hook input priority filter - 10; policy accept;
        iifname "{prefix}*" counter drop
    }}
    chain forward {{
        type filter hook forward priority filter - 10; policy accept;
        iifname "{prefix}*" goto out
        oifname "{prefix}*" goto in
    }}
    chain nat {{
        type nat hook postrouting priority srcnat; policy accept;
        iifname "{prefix}*" masquerade
    }}

    chain out {{
        ct state invalid drop
        oifname "pg*" goto refuse
        ct state established,related ip saddr . ct mark @current accept
        add @flows {{ ip saddr ct count over {flows} }} goto refuse
        ip saddr vmap @modes
        goto refuse
    }}
    chain allow {{
        ip saddr . ip daddr @names goto pass
        ip saddr . ip daddr . meta l4proto . th dport @name_ports goto pass
        ip saddr . ip daddr @cidrs goto pass
        ip saddr . ip daddr . meta l4proto . th dport @cidr_ports goto pass
        goto refuse
    }}
    chain open {{
        ip daddr != @private goto pass
        ip saddr . ip daddr @cidrs goto pass
        ip saddr . ip daddr . meta l4proto . th dport @cidr_ports goto pass
        goto refuse
    }}
    chain pass {{
        ct mark set ip saddr map @generations accept
    }}
    chain refuse {{
        ip saddr @refused
        update @explained {{ ip saddr limit rate {explained}/second burst 10 packets }} log group {group} snaplen {snap}
        meta l4proto tcp reject with tcp reset
        reject with icmp admin-prohibited
        counter drop
    }}
    chain in {{
        ct state established,related ip daddr . ct mark @current accept
        counter drop
    }}
}}
"""


def ruleset(table: str, prefix: str, group: int) -> str:
    """The table in nft's language. `prefix`: of the names of sandboxes' links. `group`: of NFLOG."""
    fields = {
        "table": table,
        "prefix": prefix,
        "group": group,
        "flows": FLOWS_MOST,
        "explained": EXPLAINED,
        "snap": SNAP,
        "never": ", ".join(map(str, (*NEVER, *METADATA))),
        "private": ", ".join(map(str, PRIVATE)),
    }
    return _TABLE.format(version=version(table, prefix, group), **fields)


def version(table: str, prefix: str, group: int) -> str:
    """A name that changes with the rules: a daemon finds out whether the table there is its own."""
    described = f"{_TABLE}{table}{prefix}{group}{FLOWS_MOST}{EXPLAINED}{SNAP}{NEVER}{METADATA}{PRIVATE}"
    return f"version_{hashlib.sha256(described.encode()).hexdigest()[:12]}"
