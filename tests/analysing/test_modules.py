"""rankbench.analyses on torch modules that are not ours: what is found in them, and what is refused."""

import re
import weakref
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import scipy
import torch
import torch.nn.functional as F
from breadth import some
from by_hand import relative_residual
from command_line import rankbench as called
from command_line import refused, succeeds
from refusals import refusal
from safetensors.torch import save_file
from torch import nn

import rankbench
from rankbench.analyses import ANALYSES
from rankbench.analysing.modules import BUILT
from rankbench.analysing.subjects import fresh_subjects
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.measures import module_reading
from rankbench.measures.attention_matrices import ATTENTION_METRICS
from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.module_paths import floors_of_parts, paths_of
from rankbench.measures.module_reading import read_module
from rankbench.measures.module_states import layers_of, states_of
from rankbench.measures.norms import composite_norm
from rankbench.measures.rounding import floors_of_sums, num_passes, side_by_side
from rankbench.model.modules import Example, as_example, build, read_inputs, unpacked
from rankbench.model.network import run
from rankbench.runs.machine import Machine
from rankbench.tape import record
from rankbench.tape.read import read
from rankbench.tape.tags import Visit

pytestmark = pytest.mark.usefixtures("unpainted")


class Head(nn.Module):
    """A causal head as students write it, one module a head."""

    def __init__(self, width, head_width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, head_width, bias=False) for _ in range(3))

    def weights(self, x):
        scores = self.q(x) @ self.k(x).mT * self.q.out_features**-0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)

    def forward(self, x):
        return self.weights(x) @ self.v(x)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.out(torch.cat([head(y) for head in self.heads], -1))
        return x + self.mlp(x)


class Language(nn.Module):
    def __init__(self, tokens=11, width=12, heads=3, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, tokens))

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


@pytest.fixture
def language():
    torch.manual_seed(0)
    return Language().double().eval().requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(11, (5, 7), generator=torch.Generator().manual_seed(1))


def fresh(*words):
    cfg = compose("analyze", *words)
    return fresh_subjects(cfg, Machine.prepare(cfg))


def next_token(ids):
    return torch.cat([ids[:, 1:], torch.full((len(ids), 1), -1)], 1)


# --- what is found ---------------------------------------------------------------------------------------------------


def test_layers_and_states_of_heads_side_by_side(language, ids):
    read = read_module(language, Example((ids,)))
    layers = layers_of(read)
    assert layers == [Visit(f"blocks.{index}", 0) for index in range(3)]
    x = language.embedding(ids)
    expected = [x]
    for block in language.blocks:
        expected.append(block(expected[-1]))
    for state, wanted in zip(states_of(read, layers, read.example), expected, strict=True):
        assert torch.equal(state, wanted)
    assert sorted(read.first.values()) == [(depth, head) for depth in (1, 2, 3) for head in (1, 2, 3)]
    paths = paths_of(read)
    assert paths.by_length == [1, 9, 27, 27] and set(paths.through.values()) == {16}


class Shared(nn.Module):
    """One layer, run several times, with torch's own attention."""

    def __init__(self, layers=4):
        super().__init__()
        self.layer, self.layers = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers

    def forward(self, x):
        for _ in range(self.layers):
            x = self.layer(x)
        return x


def test_a_shared_layer_counts_each_time_it_runs():
    module = Shared().double().eval().requires_grad_(False)
    layers = layers_of(read_module(module, Example((torch.randn(2, 5, 8, dtype=torch.float64),))))
    assert layers == [Visit("layer", time) for time in range(4)]


def test_cross_attention_lies_behind_the_encoder():
    torch.manual_seed(0)
    module = nn.Transformer(8, 2, 2, 1, 16, batch_first=True).double().eval().requires_grad_(False)
    x, y = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    read = read_module(module, Example((x, y)))
    # two layers of the encoder, the decoder's own attention beside the first, its cross-attention behind the second
    assert [(call.depth, call.lead.heads, call.is_cross) for call in read.heads] == [
        (1, 2, False), (2, 2, False), (1, 2, False), (3, 2, True),
    ]  # fmt: skip
    # the decoder's own heads or none, (1, 2); or paths of the encoder, (1, 4, 4), and then the cross-attention's heads
    assert paths_of(read).by_length == [1, 2 + 2, 8, 8]


# --- the tables ------------------------------------------------------------------------------------------------------


def test_spectrum_against_single_forward_passes(language, ids):
    every = rankbench.analyze(language, {"ids": ids, "targets": next_token(ids)}, "spectrum")["spectrum"]
    assert every.of.unique().tolist() == ["states", "logits", "output"]
    table, logits = (every[(every.of == of) & (every.part == "length")] for of in ("output", "logits"))
    for column in ("loss_upto", "accuracy_upto", "num_paths"):  # a softmax does not see the logits' mean
        assert logits[column].to_numpy() == pytest.approx(table[column].to_numpy(), rel=1e-12)
    assert table.path_length.tolist() == [0, 1, 2, 3] and table.num_paths.tolist() == [1, 9, 27, 27]
    assert table.remainder.max() < 1e-14
    assert set(table.frozen) == {"attention weights; scale of the norm; act(z)/z"}
    logits = language(ids)
    losses = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)
    assert table.whole_loss.to_numpy() == pytest.approx(losses.mean().item(), rel=1e-12)
    assert table.share.sum() == pytest.approx(1, abs=1e-12)
    assert (table.mass_low < table.mass).all() and (table.mass < table.mass_high).all()
    # without heads, the logits of paths of length 0: heads cut out, norms and gates as they were
    scales, x = [], language.embedding(ids)
    for block in language.blocks:
        middle = x + block.out(torch.cat([head(block.norm(x)) for head in block.heads], -1))
        scales.append((middle, block.mlp))
        x = middle + block.mlp(middle)
    y = language.embedding(ids)
    for block, (middle, mlp) in zip(language.blocks, scales, strict=True):
        y = y + block.out.bias
        hidden = mlp[1](mlp[0](middle))
        gate = F.gelu(hidden) / hidden
        y = y + mlp[3](gate * mlp[1](frozen_norm(mlp[0], y, middle)))
    zero = language.head[1](frozen_norm(language.head[0], y, x))
    mass = zero.flatten(1).norm(dim=1) / logits.flatten(1).norm(dim=1)
    assert table.mass.iloc[0] == pytest.approx(mass.mean().item(), rel=1e-10)
    # pairs of sequences are drawn: their losses differ far more than those of one sequence with and without heads
    of_zero = F.cross_entropy(zero[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)
    pairs = of_zero.detach().double().numpy(), losses.detach().double().numpy()
    how = {"n_resamples": 4000, "method": "percentile", "paired": True, "rng": np.random.default_rng(1)}
    ends = scipy.stats.bootstrap(
        pairs, lambda first, second, axis: (first - second).mean(axis), **how
    ).confidence_interval
    row = table.iloc[0]
    assert row.excess_loss_upto == pytest.approx((pairs[0] - pairs[1]).mean(), rel=1e-10)
    tolerance = 0.1 * (ends.high - ends.low)  # of percentiles of 2000 and 4000 resamples
    assert (row.excess_loss_upto_low, row.excess_loss_upto_high) == pytest.approx(tuple(ends), abs=tolerance)
    distributions = zero.log_softmax(-1), logits.log_softmax(-1)
    divergence = F.kl_div(*distributions, reduction="none", log_target=True).sum(-1)
    assert row.kl_upto == pytest.approx(divergence.mean().item(), rel=1e-9)
    assert row.agreement_upto == pytest.approx((zero.argmax(-1) == logits.argmax(-1)).double().mean().item())
    assert table[["agreement_upto", "settled_upto", "loss_settled_upto"]].iloc[-1].tolist() == [1, 1, 1]
    assert (table.settled_upto.diff().dropna() >= 0).all() and table.settled_upto.iloc[0] < 1
    assert table.kl_below_floor.tolist() == [0, 0, 0, 1] and table.kl_upto.iloc[2] > 1e-13
    assert row.k95 <= row.k99 <= row.k999 <= 3 and (table.k95 == row.k95).all()


def frozen_norm(norm, y, x):
    """LayerNorm of y with the scale that it has at x."""
    scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
    return (y - y.mean(-1, keepdim=True)) * scale * norm.weight + norm.bias


@pytest.mark.further
def test_spectrum_of_a_network_of_ours_is_its_paths():
    words = ["model=san_skip", "model.layers=3", "model.width=8", "model.heads=2", "model.bias=false"]
    words += ["task.length=4", "task.test_size=6", "task.train_size=20", "replicas=2"]
    tables = rankbench.analyze(words, "spectrum", "paths", paths={"schemes": ["frozen"], "subset_sizes": []})
    spectrum = tables["spectrum"][(tables["spectrum"].of == "output") & (tables["spectrum"].part == "length")]
    assert set(spectrum.seed) == {0, 1}
    everything = tables["paths"][tables["paths"].selection == "all"]
    assert spectrum.num_paths.tolist() == everything.num_paths.tolist()
    # the read-out's bias is a path of length 0 here, and none at all there
    for subject in fresh(*words):
        sums, model = sums_by_length(subject.network, subject.test.inputs), subject.network
        parts = F.linear(sums.by_length_KBND, model.read_out.weight)
        parts[0] += F.linear(sums.bias_BND, model.read_out.weight, getattr(model.read_out, "bias", None))
        whole = parts.sum(0)
        mass = parts.flatten(2).norm(dim=2) / whole.flatten(1).norm(dim=1)
        rows = spectrum[spectrum.seed == subject.seed]
        assert rows.mass.to_numpy() == pytest.approx(mass.mean(1).detach().numpy(), rel=1e-9)


class OneLayer(nn.Module):
    """A layer of a network of ours as a submodule."""

    def __init__(self, sublayers):
        super().__init__()
        self.sublayers = sublayers

    def forward(self, x):
        for sublayer in self.sublayers:
            x = sublayer(x)
        return x


class InLayers(nn.Module):
    """A network of ours whose layers are submodules."""

    def __init__(self, network):
        super().__init__()
        self.network, self.layers = network, nn.Sequential(*map(OneLayer, network.layers))

    def forward(self, inputs):
        return self.network.read_out(self.network.finish(self.layers(self.network.embed(inputs))))


def test_residual_of_a_network_of_ours_seen_as_a_module():
    words = ["model.layers=3", "model.width=8", "model.heads=2", "task.length=5", "task.test_size=9"]
    words += ["task.train_size=9"]
    own = rankbench.analyze(words, "residual", variants=["full"], sequences=9)["residual"]
    (subject,) = fresh(*words)
    seen = rankbench.analyze(InLayers(subject.network), subject.test.inputs, "residual", sequences=9)["residual"]
    seen = seen[seen.view == "all"]
    ours = own[own.sublayer.isin(["input", "mlp"])]
    assert seen.layer.tolist() == ours.layer.tolist() == [0, 1, 2, 3]
    assert seen.submodule.tolist()[1:] == ["layers.0", "layers.1", "layers.2"]
    for name in ("relative_residual", "effective_rank", "mean_cosine", "relative_residual_sd"):
        assert seen[name].to_numpy() == pytest.approx(ours[name].to_numpy(), rel=1e-12)
    # random passes: a factor of 3 is what 8 of them can differ by
    ratio = seen.noise_floor.to_numpy() / ours.noise_floor.to_numpy()
    assert ((ratio > 1 / 3) & (ratio < 3)).all()
    # its own submodules are parts of sub-layers
    assert "branches, not layers" in refusal(rankbench.analyze, subject.network, subject.test.inputs, "residual")


def test_attention_of_heads_side_by_side(language, ids):
    table = rankbench.analyze(language, ids, "attention")["attention"]
    assert "singular_over_law" not in table and (table.num_undefined == 0).all()  # the law has no mask
    assert list(zip(table.layer, table["head"], strict=True)) == list(product((1, 2, 3), repeat=2))
    x = language.embedding(ids)
    for layer, block in enumerate(language.blocks, start=1):
        y = block.norm(x)
        for number, head in enumerate(block.heads, start=1):
            p = head.weights(y)
            (row,) = table[(table.layer == layer) & (table["head"] == number)].itertuples()
            assert row.own_weight == pytest.approx(p.diagonal(dim1=1, dim2=2).mean().item())
            expected = (p - torch.eye(7)).flatten(1).norm(dim=1).mean().item() / 7**0.5
            assert row.distance_to_identity == pytest.approx(expected)
        x = block(x)


@pytest.mark.parametrize("gain", [1.0, 1e-9])
def test_attention_has_the_floors_of_the_residual_of_its_weights(gain):
    """Of queries and keys of 1e-9, whose attention is uniform but for rounding, the same heads are below them."""
    (subject,) = fresh("model=san_skip", "model.layers=2", "model.width=8", "model.heads=2", "task.length=5")
    for sublayer in subject.network.sublayers:
        sublayer.part.qkv.weight.data[:16] *= gain
    options = ANALYSES["residual"].options(sequences=9, variants=["full"], views=None, sink_ratio=10.0)
    residual = ANALYSES["residual"].table(subject, options)
    of_weights = residual[residual.sublayer == "weights"].set_index(["layer", "head"])
    seen = ANALYSES["attention"].table(subject, ANALYSES["attention"].options(sequences=9)).set_index(["layer", "head"])
    assert (seen.attention_below_floor == of_weights.attention_below_floor).all()
    assert (seen.attention_below_floor == float(gain < 1)).all()
    ratio = seen.attention_relative_noise_floor / of_weights.attention_relative_noise_floor
    assert ((ratio > 1 / 3) & (ratio < 3)).all()  # what 8 random passes can differ by


def test_sequences_to_which_a_head_gives_no_weights_have_no_relative_floor():
    """ReLU gives none where all scores are negative, and the floor over such a P, which is zero, was infinite."""
    words = ["model=relu", "model.layers=1", "model.width=4", "model.heads=2", "model.positions=none", "task.length=5"]
    (subject,) = fresh(*words)
    qkv = subject.network.attentions[0].qkv
    qkv.bias.data.zero_()
    qkv.weight.data[4:8] = qkv.weight.data[:4]  # so scores of equal letters are squares
    qkv.weight.data[4:6] *= -1.0  # but for head 1
    subject.test.inputs[:9] = subject.test.inputs[:9, :1]
    subject.test.inputs[:2] = torch.arange(5)
    with torch.no_grad():
        weights_BHNM = next(run(subject.network, subject.test.inputs[:9])).weights_BHNM
    assert (weights_BHNM == 0).all((2, 3)).sum(0).tolist() == [7, 0]
    table = ANALYSES["attention"].table(subject, ANALYSES["attention"].options(sequences=9))
    assert table.attention_relative_noise_floor.between(1e-17, 1e-12).all()


@pytest.mark.parametrize("name", ["cosine", "contractive_l2"])
def test_attention_shows_the_same_matrix_where_the_network_would_fuse_it(name):
    """What multiplies the values includes their gains. Heads of width 1 are fused in a plain forward pass."""
    words = [f"model={name}", "model.layers=1", "model.width=4", "model.heads=4", "task.length=5", "task.test_size=9"]
    (subject,) = fresh(*words, "precision=fp64")
    table = ANALYSES["attention"].table(subject, ANALYSES["attention"].options(sequences=9)).set_index("head")
    (step, *_) = run(subject.network, subject.test.inputs)
    row_sums_H = step.mixing_BHNM.detach().sum(-1).mean((0, 2))
    assert table.row_sum.to_numpy() == pytest.approx(row_sums_H.numpy())
    assert (table.row_sum - 1).abs().min() > 0.1


@pytest.mark.parametrize("norm_first", [True, False])
def test_attention_of_torchs_own_layers(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval().requires_grad_(False)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    table = rankbench.analyze(module, x, "attention")["attention"]
    read = module.layers[0].norm1(x) if norm_first else x
    _, p_BHNM = module.layers[0].self_attn(read, read, read, average_attn_weights=False)
    expected = p_BHNM.diagonal(dim1=2, dim2=3).mean((0, 2))
    assert table[table.layer == 1].own_weight.to_numpy() == pytest.approx(expected.numpy())
    of_matrices = []
    for p_NM in p_BHNM.flatten(0, 1).numpy():
        s = np.sqrt(np.mean((5 * p_NM - 1) ** 2))  # of weights over their mean, 1/5
        second, eigenvalues = np.linalg.svd(p_NM)[1][1], np.sort(np.abs(np.linalg.eigvals(p_NM)))
        of_matrices.append((second * 5**0.5 / (2 * s), eigenvalues[-2] * 5**0.5 / s))
    singular_H, eigenvalue_H = np.reshape(of_matrices, (4, 2, 2)).mean(0).T
    first = table[table.layer == 1]
    assert first.singular_over_law.to_numpy() == pytest.approx(singular_H)
    assert first.eigenvalue_over_law.to_numpy() == pytest.approx(eigenvalue_H)
    assert (first.shuffled_over_law != first.singular_over_law).all() and (first.num_undefined == 0).all()
    assert table.largest_logit.notna().all()


def test_largest_logit_of_a_network_of_ours(random_network):
    """Also for rows so short that their softmax is written out on a CPU."""
    model, batch = random_network(3, seed=0, mask="causal", heads=3, width=6)
    table = rankbench.analyze(model, batch.inputs, "attention")["attention"]
    attentions = [step for step in run(model, batch.inputs) if step.sublayer.kind == "attention"]
    assert len(table) == 3 * len(attentions)
    for layer, step in enumerate(attentions, start=1):
        heads = step.sublayer.part
        q_BHNK, k_BHMK, _ = heads.queries_keys_values(step.input_BND)
        logits_BHNM = (q_BHNK @ k_BHMK.mT * heads.head_width**-0.5).tril()
        expected_H = logits_BHNM.abs().amax((2, 3)).mean(0)
        assert table[table.layer == layer].largest_logit.to_numpy() == pytest.approx(expected_H.numpy())


class Padded(nn.Module):
    """Attends to the tokens that attention_mask says are there."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(11, 8), nn.ModuleList(PaddedLayer() for _ in range(2))

    def forward(self, ids, attention_mask=None):
        x = self.embedding(ids)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        for layer in self.layers:
            x = layer(x, mask)
        return x


class PaddedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.maps(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class ToldByLengths(Padded):
    """Its argument is called as one of the functions that record it."""

    def forward(self, ids, keep):
        return super().forward(ids, torch.arange(ids.shape[1]) < keep[:, None])


@pytest.mark.further
def test_padding_is_in_no_metric_whether_a_mask_lengths_or_negative_ids_tell_it():
    torch.manual_seed(0)
    module, ids, lengths = Padded().double().eval().requires_grad_(False), torch.randint(11, (2, 6)), [6, 4]
    by_lengths = ToldByLengths().double().eval().requires_grad_(False)
    by_lengths.load_state_dict(module.state_dict())
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    checked = {
        "attention": ["attention_entropy", "sink_weight", "largest_logit", "value_cosine", "distance_to_uniform"],
        "residual": ["relative_residual", "effective_rank", "mean_cosine"],
        "spectrum": ["mass", "share", "error_upto"],
        "paths": ["relative_residual", "norm_share"],
        "path_mass": ["mass"],
    }
    masked = {"ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -1)
    inputs = [(module, given) for given in (*masked, {"ids": ids[:1]}, {"ids": ids[1:, :4]})]
    inputs.append((by_lengths, {"ids": ids, "keep": torch.tensor(lengths)}))
    tables = [rankbench.analyze(*given, *checked) for given in inputs]
    for name, columns in checked.items():
        both, negative, long, short, told = (of_input[name] for of_input in tables)
        numbers = [column for column in both.select_dtypes("number") if "floor" not in column and column != "remainder"]
        for same in (negative, told):
            pd.testing.assert_frame_equal(same[numbers], both[numbers], rtol=1e-9, atol=1e-14)
        for column in columns:
            expected = (long[column] + short[column]) / 2
            # error_upto of all lengths is rounding
            assert both[column].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-9, abs=1e-14, nan_ok=True)


class State(nn.Module):
    """A network of ours without its read-out."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network.state(inputs)


@pytest.mark.further
def test_sums_of_a_module_have_the_floors_of_the_same_network_of_ours(random_network):
    model, batch = random_network(9, seed=1, mlp=False, norm="none", bias=False, layers=3)
    part = model.sublayers[-1].part
    # the two heads of the last layer attend alike, and their values cancel, but for rounding
    q, k, v = (rows.view(2, 2, 4) for rows in part.qkv.weight.split(4))
    q[1], k[1], v[1] = q[0], k[0], 3 * v[0]
    part.out.weight[:, 2:] = part.out.weight[:, :2] / -3
    tables = rankbench.analyze(State(model), batch.inputs, "paths", "spectrum", "path_mass")

    def sums_of(copies):
        return sums_by_length(model, side_by_side(batch.inputs, copies)).by_length_KBND

    wanted = floors_of_sums(sums_of, sums_of(1), None, torch.Generator().manual_seed(0))
    paths, spectrum = tables["paths"], tables["spectrum"][tables["spectrum"].part == "length"]
    assert paths.sum_below_floor.tolist() == spectrum.below_floor.tolist() == [0, 0, 0, 1]
    assert 0 < spectrum.mass.iloc[3] < 1e-15 and paths.below_floor.iloc[3] == 1
    sizes = torch.stack([torch.stack([composite_norm(x) for x in sum_BND]) for sum_BND in sums_of(1)])
    ratio = paths.relative_noise_floor.to_numpy()[:3] / (wanted.residual_GB / sizes).mean(1).numpy()[:3]
    assert ((ratio > 1 / 3) & (ratio < 3)).all()  # random passes: what 8 of them can differ by
    parts = tables["path_mass"]
    assert parts[parts.part == "length"].below_floor.tolist() == [0, 0, 0, 1]
    assert (parts[parts.part == "head"].below_floor == 0).all()


@pytest.mark.slow
def test_floors_of_many_parts_hold_a_few_of_them_at_a_time(random_network):
    """All 157 parts of the logits of a network of BERT's size are 2.5 GB, and a perturbed pass has them again."""
    model, batch = random_network(9, seed=1, layers=3)
    module, example = State(model), Example((batch.inputs,))
    alive, most = weakref.WeakSet(), 0

    def parts_of(tape):
        nonlocal most
        for _ in range(24):
            part = tape.sums().by_length_KBND[:1].clone()
            alive.add(part)
            most = max(most, len(alive))
            yield part

    read, generator = read_module(module, example), torch.Generator().manual_seed(0)
    floors = [floors.norm_GB for floors in floors_of_parts(read, example, parts_of, generator)]
    passes = 1 + num_passes(*batch.inputs.shape[1:], model.width)
    assert len(floors) == 24 and passes <= most <= 2 * passes


@pytest.mark.further
def test_path_mass_of_heads_adds_up(language, ids):
    """In the last layer no path goes through two heads, so these are the paths that do not pass it by."""
    example = {"ids": ids, "targets": next_token(ids)}
    table = rankbench.analyze(language, example, "path_mass")["path_mass"]
    assert table.part.tolist() == ["length"] * 4 + ["head"] * 9
    assert table.gradient_mass.notna().all() and table.whole_loss.nunique() == 1
    # first order: all parts of X together are X itself
    logits = language(ids).requires_grad_(True)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    expected = (logits.grad * logits).sum().item() / ids[:, 1:].numel()
    assert table[table.part == "length"].gradient_mass.sum() == pytest.approx(expected)


# --- inputs and modules ----------------------------------------------------------------------------------------------


def test_inputs_from_files(tmp_path, ids):
    np.save(tmp_path / "ids.npy", ids.numpy())
    assert torch.equal(read_inputs(str(tmp_path / "ids.npy")).args[0], ids)
    save_file({"ids": ids, "targets": ids + 1}, tmp_path / "ids.safetensors")
    example = read_inputs(str(tmp_path / "ids.safetensors"))
    assert torch.equal(example.kwargs["ids"], ids) and torch.equal(example.targets, ids + 1) and not example.args
    (tmp_path / "texts.txt").write_text("a b\n\nc d\n")
    example = read_inputs(
        str(tmp_path / "texts.txt"), lambda lines: {"ids": torch.tensor([[len(line)] for line in lines])}
    )
    assert example.kwargs["ids"].tolist() == [[3], [3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (change, "has no floating-point numbers")
            for change in (lambda y: y > 0, torch.Tensor.long, lambda y: y[:0])
        ),
        (torch.sum, "is one number for all sequences"),
    ],
)
def test_an_output_that_cannot_be_measured_is_refused(change, message):
    module = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Identity())
    module.register_forward_hook(lambda _, args, output: change(output))
    with pytest.raises(ConfigError, match=rf"^Sequential: (its )?output {message}.*; return (its|the) last states"):
        read_module(module.eval(), Example((torch.randn(2, 5, 8),)))


def npy(header):
    """An .npy of this header, and 100 bytes of numbers."""
    text = header.ljust(117) + b"\n"
    return np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text + bytes(100)


SHAPED = b"{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"
DAMAGED = r"x.npy: not an array of numbers \(.*\); write it with numpy.save$"
REFUSED = [
    ("none.npy", None, "no such file"),
    ("texts.txt", b"a", "needs a tokenizer"),
    ("table.csv", b"a", "allowed are .npy, .safetensors, .txt"),
    ("torn.safetensors", b"a", "not readable"),
    *(("x.npy", content, DAMAGED) for content in (b"", b"PK\x03\x04 and no zip", npy(b"(" * 110))),
    ("x.npy", npy(b"{'descr': '<f4', 'fortran_ord"), DAMAGED),
    *(("x.npy", npy(SHAPED % shape), DAMAGED) for shape in (b"(9, 3)", b"(2, -3)", b"(-1,)")),
    ("x.npy", np.array([{"a": 1}], dtype=object), "not an array of numbers"),  # a pickle, which is not opened
    ("x.npy", np.zeros((0, 4, 8)), r"x\.npy: inputs of shape \(0, 4, 8\); give a sequence or more$"),
    ("x.npy", np.zeros((3, 0, 8)), r"x\.npy: inputs of shape \(3, 0, 8\); give a sequence or more$"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED, ids=lambda given: repr(given)[:40])
def test_inputs_refused(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        np.save(tmp_path / name, content, allow_pickle=True)
    with pytest.raises(ConfigError, match=message):
        read_inputs(str(tmp_path / name))


def test_an_npy_larger_than_the_memory_is_one_line_with_its_size(tmp_path):
    (tmp_path / "x.npy").write_bytes(npy(SHAPED % b"(400000, 500000)"))
    (tmp_path / "mine.py").write_text("import torch\ndef build(): return torch.nn.Linear(2, 2)")
    line = refused("analyze", "model=mine.py:build", "inputs=x.npy", "analysis=[residual]", at=tmp_path)
    assert line.startswith("rankbench analyze: out of memory (inputs=x.npy: Unable to allocate 745. GiB for an ")


@pytest.mark.further
@pytest.mark.parametrize("analysis", ["residual", "attention"])
def test_numbers_that_overflow_inside_a_module_are_one_line(analysis, tmp_path):
    layer = "torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)"
    (tmp_path / "mine.py").write_text(f"import torch\ndef build(): return {layer}")
    np.save(tmp_path / "x.npy", 1e300 * np.random.default_rng(0).normal(size=(3, 4, 8)))
    result = called("analyze", "model=mine.py:build", "inputs=x.npy", f"analysis=[{analysis}]", at=tmp_path)
    assert result.code == 1 and "your own code" not in result.err and result.err.count("rankbench analyze: ") == 1
    assert result.err.endswith("nan or infinite entries, all must be finite; check inputs and weights\n")


def test_numbers_that_the_precision_does_not_reach_are_refused():
    example = as_example(torch.tensor([[1e300, -1.0, 0.0]], dtype=torch.float64), "x")
    assert example.to(torch.device("cpu"), torch.float64).args[0].max() == 1e300
    with pytest.raises(ConfigError, match=r"hold numbers as large as 1e\+300, infinite in float32; scale"):
        example.to(torch.device("cpu"), torch.float32)


def test_a_text_that_is_no_utf8_is_one_line(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"caf\xe9\n")
    assert "x.txt: not a text in UTF-8" in refusal(read_inputs, str(tmp_path / "x.txt"), dict)


def test_the_mark_of_utf8_is_no_part_of_a_text(tmp_path):
    (tmp_path / "x.txt").write_text("a\nb\n", encoding="utf-8-sig")
    given = Mock(return_value={"ids": torch.zeros(2, 1, dtype=torch.long)})
    read_inputs(str(tmp_path / "x.txt"), given)
    given.assert_called_once_with(["a", "b"])


def test_some_sequences_of_an_example(ids):
    mask = torch.ones(7, 7)
    example = as_example({"ids": ids, "mask": mask, "scale": 2.0}, "")
    assert len(example[:2].kwargs["ids"]) == 2 and example[:2].kwargs["mask"] is mask
    square = replace(example, kwargs={"ids": ids[:, :5], "mask": torch.ones(5, 5)})
    assert square[:5] is square
    with pytest.raises(ConfigError, match="may be a mask"):
        square[:2]


@pytest.mark.parametrize(
    "code, spec, message",
    [
        ("", "mine.py:build", "has no function build"),
        ("def biuld(): pass", "mine.py:build", "did you mean biuld"),
        ("def build(): return 3", "mine.py:build", r"gave \(int\)"),
        ("class Net:\n  def __init__(self, a): pass", "mine.py:Net", "called without arguments .*; write a function"),
        ("", "other.py:build", "no file other.py"),
        ("", "no_such_package.module:build", "no module no_such_package"),
        ("", "<b>", "model=<b>: not a module; "),
        ("from torch import nn\ndef build(): return nn.Linear(2, 2), 5", "mine.py:build", "hold no tensor"),
        ("def build(): return ()", "mine.py:build", r"gave \(\); allowed are an nn.Module"),
    ],
)
def test_modules_refused(tmp_path, monkeypatch, code, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        build(spec)


def test_a_module_that_the_users_module_lacks_is_not_taken_for_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_of_layers.py").write_text("import mine_of")  # a name that begins like the user's
    with pytest.raises(ModuleNotFoundError, match="'mine_of'"):
        build("mine_of_layers:build")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_inputs_and_targets_that_are_no_plain_tensors_are_refused():
    x_BND, nested = torch.ones(2, 3, 4), torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    for built in ((nn.Identity(), x_BND, [1]), (nn.Identity(), {"x": x_BND, "targets": [1]})):
        assert refusal(unpacked, built, "mine") == "targets: a list; give a tensor of classes or of numbers"
    assert refusal(as_example, nested, "mine").startswith("mine: inputs are nested; give x.to_padded_tensor(0), and ")


@pytest.mark.further
def test_the_users_module_stays_as_it_was(language, ids):
    module = language.float().train().requires_grad_(True)
    rankbench.analyze(module, ids, "spectrum")
    assert module.training and all(p.requires_grad and p.dtype == torch.float32 for p in module.parameters())


FILE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 8)

def opaque():
    class Sorts(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x).sort(-2).values
    return Sorts(), torch.randn(3, 5, 8)
"""


@pytest.mark.further
def test_the_command_on_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    words = ["analyze", "model=mine.py:build", "analysis=[residual,paths,spectrum]", "out=out"]
    assert "remainder" in succeeds(*words, at=tmp_path).out
    for name in ("residual", "paths", "spectrum"):
        table = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        assert len(table) and set(table.run) == {"mine.py:build"} and set(table.model) == {"TransformerEncoder"}
        assert (tmp_path / "out" / f"{name}.png").exists()
    assert "spectrum.csv is up to date" in succeeds(*words, at=tmp_path).err


TOWERS = """
import torch
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.TransformerEncoderLayer(8, 4, 16, 0.0, batch_first=True)
        self.embedding = nn.Embedding(9, 8, padding_idx=0)
        self.text = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, pixels, ids, hidden):
        return self.image(pixels), self.text(self.embedding(ids), src_key_padding_mask=hidden)


def build():
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 1, 0]])
    return Towers(), {"pixels": torch.randn(3, 5, 8), "ids": ids, "hidden": ids == 0}
"""


@pytest.mark.further
def test_network_csv_and_a_line_say_what_was_read(tmp_path):
    (tmp_path / "mine.py").write_text(TOWERS)
    said = succeeds("analyze", "model=mine.py:build", "output=1", "analysis=[attention]", "out=out", at=tmp_path)
    line = next(line for line in (said.out + said.err).splitlines() if " was read as: " in line)
    assert "1 attention call of 2 heads (softmax, self) in text.self_attn; 1 attention call not on the way" in line
    assert "; measured: output 1 (3, 4, 8), tokens are axis 1 (output 0 left out); 9 of 12 tokens count" in line
    rows = pd.read_csv(tmp_path / "out" / "network.csv", dtype=str, keep_default_na=False).set_index(["part", "name"])
    assert rows.loc[("input", "hidden"), "counts"] == "mask: true means absent"
    assert rows.loc[("input", "ids"), ["token_axis", "sequence_axis"]].tolist() == ["1", "0"]
    image, text = (rows.loc[("attention", f"{name}.self_attn")] for name in ("image", "text"))
    assert [image.heads, image["shape"], text.heads, text["shape"]] == ["4", "3 4 5 5", "2", "3 2 4 4"]
    assert image.counts == "left out: not on the way to what is measured" and text.counts == "head"
    assert rows.loc[("output", "1"), "counts"] == "measured" and rows.loc[("output", "0"), "counts"] == "not measured"
    assert rows.loc[("tokens", "1"), "note"] == "9 of 12 tokens count, by absent:hidden"


@pytest.mark.parametrize(
    "words, message",
    [
        (["model=mine.py:opaque"], "not covered"),
        (["model=mine.py:build", "replicas=2"], "use replicas=1"),
        (["model=pretrained"], "give model.path="),
        (["model=mine.py"], "model=mine.py: which function[?] give model=mine.py:<function>"),
        (["model=mine.py:build", "masked=0.1"], "is for texts of a checkpoint"),
        (["model=mine.py:build", "task.length=4"], "has no task.length"),
    ],
)
def test_refused_and_nothing_written(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(ConfigError, match=message):
        rankbench.analyze(words, "spectrum", out="out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_changed_is_read_again(tmp_path, monkeypatch):
    """In a notebook, where the process lives on."""
    monkeypatch.chdir(tmp_path)
    layer = "torch.nn.TransformerEncoderLayer(8, 2, {}, batch_first=True)"
    code = f"import torch\ndef build(): return {layer}, torch.ones(1, 3, 8)"
    names = []
    for width in (16, 24):
        (tmp_path / "mine.py").write_text(code.format(width))
        module, _ = build("mine.py:build")
        rankbench.analyze(["model=mine.py:build"], "attention")
        names.append(module.linear1.out_features)
        assert not BUILT
    assert names == [16, 24]


@pytest.mark.further
def test_a_network_that_was_checked_is_not_read_again(tmp_path, monkeypatch):
    """Reading one of 30 layers takes as long as a fifth of its spectrum."""
    monkeypatch.chdir(tmp_path)
    layer = "torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)"
    (tmp_path / "mine.py").write_text(f"import torch\ndef build(): return {layer}, torch.ones(1, 3, 8)")
    times = []
    monkeypatch.setattr(module_reading, "read", lambda *args: times.append(args) or read(*args))
    called("analyze", "model=mine.py:build", "analysis=[attention]", at=tmp_path)
    called("analyze", "model=mine.py:build", "analysis=[residual]", at=tmp_path)
    assert len(times) == 2


@torch.no_grad()
def test_states_that_are_kept_are_those_of_a_second_pass(language, ids):
    """Also where what runs after them changes them in place."""

    class Tail(torch.nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.head = body, torch.nn.Linear(11, 5).double()

        def forward(self, ids):
            return self.head(self.body(ids).mul_(2))

    module = Tail(language)
    reading = read(module, (ids,), {})
    (kept, whole), (again, same) = (
        record(module, ids, reading=reading, keep=name).sums_behind("body") for name in ("body", None)
    )
    assert torch.equal(kept.state_BND, again.state_BND) and torch.equal(kept.by_length_KBND, again.by_length_KBND)
    assert torch.equal(kept.state_BND, language(ids)) and torch.equal(whole.state_BND, same.state_BND)


def shares_by_numpy(p_NM):
    """Metrics of the rows that read something, each over its sum; none of shares if an entry is negative."""
    sums = p_NM.sum(1)
    s_NM = p_NM / np.where(sums == 0, 1, sums)[:, None]
    if (p_NM < 0).any():
        s_NM = p_NM
    singular = np.linalg.svd(s_NM)[1]
    expected = {
        "attention_stable_rank": (singular**2).sum() / singular[0] ** 2,
        "attention_relative_residual": relative_residual(s_NM),
    }
    if (p_NM < 0).any():
        return expected
    rows_NM = s_NM[sums > 0]
    expected["attention_entropy"] = scipy.stats.entropy(rows_NM, axis=1).mean() / np.log(p_NM.shape[1])
    expected["attention_gap_singular"] = singular[0] - singular[1]
    if (sums > 0).all():
        expected["attention_gap_eigenvalue"] = 1 - np.sort(np.abs(np.linalg.eigvals(s_NM)))[-2]
    expected["sink_weight"], expected["first_weight"] = rows_NM.mean(0).max(), rows_NM[:, 0].mean()
    expected["own_weight"] = s_NM.diagonal()[sums > 0].mean()
    return expected | {"sink_mass": p_NM.mean(0).max(), "first_mass": p_NM[:, 0].mean(), "own_mass": np.trace(p_NM) / 5}


@pytest.mark.parametrize("name", ["sigmoid", "relu", "differential"])
def test_a_column_has_one_definition_in_all_tables(name):
    """Of rows that are no probabilities: their shares, in `attention` as in `residual`."""
    words = [f"model={name}", "model.layers=1", "model.heads=2", "task.length=5", "task.test_size=3", "precision=fp64"]
    (subject,) = fresh(*words)
    with torch.no_grad():
        first = subject.network.blocks[0].attention
        first.qkv.weight.mul_(4)  # scores that differ
        step = next(run(subject.network, subject.test.inputs))
        if name == "relu":  # a query that reads nothing
            assert (step.weights_BHNM.sum(-1) == 0).any()
    by_head = [
        pd.DataFrame([shares_by_numpy(p_NM) for p_NM in p_BNM]).mean()
        for p_BNM in step.weights_BHNM.transpose(0, 1).numpy()
    ]
    of_attention = ANALYSES["attention"].table(subject, ANALYSES["attention"].options(sequences=3))
    of_residual = ANALYSES["residual"].table(subject, ANALYSES["residual"].options(["full"], 3, None, 10.0))
    of_residual = of_residual[of_residual.sublayer == "weights"].reset_index(drop=True)
    for head, expected in enumerate(by_head):
        for column, value in expected.items():
            assert of_attention[column][head] == pytest.approx(value, rel=1e-10), column
            if column in ATTENTION_METRICS:
                assert of_residual[column][head] == pytest.approx(value, rel=1e-10), column
    empty = set(ATTENTION_METRICS) - {"attention_effective_rank"}.union(*(expected.index for expected in by_head))
    assert all(of_residual[column].isna().all() and column not in of_attention for column in empty)
    # both are about the same rows, so both find the same rounding
    assert not of_residual.attention_below_floor.any() and not of_attention.attention_below_floor.any()


class Gated(nn.Module):
    """Softmax attention whose queries read through a gate of their own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def weights(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1)

    def forward(self, x):
        return x + (self.gate(x).sigmoid() * self.weights(x)) @ x


def test_a_gate_hides_no_sink():
    torch.manual_seed(0)
    x, module = torch.randn(3, 5, 4, dtype=torch.float64), Gated().double()
    (row,) = rankbench.analyze(module, x, "attention")["attention"].itertuples()
    p_BNM = module.weights(x).detach()
    gated_BNM = p_BNM * module.gate(x).sigmoid().detach()
    assert row.sink_weight == pytest.approx(p_BNM.mean(1).amax(-1).mean().item())
    assert row.sink_mass == pytest.approx(gated_BNM.mean(1).amax(-1).mean().item()) and row.sink_mass < row.sink_weight
    assert row.row_sum == pytest.approx(gated_BNM.sum(-1).mean().item())


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32"])
def test_tokens_of_any_whole_numbers_are_read(dtype, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(6, dtype=dtype).reshape(2, 3))
    (ids_BN,) = read_inputs(str(tmp_path / "ids.npy")).args
    assert ids_BN.dtype == torch.int64 and ids_BN.flatten().tolist() == list(range(6))


class Counting(nn.Module):
    """A layer whose result depends on how often it ran."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x * (1 + 0.1 * self.calls))


class InPlace(nn.Module):
    """Adds its positions to its input, and its layers to the state, in place."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x):
        x += self.positions
        for block in self.blocks:
            x = block(x)
        return x


def test_an_input_that_the_module_changes_is_measured_as_it_was_given():
    torch.manual_seed(0)
    module, x = InPlace().double().eval(), torch.randn(3, 5, 8, dtype=torch.float64)
    table = rankbench.analyze(module, x, "residual", views=["all"])["residual"]
    expected = []
    state = (x + module.positions).detach()
    for block in [None, *module.blocks]:
        state = state if block is None else block(state).detach()
        expected.append((composite_norm(state - state.mean(1, keepdim=True)) / composite_norm(state)).mean().item())
    assert table.relative_residual.to_numpy() == pytest.approx(expected, rel=1e-12)


class Erasing(nn.Module):
    """Erases padded tokens, which are 0; its P multiplies the tokens as often as `calls` says."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out, self.calls = nn.Embedding(9, 8), nn.Linear(8, 8), 1

    def forward(self, ids_BN):
        present_BN1 = (ids_BN > 0)[..., None]
        x = self.embedding(ids_BN) * present_BN1
        p = (x @ x.mT).masked_fill(~present_BN1.mT, -1e9).softmax(-1)
        for _ in range(self.calls):
            x = self.out(p @ x)
        return x


def test_a_token_that_the_module_erases_is_not_the_one_that_is_touched():
    ids_BN = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 0, 0, 0]])
    torch.manual_seed(0)
    (call,) = read_module(Erasing().double(), as_example(ids_BN, "Erasing")).heads
    assert call.is_sure and call.keys_of == call.queries_of == 0 and len(call.touched) == 1


def test_fewer_calls_of_attention_than_were_read_are_refused():
    module = Erasing().double()
    module.calls = 2
    found = read_module(module, example := as_example(torch.tensor([[1, 2, 3], [4, 5, 6]]), "Erasing"))
    module.calls = 1
    message = r"torch.Tensor.matmul multiplied 3 times when the network was read, and 2 times now, so its calls depend"
    for attempt in (lambda: found.tap(example, lambda call: None), lambda: found.record(example)):
        with pytest.raises(ConfigError, match=message):
            attempt()


class Answer(nn.Module):
    """The input itself, and what a map of weights makes of it beside a head."""

    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        p = (self.q(x) @ x.mT).softmax(-1)
        return x + self.out(x + p @ x)


def test_an_output_that_holds_the_input_is_no_read_out_of_last_states():
    torch.manual_seed(0)
    table = rankbench.analyze(Answer().double(), torch.randn(3, 5, 8).double(), "spectrum")["spectrum"]
    assert set(table["of"]) == {"output"}


class Two(nn.Module):
    """Returns the states after one layer and after two."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        return x, self.second(x)


@pytest.mark.parametrize(
    ("output", "num_paths"),
    some([(None, [1, 2]), (0, [1, 2]), (1, [1, 4, 4]), ("1", [1, 4, 4]), ("second", [1, 4, 4])], 2),
)
def test_an_output_is_chosen_by_its_number_or_by_a_submodule(output, num_paths):
    given = {} if output is None else {"output": output}
    table = rankbench.analyze(Two().double(), torch.randn(3, 5, 8).double(), "spectrum", **given)["spectrum"]
    assert list(table.num_paths.dropna()) == num_paths
    assert ("constant" in set(table.part)) == (output != "second")


IDS, STATES = torch.arange(12).view(2, 6) % 11, torch.arange(120.0).view(3, 5, 8).sin()


@pytest.mark.parametrize(
    ("module", "inputs", "analysis", "options", "message"),
    [
        (Language, IDS, "collapse", {}, "needs the sub-layers of a network of ours or of bert"),
        (Language, IDS, "spectrum", {"replicas": 2}, "no option of spectrum"),
        (lambda: Language, IDS, "residual", {}, "^Language: not a module; give an instance"),
        (lambda: len, IDS, "residual", {}, "^len: not a module; give an instance"),
        (Language, STATES[0], "spectrum", {}, "does not run on inputs"),
        (lambda: nn.Linear(8, 3), STATES, "attention", {}, "no attention call"),
        (Padded, torch.tensor([[1, -1, 2]]), "residual", {}, "^inputs: an absent token, .* comes before others; pad"),
        (Counting, STATES, "residual", {}, "Counting: call 1, torch.Tensor.mul in the module itself gives other"),
        (Two, STATES, "spectrum", {"output": 7}, "^output=7: Two returns no such tensor; it returns 0, 1, or give the"),
    ],
    ids=lambda given: given[:40] if isinstance(given, str) else "",
)
def test_what_cannot_be_measured_is_one_line(module, inputs, analysis, options, message):
    assert re.search(message, refusal(rankbench.analyze, module(), inputs, analysis, **options))


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2}
SCAN = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
CHUNKS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "num_local_experts": 2, "num_key_value_heads": 2}
STEPS = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts": 2}
FAMILIES = {  # settings, and the heads of each layer
    "deepseek_v2": (LATENT | {"q_lora_rank": None, "num_key_value_heads": 4}, [4, 4]),  # keys written part by part
    "falcon_h1": (SCAN | {"num_key_value_heads": 2, "head_dim": 8, "mamba_n_groups": 1}, [4, 4]),  # a scan in chunks
    "granitemoehybrid": (  # scans in chunks before and behind experts
        CHUNKS | EXPERTS | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
        [4],
    ),
    "qwen3_next": (EXPERTS | {"num_hidden_layers": 4, "head_dim": 8}, [4]),  # three delta rules before attention
    # linear attention in every other layer
    "minimax": (EXPERTS | {"num_hidden_layers": 4, "head_dim": 8}, [4, 4, 4, 4]),
    "jamba": (STEPS | {"num_hidden_layers": 4, "num_key_value_heads": 2}, [4, 4]),  # a scan step by step
    "longformer": ({"attention_window": 4}, [4, 4]),  # windows beside flattened heads
    "longformer, short texts": ({"attention_window": 64}, [4, 4]),  # each window holds all tokens
}


@pytest.mark.further
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_heads_that_their_configs_say(family):
    transformers = pytest.importorskip("transformers")
    settings, heads = FAMILIES[family]
    torch.manual_seed(0)
    module = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(family.partition(",")[0], **SIZES | settings)
    )
    inputs = {"input_ids": torch.randint(4, 61, (3, 11))}
    table = rankbench.analyze(module, inputs, "attention", precision="fp32")["attention"]
    assert list(table.groupby("layer").size()) == heads
