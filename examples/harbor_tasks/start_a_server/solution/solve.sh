#!/bin/bash
set -e
cd /app/site
nohup python3 -m http.server 8080 --bind 127.0.0.1 > /tmp/server.log 2>&1 &
until python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8080')" 2> /dev/null; do sleep 0.1; done
