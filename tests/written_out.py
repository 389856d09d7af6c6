"""Transformers written out from the papers, in plain torch, and every path of theirs one by one.

Shapes: B batch, N token, D width, H head, L layer, P path, K path length.
"""

import functools
import itertools
import math

import numpy as np
import torch
from by_hand import head_by_hand

from rankbench.measures.frozen_network import FrozenNetwork, sums_by_last_head, sums_by_length, sums_through_heads
from rankbench.measures.paths import sums_of_groups

ROUNDING = 1e-12  # float64, a few hundred additions


def close(got, wanted, scale=None):
    """Equal to rounding, relative to the largest entry (of `scale` where what is compared is a small difference)."""
    got, wanted, scale = (np.asarray(x) for x in (got, wanted, wanted if scale is None else scale))
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ROUNDING * np.abs(scale).max())


class Written:
    """The network written out. What a pass at `tokens` finds (what mixes the values, scales of norms, gates; with
    mlp="source" the MLPs' outputs) is kept, so that later passes are affine in the embedding and in the switches of the
    heads."""

    def __init__(self, model, tokens, mlp="gate"):
        self.model, self.cfg, self.mlp, self.kept = model, model.cfg, mlp, {}
        self.embedding = model.embed(tokens)
        self.heads = list(itertools.product(range(self.cfg.layers), range(self.cfg.heads)))
        self.state = self.run(self.embedding, self.heads)
        self.bias = self.run(torch.zeros_like(self.embedding), self.heads)

    def run(self, embedding, on):
        cfg, x, first_read = self.cfg, embedding, None
        streams = [x] * cfg.streams
        for layer, block in enumerate(self.model.blocks):
            for kind in ("attention", "mlp") if cfg.mlp else ("attention",):
                skip = cfg.skip_scale if (cfg.skip if kind == "attention" else cfg.mlp_skip) else 0.0
                hyper = getattr(block, f"{kind}_streams")
                if hyper is not None:
                    x = sum(weight * stream for weight, stream in zip(hyper.read, streams, strict=True))
                elif kind == "attention":
                    x = x + cfg.embedding_skip * embedding
                key = (layer, kind)
                read = self.norm(x, getattr(block, f"{kind}_norm"), (*key, 1)) if cfg.norm in ("pre", "peri") else x
                if kind == "attention":
                    first_read = read if layer == 0 else first_read
                    y = self.attend(block.attention, read, first_read, layer, on)
                else:
                    y = self.feed(block.mlp, read, key)
                if cfg.norm in ("peri", "ngpt"):
                    y = self.norm(y, getattr(block, f"{kind}_branch_norm"), (*key, 2))
                if hyper is not None:
                    mix = doubly_by_hand(hyper.mix) if cfg.hyper_connections == "doubly_stochastic" else hyper.mix
                    streams = [
                        sum(skip * mix[i, j] * streams[j] for j in range(cfg.streams))
                        + hyper.write[i] * cfg.branch_scale * y
                        for i in range(cfg.streams)
                    ]
                    continue
                x = skip * x + cfg.branch_scale * y
                if cfg.norm in ("post", "ngpt"):
                    x = self.norm(x, getattr(block, f"{kind}_norm"), (*key, 1))
        if cfg.hyper_connections != "none":
            x = sum(streams) / cfg.streams
        return self.norm(x, self.model.last_norm, "last") if cfg.norm in ("pre", "peri") else x

    def attend(self, attention, read, first_read, layer, on):
        y = torch.zeros_like(read) if attention.out.bias is None else attention.out.bias.expand_as(read)
        share = self.cfg.value_residual if layer else 0.0
        for head in range(self.cfg.heads):
            if (layer, head) not in self.kept:
                self.kept[layer, head] = heads_by_hand(attention, self.cfg, read, head)
            mixing_BNM, w, bias, w_o = self.kept[layer, head]
            _, first_w, first_bias, _ = self.kept[0, head]
            values = (1 - share) * (read @ w + bias) + share * (first_read @ first_w + first_bias)
            if (layer, head) in on:
                y = y + mixing_BNM @ values @ w_o
        return y

    def feed(self, mlp, read, key):
        z = mlp.up(read)
        is_relu = self.cfg.activation == "relu"
        gate = self.once((*key, "gate"), z > 0 if is_relu else 0.5 * (1 + torch.erf(z / math.sqrt(2))))
        y = mlp.down(gate * z)
        return self.once((*key, "source"), y) if self.mlp == "source" else y

    def norm(self, x, module, key):
        centred = x - x.mean(-1, keepdim=True) if self.cfg.norm_kind == "layernorm" else x
        scale = self.once((key, "scale"), (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
        normed = centred * scale * (1 if module.weight is None else module.weight)
        normed = normed + (0 if module.shift is None else module.shift)
        is_scaled = self.cfg.norm_scale == "depth" and key[-1] == 1  # in front of a sub-layer or behind it
        return normed / math.sqrt(key[0] + 1) if is_scaled else normed

    def once(self, key, value):
        return self.kept.setdefault(key, value)

    @functools.cache  # noqa: B019, of an object that lives as long as its test
    def linear(self, on):
        """What comes from the embedding, with these heads switched on."""
        return self.run(self.embedding, on) - self.run(torch.zeros_like(self.embedding), on)

    def path(self, choices):
        """The path's own term: the part of the output in which each of its heads is a factor, and no other head is. By
        inclusion and exclusion over its heads."""
        heads = [(layer, choice - 1) for layer, choice in enumerate(choices) if choice]
        term = torch.zeros_like(self.state)
        for number in range(len(heads) + 1):
            for on in itertools.combinations(heads, number):
                term += (-1) ** (len(heads) - number) * self.linear(on)
        return term

    def paths(self):
        """Every path with its term."""
        choices = itertools.product(range(self.cfg.heads + 1), repeat=self.cfg.layers)
        return {path: self.path(path) for path in choices}


def heads_by_hand(attention, cfg, x_BND, number):
    """What a head (from 0) mixes the values of each sequence by, its W_V, b_V and W_O."""
    heads = [head_by_hand(attention, cfg, x_ND, number) for x_ND in x_BND.numpy()]
    return [torch.from_numpy(x) for x in (np.stack([head.mixing for head in heads]), *heads[0][2:])]


def doubly_by_hand(mix):
    positive = mix.exp().clone()
    for _ in range(20):
        for column in range(len(mix)):
            positive[:, column] /= positive[:, column].sum()
        for row in range(len(mix)):
            positive[row] /= positive[row].sum()
    return positive


def assert_sums_are_those_of_all_paths(model, tokens, mlp):
    """The state, each path, and the sums by length, through each head and by last head, against the enumeration."""
    written, frozen = Written(model, tokens, mlp), FrozenNetwork(model, tokens, mlp)
    terms = written.paths()
    largest = torch.stack([*terms.values(), written.bias, written.state])

    def total(wanted):
        return torch.stack([term for path, term in terms.items() if wanted(path)]).sum(0)

    sums = sums_by_length(model, tokens, mlp)
    for state_BND in (model.state(tokens), sums.state_BND):
        close(state_BND, written.state, largest)
    close(sums.bias_BND, written.bias, largest)
    close(model.read_out(sums.by_length_KBND.sum(0) + sums.bias_BND), model(tokens), largest)
    # a ReLU that is dead for a whole sequence, without skip and bias, leaves a state of 0
    assert sums.remainder().shape == (len(tokens),) and (sums.remainder() < ROUNDING * max(1, largest.max())).all()
    for length, sum_BND in enumerate(sums.by_length_KBND):
        close(sum_BND, total(lambda path, length=length: np.count_nonzero(path) == length), largest)
    close(sums_of_groups(frozen, [np.array([path]) for path in terms]), torch.stack(list(terms.values())), largest)
    through_LHBND = sums_through_heads(frozen)
    for layer, head in written.heads:
        wanted = total(lambda path, layer=layer, head=head: path[layer] == head + 1)
        close(through_LHBND[layer, head], wanted, largest)
    close(sums_by_last_head(frozen).sum(0), total(lambda path: True), largest)
