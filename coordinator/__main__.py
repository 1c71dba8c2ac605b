"""``python -m coordinator``"""

import sys

from coordinator.app import main

if __name__ == "__main__":
    sys.exit(main())
