"""The parts of the controller: attempts, groups and trees of trajectories, waiting batches, refusing parts."""
