"""What columns mean that the tables of several analyses have."""

WEIGHTS = {"weights": "trained or initialised; of a user's module given."}
VARIANT = {"variant": "Parts that are taken out of the network, as in the option `variants`; full: none."}
SPECIAL_TOKENS = {
    "special_tokens": "Whether special tokens count: in or out, with the names of other kinds that are left out, as in "
    "out+first. No column for networks of ours in which all tokens count."
}
WHOLE_ACCURACY = {"whole_accuracy": "Accuracy of the whole network (share of tokens)."}
OF_CLASSIFIER = {
    "whole_accuracy": "Accuracy of the trained network on the whole test set (share of tokens). No column for a "
    "regression, and for networks that were not trained."
}
LOSS_FALL = {
    "loss_fall": "Fall of the test loss (per token) over the last quarter of training, which shows whether it had "
    "converged. No column for networks that were not trained."
}
# X is the state of a sequence, R its residual from the token mean (formulas: docs/METRICS.md). Rounding errors:
# rankbench.measures.rounding.
STATE_FLOORS = {
    "noise_floor": "Rounding error of `residual` (units of X).",
    "relative_noise_floor": "The same over ||X||.",
    "below_floor": "Share of sequences whose residual is no larger than noise_floor: rounding, not a measurement.",
}
STATES = {
    "relative_residual": "Distance to the nearest matrix of equal tokens over the state's size, ||R|| / ||X||, in the "
    "composite norm.",
    "residual": "||R|| in the composite norm (units of X).",
    "relative_residual_l1": "||R|| / ||X|| in the 1-norm.",
    "relative_residual_linf": "||R|| / ||X|| in the inf-norm.",
    "relative_residual_frobenius": "||R|| / ||X|| in the Frobenius norm, 0 to 1.",
    "residual_frobenius": "||R|| in the Frobenius norm (units of X).",
    "high_frequency_energy": "||R||_F over the Frobenius norm of the token mean, once for each token.",
    "stable_rank": "sum s^2 / s_1^2, of the singular values s of X.",
    "stable_rank_gram": "sum s^4 / s_1^4: the stable rank of X X^T.",
    "effective_rank": "exp of the entropy of s / sum s.",
    "effective_rank_squared": "exp of the entropy of s^2 / sum s^2: the effective rank of X X^T.",
    "effective_rank_centred": "effective_rank of the residual R.",
    "effective_rank_squared_centred": "effective_rank_squared of the residual R.",
    "participation_ratio": "(sum s^2)^2 / sum s^4.",
    "numerical_rank": "Number of singular values above the rounding error of the largest.",
    "second_singular_ratio": "s_2 / s_1, 0 to 1.",
    "mean_cosine": "Mean cosine of all pairs of tokens.",
    "mean_cosine_centred": "Mean cosine of all pairs of rows of R.",
    "mean_absolute_cosine": "Mean absolute cosine of all pairs of tokens, 0 to 1.",
    "antipodal_share": "Share of pairs of tokens with a cosine below -0.9.",
}
ATTENTION = {
    "attention_entropy": "Entropy of a row of P over the log of the number of keys that it sees, 0 to 1; mean over "
    "rows.",
    "attention_stable_rank": "stable_rank of P.",
    "attention_effective_rank": "effective_rank of P.",
    "attention_relative_residual": "relative_residual of P: 0 if all queries read alike.",
    "attention_gap_eigenvalue": "1 - |second eigenvalue| of P, 0 to 1.",
    "attention_gap_singular": "s_1 - s_2 of P.",
}
ATTENTION_FLOORS = {
    "attention_noise_floor": "Rounding error of the residual of P.",
    "attention_relative_noise_floor": "Rounding error of attention_relative_residual.",
    "attention_below_floor": "Share of sequences for which the residual of P is no larger than its rounding error.",
}
# Of hyper-connections (rankbench.measures.streams). M is the mixing matrix of the sub-layer, S the number of streams.
STREAMS = {
    "stream_residual": "Distance of a token's streams to their mean over their size, 0 to 1, in the Frobenius norm; "
    "mean over tokens. This column and the next three are of networks with hyper-connections.",
    "mixing_from_identity": "Spectral norm of M - I.",
    "mixing_from_mean": "Spectral norm of M - 1 1^T / S, of which 1 is the value for M = I.",
    "mixing_gain": "Spectral norm of the product of the mixing matrices up to this sub-layer.",
}
SPREAD = {"<column>_sd": "Sample standard deviation of <column> over the sequences for which it is defined."}
