"""Sequences of several lengths in one batch: shorter ones end in absent tokens, -1."""

from torch import Tensor


class Padded:
    """A network that may be given such batches, where `padded` says so."""

    padded: bool

    def present(self, inputs: Tensor) -> Tensor | None:
        """Which tokens are there, (B, N) bool; None where all are."""
        return inputs >= 0 if self.padded else None

    def lengths(self, inputs: Tensor) -> Tensor | None:
        """How many tokens each sequence has, (B,); None where all are there."""
        return self.present(inputs).sum(-1) if self.padded else None
