#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
python3 - <<'END'
import collections, re
words = collections.Counter(re.findall("[a-z]+", open("/app/text.txt").read().lower()))
wanted = [f"{n} {w}" for w, n in sorted(words.items(), key=lambda each: (-each[1], each[0]))]
assert "6 the" in wanted and open("/app/counts.txt").read().splitlines() == wanted
END
echo 1 > /logs/verifier/reward.txt
