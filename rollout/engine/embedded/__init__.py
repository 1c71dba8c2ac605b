"""The embedded engine: our small Qwen3, or a model of transformers, behind vLLM's routes in a process of its own."""
