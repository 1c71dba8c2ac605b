"""What runs inside a vLLM server: this folder is on its PYTHONPATH, nothing else of ours is in its environment."""
