"""Each path as a network of its own, with attention weights from its own states (Dong et al. 2021, sec. 4.3).

This is the protocol of the authors' code. These paths do not add up to the network's output.

Shapes: B batch, N query token, M key token, D width, H head, K head width, P path.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.model.attention import Heads
from rankbench.model.network import Network
from rankbench.model.norm import plain_norm
from rankbench.model.sublayers import AttentionSublayer


def check_recomputed(network: Network, analysis: str) -> None:
    """Raise ConfigError for weights that depend on more than one head, and for streams: no path can then run as its own
    network."""
    if len(network.shares) > 1:
        raise ConfigError(
            f"{network.name}: its tokens have {len(network.shares)} states side by side, which a path alone does not "
            f"have, so no path can be run as a network of its own; take analysis.{analysis}.schemes=[frozen]"
        )
    for attention in network.attentions:
        if not attention.weighting.by_head:
            raise ConfigError(
                f"{network.name}: its scores, {attention.score_name}, are not those of one head's queries and keys "
                f"alone, so no path can be run as a network of its own; take analysis.{analysis}.schemes=[frozen]"
            )


class RecomputedNetwork:
    """Paths that are networks of their own.

    Each layer that a path uses computes attention of one head on the path's own state, adds the whole output bias, and
    applies the norm without its learned scale and shift (the network's kind; none in a network without norms). Skips,
    MLPs and layers that the path skips do nothing. mlp=True keeps the MLP sub-layers, which the authors' code leaves
    out.
    """

    def __init__(self, network: Network, inputs: Tensor, mlp: bool = False) -> None:
        check_recomputed(network, "paths")
        with torch.no_grad():
            self.embedding_BND, self.present_BN = network.embed(inputs), network.present(inputs)
            self.layers = [sublayers if mlp else sublayers[:1] for sublayers in network.layers]
            # per layer and head: query, key and value of one head in one product, and the map back to the width
            heads = [attention.maps_as_applied() for attention in network.attentions]
            self.read = [
                [
                    (torch.cat([w_DK.T for w_DK in (q, k, v)]), torch.cat(biases))
                    for q, k, v, *biases in zip(
                        w.w_q_HDK, w.w_k_HDK, w.w_v_HDK, w.b_q_HK, w.b_k_HK, w.b_v_HK, strict=True
                    )
                ]
                for w in heads
            ]
            self.write = [[(w_o_KD.T.contiguous(), w.b_o_D) for w_o_KD in w.w_o_HKD] for w in heads]

    @torch.no_grad()
    def step(self, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        """Path prefixes after layer `layer` (from 0), which they skip (choice 0) or pass by head `choice`."""
        if choice == 0:
            return states_PBND
        for sublayer in self.layers[layer]:
            if isinstance(sublayer, AttentionSublayer):
                states_PBND = self._one_head(sublayer.part, states_PBND, layer, choice, sequences)
            else:
                states_PBND = sublayer.part(states_PBND)
            states_PBND = sublayer.branch * states_PBND
            if sublayer.norm is not None:
                states_PBND = plain_norm(sublayer.norm.kind, states_PBND)
        return states_PBND

    def _one_head(self, attention: Heads, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        widths = [attention.head_width] * 2 + [attention.value_width]
        q_PBNK, k_PBNK, v_PBNK = F.linear(states_PBND, *self.read[layer][choice - 1]).split(widths, dim=-1)
        # `weights` expects axes (B, H, N, K) and here gets (P, B, N, K)
        present_BN = None if self.present_BN is None else self.present_BN[sequences]
        seen_BNM = attention.seen(present_BN, q_PBNK.shape[-2], q_PBNK.device)
        p_PBNM = attention.weights(q_PBNK, k_PBNK, seen_BNM)
        gains_PBM = attention.gains(v_PBNK, present_BN)
        gate_PBN = attention.weighting.gate(q_PBNK, attention)
        mixing_PBNM = attention.mixing(p_PBNM, seen_BNM, gains_PBM, v_PBNK, gate_PBN)
        return F.linear(mixing_PBNM @ v_PBNK, *self.write[layer][choice - 1])

    def start(self, sequences: slice) -> Tensor:
        """The path of no layers: the embedded inputs, (B, N, D)."""
        return self.embedding_BND[sequences]

    def finish(self, states_GBND: Tensor, sequences: slice) -> Tensor:
        """Return x: the read-out normalises."""
        return states_GBND
