"""``pagurus``: one program for people and scripts.

Each verb parses its arguments and calls one library method; heavy rooms are imported only by the verb that
needs them. Every listing takes ``--json``.

Exit codes: 0 done; 1 the thing asked for failed (one line on stderr says what to do); 2 wrong usage;
``exec`` and ``run`` exit with the command's own code, 124 when it was cut off by its time limit.
"""

from __future__ import annotations

import sys

from pagurus.cli import application
from sandbox.errors import PagurusError


def main() -> None:
    """Entry of the console script."""
    try:
        application()
    except PagurusError as error:
        print(f"pagurus: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except BrokenPipeError:
        raise SystemExit(141) from None


if __name__ == "__main__":
    main()
