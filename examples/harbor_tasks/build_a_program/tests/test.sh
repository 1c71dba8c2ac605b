#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
test "$(python3 /app/dist/tide.pyz 3)" = 7
test "$(python3 /app/dist/tide.pyz 10)" = 5
rm -r /app/dist && mkdir /app/dist && sh /app/build.sh
test "$(python3 /app/dist/tide.pyz 1)" = 2
echo 1 > /logs/verifier/reward.txt
