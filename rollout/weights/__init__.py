"""Versions of a policy's weights: as exact changes, by content, from one cluster to the next."""
