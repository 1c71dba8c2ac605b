#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
test "$(cat /app/greeting.txt)" = 'Hello, sandbox!'
echo 1 > /logs/verifier/reward.txt
