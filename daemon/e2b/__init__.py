"""The API of E2B's clients, served next to our own on the same listeners.

Guarantee: a caller that may not do something by our own API may not do it by this one.

::

    request ─▶ names a sandbox and a port? ──no──▶ control plane   /sandboxes, /snapshots       X-API-KEY
                     │ yes
                     ├─ port 49983 ──▶ envd   /process.Process/…, /filesystem.Filesystem/…, /files   X-Access-Token
                     └─ another ─────▶ proxy to that port of the sandbox's loopback
"""
