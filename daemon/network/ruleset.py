"""The nftables table of one daemon, as text: everything that does not depend on a single sandbox.

Pure. What is said of one sandbox is an element of a set or map, found by a hash of its address, so a packet costs the
same among one sandbox and a thousand; and elements can be changed together in one atomic batch.

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

MAX_FLOWS = 1024  # connections of one sandbox that the host keeps in mind
EXPLAINED = 5  # refused packets of one sandbox per second that are explained; all are counted
SNAP = 64  # bytes of a refused packet that are looked at

_TABLE = """
add set inet {table} {version} {{ type ipv4_addr; }}

add set inet {table} bound {{ type ifname . ipv4_addr; }}
add map inet {table} modes {{ type ipv4_addr : verdict; }}
add map inet {table} generations {{ type ipv4_addr : mark; }}
add set inet {table} current {{ type ipv4_addr . mark; }}
add set inet {table} cidrs {{ type ipv4_addr . ipv4_addr; flags interval; }}
add set inet {table} cidr_ports {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service; flags interval; }}
add set inet {table} names {{ type ipv4_addr . ipv4_addr; flags timeout; }}
add set inet {table} name_ports {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service; flags timeout; }}
add set inet {table} refused {{ type ipv4_addr; counter; }}

add set inet {table} never {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {never} }}; }}
add set inet {table} private {{ type ipv4_addr; flags interval; auto-merge; elements = {{ {private} }}; }}
add set inet {table} flows {{ type ipv4_addr; flags dynamic; size 65535; }}
add set inet {table} explained {{ type ipv4_addr; flags dynamic; size 65535; }}

add chain inet {table} refuse {{
    ip saddr @refused
    update @explained {{ ip saddr limit rate {explained}/second burst 10 packets }} log group {group} snaplen {snap}
    meta l4proto tcp reject with tcp reset
    reject with icmp admin-prohibited
    counter drop
}}
add chain inet {table} pass {{
    ct mark set ip saddr map @generations accept
}}
add chain inet {table} allow {{
    ip saddr . ip daddr @names goto pass
    ip saddr . ip daddr . meta l4proto . th dport @name_ports goto pass
    ip saddr . ip daddr @cidrs goto pass
    ip saddr . ip daddr . meta l4proto . th dport @cidr_ports goto pass
    goto refuse
}}
add chain inet {table} open {{
    ip daddr != @private goto pass
    ip saddr . ip daddr @cidrs goto pass
    ip saddr . ip daddr . meta l4proto . th dport @cidr_ports goto pass
    goto refuse
}}
add chain inet {table} out {{
    ct state invalid drop
    oifname "pg*" goto refuse
    ct state established,related ip saddr . ct mark @current accept
    add @flows {{ ip saddr ct count over {flows} }} goto refuse
    ip saddr vmap @modes
    goto refuse
}}
add chain inet {table} in {{
    ct state established,related ip daddr . ct mark @current accept
    counter drop
}}

add chain inet {table} guard {{
    type filter hook prerouting priority raw; policy accept;
    iifname != "{prefix}*" accept
    meta nfproto != ipv4 counter drop
    iifname . ip saddr != @bound counter drop
    ip daddr @never goto refuse
    fib daddr type {{ local, broadcast, multicast }} goto refuse
}}
add chain inet {table} input {{
    type filter hook input priority filter - 10; policy accept;
    iifname "{prefix}*" counter drop
}}
add chain inet {table} forward {{
    type filter hook forward priority filter - 10; policy accept;
    iifname "{prefix}*" goto out
    oifname "{prefix}*" goto in
}}
add chain inet {table} nat {{
    type nat hook postrouting priority srcnat; policy accept;
    iifname "{prefix}*" masquerade
}}
"""


def ruleset(table: str, prefix: str, group: int) -> str:
    """What is added to an empty table, in nft's language. `prefix`: of sandboxes' links. `group`: of NFLOG.

    Commands, not a table block: a block says which flags the table has, and `nft` does not know all of them.
    """
    fields = {
        "table": table,
        "prefix": prefix,
        "group": group,
        "flows": MAX_FLOWS,
        "explained": EXPLAINED,
        "snap": SNAP,
        "never": ", ".join(map(str, (*NEVER, *METADATA))),
        "private": ", ".join(map(str, PRIVATE)),
    }
    return _TABLE.format(version=version(table, prefix, group), **fields)


def version(table: str, prefix: str, group: int) -> str:
    """A name that changes with the rules: a daemon finds out whether the table there is its own."""
    described = f"{_TABLE}{table}{prefix}{group}{MAX_FLOWS}{EXPLAINED}{SNAP}{NEVER}{METADATA}{PRIVATE}"
    return f"version_{hashlib.sha256(described.encode()).hexdigest()[:12]}"
