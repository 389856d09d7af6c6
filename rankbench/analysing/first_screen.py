"""The answer about a network that is not ours: the heading of its figure, and a table for a terminal of 80 columns."""

import re
import textwrap

import pandas as pd

from rankbench.analyses import Subject
from rankbench.analyses.residual import disagreements
from rankbench.plots.residual import frozen_lengths
from rankbench.runs.tables import last_of_layer, thinned

WIDTH = 80  # characters of a terminal
FRESH = {"initialised": "fresh"}
SHARES = {"sizes": "norm_share", "paths": "path_share"}


def name_of(subject: Subject) -> str:
    """Name of a network that is not ours for a heading: the last part of what the user named, and its class."""
    assert subject.foreign is not None
    module = next(iter(subject.modules.values()))
    half = f", {subject.foreign.half}" if subject.foreign.half else ""
    return f"{re.split('[/:]', subject.run.rstrip('/'))[-1]} ({type(module).__name__}{half})"


def heading_of(name: str, network: pd.DataFrame) -> str:
    """Name, layers, heads and the tokens that were read. network: rankbench.measures.network_table."""
    calls = network[(network.part == "attention") & (network.counts == "head")]
    heads = " or ".join(f"{number:g}" for number in sorted(set(calls.heads)))
    (tokens,) = network[network.part == "tokens"].itertuples()
    sequences, *length = str(tokens.shape).split()
    of_each = f" of {length[0]} tokens" if length else ""
    return f"{name}: {len(calls)} layers of {heads} heads; {sequences} sequences{of_each} ({tokens.task})"


def first_screen(name: str, network: pd.DataFrame, residual: pd.DataFrame, paths: pd.DataFrame, read: list[str]) -> str:
    """Residual and effective rank of the state that leaves each layer, and the share of paths of each length, as rows
    of one table, means over seeds; where other views of the tokens differ; and what was read and left out.

    read: the sentences of `modules.described`.
    """
    last, lengths = last_of_layer(residual), frozen_lengths(paths)
    states = last[(last.variant == "full") & (last.view == "all")]
    columns = {
        (heading, FRESH.get(weights, weights)): of_weights.groupby("layer")[metric].mean()
        for metric, heading in (("relative_residual", "residual"), ("effective_rank", "effective rank"))
        for weights, of_weights in states.groupby("weights", sort=False)
    }
    by_length = lengths.groupby("path_length")[["norm_share", "path_share"]].mean()
    columns |= {(f"share of {part}", "length k"): by_length[name] for part, name in SHARES.items()}
    table = thinned(pd.DataFrame(columns).rename_axis("k").T).T
    text = table.map("{:.3g}".format).replace("nan", "").to_string()
    sentences = [f"{heading_of(name, network)}. k: layer (0: embedding), or heads that a path passes"]
    left_out = [*disagreements(last), *read]
    if lengths.bias_norm_share.max() > 0:
        left_out += [f"biases, which are no paths, have {lengths.bias_norm_share.mean():.2g} of the sums' size"]
    before, after = (
        [textwrap.fill(sentence, WIDTH, subsequent_indent="  ") for sentence in part] for part in (sentences, left_out)
    )
    return "\n".join([*before, text, *after])
