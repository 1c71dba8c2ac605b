exec python3 /programs/app.py store "$PORT"
