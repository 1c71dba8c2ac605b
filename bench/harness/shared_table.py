"""The daemon with a table that others may write to, as before Linux 6.9: the bench adds the rules of a crowd to it.

What a packet costs does not depend on whose the table is.
"""

from __future__ import annotations

from daemon.network.table import NftTable

if __name__ == "__main__":
    NftTable.ownable = False
    from daemon.app import main

    raise SystemExit(main())
