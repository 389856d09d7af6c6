"""Formulas, tensors in and numbers out: norms, metrics, path sums, residual coordinates, Lipschitz constants."""
