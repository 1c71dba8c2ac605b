#!/bin/bash
set -e
echo 'Hello, sandbox!' > /app/greeting.txt
