"""The network of sandboxes: who may reach what, and the links, rules and resolver that hold them to it.

Guarantee (I6): a sandbox sends from its own address only, and reaches nothing but what its policy names; the host,
other sandboxes, link-local and multicast addresses are out of reach under every policy. A sandbox without a network
costs nothing: no link, no rule, no socket.

::

    policy    what is allowed                pure: no I/O, no clock
    names     DNS messages in and out        pure
    ruleset   the table as nft reads it      pure
    table     nftables: sets of elements     netlink, atomic batches
    links     veth pairs, addresses          netlink
    resolver  127.0.0.53 in each namespace   puts an address into the sandbox's set before it answers
    refusals  what was refused, and why      NFLOG, bounded
    networks  the attachment that owns it all
"""
