"""What a researcher writes, and what comes with it."""
