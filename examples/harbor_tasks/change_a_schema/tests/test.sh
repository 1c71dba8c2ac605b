#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
python3 - <<'END'
import sqlite3
db = sqlite3.connect("/app/shop.db")
sold = {n: 0 for n in (1, 2, 3)}
for n in range(200):
    sold[1 + n % 3] += 1 + n % 4
assert dict(db.execute("select id, sold from shells")) == sold
assert list(db.execute("select id, name, price from shells")) == [(1, "moon", 5), (2, "whelk", 7), (3, "turban", 12)]
db.execute("insert into sales values (2, 11, '2026-03-01')")
assert dict(db.execute("select id, sold from shells"))[2] == sold[2] + 11
assert db.execute("select count(*) from sales").fetchone() == (201,)
END
echo 1 > /logs/verifier/reward.txt
