"""rankbench.measures.lipschitz_of_networks: a head's W_QK against derivatives of the scores that enter the softmax, and
bounds against Jacobians."""

import pytest
import torch
from torch.func import jacrev

from rankbench.measures.lipschitz_of_networks import attention_bound, constants_by_layer, head_maps
from rankbench.model.weightings import COSINE_EPSILON

ROUNDING = 1e-12  # float64, some hundred operations of order 1


def dot(q_K, k_K):
    return q_K @ k_K


def l2(q_K, k_K):
    return -(q_K - k_K).square().sum()


def cosine_times_lengths(q_K, k_K):
    return cosine(q_K, k_K) * ((q_K @ q_K + COSINE_EPSILON) * (k_K @ k_K + COSINE_EPSILON)).sqrt()


def cosine(q_K, k_K):
    return q_K @ k_K / ((q_K @ q_K + COSINE_EPSILON) * (k_K @ k_K + COSINE_EPSILON)).sqrt()


SIZES = {"width": 6, "heads": 2, "head_width": 4, "temperature": 0.7}  # sqrt(K) = 2
KINDS = [
    ({"attention": "dot"}, dot, dot, 2.0),
    ({"attention": "l2"}, l2, l2, 2.0),
    ({"attention": "l2", "tied_qk": True}, l2, l2, 2.0),
    ({"attention": "contractive_l2", "tied_qk": True, "contraction": 1.0}, l2, l2, 2.0),
    ({"attention": "cosine"}, cosine, cosine_times_lengths, 1.0),
]


@pytest.mark.parametrize(
    ("changes", "score", "bilinear", "root"), KINDS, ids=["dot", "l2", "l2 tied", "contractive", "cosine"]
)
def test_w_qk_is_the_mixed_derivative_of_the_scores(random_network, changes, score, bilinear, root):
    model, batch = random_network(1, 3, **SIZES, **changes)
    attention = model.blocks[0].attention
    x_ND = model.embed(batch.inputs)[0]
    w = attention.maps()
    q_1HNK, k_1HNK, _ = attention.queries_keys_values(x_ND[None])
    p_HNN = attention.weights(q_1HNK, k_1HNK, None)[0]
    left_HDK, right_HDK = head_maps(attention)["qk"]
    norms = [values["qk_norm"] for values in constants_by_layer(model, 4).values() if "qk_norm" in values]
    for head in range(2):

        def between(function, x_D, y_D, head=head):
            q_K, k_K = x_D @ w.w_q_HDK[head] + w.b_q_HK[head], y_D @ w.w_k_HDK[head] + w.b_k_HK[head]
            return function(q_K, k_K) / (root * attention.temperature)

        # these scores are the ones that enter the softmax
        scores_NN = torch.stack([torch.stack([between(score, x_D, y_D) for y_D in x_ND]) for x_D in x_ND])
        torch.testing.assert_close(scores_NN.softmax(-1), p_HNN[head], rtol=ROUNDING, atol=ROUNDING)
        mixed_DD = jacrev(jacrev(lambda x_D, y_D: between(bilinear, x_D, y_D)), argnums=1)(x_ND[0], x_ND[1])
        torch.testing.assert_close(left_HDK[head] @ right_HDK[head].T, mixed_DD, rtol=ROUNDING, atol=ROUNDING)
        assert norms[head] == pytest.approx(torch.linalg.matrix_norm(mixed_DD, 2).item(), rel=ROUNDING)


@pytest.mark.parametrize("attention", ["l2", "cosine"])
def test_no_bound_is_below_the_jacobian_with_values_of_the_first_layer(random_network, attention):
    model, _ = random_network(2, 3, width=4, heads=2, attention=attention, tied_qk=True, value_residual=0.4)
    heads, generator = model.attentions[1], torch.Generator().manual_seed(0)
    x_ND, first_ND = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    for size in (1, 1e4):  # of what the first layer has read, which no Jacobian by x_ND may depend on without limit
        jacobian = jacrev(lambda x_ND, size=size: heads(torch.cat([x_ND, size * first_ND], -1)[None])[0])(x_ND)
        jacobian = jacobian.reshape(20, 20)
        assert torch.linalg.matrix_norm(jacobian, 2) <= attention_bound(heads, 5, "2")
        assert jacobian.abs().sum(1).max() <= attention_bound(heads, 5, "inf")
