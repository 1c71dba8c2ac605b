"""Headers that requests of sandboxes get on their way out, whose values no sandbox ever sees.

::

    program ▸ resolver: the host is 127.0.0.54 ▸ TLS to a socket of the daemon there, by a certificate of this host
            ▸ its request gets the header ▸ TLS to the host itself

Owns: the values (:mod:`daemon.credentials.store`), the authority whose certificates sandboxes with a credential trust
(:mod:`daemon.credentials.authority`), the sockets in their network namespaces (:mod:`daemon.credentials.service`) and
what passes through them (:mod:`daemon.credentials.passing`). Does not own: which credentials a sandbox has (its network
policy), the resolver (:mod:`daemon.network.resolver`).
"""
