"""What benches share: a daemon of their own, an internet of their own, what is left behind."""
