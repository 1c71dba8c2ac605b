"""Who runs where: the processes of a run on this machine."""
