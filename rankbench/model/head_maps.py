"""The heads of an attention as linear maps.

Shapes: D width, H head, K head width.
"""

from typing import NamedTuple

from torch import Tensor


class HeadMaps(NamedTuple):
    """One layer's heads, each as its own linear maps: y_h = M_h (x W_V,h + b_V,h) W_O,h, and b_O once for the layer.

    M_h is the matrix that multiplies the values: P_h, or its mix with the identity and the average, or P_h with
    scaled columns. w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD; b_q_HK, b_k_HK, b_v_HK, b_o_D (zeros without biases). In w_v,
    w_o and b_v, K is the width of the values. Scores are products of w_q and w_k only if Heads.has_score_maps is true.
    """

    w_q_HDK: Tensor
    w_k_HDK: Tensor
    w_v_HDK: Tensor
    w_o_HKD: Tensor
    b_q_HK: Tensor
    b_k_HK: Tensor
    b_v_HK: Tensor
    b_o_D: Tensor
