"""usage: wait_redis.py SECONDS RESULTS: a client waits for a list of a redis server; see ../waits.c

The server waits until an instant of the wall clock, so that measures.
"""

import os
import socket
import subprocess
import sys
import time

SECONDS, RESULTS = float(sys.argv[1]), sys.argv[2]
PORT = 6399
subprocess.Popen(["redis-server", "--port", str(PORT), "--save", "", "--dir", "/tmp"], stdout=subprocess.DEVNULL)
while True:
    try:
        client = socket.create_connection(("127.0.0.1", PORT))
        break
    except OSError:
        time.sleep(0.05)
began = time.time()
client.sendall(f"BLPOP nothing {SECONDS:g}\r\n".encode())
good = client.recv(100) == b"*-1\r\n"
ended = time.time()
lasted = int(1e6 * (ended - began))
file = os.open(RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(file, f"redis_blpop main {int(good)} 0 {lasted} {int(1e6 * ended)}\n".encode())
