"""What may be dumped, and what may be restored: images are an adversary's."""
