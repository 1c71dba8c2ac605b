#!/bin/bash
set -e
echo '{"port": 9000, "prices": {"moon": 5, "whelk": 7, "turban": 12}}' > /app/settings.json
nohup python3 /app/prices.py > /tmp/prices.log 2>&1 &
until python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:9000/moon')" 2> /dev/null; do sleep 0.1; done
