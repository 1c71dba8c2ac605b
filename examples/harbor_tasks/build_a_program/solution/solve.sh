#!/bin/bash
set -e
sed -i 's/print(HEIGHTS\[int(sys.argv\[1\]) % len(HEIGHTS)\]$/&)/' /app/src/tide/__init__.py
mkdir -p /app/dist
sh /app/build.sh
