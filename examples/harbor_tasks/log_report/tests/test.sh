#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
python3 - <<'END'
import json
wanted = {}
for n in range(150):
    each = wanted.setdefault("/" + "abc"[n % 3], [0, 0, 0])
    each[0] += 1
    each[1] += n % 5 in (2, 3)
    each[2] = max(each[2], n * 7 % 97)
told = json.load(open("/app/report.json"))
assert {path: [e["requests"], e["errors"], e["slowest"]] for path, e in told.items()} == wanted
END
echo 1 > /logs/verifier/reward.txt
