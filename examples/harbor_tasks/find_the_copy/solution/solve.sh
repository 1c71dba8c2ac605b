#!/bin/bash
set -e
for file in /app/boxes/*/content; do
  if [ "$(sha256sum < "$file" | cut -d' ' -f1)" = "$(cat /app/wanted.txt)" ]; then mv "$file" /app/found; fi
done
rm -r /app/boxes
