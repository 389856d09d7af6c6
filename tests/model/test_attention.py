"""Attention of every kind: against loops in numpy, mpmath, Jacobians of autograd and closed forms.

Shapes: B batch, N query token, M key token, D width, H head, K head width, V value width.
"""

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from breadth import some
from by_hand import CONTRACTIVE, KINDS, TIED, attention_by_hand, bound_by_hand, head_by_hand
from drawn import generator, label_of, normal, randomised, transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from rankbench.model.attention import FUSED_FROM_TOKENS
from rankbench.model.contraction import inverse_phi, l2_bound_inf
from rankbench.model.weightings import ATTENTIONS

# Float64 against another float64 route: a few hundred terms of order 1 to 10, eps = 2.2e-16.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
DOTS = [{"norm": "pre"}, {"norm": "none", "positions": "sinusoidal"}]
MASKS = [{"mask": "none"}, {"mask": "causal"}, {"mask": "window", "window": 1}]
MIXED = {"mix_attention": 0.6, "mix_identity": -0.3, "mix_uniform": 0.2, "temperature": 0.7}

every = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def network(seed=0, padded=False, deviation=0.5, **changes):
    """A small Transformer on 7 tokens in, 4 classes out, all parameters random."""
    model = transformer(**{"mlp_ratio": 1.5, "length": 300, "padded": padded, **changes})
    return randomised(model, generator(seed), deviation)


def layer(*args, **changes):
    """The attention of the first layer of `network`."""
    return network(*args, **changes).attentions[0]


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [*MASKS, {"mask": "others"}], ids=label_of)
@pytest.mark.parametrize("changes", some(KINDS, 2), ids=label_of)
@torch.no_grad()
def test_each_attention_is_that_of_a_loop_over_its_heads_which_add_up_to_the_output(changes, mask):
    for others in ({"bias": False}, MIXED):
        model = network(1, **changes, **mask, **others)
        x_BND, present_BN = normal(2, 3, 4, 6), torch.arange(4) < torch.tensor([[4], [1], [3]])
        x_BND[0, 1] = 0  # without biases a value of zero
        for attention in model.attentions:
            for present, lengths in ((None, (4, 4, 4)), (present_BN, (4, 1, 3))):
                output_BND, tables = attention.observe(x_BND, present)
                torch.testing.assert_close(attention(x_BND, present), output_BND, rtol=0, atol=0)
                maps = attention.maps_as_applied()
                summed_BND = (tables["mixed_BHNK"] @ maps.w_o_HKD).sum(1) + maps.b_o_D
                torch.testing.assert_close(summed_BND, output_BND, **EXACT)
                wanted_BND = attention_by_hand(attention, model.cfg, x_BND, lengths)
                for b, length in enumerate(lengths):  # what stands at absent tokens means nothing
                    torch.testing.assert_close(output_BND[b, :length], wanted_BND[b, :length], **EXACT)
                    x_ND = x_BND[b].numpy()
                    for h in range(attention.heads):
                        head = head_by_hand(attention, model.cfg, x_ND, h, length)
                        mixed = head.mixing @ (x_ND @ head.w + head.bias)
                        for name, wanted in zip(tables, (head.p, head.mixing, mixed), strict=True):
                            np.testing.assert_allclose(tables[name][b, h, :length], wanted[:length], **EXACT)


@every
@given(seeds, st.integers(1, 64))
def test_scores_of_l2_in_bfloat16_lose_no_digits_of_the_squared_keys(seed, width):
    q_BNK, k_BMK = (9 * normal(seed + number, 2, 3, width).bfloat16() for number in range(2))
    left, right, _ = ATTENTIONS["l2"].factors(q_BNK, k_BMK)
    assert left.dtype == right.dtype == torch.bfloat16
    wanted = q_BNK.double() @ k_BMK.double().mT - k_BMK.double().square().sum(-1)[:, None] / 2
    # two columns of 8 binary digits each: 2^-18 of the square; one column would be wrong by up to 2^-9 of it
    largest = k_BMK.double().square().sum(-1).max().item() / 2
    torch.testing.assert_close(left.double() @ right.double().mT, wanted, rtol=0, atol=2**-17 * largest)


def test_there_is_an_attention_of_every_name_in_the_config():
    from rankbench.config.schema import KEYS

    assert set(ATTENTIONS) == set(KEYS["model.attention"].choices)


# --- fused ------------------------------------------------------------------------------------------------------------


FUSED = [
    {},
    {"tied_qk": True},
    {"attention": "l2"},
    {"mix_attention": 0.4, **TIED, "temperature": 2.0, "head_width": 6, "value_width": 3},
    CONTRACTIVE,
    {"attention": "cosine", "value_width": 5},
    {"attention": "cosine", "mix_attention": 0.6, "exclusive": True},
    {"attention": "gated", "exclusive": True},
]


@pytest.fixture
def fused_calls(monkeypatch):
    """The shapes of the queries of each call of the fused kernel."""
    calls, fused = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(a[0].shape) or fused(*a, **k))
    return calls


@pytest.mark.parametrize(("more", "padded"), [(-1, False), (0, False), (1, True)], ids=["short", "whole", "padded"])
@pytest.mark.parametrize("mask", MASKS, ids=label_of)
@pytest.mark.parametrize("changes", FUSED, ids=label_of)
def test_fused_and_explicit_agree_forward_and_backward(fused_calls, changes, mask, more, padded):
    num_tokens = FUSED_FROM_TOKENS + more
    present_BN = torch.arange(num_tokens) < torch.tensor([[num_tokens], [40]])
    slope = normal(3, 2, num_tokens, 6) * present_BN[..., None]
    # float32: sums of 100 terms, and differences of squares of order 10 in the scores
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-3)):
        module, results = layer(1, **changes, **mask).to(dtype), []
        for kernel, expected in (("fused", more >= 0), ("table", 0)):
            x_BND = normal(2, 2, num_tokens, 6).to(dtype).requires_grad_()
            fused_calls.clear()
            y_BND = module(x_BND, present_BN if padded else None, kernel=kernel)
            assert len(fused_calls) == expected
            gradients = torch.autograd.grad(y_BND, [x_BND, *module.parameters()], slope.to(dtype))
            results.append([y_BND * present_BN[..., None], *gradients])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("mask", MASKS, ids=label_of)
@pytest.mark.parametrize("changes", [{"head_width": 1}, *FUSED], ids=label_of)
def test_networks_side_by_side_are_fused_in_one_call(fused_calls, changes, mask, padded):
    num_tokens = 5 if changes.get("head_width") == 1 else FUSED_FROM_TOKENS + 1
    present_SBN = torch.arange(num_tokens) < torch.tensor([[[num_tokens], [3]], [[2], [4]], [[5], [num_tokens]]])
    slope_SBND = normal(3, 3, 2, num_tokens, 6) * present_SBN[..., None]
    modules = [layer(seed, **changes, **mask) for seed in range(3)]
    x_SBND = normal(2, 3, 2, num_tokens, 6).requires_grad_()
    weights = [
        torch.stack(of_seeds).detach().requires_grad_()
        for of_seeds in zip(*(m.parameters() for m in modules), strict=True)
    ]
    names = [name for name, _ in modules[0].named_parameters()]

    def attend(weights, x_BND, present_BN, kernel):
        arguments = (x_BND, present_BN if padded else None, None, kernel)
        return functional_call(modules[0], dict(zip(names, weights, strict=True)), arguments)

    together = vmap(attend, in_dims=(0, 0, 0, None))(weights, x_SBND, present_SBN, "side_by_side")
    assert [tuple(shape[:2]) for shape in fused_calls] == [(6, 2)]
    alone = [attend([w[i] for w in weights], x_SBND[i], present_SBN[i], "table") for i in range(3)]
    assert len(fused_calls) == 1
    present_SBN1 = present_SBN[..., None]
    results = [
        [y * present_SBN1, *torch.autograd.grad(y, [x_SBND, *weights], slope_SBND)]
        for y in (together, torch.stack(alone))
    ]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11 * max(1.0, wanted.abs().max().item()))


class Sizes(TorchDispatchMode):
    """The largest number of entries of any floating-point tensor made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                self.largest = max(self.largest, output.numel())
        return result


@pytest.mark.parametrize("mask", MASKS[:2], ids=label_of)
@pytest.mark.parametrize("changes", [{"attention": "l2"}, CONTRACTIVE, {"attention": "cosine"}], ids=label_of)
def test_training_makes_no_table_of_tokens_by_tokens(changes, mask):
    module, num_tokens = layer(1, **changes, **mask).float(), 250
    largest = []
    for kernel in ("fused", "table"):
        x_BND = normal(2, 1, num_tokens, 6).float().requires_grad_()
        with Sizes() as sizes:
            module(x_BND, kernel=kernel).sum().backward()
        largest.append(sizes.largest)
    assert largest[0] < num_tokens**2 <= largest[1]


# --- contraction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_keys", [2, 3, 5])
def test_inverse_phi_is_the_largest_value_of_the_lemma(num_keys):
    """Lemma F.2: the largest sum z^2 exp(-z^2) / sum exp(-z^2), the query itself at z = 0."""

    def value(z):
        z = np.append(z, 0.0)
        return -(z**2 @ np.exp(-(z**2))) / np.exp(-(z**2)).sum()

    starts = np.random.default_rng(0).uniform(0, 3, (10, num_keys - 1))
    largest = max(-scipy.optimize.minimize(value, start).fun for start in starts)
    assert largest == pytest.approx(inverse_phi(num_keys), rel=1e-8)  # the square of the optimiser's tolerance


@pytest.mark.parametrize("mixed", [{}, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("changes", [{}, {"heads": 3, "head_width": 4, "value_width": 2}], ids=label_of)
@torch.no_grad()
def test_the_bound_is_theorem_3_2(changes, mixed):
    model = network(3, **TIED, **changes, **mixed)
    attention = model.attentions[0]
    for num_keys in (1, 2, 30, 5000):
        got = attention.bound_inf(inverse_phi(num_keys))
        assert got.item() == pytest.approx(bound_by_hand(attention, model.cfg, num_keys), rel=1e-13)
    w = attention.maps()
    many = l2_bound_inf(w.w_q_HDK, w.w_v_HDK, w.w_o_HKD, torch.tensor([[0.0], [inverse_phi(30)]]))
    assert many.shape == (2, 1) and (many[1] > many[0]).all()


def largest_row_sum(attention, x_ND, present_1N=None):
    rows = torch.func.jacrev(lambda x: attention(x[None], present_1N)[0])(x_ND)
    return rows.flatten(2).abs().sum(-1).max().item()


@every
@given(
    seeds,
    st.sampled_from(MASKS),
    st.sampled_from([{}, MIXED, {"temperature": 0.2}]),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.integers(1, 6),
    st.booleans(),
)
def test_no_jacobian_is_above_the_bound(seed, mask, mixed, size, num_tokens, bias):
    x_ND = size * normal(seed, num_tokens, 6)
    keys = min(num_tokens, 3) if mask["mask"] == "window" else num_tokens
    plain = network(seed, **TIED, **mask, **mixed, bias=bias).attentions[0]
    assert largest_row_sum(plain, x_ND) <= plain.bound_inf(inverse_phi(keys)).item() * (1 + 1e-12)
    contractive = network(seed, **CONTRACTIVE, **mask, **mixed, bias=bias).attentions[0]
    assert largest_row_sum(contractive, x_ND) <= 0.7 * (1 + 1e-12)


def test_gradients_reach_through_the_bound():
    attention, x_BND = layer(4, **CONTRACTIVE), normal(1, 1, 3, 6)
    names = [name for name, _ in attention.named_parameters()]

    def output(*values):
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (x_BND))

    # norms are differentiable where no two sums are equal: at random weights
    assert torch.autograd.gradcheck(output, [p.detach().clone().requires_grad_() for p in attention.parameters()])


def test_a_fixed_number_of_keys_makes_causal_outputs_independent_of_what_follows():
    x_BND = normal(1, 1, 5, 6)
    outputs = {}
    for keys in (None, 8):
        attention = layer(2, **CONTRACTIVE, mask="causal", contraction_keys=keys)
        outputs[keys] = [attention(x_BND[:, :length])[:, :3] for length in (3, 5)]
    torch.testing.assert_close(*outputs[8], **EXACT)
    assert (outputs[None][0] - outputs[None][1]).abs().max() > 1e-3
    said = "model.contraction_keys=4: here a query may see 5 keys; set it to 5 or more"
    assert refusal(layer(2, **CONTRACTIVE, contraction_keys=4), x_BND) == said
    layer(2, **CONTRACTIVE, contraction_keys=4, mask="window", window=1)(x_BND)


# --- the rest of the house --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("changes", KINDS, ids=label_of)
@torch.no_grad()
def test_seeds_side_by_side_agree_with_each_alone(fused_calls, changes, padded):
    """In short and long sequences, of which the latter are fused, once in each layer, if their weights allow it."""
    models = [network(seed, padded, **changes, mask="causal") for seed in (1, 2)]
    names = [name for name, _ in models[0].named_parameters()]
    stacked = {name: torch.stack([model.get_parameter(name) for model in models]) for name in names}
    for num_tokens in (5, FUSED_FROM_TOKENS + 1):
        inputs_SBN = torch.randint(7, (2, 2, num_tokens), generator=generator(0))
        if padded:
            inputs_SBN[:, 1, 3:] = -1
        fused_calls.clear()
        got = vmap(lambda w, x: functional_call(models[0], w, (x,), {"kernel": "side_by_side"}))(stacked, inputs_SBN)
        is_short = num_tokens < FUSED_FROM_TOKENS and changes.get("head_width") != 1
        assert len(fused_calls) == (0 if is_short or not models[0].attentions[0].weighting.fusible else 2)
        for seed, model in enumerate(models):
            torch.testing.assert_close(got[seed], model(inputs_SBN[seed]), **EXACT)


@pytest.mark.parametrize(("mask", "num_tokens"), [(MASKS[2], 5), *((mask, FUSED_FROM_TOKENS + 3) for mask in MASKS)])
@pytest.mark.parametrize("changes", [*KINDS, *DOTS], ids=label_of)
def test_a_padded_sequence_gives_what_it_gives_alone(changes, mask, num_tokens):
    model = network(1, True, **changes, **mask)
    inputs = torch.randint(7, (2, num_tokens), generator=generator(0))
    inputs[1, 3:] = -1
    outputs = model(inputs)
    assert outputs.isfinite().all()
    torch.testing.assert_close(outputs[:1], model(inputs[:1]), **EXACT)
    torch.testing.assert_close(outputs[1:, :3], model(inputs[1:, :3]), **EXACT)
    outputs[1, :3].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("changes", [kind for kind in KINDS if "exclusive" not in kind], ids=label_of)
@torch.no_grad()
def test_dropout_falls_on_the_weights(changes):
    attention, x_BND = layer(1, **changes), normal(2, 2, 4, 6)
    mixing_BHNM = attention.observe(x_BND)[1]["mixing_BHNM"]
    mask = torch.empty(2, attention.heads, 4, 4, dtype=torch.float64).bernoulli_(0.5, generator=generator(0)) * 2
    w = attention.maps_as_applied()
    v_BHNV = x_BND[:, None] @ w.w_v_HDK + w.b_v_HK[:, None]
    wanted = (mixing_BHNM * mask @ v_BHNV @ w.w_o_HKD).sum(1) + w.b_o_D
    torch.testing.assert_close(attention(x_BND, None, mask), wanted, **EXACT)
