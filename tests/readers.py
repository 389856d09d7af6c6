"""Small encoders of torch's with a linear read-out, of each token or of each sequence.

Shapes: B sequence, N token, D width, C output.
"""

from torch import nn

D = 8


class Reader(nn.Module):
    """outputs: numbers of each token, or of each sequence if their tokens are pooled; None: one, without an axis.
    named: the name under which they are returned, as by models of the transformers library."""

    def __init__(self, outputs, pooled=False, batch_first=True, named=None):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(D, 2, 16, batch_first=batch_first)
        self.read_out = nn.Linear(D, outputs or 1)
        self.squeezed, self.pooled, self.named = outputs is None, pooled, named

    def forward(self, x, absent=None):
        x = self.encoder(x, src_key_padding_mask=absent)
        y = self.read_out(x.mean(1) if self.pooled else x)
        y = y.squeeze(-1) if self.squeezed else y
        return y if self.named is None else {self.named: y}


def reader(generator, *args, scale=0.3, **kwargs):
    """A Reader with random weights of this standard deviation, in double precision."""
    module = Reader(*args, **kwargs).double().eval().requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(0, scale, generator=generator)
    return module
