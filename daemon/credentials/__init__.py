"""Headers that requests of sandboxes get on their way out, whose values no sandbox ever sees.

::

    program ▸ resolver: the host is 127.0.0.54 ▸ TLS to a socket of the daemon there, by a certificate of this host
            ▸ its request gets the header ▸ TLS to the host itself
"""
