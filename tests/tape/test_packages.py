"""Designs of public packages that were misread or stopped with an error, written anew."""

import pytest
import torch
from networks_of_others import (
    Attention,
    D,
    H,
    N,
    Sequence,
    drawn,
    states,
    written_out,
)

from rankbench.config.keys import ConfigError
from rankbench.measures.module_reading import read_module
from rankbench.model.modules import Example
from rankbench.tape import record


class WithALoss(Sequence):
    """The states, and one number for all sequences."""

    def forward(self, x):
        return super().forward(x), x.new_zeros(1)


def test_a_result_of_one_number_is_read():
    read = read_module(drawn(WithALoss(Attention(written_out))), Example((states(),)))
    assert [output.shape for output in read.reading.outputs] == [(3, N, D), (1,)]  # of three sequences


def test_weights_may_be_multiplied_by_a_number():
    """As in the iteration for a pseudoinverse, which begins with the weights over their largest sums."""

    def scaled(q, k, v, _):
        p = (q @ k.mT).softmax(-1)
        return p * (p.sum(-2).amax() * p.amax()) @ v

    assert record(drawn(Sequence(Attention(scaled))), states()).paths().by_length == [1, H]


class LearnsInside(Sequence):
    """Attention to which the gradient of a loss is added, as in a memory that learns."""

    def forward(self, x):
        return super().forward(x) + torch.func.grad(lambda y: super(LearnsInside, self).forward(y).square().sum())(x)


def test_gradients_by_torch_func_are_refused():
    with pytest.raises(ConfigError, match=r"within torch\.func"):
        record(drawn(LearnsInside(Attention(written_out))), states())
