#!/bin/bash
set -e
chown -R root:root /app/vault
find /app/vault -type d -exec chmod 700 {} +
find /app/vault -type f -exec chmod 600 {} +
find /app/vault -type f -name '*.sh' -exec chmod 700 {} +
