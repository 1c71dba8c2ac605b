"""``python -m daemon``"""

import sys

from daemon.app import main

if __name__ == "__main__":
    sys.exit(main())
