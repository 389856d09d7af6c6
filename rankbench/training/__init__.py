"""Training: the loop, the networks of all seeds side by side, batches, optimizers, TensorBoard."""
