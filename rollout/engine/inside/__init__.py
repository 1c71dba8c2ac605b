"""What runs inside a vLLM server: this directory is on its PYTHONPATH, nothing else of ours is in its environment."""
