#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
python3 - <<'END'
import urllib.request
assert urllib.request.urlopen("http://127.0.0.1:8080/stock.txt", timeout=20).read() == b"turban 3\nmoon 5\n"
END
echo 1 > /logs/verifier/reward.txt
