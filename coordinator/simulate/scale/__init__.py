"""A run on hundreds of GPUs, computed on paper: step time by part, bytes over each link, memory of each GPU."""
