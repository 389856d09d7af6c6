"""Exclusive self-attention: as sums of paths, and in the analysis of attention (by hand: test_attention).

Shapes: B batch, N query token, M key token, D width, H head, K head width.
"""

import math

import pytest
import torch

import rankbench
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.measures import lipschitz_of_networks as of_networks
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length
from rankbench.measures.residual_propagation import check
from rankbench.model.network import without


@torch.no_grad()
def test_paths_add_up_with_the_weights_and_the_own_shares_frozen(random_network):
    model, batch = random_network(3, seed=2, exclusive=True, mask="causal")
    assert sums_by_length(model, batch.inputs).remainder().max() < 1e-13
    frozen, plain = FrozenNetwork(model, batch.inputs), FrozenNetwork(model, batch.inputs)
    for (attention, *_), (of_plain, *_) in zip(frozen.layers, plain.layers, strict=True):
        share_BHN = 1 - of_plain.mixing_BHNM.sum(-1)  # rows of P sum to 1, so this is what exclusivity took away
        attention.mixing_BHNM.add_(torch.diag_embed(share_BHN))
    assert frozen.by_length().remainder().min() > 1e-3  # P in its place: the paths of a network that is not this


@pytest.mark.further
def test_outputs_are_orthogonal_to_own_values_in_the_table(random_network):
    for exclusive in (False, True):
        model, batch = random_network(3, seed=3, exclusive=exclusive)
        table = rankbench.analyze(model, batch.inputs, "attention")["attention"]
        assert len(table) == model.num_layers * model.num_heads
        assert (table.value_cosine.abs() < 1e-12).all() == exclusive


def test_what_rests_on_plain_softmax_rows_is_refused(random_network):
    model, _ = random_network(3, seed=4, exclusive=True)
    assert of_networks.layer_of(model.attentions[0], 4) is None
    assert of_networks.attention_bound(model.attentions[0], 4, "2") == math.inf
    cosine, _ = random_network(3, seed=4, exclusive=True, attention="cosine")
    assert of_networks.attention_bound(cosine.attentions[0], 4, "inf") == math.inf
    with pytest.raises(ConfigError, match=r"^model.exclusive=true: residual coordinates follow false alone"):
        check(without(model, norm=True))
    with pytest.raises(ConfigError, match=r"^model.exclusive=true: .*_l2 has no Lipschitz constant once the part"):
        compose("train", "model=contractive_l2", "model.exclusive=true")
