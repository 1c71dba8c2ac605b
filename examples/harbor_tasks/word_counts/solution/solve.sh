#!/bin/bash
set -e
tr -cs 'A-Za-z' '\n' < /app/text.txt | tr A-Z a-z | grep . | LC_ALL=C sort | uniq -c | awk '{print $1, $2}' | LC_ALL=C sort -k1,1nr -k2,2 > /app/counts.txt
