"""``python -m daemon``"""

import os
import sys

from daemon.precedence import hurry

if __name__ == "__main__":
    hurry()  # before all that is imported: sandboxes and agents wait for a daemon that is started again
    if os.geteuid() == 0:  # any other gets an error
        from daemon.ahead import begin

        begin()
    from daemon.app import main

    sys.exit(main())
