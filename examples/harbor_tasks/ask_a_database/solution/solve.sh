#!/bin/bash
set -e
python3 - > /app/best.txt <<'END'
import sqlite3
db = sqlite3.connect("/app/shop.db")
query = "select name, sum(price * number) as earned from sales join shells on shell = id where day like '2026-02%' group by id"
print(*db.execute(query + " order by earned desc limit 1").fetchone())
END
