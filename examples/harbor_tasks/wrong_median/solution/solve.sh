#!/bin/bash
set -e
cat > /app/median.py <<'END'
import statistics
import sys

print(f"{statistics.median(map(float, sys.argv[1:])):g}")
END
