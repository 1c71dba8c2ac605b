#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
python3 - <<'END'
import urllib.request
for shell, price in {"moon": b"5", "whelk": b"7", "turban": b"12"}.items():
    assert urllib.request.urlopen(f"http://127.0.0.1:9000/{shell}", timeout=20).read() == price
END
echo 1 > /logs/verifier/reward.txt
