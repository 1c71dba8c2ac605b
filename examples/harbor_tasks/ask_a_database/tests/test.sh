#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
python3 - <<'END'
earned = {}
for n in range(200):
    if n % 2:
        name, price = [("moon", 5), ("whelk", 7), ("turban", 12)][n % 3]
        earned[name] = earned.get(name, 0) + price * (1 + n % 4)
best = max(earned, key=earned.get)
assert open("/app/best.txt").read().split() == [best, str(earned[best])]
END
echo 1 > /logs/verifier/reward.txt
