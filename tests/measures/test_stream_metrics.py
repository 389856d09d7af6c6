"""rankbench.measures.streams against closed forms, and against the streams of a network one by one."""

import numpy as np
import pytest
import torch
from drawn import generator, initialised, normal

import rankbench
from rankbench.measures.streams import mixing_metrics, stream_residual, streams_by_layer

S, LAYERS = 3, 2
# Float64: eps = 2.2e-16, a few dozen operations on numbers of size 1
ROUNDING = 1e-13


def network(**keys):
    """A Transformer with hyper-connections, and tokens."""
    model = initialised(layers=LAYERS, **{"norm": "pre", "hyper_connections": "free", "streams": S, **keys})
    return model.requires_grad_(False), torch.randint(7, (4, 5), generator=generator())


def connections(model):
    return [getattr(block, f"{kind}_streams") for block in model.blocks for kind in ("attention", "mlp")]


def test_plain_skips_keep_the_streams_equal():
    rows = list(streams_by_layer(*network(stream_deviation=0.0)))
    assert [place for place, _ in rows] == [(layer, kind) for layer in (1, 2) for kind in ("attention", "mlp")]
    for _, (residual_B, of_mixing) in rows:
        assert residual_B.max() < ROUNDING
        assert of_mixing == pytest.approx({"mixing_from_identity": 0, "mixing_from_mean": 1, "mixing_gain": 1})


def test_the_product_of_doubly_stochastic_matrices_has_gain_1():
    model, inputs = network(hyper_connections="doubly_stochastic", stream_deviation=0.1)
    product_SS = torch.eye(S, dtype=torch.float64)
    rows = zip(connections(model), streams_by_layer(model, inputs), strict=True)
    for connection, (_, (residual_B, of_mixing)) in rows:
        mix_SS = connection.streams(1.0).mix
        for axis in (0, 1):  # Sinkhorn's 20 steps leave a little
            torch.testing.assert_close(mix_SS.sum(axis), torch.ones(S, dtype=torch.float64), rtol=0, atol=1e-9)
        product_SS = mix_SS @ product_SS
        assert of_mixing["mixing_gain"] == pytest.approx(1, abs=1e-9)
        assert of_mixing["mixing_gain"] == pytest.approx(torch.linalg.svdvals(product_SS)[0].item())
        assert 0 < of_mixing["mixing_from_mean"] < 1
        assert residual_B.min() > 1e-3


def test_mixing_to_the_mean_makes_the_streams_equal():
    model, inputs = network(stream_deviation=0.3)
    for connection in connections(model):
        connection.mix.fill_(1 / S)
        connection.write.fill_(1)
    for _, (residual_B, of_mixing) in streams_by_layer(model, inputs):
        assert residual_B.max() < ROUNDING
        assert of_mixing == pytest.approx({"mixing_from_identity": 1, "mixing_from_mean": 0, "mixing_gain": 1})


def test_gain_and_distances_of_matrices_that_do_not_keep_sizes():
    mix_SS = torch.diag(torch.tensor([3.0, 1.0, -1.0], dtype=torch.float64))
    values = mixing_metrics(mix_SS, mix_SS @ mix_SS)
    assert (values["mixing_from_identity"], values["mixing_gain"]) == pytest.approx((2, 9))


def test_the_residual_of_streams_token_by_token():
    x_BNSD = normal(0, 2, 4, S, 5)
    counted_BN = torch.tensor([[True, True, False, True], [False, True, True, False]])
    for x_NSD, counted_N, got in zip(x_BNSD, counted_BN, stream_residual(x_BNSD, counted_BN), strict=True):
        ratios = []
        for x_SD in x_NSD[counted_N]:
            orthogonal = torch.eye(S, dtype=torch.float64) - 1 / S
            ratios.append((orthogonal @ x_SD).norm() / x_SD.norm())
        assert got.item() == pytest.approx(torch.stack(ratios).mean().item(), abs=ROUNDING)
    x_BNSD[~counted_BN] = 0  # absent tokens may hold anything
    assert torch.equal(stream_residual(x_BNSD, counted_BN), stream_residual(x_BNSD, counted_BN).nan_to_num(-1))


@pytest.mark.parametrize("keys", [{}, {"value_residual": 0.5}, {"embedding_skip": 0.5}])
def test_other_networks_have_no_mixing_matrices(keys):
    assert list(streams_by_layer(*network(hyper_connections="none", **keys))) == []


def test_the_table_of_residual_has_a_row_for_each_matrix():
    words = ["task.length=4", "model.layers=2", "model.norm=pre", "model.stream_deviation=0.1"]
    words += ["model.hyper_connections=doubly_stochastic"]
    variants = ["full", "no_mlp", "no_skip"]
    table = rankbench.analyze(words, "residual", variants=variants, sequences=3)["residual"]
    measured = table.dropna(subset="mixing_gain")
    assert measured.groupby("variant").size().to_dict() == {"full": 4, "no_mlp": 2}  # without skips no streams
    assert set(measured.sublayer) == {"attention", "mlp"} and (measured.stream_residual_sd > 0).all()
    np.testing.assert_allclose(measured.mixing_gain, 1, atol=1e-9)
