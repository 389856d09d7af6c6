"""A network's cell of the map of depth and inverse temperature: the cosine of its tokens in theory and before training,
and its accuracy after it (theory in rankbench.measures.signal_propagation).

Shapes: B sequence, N token, D width.
"""

import math
from dataclasses import dataclass
from itertools import islice
from typing import cast

import pandas as pd
import torch

from rankbench.analyses.analysis import Analysis, Subject, each_sequence
from rankbench.config.keys import key
from rankbench.measures.law import mean_cosine
from rankbench.measures.signal_propagation import WEIGHT_VARIANCE, cosines, critical_beta
from rankbench.model import initial_model
from rankbench.model.network import run
from rankbench.model.transformer import Transformer
from rankbench.plots.signal_map import draw_signal_map

# The networks that theory covers: values of the keys of the model, besides those of `_is_covered`.
COVERED: dict = {"attention": "dot", "tied_qk": False, "mask": "none", "exclusive": False, "init": "pytorch"}
COVERED |= {"heads": 1, "skip": True, "skip_scale": 1.0, "branch_scale": 1.0, "mlp": True, "mlp_skip": True}
COVERED |= {"activation": "relu", "bias": False, "mlp_ratio": 1.0, "values": "free", "attention_init": None}
COVERED |= {"mix_attention": 1.0, "mix_identity": 0.0, "mix_uniform": 0.0, "weight_norm": "none"}
COVERED |= {"norm_scale": "none", "value_residual": 0.0, "embedding_skip": 0.0, "hyper_connections": "none"}
COVERED |= {"head_width": None, "value_width": None, "latent_width": None, "embedding_norm": True}
NEAR = 0.01  # relative error of a variance that is stated with a few digits


@dataclass(frozen=True)
class Options:
    """Where theory starts, and on how many sequences cosines are measured."""

    first_cosine: float = key("Mean cosine of two tokens of the embedding, in theory.", at_least=0.0, below=1.0)
    sequences: int = key("Number of test sequences on which cosines are measured.", at_least=1)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """One row: the network's cell of the map."""
    cfg, tokens = subject.network.cfg, max(2, subject.task.length)
    gain = cfg.query_gains[subject.seed % len(cfg.query_gains)]
    beta = gain / (cfg.temperature * math.sqrt(math.log(tokens)))
    critical, theory = math.nan, math.nan
    if _is_covered(subject):
        critical = critical_beta(1.0, options.first_cosine)
        theory = next(islice(cosines(cfg.norm, False, beta, tokens, options.first_cosine), cfg.layers, None))
    fresh = cast(Transformer, initial_model(cfg, subject.task, subject.seed)).to(subject.network.read_out.weight)
    inputs = subject.test.inputs[: options.sequences]
    *_, last = run(fresh, inputs)
    measured = [mean_cosine(x_ND) for x_ND in each_sequence(last.output_BND, fresh.lengths(inputs))]
    score = subject.score(subject.test)
    row = {
        "layers": cfg.layers,
        "beta": beta,
        "draw": subject.seed // len(cfg.query_gains),
        "critical_beta": critical,
        "theory_cosine": theory,
        "initial_cosine": pd.Series(measured).mean(),
        "test_loss": score.mean_loss.item(),
    }
    if subject.task.target_kind == "classes":
        row["test_accuracy"] = score.accuracy.item()
    return pd.DataFrame([row])


def _is_covered(subject: Subject) -> bool:
    """Whether theory is about this network."""
    cfg = subject.network.cfg
    variances = {"init_gain": 3.0, "mlp_gain": WEIGHT_VARIANCE}  # of torch's U(+-1/sqrt(d)) 3 times 1/(3 d)
    return (
        all(getattr(cfg, name) == value for name, value in COVERED.items())
        and all(math.isclose(getattr(cfg, name) ** 2, wanted, rel_tol=NEAR) for name, wanted in variances.items())
        and cfg.norm in ("pre", "post")
        and not subject.task.padded
    )


def digest(table: pd.DataFrame) -> str:
    """Means over the networks below and above the critical beta, by depth, for a terminal."""
    columns = [name for name in ("theory_cosine", "initial_cosine", "test_loss", "test_accuracy") if name in table]
    side = (table.beta > table.critical_beta).map({False: "no", True: "yes"}).rename("above critical beta")
    means = table.groupby(["layers", side])[columns].mean()
    return f"means over {len(table)} networks, by depth and inverse temperature\n{means.to_string(float_format='%.3g')}"


COLUMNS = {
    "layers": "Number of layers.",
    "beta": "Inverse temperature at initialisation: scores have the variance beta^2 log(tokens), for tokens of mean "
    "square 1 and cosine 0.",
    "draw": "Number of the network among those of equal beta.",
    "critical_beta": "Critical beta in the first layer, above which attention concentrates on few tokens. This and the "
    "next: empty for networks that theory does not cover.",
    "theory_cosine": "Cosine of two tokens after the last layer of the initialised network, in theory.",
    "initial_cosine": "The same as measured: mean over pairs and test sequences.",
    "test_loss": "Of the trained network (nats per scored token, or squared error).",
    "test_accuracy": "Share of scored tokens. No column for a regression.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_signal_map,
    digest,
    COLUMNS,
    ("theory_cosine", "initial_cosine"),
    needs={"sublayers", "task", "history"},
    drawn_apart=("layers",),
)
