"""The columns of the analysis `spectrum`, and the groups that its code names them by."""

from rankbench.analyses.columns import SPECIAL_TOKENS, WEIGHTS

RELATIVE = ("mass", "share", "error_upto")  # to the output
SCORED = ("loss_upto", "accuracy_upto")
EXCESS = "excess_loss_upto"
BESIDE = ("kl_upto", "agreement_upto", "settled_upto", "loss_settled_upto")  # the whole output, token by token
LATER = ("hard_tokens_later", "last_tokens_later")
MEASURED = (*RELATIVE, *SCORED, EXCESS, *BESIDE)
NEEDED = {"k95": 0.05, "k99": 0.01, "k999": 0.001}  # the error that is left
WHOLE = ("whole_loss", "whole_accuracy")
OF_TARGETS = (*SCORED, EXCESS, "loss_settled_upto", *WHOLE)


def _with_interval(columns: dict[str, str]) -> dict[str, str]:
    """The columns, each with the ends of its interval."""
    ends = {"": None, "_low": "lower", "_high": "upper"}
    of_interval = "End of the 95 % bootstrap interval over sequences, the {}; nan for one sequence."
    return {
        f"{name}{suffix}": text if end is None else of_interval.format(end)
        for name, text in columns.items()
        for suffix, end in ends.items()
    }


ROWS = {
    **WEIGHTS,
    "of": "What X is. states: the last states, which the output is read out of (of a public checkpoint what its body "
    "returns, else what the last map of weights reads); logits: the output less its mean over the classes, as a "
    "softmax sees it; output: the output as it is; layer: the state after a layer, as the layer returns it.",
    "part": "length; constant, the part of X that depends on no input (biases, shifts, positions) and that the "
    "lengths contain; or layer, all lengths of the state after one layer (each_layer), with the lengths that it needs.",
    "layer": "Number of the layer, from 1, of the rows of layers.",
    "path_length": "k. Embeddings, and biases that pass no head, are of length 0.",
    "num_paths": "Number of sequences of k heads on the network's own graph.",
    **_with_interval(
        {
            "mass": "||S_k||_F / ||X||_F, over the sequences whose X is not zero.",
            "share": "<S_k, X> / ||X||_F^2, which sums to 1, over the same sequences. Where the masses sum to far more "
            "than 1, lengths cancel: shares are then no parts of a whole, and a mean of lengths by them says nothing.",
            "error_upto": "||X - (S_0 + ... + S_k)||_F / ||X||_F, over the same sequences.",
            "loss_upto": "Loss of S_0 + ... + S_k of the output, whatever X is (nats per scored token), over the "
            "sequences that have a scored token; nan without targets.",
            "accuracy_upto": "Accuracy of the same; nan without targets.",
            EXCESS: "loss_upto of a sequence minus its whole loss (nats per scored token), over the same sequences; "
            "nan without targets.",
            "kl_upto": "sum_c p_c log(p_c / q_c): Kullback-Leibler divergence of the softmax p of the output from that "
            "of S_0 + ... + S_k (nats, mean over tokens); nan for an output that is no logits, as the next three.",
            "agreement_upto": "Share of tokens for which both have the same most likely class.",
            "settled_upto": "Share of tokens whose divergence is below .01 nats from k on.",
            "loss_settled_upto": "Share of scored tokens whose loss is within .01 nats of their whole one from k on: "
            "what a mean loss, in which errors of both signs cancel, does not tell; over the same sequences, nan "
            "without targets.",
        }
    ),
    "below_floor": "Share of the first 16 sequences, fewer for large modules, whose S_k is no more than rounding "
    "(rankbench.measures.rounding).",
    "error_below_floor": "1 where error_upto is at most ten remainders, as at the largest length, else 0.",
    "kl_below_floor": "1 where kl_upto is at most ten times its rounding, which it is at the largest length, else 0.",
    **_with_interval(
        {
            name: f"First k from which error_upto is below {most:g}, mean over sequences."
            for name, most in NEEDED.items()
        }
    ),
    **_with_interval(
        {
            "hard_tokens_later": "First k from which a token's divergence is below .01 nats: mean over the third of a "
            "sequence's scored tokens with the largest loss, less that over the third with the smallest (heads), over "
            "the sequences with at least three such tokens; nan if there are none.",
            "last_tokens_later": "The same for the last third of a sequence's tokens and its first; nan for an output "
            "that is no logits.",
        }
    ),
    "remainder": "Largest ||X - sum_k S_k|| / ||X|| of a batch.",
    "whole_loss": "Loss of the output, over the sequences that have a scored token; nan without targets.",
    "whole_accuracy": "Accuracy of the output, over the same sequences; nan without targets.",
    "num_sequences": "Number of sequences.",
    "num_undefined": "Number of sequences whose X is zero.",
    "frozen": "All parts that were held fixed; of a product of two activations which factor, and the call that made "
    "it.",
    "measured": "Name of the measured tensor in the module.",
    "weights_sd": "Standard deviation of the entries of all matrices of the module; nan in rows of layers.",
}
COLUMNS = ROWS | SPECIAL_TOKENS
