#!/bin/bash
set -e
python3 - <<'END'
import csv
names = {row["number"].strip(): row["shell"] for row in csv.DictReader(open("/app/shells.csv"))}
rows = [(row["crab"], row["number"].strip()) for row in csv.DictReader(open("/app/crabs.csv"))]
with open("/app/homes.csv", "w", newline="") as file:
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["crab", "shell"])
    out.writerows(sorted((crab, names[number]) for crab, number in rows if number in names))
END
