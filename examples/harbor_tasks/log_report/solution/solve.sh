#!/bin/bash
set -e
python3 - <<'END'
import json
found = {}
for line in open("/app/access.log"):
    _, _, path, status, time = line.split()
    each = found.setdefault(path, {"requests": 0, "errors": 0, "slowest": 0})
    each["requests"] += 1
    each["errors"] += int(status) >= 400
    each["slowest"] = max(each["slowest"], int(time.removesuffix("ms")))
json.dump(found, open("/app/report.json", "w"))
END
