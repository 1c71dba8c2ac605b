"""Models: directories in the Hugging Face layout, and what the trainer wants of them."""
