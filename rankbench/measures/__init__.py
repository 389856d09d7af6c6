"""Formulas, tensors in and numbers out: metrics, path sums, residual coordinates, Lipschitz constants, theorems."""
