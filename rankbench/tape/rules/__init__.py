"""What the tape knows about each torch function: a rule by name, from a call that was seen to tags of its results.

A rule returns None for arguments that it does not cover; then only the value of the result is known. Importing this
package registers all rules.
"""

from rankbench.tape.rules import attention, functions, linear, products, written_out
from rankbench.tape.rules.registry import RULES

__all__ = ["COVERED", "RULES", "attention", "functions", "linear", "products", "written_out"]

COVERED = (
    "attention (scaled_dot_product_attention, multi_head_attention_forward, flex_attention, softmax(...) times v by "
    "matmul, bmm or einsum), linear maps, convolutions, norms, elementwise activation functions, products of which one "
    "side is frozen, sums, and calls that move numbers"
)
