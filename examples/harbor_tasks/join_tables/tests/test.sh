#!/bin/bash
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
set -e
test "$(tr -d '\r' < /app/homes.csv | tr '\n' ';')" = 'crab,shell;Anna,moon;Bert,whelk;Kim,turban;Paul,turban;'
echo 1 > /logs/verifier/reward.txt
