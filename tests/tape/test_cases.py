"""Networks that were once read wrongly, in a folder beside the repository, with the values that they give by hand."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import rankbench
from rankbench.config.keys import ConfigError

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "cases"

pytestmark = [
    pytest.mark.skipif(not FOLDER.exists(), reason="no folder of cases beside the repository"),
    pytest.mark.usefixtures("unpainted"),
]


@pytest.fixture
def case(monkeypatch):
    """case("file:function", analysis, ...): the table of a network in the folder, in float64 unless said."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def table(name, analysis, precision="fp64", **keys):
        file, _, function = name.partition(":")
        module, inputs = getattr(importlib.import_module(file), function or "build")()
        return rankbench.analyze(module, inputs, analysis, precision=precision, **keys)[analysis]

    yield table
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def lengths(table, of="output"):
    """num_paths and mass by length, of one tensor."""
    rows = table[(table["of"] == of) & (table.part == "length")]
    return list(rows.num_paths), rows.mass.to_numpy()


def same(one, other, rtol=1e-9):
    left_out = ("remainder", "run", "model", "frozen")
    for name in [name for name in one.columns if "floor" not in name and name not in left_out]:
        if one[name].dtype == float:
            np.testing.assert_allclose(one[name], other[name], rtol=rtol, atol=rtol, err_msg=name)
        else:
            assert list(one[name]) == list(other[name]), name


def states(table):
    return table[(table["view"] == "all") & table["sublayer"].isin(["input", "layer"])]


def test_layers_that_take_tokens_first(case):
    found = states(case("seqfirst", "residual")).relative_residual
    np.testing.assert_allclose(found, [0.9722, 0.9622, 0.9569, 0.9525], atol=5e-5)


def test_torchs_own_encoder_with_tokens_first(case):
    found = states(case("encoder_seqfirst", "residual")).relative_residual_frobenius
    module, x_NBD = sys.modules["encoder_seqfirst"].build()
    x_NBD = x_NBD.double()
    for layer, value in zip([lambda x: x, *module.double().eval().layers], found, strict=True):
        x_NBD = layer(x_NBD)
        rest_NBD = x_NBD - x_NBD.mean(0)
        by_hand = rest_NBD.norm(dim=(0, 2)) / x_NBD.norm(dim=(0, 2))
        np.testing.assert_allclose(value, by_hand.mean().item(), rtol=1e-12)


@pytest.mark.further
def test_the_paths_of_one_tower(case):
    assert lengths(case("two_towers", "spectrum"))[0] == [1, 8, 16]


@pytest.mark.further
def test_padding_under_two_names(case):
    one, other = (case(f"padding_named_otherwise:{name}", "spectrum") for name in ("build", "build_named"))
    same(one, other)
    np.testing.assert_allclose(lengths(one)[1], [0.858, 0.432, 0.138, 0.015], atol=5e-4)
    for analysis in ("residual", "attention"):
        same(*(case(f"padding_named_otherwise:{name}", analysis) for name in ("build", "build_named")))


@pytest.mark.slow
class TestFamilies:
    """Networks of the transformers library."""

    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("transformers")

    def test_mixing_of_residual_streams_is_no_attention(self, case):
        one, other = (case(name, "spectrum", "fp32") for name in ("streams_v4", "streams_v4_rewritten"))
        for counts, mass in map(lengths, (one, other)):
            assert counts == [1, 8, 16]
            np.testing.assert_allclose(mass, [0.988, 0.239, 0.030], atol=5e-4)

    def test_one_network_with_two_kernels(self, case):
        one, other = (case(f"differential:{name}", "spectrum") for name in ("build", "eager"))
        assert lengths(one)[0] == lengths(other)[0] == [1, 8, 16]
        same(one, other, 1e-6)  # the library's softmax is in float32
        assert list(case("differential:build", "attention").groupby("layer").size()) == [4, 4]

    def test_a_scan_has_no_head(self, case):
        with pytest.raises(ConfigError, match="no attention"):
            case("not_attention:mamba", "attention")

    def test_a_router_is_no_head(self, case):
        assert list(case("not_attention:gpt_oss", "attention", "fp32").groupby("layer").size()) == [4, 4]

    def test_linear_attention_is_no_softmax(self, case):
        table = case("not_attention:qwen3_next", "attention", "fp32")
        assert (table.kind == "softmax").sum() == 4

    def test_logits_behind_a_cast(self, case):
        capped, eager, fused = (case(f"eager_logits:{name}", "attention") for name in ("build", "gpt2", "gpt2_sdpa"))
        assert (capped.largest_logit < 2).all()
        same(eager, fused, 1e-6)  # the library's softmax is in float32
        assert eager.largest_logit.notna().all()

    def test_experts_called_together_and_one_by_one(self, case):
        one, other = (case(f"experts:{name}", "spectrum", "fp32") for name in ("build", "eager"))
        same(one, other, 1e-5)
        assert lengths(one)[0] == [1, 8, 16] and one.remainder.max() < 2e-6
        with pytest.raises(ConfigError, match="precision=fp32"):
            case("experts:build", "spectrum")

    def test_hybrids_have_a_state_for_every_layer(self, case):
        for name, count in (("recurrent_gemma", 4), ("lfm2", 3)):
            table = case(f"hybrid:{name}", "residual")
            assert table.layer.nunique() == count
