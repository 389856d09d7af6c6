"""Watching a training that is not ours: the observer, what it measures, and the folder that grows with the training."""
