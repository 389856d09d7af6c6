"""Attentions other than the plain softmax: what is special to some (formulas: test_attention; paths: test_paths).

Shapes: B batch, N query token, M key token, D width, H head, K head width.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from drawn import initialised, normal
from refusals import refusal

import rankbench
from rankbench.config.keys import ConfigError
from rankbench.measures import lipschitz_of_networks as of_networks
from rankbench.measures.by_layer import metrics_by_layer
from rankbench.measures.recomputed_network import check_recomputed
from rankbench.measures.residual_propagation import check
from rankbench.model.network import without
from rankbench.model.pretrained.parts import BiasedAttention, RotaryAttention
from rankbench.model.weightings import ATTENTIONS, Softmax, Start

NEW = ("sigmoid", "relu", "differential")  # whose rows are no probabilities
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 by another route: a few hundred terms of order 1


def network(seed=0, **changes):
    """A small Transformer on 7 tokens in, 4 classes out."""
    model = initialised(seed, **{"width": 8, "mlp_ratio": 1.5, "length": 6, **changes})
    for number, parameter in enumerate(model.parameters()):
        parameter.data += 0.3 * normal(1000 * seed + number, *parameter.shape)
    return model


@pytest.mark.parametrize("kind", ATTENTIONS)
@torch.no_grad()
def test_rows_are_probabilities_where_it_says_so(kind):
    changes = {"tied_qk": True, "contraction": 1.0} if kind == "contractive_l2" else {}
    attention = network(2, attention=kind, **changes).attentions[0]
    weights_BHNM = attention.observe(normal(1, 3, 6, 8))[1]["weights_BHNM"]
    error = (weights_BHNM.sum(-1) - 1).abs().max().item()
    assert (error < 1e-14) == attention.weighting.stochastic == (kind not in NEW)


@torch.no_grad()
def test_a_kernels_weights_have_at_most_the_rank_of_its_heads():
    """Of 12 tokens and heads of width 2; softmaxes of the same scores have more."""
    ranks = {}
    for kind in ("kernel", "dot"):
        _, tables = network(2, attention=kind, heads=4).attentions[0].observe(3 * normal(1, 3, 12, 8))
        ranks[kind] = torch.linalg.matrix_rank(tables["weights_BHNM"])
    assert ranks["kernel"].max() == 2 and ranks["dot"].min() > 2


def test_a_kernel_of_very_negative_numbers_is_no_division_by_zero():
    """elu(x) + 1, computed as it is written, is 0 in float32 from -17 on, for all keys of a row."""
    q_BHNK = torch.full((1, 1, 3, 2), -30.0)
    weights = ATTENTIONS["kernel"].weights(q_BHNK, q_BHNK, None, SimpleNamespace(temperature=1.0))
    torch.testing.assert_close(weights, torch.full((1, 1, 3, 3), 1 / 3))


def test_the_part_of_the_keys_is_a_quarter_and_grows_with_the_sequence():
    part = ATTENTIONS["sparse"].part
    first, second = part(1, 200, 200), part(2, 200, 200)
    off = ~torch.eye(200, dtype=torch.bool)
    for part_NM in (first, second):  # .25 of 39,800 with a standard error of .002; a query always sees itself
        assert part_NM[off].float().mean().item() == pytest.approx(0.25, abs=0.01) and part_NM.diagonal().all()
    assert (first & second)[off].float().mean().item() == pytest.approx(1 / 16, abs=0.01)  # layers differ
    torch.testing.assert_close(part(1, 7, 7), first[:7, :7])
    torch.testing.assert_close(part(1, 3, 7), first[:3, :7])


@pytest.mark.parametrize("kind", NEW)
def test_what_needs_probabilities_is_nan_or_refused(kind):
    model, inputs = network(10, attention=kind), torch.arange(12).view(2, 6) % 7
    places = metrics_by_layer(model, inputs, torch.Generator())
    rows = [values for axes, values in places if axes["sublayer"] == "weights"]
    signed = kind not in ("sigmoid", "relu")  # else these are metrics of the shares, rows over their sums
    for values in rows:
        for name in ("attention_entropy", "attention_gap_eigenvalue"):
            assert values[name].isnan().all() or not signed
        rank_B = values["attention_effective_rank"]
        assert ((rank_B >= 1) & (rank_B <= 6)).all()
    with pytest.raises(ConfigError, match=f"^model.attention={kind}: residual coordinates follow dot, l2 alone"):
        check(without(model, norm=True))


def test_maps_to_queries_and_keys_are_those_of_the_scores():
    x_BND = normal(11, 1, 4, 8)
    for kind in NEW:
        attention = network(12, attention=kind, temperature=0.5, bias=False).attentions[0]
        q_BHNK, k_BHNK, _ = attention.queries_keys_values(x_BND)
        parts = 2 if kind == "differential" else 1
        maps = of_networks.head_maps(attention)
        assert list(maps) == (["qk_first", "qk_second", "vo"] if parts == 2 else ["qk", "vo"])
        for (left, right), q, k in zip(maps.values(), q_BHNK.chunk(parts, -1), k_BHNK.chunk(parts, -1), strict=False):
            wanted = q @ k.mT / math.sqrt(q.shape[-1]) / 0.5
            torch.testing.assert_close(x_BND @ left @ right.mT @ x_BND.mT, wanted[0], **EXACT)


def test_a_parameter_that_nothing_draws_is_an_error(monkeypatch):
    class Forgetful(type(ATTENTIONS["differential"])):
        def parameters(self, heads):
            return super().parameters(heads) | {"second_k": Start((heads.head_width // 2,), lambda *_: None)}

    monkeypatch.setitem(ATTENTIONS, "differential", Forgetful())
    said = "model.attention=differential: its parameter blocks.0.attention.own.second_k has"
    assert refusal(network, attention="differential").startswith(said)


def test_vectors_of_differential_attention_begin_with_their_deviation():
    own = [attention.own for attention in initialised(width=512, heads=1, attention="differential").attentions]
    numbers = torch.cat([vector for vectors in own for vector in vectors.values()])
    assert numbers.std().item() == pytest.approx(0.1, rel=5 / (2 * len(numbers)) ** 0.5)  # five standard errors


def test_gates_begin_at_a_half():
    for attention in initialised(width=8, attention="gated").attentions:
        gate_BHN = attention.weighting.gate(normal(15, 2, 2, 5, 4), attention)
        assert torch.equal(gate_BHN, torch.full((2, 2, 5), 0.5, dtype=torch.float64))


def test_halves_need_an_even_width():
    with pytest.raises(ConfigError, match=r"^model.head_width=3: model.attention=differential takes the two halves"):
        network(attention="differential", head_width=3)


def test_only_a_heads_own_softmax_is_run_by_path():
    for kind in (BiasedAttention, RotaryAttention):
        assert not kind.weighting.by_head and kind.weighting.stochastic
    assert not BiasedAttention.weighting.fusible and RotaryAttention.weighting.fusible
    assert all(weighting.fusible == isinstance(weighting, Softmax) for weighting in ATTENTIONS.values())
    attention = SimpleNamespace(weighting=RotaryAttention.weighting, score_name="rotary")
    with pytest.raises(ConfigError, match=r"^llama: its scores, rotary, .*take analysis.paths.schemes=\[frozen\]$"):
        check_recomputed(SimpleNamespace(name="llama", shares=[1.0], attentions=[attention]), "paths")


@pytest.mark.further
def test_outputs_are_orthogonal_to_own_values_in_the_table(random_network):
    for exclusive in (False, True):
        model, batch = random_network(3, seed=3, exclusive=exclusive)
        table = rankbench.analyze(model, batch.inputs, "attention")["attention"]
        assert len(table) == model.num_layers * model.num_heads
        assert (table.value_cosine.abs() < 1e-12).all() == exclusive


def test_exclusive_heads_have_no_residual_coordinates(random_network):
    said = refusal(check, without(random_network(3, seed=4, exclusive=True)[0], norm=True))
    assert said.startswith("model.exclusive=true: residual coordinates follow false alone")
