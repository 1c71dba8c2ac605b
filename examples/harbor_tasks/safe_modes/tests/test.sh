#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
test "$(cd /app/vault && find . -printf '%p %m %U\n' | LC_ALL=C sort | tr '\n' ';')" = '. 700 0;./deep 700 0;./deep/note 600 0;./deep/run.sh 700 0;./key 600 0;'
echo 1 > /logs/verifier/reward.txt
