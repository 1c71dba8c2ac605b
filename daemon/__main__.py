"""``python -m daemon``"""

import sys

from daemon.precedence import hurry

if __name__ == "__main__":
    hurry()  # before all that is imported: sandboxes and agents wait for a daemon that is started again
    from daemon.app import main

    sys.exit(main())
