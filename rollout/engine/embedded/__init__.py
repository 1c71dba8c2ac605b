"""The embedded engine: a small Qwen3 behind vLLM's routes, in a process of its own."""
