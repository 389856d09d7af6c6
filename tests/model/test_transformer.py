"""rankbench.model against torch's own Transformer, loops, closed forms and autograd.

Shapes: B batch, N query token, M key token, D width, H head, K head width, F hidden width of the MLP.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from by_hand import is_seen
from drawn import generator, normal, randomised, transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankbench.config.keys import ConfigError
from rankbench.model import initial_model
from rankbench.model.attention import FUSED_FROM_TOKENS, visible_keys
from rankbench.model.dropout import dropout_masks
from rankbench.model.network import MlpStep, run, without
from rankbench.model.norm import NORM_EPSILON, Norm
from rankbench.model.sublayers import MlpSublayer
from rankbench.model.transformer import Transformer, sinusoidal_positions
from rankbench.seeds import streams_of

# Float64 against another float64 route: a few hundred terms of order 1 in each of a few layers, eps = 2.2e-16.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

every = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def masks_of_one(model, num_sequences, num_tokens, state=0):
    """Dropout masks of a single network, in float64."""
    masks = dropout_masks(model, num_sequences, num_tokens, streams_of([state]), dtype=torch.float64)
    return {name: mask[0] for name, mask in masks.items()}


def network(seed=0, **changes):
    """A small Transformer on coordinates (3 in, 4 out), all parameters random."""
    sizes = {"input_kind": "coordinates", "num_inputs": 3, "length": 200}
    return randomised(transformer(**sizes, **{"width": 8, "positions": "none", **changes}), generator(seed), 0.4)


# --- the whole network -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_the_transformer_is_the_one_of_torch(norm, activation, mask):
    model = network(norm=norm, activation=activation, mask=mask, layers=3, heads=4, width=12, mlp_ratio=2.0)
    layer = nn.TransformerEncoderLayer(
        12, 4, 24, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    last_norm = nn.LayerNorm(12, dtype=torch.float64) if norm == "pre" else None
    # in training mode (without dropout the same function) torch takes its plain path, not the fused inference one
    reference = nn.TransformerEncoder(layer, 3, norm=last_norm, enable_nested_tensor=False).train()
    weights = {}
    for index, block in enumerate(model.blocks):
        parts = {
            "self_attn.in_proj_": block.attention.qkv,
            "self_attn.out_proj.": block.attention.out,
            "linear1.": block.mlp.up,
            "linear2.": block.mlp.down,
        }
        for name, linear in parts.items():
            weights |= {f"layers.{index}.{name}weight": linear.weight, f"layers.{index}.{name}bias": linear.bias}
        for name, own in {"norm1": block.attention_norm, "norm2": block.mlp_norm}.items():
            weights |= {f"layers.{index}.{name}.weight": own.weight, f"layers.{index}.{name}.bias": own.shift}
    if norm == "pre":
        weights |= {"norm.weight": model.last_norm.weight, "norm.bias": model.last_norm.shift}
    reference.load_state_dict(weights)
    x_BNC = normal(1, 5, 7, 3)
    hidden = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64) if mask == "causal" else None
    wanted = model.read_out(reference(model.read_in(x_BNC), mask=hidden))
    torch.testing.assert_close(model(x_BNC), wanted, **EXACT)


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("removed", [("skip",), ("mlp",), ("norm",), ("skip", "mlp"), ("skip", "mlp", "norm"), ()])
@torch.no_grad()
def test_without_is_a_model_built_without(removed, norm):
    no_skip, no_mlp = {"skip": False, "mlp_skip": False}, {"mlp": False, "mlp_skip": False}
    changes = {"skip": no_skip, "mlp": no_mlp, "norm": {"norm": "none"}}
    full = network(norm=norm)
    merged = {key: value for part in removed for key, value in changes[part].items()}
    built = network(seed=5, **{"norm": norm, **merged})
    built.load_state_dict({name: full.state_dict()[name] for name in built.state_dict()})
    x_BNC = normal(1, 2, 5, 3)
    before, reduced = full(x_BNC), without(full, **dict.fromkeys(removed, True))
    torch.testing.assert_close(reduced(x_BNC), built(x_BNC), rtol=0, atol=0)  # the same operations
    assert torch.equal(full(x_BNC), before)  # nothing of it has changed
    changed = not torch.allclose(reduced(x_BNC), before)
    assert changed == bool(set(removed) - ({"norm"} if norm == "none" else set()))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@torch.no_grad()
def test_coordinates_are_read_in_by_two_maps(activation):
    model, x_BNC = network(read_in="mlp", activation=activation), normal(1, 2, 5, 3)
    weights = {name.removeprefix("read_in."): value for name, value in model.named_parameters() if "read_in" in name}
    hidden_BND = getattr(F, activation)(x_BNC @ weights["0.weight"].T + weights["0.bias"])
    wanted_BND = hidden_BND @ weights["2.weight"].T + weights["2.bias"]
    torch.testing.assert_close(model.embed(x_BNC), wanted_BND, **EXACT)


@pytest.mark.parametrize("read_in", ["identity", "mlp"])
def test_tokens_have_an_embedding_of_their_own(model_config, sorting_task, read_in):
    with pytest.raises(ConfigError, match=f"model.read_in={read_in}: this task's inputs are tokens"):
        initial_model(model_config(read_in=read_in), sorting_task(), 0)


@pytest.mark.parametrize("norm", ["none", "post"])
@torch.no_grad()
def test_a_norm_behind_the_embedding_is_that_of_torch(norm):
    """It stays where the layers' norms are taken out: layers begin behind it."""
    changes = {"positions": "learned", "norm": norm, "norm_affine": True}
    model, x_BNC = network(embedding_norm=True, **changes), normal(1, 2, 5, 3)
    learned = (model.embedding_norm.weight, model.embedding_norm.shift)
    summed_BND = model.read_in(x_BNC) + model.position.weight[:5]
    wanted_BND = F.layer_norm(summed_BND, (model.cfg.width,), *learned, NORM_EPSILON)
    torch.testing.assert_close(model.embed(x_BNC), wanted_BND, **EXACT)
    torch.testing.assert_close(without(model, norm=True).embed(x_BNC), wanted_BND, **EXACT)
    seen, masks = [], masks_of_one(network(dropout=0.4), 2, 5)
    with model.attentions[0].register_forward_pre_hook(lambda module, read: seen.append(read[0])):
        model(x_BNC, dropout=masks)
    torch.testing.assert_close(seen[0], wanted_BND * masks["embedding"], **EXACT)


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoidal_positions_are_those_of_numpy(width):
    angles = np.arange(9)[:, None] / 10000 ** (2 * np.arange((width + 1) // 2) / width)
    wanted = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(9, -1)[:, :width]
    torch.testing.assert_close(sinusoidal_positions(9, width), torch.from_numpy(wanted.copy()), rtol=0, atol=1e-14)


@torch.no_grad()
def test_sinusoidal_positions_are_added_to_tokens_and_coordinates(model_config, sorting_task):
    model, x_BNC = network(positions="sinusoidal"), normal(1, 2, 5, 3)
    torch.testing.assert_close(model.embed(x_BNC), model.read_in(x_BNC) + sinusoidal_positions(5, 8), **EXACT)
    reader = initial_model(model_config(layers=1, positions="sinusoidal"), sorting_task(), 0)
    tokens = torch.tensor([[3, 1, 4]])
    assert reader.embed(tokens).dtype == torch.float32
    wanted = reader.read_in.weight[tokens] + sinusoidal_positions(3, 48).float()
    torch.testing.assert_close(reader.embed(tokens), wanted, rtol=0, atol=0)


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied_qk", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_head_weights_are_views_of_the_fused_matrices(tied_qk, bias):
    attention = network(heads=3, width=6, head_width=4, tied_qk=tied_qk, bias=bias).attentions[0]
    got = attention.maps_as_applied()
    for name, part in {"q": 0, "k": 0 if tied_qk else 1, "v": 1 if tied_qk else 2}.items():
        weight_HDK, bias_HK = getattr(got, f"w_{name}_HDK"), getattr(got, f"b_{name}_HK")
        rows = slice(12 * part, 12 * (part + 1))
        assert torch.equal(weight_HDK.mT.flatten(0, 1), attention.qkv.weight[rows])
        assert torch.equal(bias_HK.flatten(), attention.qkv.bias[rows] if bias else torch.zeros(12).double())
        assert weight_HDK.untyped_storage().data_ptr() == attention.qkv.weight.untyped_storage().data_ptr()
    assert torch.equal(got.w_o_HKD.flatten(0, 1).T, attention.out.weight)
    assert got.w_o_HKD.untyped_storage().data_ptr() == attention.out.weight.untyped_storage().data_ptr()
    assert torch.equal(got.b_o_D, attention.out.bias if bias else torch.zeros(6).double())


@every
@given(st.sampled_from(["none", "causal", "window", "others"]), st.integers(0, 9), st.integers(1, 8))
def test_visible_keys_are_those_of_a_loop(mask, window, num_tokens):
    got = visible_keys(mask, window if mask == "window" else None, num_tokens)
    wanted = [[is_seen(mask, window, n, m, num_tokens) for m in range(num_tokens)] for n in range(num_tokens)]
    assert (torch.ones(num_tokens, num_tokens, dtype=torch.bool) if got is None else got).tolist() == wanted
    assert (got is None) == (mask == "none")


# --- norm ------------------------------------------------------------------------------------------------------------


@every
@given(seeds, st.integers(1, 9), st.booleans(), st.sampled_from([1e-3, 1.0, 1e3]))
@torch.no_grad()
def test_norms_are_those_of_a_formula(model_config, seed, width, affine, size):
    x_BND = size * normal(seed, 2, 3, width)
    for kind in ("layernorm", "rmsnorm"):
        norm = randomised(Norm(model_config(width=width, heads=1, norm_kind=kind), affine), generator(seed), 0.4)
        x = x_BND.numpy() - (x_BND.numpy().mean(-1, keepdims=True) if kind == "layernorm" else 0)
        scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        wanted = x * scale * (norm.weight.numpy() if affine else 1)
        wanted = wanted + norm.shift.numpy() if affine and kind == "layernorm" else wanted
        np.testing.assert_allclose(norm(x_BND).numpy(), wanted, rtol=1e-10, atol=1e-10)
        for scale_BN1 in (norm.scale(x_BND), norm.with_scale(x_BND)[1]):
            np.testing.assert_allclose(scale_BN1.numpy(), scale, rtol=1e-10)
        assert (norm.shift is not None) == (affine and kind == "layernorm")
        assert (norm.weight is not None) == affine


def test_the_norm_of_a_zero_token_is_finite(model_config):
    for kind in ("layernorm", "rmsnorm"):
        norm = Norm(model_config(norm_kind=kind), True).double()
        zero = torch.zeros(1, 2, 48, dtype=torch.float64)
        assert torch.equal(norm(zero), zero)
        assert norm.scale(zero)[0, 0, 0].item() == pytest.approx(NORM_EPSILON**-0.5, rel=1e-14)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("mlp", [True, False])
@torch.no_grad()
def test_steps_are_the_networks_own_forward_pass(norm, mlp):
    model, x_BNC = network(norm=norm, mlp=mlp, mlp_skip=mlp), normal(1, 2, 5, 3)
    steps = list(run(model, x_BNC))
    kinds = ["attention", "mlp"] if mlp else ["attention"]
    assert [(step.sublayer.layer, step.sublayer.kind) for step in steps] == list(itertools.product((1, 2), kinds))
    assert torch.equal(steps[0].input_BND, model.embed(x_BNC))
    assert all(torch.equal(step.output_BND, next_step.input_BND) for step, next_step in itertools.pairwise(steps))
    torch.testing.assert_close(model.read_out(model.finish(steps[-1].output_BND)), model(x_BNC), **EXACT)
    for step in steps:
        assert (step.scale_BN1 is None) == (norm == "none")
        assert isinstance(step, MlpStep) == isinstance(step.sublayer, MlpSublayer) == (step.sublayer.kind == "mlp")


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_has_a_mask_for_the_embedding_the_weights_and_each_sublayer():
    shapes = {"embedding": (20, 10, 8)}
    for layer in range(2):
        shapes[f"layers.{layer}.attention.weights"] = (20, 2, 10, 10)
        shapes |= {f"layers.{layer}.{part}.output": (20, 10, 8) for part in ("attention", "mlp")}
    masks = masks_of_one(network(dropout=0.1), 20, 10)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == shapes


def test_dropout_masks_depend_on_the_state_alone():
    model = network(dropout=0.3)
    before = torch.get_rng_state()
    first, same, other = (masks_of_one(model, 4, 5, state) for state in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    beside = dropout_masks(model, 4, 5, streams_of([2, 1]), dtype=torch.float64)
    for name in first:
        assert torch.equal(first[name], same[name]) and not torch.equal(first[name], other[name])
        assert torch.equal(beside[name], torch.stack([other[name], first[name]]))
    # no two places share their draws
    assert not torch.equal(first["embedding"], first["layers.0.attention.output"])


@pytest.mark.parametrize("num_tokens", [5, FUSED_FROM_TOKENS])
@torch.no_grad()
def test_dropout_strikes_weights_sublayers_and_embedding(num_tokens):
    model, x_BNC = network(dropout=0.4, norm="none", layers=1, heads=2), normal(1, 2, num_tokens, 3)
    masks = masks_of_one(model, 2, num_tokens)
    block = model.blocks[0]
    heads = block.attention.maps_as_applied()
    state = model.read_in(x_BNC) * masks["embedding"]
    y_BND = heads.b_o_D
    for head in range(2):
        q, k, v = (
            state @ getattr(heads, f"w_{n}_HDK")[head] + getattr(heads, f"b_{n}_HK")[head] for n in ("q", "k", "v")
        )
        p = torch.softmax(q @ k.mT / 2, -1) * masks["layers.0.attention.weights"][:, head]
        y_BND = y_BND + p @ v @ heads.w_o_HKD[head]
    state = state + y_BND * masks["layers.0.attention.output"]
    state = state + block.mlp.down(F.gelu(block.mlp.up(state))) * masks["layers.0.mlp.output"]
    torch.testing.assert_close(model(x_BNC, dropout=masks), model.read_out(state), **EXACT)


# --- initial weights -------------------------------------------------------------------------------------------------

SCHEMES = ["pytorch", "glorot", "bert", "scaled"]
LAYERS, WIDTH, INNER, HIDDEN, LETTERS, LENGTH = 2, 48, 40, 96, 60, 50
WIDE = {"layers": LAYERS, "heads": 2, "width": WIDTH, "head_width": 20, "mlp_ratio": 2.0}


@pytest.fixture(scope="session")
def wide_task(sorting_task):
    return sorting_task(length=LENGTH, alphabet=LETTERS, label="value")


def uniform(limit):
    return scipy.stats.uniform(-limit, 2 * limit)


def wanted_distributions(scheme, gain):
    """By kind of matrix, worked out by hand; biases are zeros."""
    if scheme == "glorot":
        sizes = {"qkv": INNER, "out": INNER, "up": HIDDEN, "down": HIDDEN}
        weights = {kind: uniform(gain * math.sqrt(6 / (WIDTH + size))) for kind, size in sizes.items()}
        read_out = uniform(math.sqrt(6 / (WIDTH + LETTERS)))
        return weights | {"read_out": read_out, "embedding": scipy.stats.norm(0, WIDTH**-0.5)}
    into_stream = 0.02 / math.sqrt(2 * LAYERS) if scheme == "scaled" else 0.02
    deviations = {"qkv": 0.02, "out": into_stream, "up": 0.02, "down": into_stream}
    weights = {kind: scipy.stats.norm(0, gain * deviation) for kind, deviation in deviations.items()}
    return weights | dict.fromkeys(("read_out", "embedding"), scipy.stats.norm(0, 0.02))


def test_attention_starts_within_its_own_limit_and_the_rest_as_before(model_config, wide_task):
    own = initial_model(model_config(**WIDE, init="glorot", attention_init=0.5), wide_task, 0)
    limit = 0.5 / own.cfg.width**0.5
    for name, weight in own.named_parameters():
        if weight.ndim == 2 and ".attention." in name:
            # the largest of at least 1,000 draws is within 2 % of the limit in all but e^-20 of cases
            assert weight.numel() >= 1000 and 0.98 * limit < weight.abs().max() <= limit
        elif name.endswith("mlp.up.weight"):
            assert weight.abs().max() > 1.1 * limit


@pytest.mark.parametrize("weight_norm", ["none", "sigma"])
def test_the_gain_of_mlps_multiplies_their_matrices_alone(model_config, wide_task, weight_norm):
    plain, larger = (
        initial_model(model_config(**WIDE, init_gain=1.5, mlp_gain=gain, weight_norm=weight_norm), wide_task, 0)
        for gain in (1.0, 4.0)  # a power of two: exact in float32
    )
    for (name, module), other in zip(plain.named_modules(), larger.modules(), strict=True):
        if isinstance(module, nn.Linear):
            times = 4 if ".mlp." in name else 1
            # sigma: gamma over a norm that is itself rounded
            torch.testing.assert_close(other.weight, times * module.weight, rtol=1e-5, atol=1e-6)
            assert module.bias is None or torch.equal(other.bias, module.bias)


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_initial_weights_have_the_distribution_of_their_scheme(model_config, wide_task, scheme, gain):
    model = initial_model(model_config(**WIDE, init=scheme, init_gain=gain), wide_task, 0)
    weights, seen = wanted_distributions(scheme, gain), set()
    for name, module in model.named_modules():
        kind = "embedding" if isinstance(module, nn.Embedding) else name.split(".")[-1]
        if kind not in weights:
            continue
        seen.add(kind)
        assert kind == "embedding" or not module.bias.any()
        for part in module.weight.chunk(3) if kind == "qkv" else [module.weight]:
            values, distribution = part.detach().double().flatten().numpy(), weights[kind]
            low, high = distribution.support()
            # float32 rounds a draw beside the end onto it, and the product with the gain once more
            assert values.min() >= low * (1 + 1e-6) and values.max() <= high * (1 + 1e-6)
            # five standard errors of a normal sample's deviation; a uniform one's is smaller. 8 percent at 2000 entries
            assert values.std() == pytest.approx(distribution.std(), rel=5 / math.sqrt(2 * len(values))), name
            # the seed is fixed: no flicker. With about 20 vectors correct code meets p < 1e-4 at 1 seed in 500
            assert scipy.stats.kstest(values, distribution.cdf).pvalue > 1e-4, name
    assert seen == set(weights)


def test_pytorch_is_what_torch_does_by_default(model_config, wide_task):
    cfg = model_config(**WIDE, init="pytorch")
    ours = dict(initial_model(cfg, wide_task, 0).named_parameters())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        defaults = Transformer(cfg, input_kind="tokens", num_inputs=LETTERS, num_outputs=LETTERS, length=LENGTH)
    for name, theirs in defaults.named_parameters():
        if "norm" in name:
            assert torch.equal(ours[name], theirs)  # ones and zeros
        else:
            drawn_here, drawn_by_torch = (values.detach().flatten().numpy() for values in (ours[name], theirs))
            assert scipy.stats.ks_2samp(drawn_here, drawn_by_torch).pvalue > 1e-4, name  # fixed seeds: no flicker


@pytest.mark.parametrize("scheme", SCHEMES)
def test_initial_weights_depend_on_the_seed_and_nothing_else(model_config, wide_task, scheme):
    cfg = model_config(**WIDE, init=scheme)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = dict(initial_model(cfg, wide_task, 7).named_parameters())
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        same = dict(initial_model(cfg, wide_task, 7).named_parameters())
    other = dict(initial_model(cfg, wide_task, 8).named_parameters())
    for name in first:
        assert torch.equal(first[name], same[name])
        drawn = "norm" not in name and (scheme == "pytorch" or not name.endswith("bias"))
        assert torch.equal(first[name], other[name]) != drawn, name


@pytest.mark.parametrize("keys", [{}, {"kv_groups": 1}, {"bias": False}])
def test_a_query_gain_is_an_inverse_temperature_of_the_seed_that_has_it(model_config, sorting_task, keys):
    cfg, task = model_config(layers=2, query_gains=[1.0, 8.0], **keys), sorting_task()
    inputs = task.sample(5, generator(0)).inputs
    for seed, temperature in ((6, 1.0), (7, 1 / 8)):
        colder = initial_model(model_config(layers=2, temperature=temperature, **keys), task, seed)
        # powers of two scale without rounding, so what is left is the order of the products
        torch.testing.assert_close(initial_model(cfg, task, seed)(inputs), colder(inputs), rtol=1e-5, atol=1e-6)


def test_layers_do_not_share_their_draws(model_config, wide_task):
    model = initial_model(model_config(**WIDE), wide_task, 0)
    first, second = (dict(block.named_parameters()) for block in model.blocks)
    assert not any(torch.equal(first[name], second[name]) for name in first if "norm" not in name)
