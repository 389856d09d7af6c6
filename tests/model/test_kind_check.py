"""rankbench.model.kind_check: kinds of models that break a promise, one each."""

from dataclasses import replace

import pytest
import torch
from refusals import refusal

from rankbench.commands.compose import compose
from rankbench.model import KINDS
from rankbench.model.kind_check import check_kind
from rankbench.model.transformer import Transformer
from rankbench.tasks import build_task


class Negated(Transformer):
    def forward(self, *args, **kwargs):
        return -super().forward(*args, **kwargs)


class Shortened(Transformer):
    def embed(self, inputs):
        return super().embed(inputs)[:, 1:]


class Centred(Transformer):
    def embed(self, inputs):
        x_BND = super().embed(inputs)
        return x_BND - x_BND.mean(0)


class Buffered(Transformer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("shift", torch.ones(self.width))


class Undrawn(Transformer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.shift = torch.nn.Parameter(torch.ones(self.width))


class Mapped(Transformer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.map = torch.nn.Linear(self.width, self.width)

    def embed(self, inputs):
        return self.map(super().embed(inputs)).abs()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Negated, "its outputs are not those of its embed, layers and read_out one after another"),
        (Shortened, "gave outputs of shape (3, "),
        (Centred, "a sequence has other outputs alone than beside others"),
        (Buffered, "its buffer shift would lose its value; compute it where it is used"),
        (Undrawn, "its parameter shift has no initial value; hold it in an nn.Linear or an nn.Embedding"),
        (Mapped, ""),
    ],
)
@pytest.mark.parametrize(
    "words", [["task=sorting"], ["task=linear_regression", "model.norm=none", "model.mask=causal"]]
)
def test_a_kind_that_is_not_the_sum_of_its_parts_is_refused(kind, said, words, monkeypatch):
    monkeypatch.setitem(KINDS, "own", kind)
    cfg = compose("train", "model.width=8", "model.heads=2", *words)
    of_kind = replace(cfg.model, kind="own"), build_task(cfg.task)
    if said:
        assert refusal(check_kind, *of_kind).startswith(f"model.kind=own: {said}")
    else:
        check_kind(*of_kind)
