#!/bin/sh
set -e
cd /app
python3 -m compileall -q src
python3 -m zipapp src -o dist/tide.pyz -m tide:main
