"""The API of E2B's clients, served next to our own on the same listeners.

Owns: its routes, their spelling, the way from a request to a sandbox. Does not own: any behaviour: a sandbox is made,
used and ended as by :mod:`daemon.api`, by the same gate. Guarantee: a caller that may not do something by our own API
may not do it by this one.

::

    request ─▶ names a sandbox and a port? ──no──▶ control plane   /sandboxes, /snapshots       X-API-KEY
                     │ yes
                     ├─ port 49983 ──▶ envd   /process.Process/…, /filesystem.Filesystem/…, /files   X-Access-Token
                     └─ another ─────▶ proxy to that port of the sandbox's loopback
"""
