"""Batches of sequences of different lengths: shorter sequences end in absent tokens, -1."""

from torch import Tensor


class Padded:
    """Mixin for a network that accepts such batches if `padded` is true."""

    padded: bool

    def present(self, inputs: Tensor) -> Tensor | None:
        """Mask of the present tokens, (B, N) bool; None for a network without padding."""
        return inputs >= 0 if self.padded else None

    def lengths(self, inputs: Tensor) -> Tensor | None:
        """Number of tokens of each sequence, (B,); None for a network without padding."""
        present_BN = self.present(inputs)
        return None if present_BN is None else present_BN.sum(-1)
