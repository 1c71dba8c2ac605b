"""Jobs: runs that wait in a queue until Ray has room for them, and run until they end."""
