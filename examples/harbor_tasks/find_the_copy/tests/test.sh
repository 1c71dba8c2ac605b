#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
test "$(cat /app/found)" = 'shell number 6'
test ! -e /app/boxes/1 && test ! -e /app/boxes/9
echo 1 > /logs/verifier/reward.txt
