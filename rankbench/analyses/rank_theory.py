"""What heads of a given rank can and cannot do, by formula and by experiment (formulas in
rankbench.measures.amsel_theory).

The task is the nearer of two orthonormal points for a uniform query; no network is trained.
Shapes: B batch, H head, D dimension.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.head_rank import hard
from rankbench.config.keys import key
from rankbench.measures import amsel_theory as theory
from rankbench.model.bare import bare_network
from rankbench.model.transformer import Transformer
from rankbench.plots.rank_theory import draw_rank_theory
from rankbench.seeds import generator_for
from rankbench.tasks import Batch
from rankbench.tasks.nearest_neighbor import NearestNeighbor, on_sphere, orthonormal

AT_A_TIME = 2000  # sequences in one forward pass
Row = tuple[str, str, str, int, int, float, float, float]  # the columns, in the order of COLUMNS
FINER = 10  # times as many pairs for generalised heads, whose error is compared with a bound that it should equal


@dataclass(frozen=True)
class Options:
    """Sizes at which bounds, random heads and random attention are computed."""

    dimensions: list[int] = key("Dimensions of the bounds.", at_least=3, nonempty=True)
    ranks: list[int] = key("Ranks of the bounds, up to the dimension.", at_least=1)
    heads: list[int] = key("Numbers of heads of the bounds.", at_least=1)
    errors: list[float] = key(
        "Errors for which the fewest heads are counted.", above=0, below=0.5, why="heads of rank 0 reach 0.5"
    )
    votes: list[int] = key("Numbers of random heads.", at_least=1)
    samples: int = key("Number of pairs of points on which random heads are tried.", at_least=2)
    tokens: list[int] = key("Sizes N of random N x N attention matrices.", at_least=3)
    matrices: int = key("Number of random attention matrices of each size.", at_least=2)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each number that a formula or an experiment gives."""
    rows = [*_bounds(options), *_random_heads(subject.seed, options)]
    rows += [*_generalised_heads(subject.seed, options), *_matrices(subject.seed, options)]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"heads": float})


def _bounds(options: Options) -> Iterator[Row]:
    for dimension, rank, form in product(options.dimensions, options.ranks, theory.FORMS):
        if rank > dimension:
            continue
        for heads in sorted({*options.heads, *options.votes}):
            bound = theory.lower_bound(dimension, rank, heads, form)
            yield "error", f"bound_{form}", "formula", dimension, rank, heads, bound, 0.0
        for error in options.errors:
            fewest = theory.fewest_heads(dimension, rank, error, form)
            yield "fewest_heads", f"bound_{form}", "formula", dimension, rank, fewest, error, 0.0


@torch.no_grad()
def _random_heads(seed: int, options: Options) -> Iterator[Row]:
    for dimension in options.dimensions:
        task = pairs(dimension)
        batch = task.sample(options.samples, generator_for(seed, "rank theory"))
        network = hard(full_rank_head(dimension))
        yield "error", "full_rank", "measured", dimension, dimension, 1, *_error(network, batch)
        right = (1 + theory.agreement(dimension)) / 2
        yield "right", "one_random_head", "formula", dimension, 1, 1, right, 0.0
        difference_BD = batch.inputs[:, 0] - batch.inputs[:, 1]
        query_BD = batch.inputs[:, 2]
        sign_B = (difference_BD * query_BD).sum(1).sign()
        for number, heads in enumerate(options.votes):
            # every pair has its own heads, so the mean is over heads, too
            generator = generator_for(seed, "random heads", number)
            directions_BHD = on_sphere((options.samples, heads), dimension, generator)
            agrees_BH1 = directions_BHD @ difference_BD[..., None] * (directions_BHD @ query_BD[..., None])
            votes_BH = agrees_BH1.sign()[..., 0]
            if number == 0:
                one_right_B = (votes_BH[:, 0] == sign_B).double()
                yield "right", "one_random_head", "measured", dimension, 1, 1, *_moments(one_right_B)
            sum_B = votes_BH.sum(1)
            wrong_B = torch.where(sum_B == 0, 0.5, (sum_B.sign() != sign_B).double())
            kappa, rho = theory.agreement(dimension), theory.likeness(dimension)
            weight = kappa / (1 + (heads - 1) * rho)
            half_B = (sign_B - weight * sum_B).square() / 2
            size = (dimension, 1, heads)
            yield "error", "equal_weights", "formula", *size, theory.equal_weights(dimension, heads), 0.0
            yield "error", "equal_weights", "measured", *size, *_moments(half_B)
            queries_HD = on_sphere((heads,), dimension, generator)
            yield "error", "optimal_weights", "formula", *size, theory.optimal_weights(queries_HD), 0.0
            yield "error", "majority_vote", "formula", *size, theory.majority_vote(dimension, heads), 0.0
            yield "error", "majority_vote", "measured", *size, *_moments(2 * wrong_B)
            if heads % 2:  # an even number of heads can tie, which gives no vote
                network = construction(queries_HD)
                yield "error", "construction", "measured", *size, *_error(network, batch)


def _generalised_heads(seed: int, options: Options) -> Iterator[Row]:
    """Errors of the theorem's own heads, by Monte Carlo, for each rank and as many heads as can be solved for."""
    for dimension in options.dimensions:
        batch = pairs(dimension).sample(FINER * options.samples, generator_for(seed, "best heads"))
        u_BD = (batch.inputs[:, 0] - batch.inputs[:, 1]) / math.sqrt(2)
        y_BD = batch.inputs[:, 2]
        for number, (rank, heads) in enumerate(product(options.ranks, options.votes), 1):
            if rank < dimension and heads * theory.num_ridges(rank, 5) <= theory.MOST_RIDGES:
                generator = generator_for(seed, "best heads", number)
                best = theory.best_heads(orthonormal(heads, rank, dimension, generator), generator)
                chunks = zip(u_BD.split(AT_A_TIME), y_BD.split(AT_A_TIME), strict=True)
                squares_B = torch.cat([((u * y).sum(1).sign() - best(u, y)).square() for u, y in chunks])
                yield "error", "generalised", "measured", dimension, rank, heads, *_moments(squares_B / 2)


def _matrices(seed: int, options: Options) -> Iterator[Row]:
    for tokens, rank in product(options.tokens, options.ranks):
        generator = generator_for(seed, "matrices", tokens)
        if rank < tokens:
            scores = torch.randn(options.matrices, tokens, tokens, generator=generator, dtype=torch.float64)
            missed = torch.tensor([theory.low_rank_attention_error(scores_NN.softmax(1), rank) for scores_NN in scores])
            yield "attention_matrix", "truncated_scores", "measured", tokens, rank, 1, *_moments(missed)
        if rank > 1:
            margins = [theory.sparse_margin(tokens, rank, generator) for _ in range(options.matrices)]
            yield "sparse_margin", "random_keys", "measured", tokens, rank, 1, *_moments(torch.tensor(margins))


def _moments(values: Tensor) -> tuple[float, float]:
    """Mean and standard error of the mean."""
    return values.mean().item(), values.std().item() / math.sqrt(len(values))


def _error(network: Transformer, batch: Batch) -> tuple[float, float]:
    outputs = torch.cat([network(chunk)[:, -1] for chunk in batch.inputs.split(AT_A_TIME)])
    return _moments((outputs - batch.targets[:, -1]).square().sum(1))


def pairs(dimension: int) -> NearestNeighbor:
    """The task of the bounds: the nearer of two orthonormal points to a separate query."""
    return NearestNeighbor("nearest_neighbor", dimension, 2, "nearest", "separate", None, 1)


@torch.no_grad()
def full_rank_head(dimension: int) -> Transformer:
    """One head of full rank, W_QK = W_VO = 1: with hardmax it is exactly the nearest neighbour."""
    sizes = {"width": dimension, "layers": 1, "heads": 1, "head_width": dimension}
    network = _network(dimension, **sizes, skip=False, positions="none")
    eye = torch.eye(dimension, dtype=torch.float64)
    (attention,) = network.attentions
    attention.qkv.weight.copy_(eye.repeat(3, 1))
    attention.out.weight.copy_(eye)
    network.read_in.weight.copy_(eye)
    network.read_out.weight.copy_(eye)
    return network


@torch.no_grad()
def construction(queries_HD: Tensor) -> Transformer:
    """Two layers of rank-1 hardmax heads: random heads vote for one of two points, then one head looks it up.

    Tokens are (point, index, tally, answer): the index is +1, -1 and 0 for the query, from learned positions. Layer 1:
    the query attends by head h to the point of larger (x.q_h)(q_h.y) and adds its index to the tally. Layer 2: one head
    compares the tally with the indices and copies the winning point to the answer.
    """
    heads, dimension = queries_HD.shape
    width = 2 * dimension + 2
    index, tally, answer = dimension, dimension + 1, slice(dimension + 2, width)
    sizes = {"width": width, "layers": 2, "heads": heads, "head_width": 1, "value_width": dimension}
    network = _network(dimension, **sizes, skip=True, positions="learned")
    eye = torch.eye(dimension, dtype=torch.float64)
    network.read_in.weight[:dimension] = eye
    network.read_out.weight[:, answer] = eye
    assert network.position is not None  # positions=learned
    network.position.weight[:2, index] = torch.tensor([1.0, -1.0], dtype=torch.float64)
    first, second = network.attentions
    for rows in first.qkv.weight.split(first.rows)[:2]:
        rows[:, :dimension] = queries_HD
    first.qkv.weight[2 * heads :: dimension, index] = 1  # the first value of each head
    first.out.weight[tally, ::dimension] = 1
    second.qkv.weight[0, tally] = 1
    second.qkv.weight[heads, index] = 1
    second.qkv.weight[2 * heads : 2 * heads + dimension, :dimension] = eye
    second.out.weight[answer, :dimension] = eye
    return hard(network)


def _network(dimension: int, **keys: object) -> Transformer:
    """Network of attention to all other tokens, without norms, MLPs and biases; float64, every weight 0."""
    around = {"mask": "others", "read_in": "linear", "read_out": "linear"}
    network = bare_network(dimension, dimension, 3, **(around | keys))
    for parameter in network.parameters():
        parameter.zero_()
    return network


def digest(table: pd.DataFrame) -> str:
    """Errors by form and number of heads, and the fewest heads that the bounds allow, for a terminal."""
    errors = table[table.quantity == "error"].assign(form=table.form + " (" + table.kind + ")")
    first = errors[errors.dimension == errors.dimension.min()]
    mean = first.pivot_table("value", ["form", "rank"], "heads", "mean", sort=False).sort_index(axis=1)
    fewest = table[table.quantity == "fewest_heads"]
    needed = fewest.pivot_table("heads", ["dimension", "form", "value"], "rank", "first", sort=False)
    return (
        f"error in dimension {errors.dimension.min()}, by number of heads\n{mean.round(4).to_string(na_rep='')}\n"
        f"fewest heads that the bounds leave for an error, by rank\n{needed.map('{:.3g}'.format).to_string()}"
    )


COLUMNS = {
    "quantity": "error: squared error summed over coordinates; fewest_heads: `heads` is the number of heads that the "
    "bound requires for the error `value`; right: how often one random rank-1 head is right; attention_matrix: "
    "relative Frobenius error at rank r of random row-stochastic matrices of `dimension` tokens; sparse_margin: by "
    "how much the score of one of `dimension` random keys of width r can exceed those of the others.",
    "form": "bound_sharp, bound_slide, bound_any: lower bounds, as in head_rank.csv; generalised: random maps of rank "
    "r, each with the best function of y and of what it sees of the points, as the bounds allow; of random rank-1 "
    "hardmax heads equal_weights, optimal_weights (this seed's heads, solved exactly) and majority_vote; construction: "
    "the vote as a network of two layers; full_rank: one head, hardmax.",
    "kind": "formula or measured.",
    "dimension": "Dimension of the points, or number of tokens.",
    "rank": "Rank of a head.",
    "heads": "Number of heads.",
    "value": "The number.",
    "standard_error": "Of a measured value; 0 for a formula; never nan.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_rank_theory,
    digest,
    COLUMNS,
    ("quantity", "form"),
    needs={"sublayers", "task"},
    drawn_apart=("dimension", "rank", "heads"),
)
