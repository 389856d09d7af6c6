"""An example of a plug-in: two tasks, counting letters and adding modulo p; an analysis, the sizes of the weights; a
metric of states; an attention; a model; an update rule; and a paper of its own, with a law, two claims and, in
published.csv, the numbers it prints.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch
import torch.nn.functional as F

from rankbench.analyses import Analysis, Subject
from rankbench.config.keys import key
from rankbench.judging import Claim, published
from rankbench.judging.claim import Control, below
from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law
from rankbench.measures.states import States
from rankbench.model.transformer import Transformer
from rankbench.model.weightings import Start, Weighting, hidden_as
from rankbench.tasks import Batch, Finite
from rankbench.tasks.task import ABSENT


@dataclass(frozen=True)
class LetterCount:
    """How often each letter occurs in its sequence, the last class standing for more."""

    name: str = key("Name of the task.")
    length: int = key("Number of letters in a sequence.", at_least=1)
    alphabet: int = key("Number of letters in the alphabet.", at_least=1)
    train_size: int | None = key("Size of the training set. null: fresh sequences.", unit="sequences", at_least=1)
    test_size: int = key("Size of the test set.", unit="sequences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False

    @property
    def num_inputs(self) -> int:
        return self.alphabet

    @property
    def num_outputs(self) -> int:
        return self.length

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        letters_BN = torch.randint(self.alphabet, (num_sequences, self.length), generator=generator)
        return Batch(letters_BN, (letters_BN[:, :, None] == letters_BN[:, None, :]).sum(-1) - 1)


@dataclass(frozen=True)
class ModularAddition(Finite):
    """(a + b) mod p from the tokens a, b and "=", which stands for p; the last token alone is scored."""

    name: str = key("Name of the task.")
    modulus: int = key("p.", at_least=2)
    train_size: int = key("Size of the training set, of p^2 pairs.", unit="sequences", at_least=1)
    test_size: int | None = key("Size of the test set. null: all other pairs.", unit="sequences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False
    length: ClassVar[int] = 3

    @property
    def num_inputs(self) -> int:
        return self.modulus + 1

    @property
    def num_outputs(self) -> int:
        return self.modulus

    @property
    def num_sequences(self) -> int:
        return self.modulus**2

    def sequences(self) -> Batch:
        numbers = torch.arange(self.modulus)
        pairs_B2 = torch.cartesian_prod(numbers, numbers)
        inputs_BN = F.pad(pairs_B2, (0, 1), value=self.modulus)
        targets_BN = torch.full_like(inputs_BN, ABSENT)
        targets_BN[:, -1] = pairs_B2.sum(1) % self.modulus
        return Batch(inputs_BN, targets_BN)


@dataclass(frozen=True)
class Options:
    """Which norm."""

    power: float = key("p of the norm of all entries of a weight.", at_least=1)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each parameter."""
    return pd.DataFrame(
        {"weights": weights, "parameter": name, "weight_size": value.norm(options.power).item()}
        for weights, module in subject.modules.items()
        for name, value in module.named_parameters()
    )


def digest(rows: pd.DataFrame) -> str:
    """The largest weight."""
    return f"weight_sizes: largest {rows.weight_size.max():.3g}"


@dataclass(frozen=True)
class InverseSquare(Weighting):
    """Weights in proportion to 1 / (s + |q - k|^2), with a learned s that begins at 1."""

    def weights(self, q_BHNK, k_BHMK, seen_NM, heads):
        squared_BHNM = (q_BHNK[..., :, None, :] - k_BHMK[..., None, :, :]).square().sum(-1)
        near_BHNM = hidden_as(0.0, 1 / (heads.own["log_s"].exp() + squared_BHNM), seen_NM)
        return near_BHNM / near_BHNM.sum(-1, keepdim=True)

    def parameters(self, heads):
        return {"log_s": Start((1,), lambda value, generator: value.zero_())}

    def qk_maps(self, maps, heads):
        return {}  # the weights are no function of a bilinear form


class ScaledEmbedding(Transformer):
    """A Transformer whose embeddings are multiplied by sqrt(D) (Vaswani et al. 2017, sec. 3.4)."""

    def embed(self, inputs):
        return self.width**0.5 * super().embed(inputs)


def length_spread(states: States) -> torch.Tensor:
    """Longest token over the shortest."""
    length_BN = states.whole.length_BN1.squeeze(-1)
    return length_BN.amax(-1) / length_BN.amin(-1)


class SignSgd(torch.optim.Optimizer):
    """Steps of the same size for all weights, against the sign of the gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad.sign())


ALPHABETS = (2, 4, 8)


def predicted(samples: int) -> Iterator[tuple[str, float, float]]:
    """Chance that two letters are alike, by the size of their alphabet."""
    yield from (("two letters", alphabet, 1 / alphabet) for alphabet in ALPHABETS)


def simulated(generator: torch.Generator, samples: int) -> Iterator[tuple[str, str, float, float]]:
    """How often they are; in the control the last letter is drawn twice as often as any other."""
    for setup, extra in ((CLAIMED, 0), (CONTROL, 1)):
        for alphabet in ALPHABETS:
            letters_2B = torch.randint(alphabet + extra, (2, samples), generator=generator).clamp(max=alphabet - 1)
            yield setup, "two letters", alphabet, (letters_2B[0] == letters_2B[1]).double().mean().item()


def printed(rows: pd.DataFrame) -> pd.DataFrame:
    """The paper's number in the format of weight_sizes."""
    numbers = published("letter_count_weights")
    return pd.DataFrame({"weight_size": numbers[numbers.unit == "norm"].value})


SMALL_WEIGHTS = Claim(
    statement="No weight of a head that counts is above 100 (largest norm of a parameter; threshold: ours).",
    source="Nobody 2026, Table 1",
    table="weight_sizes",
    measure=lambda rows: rows.weight_size.max(),
    claimed=below(100.0),
    control=Control.beyond("parameters with a norm of 101", weight_size=101.0),
    why_untrained=None,
    exact=True,
    published=printed,
)

COLUMNS = {
    "weights": "trained or initialised; of a user's module given.",
    "parameter": "Name of the parameter.",
    "weight_size": "Its norm.",
}
TASKS = {"letter_count": LetterCount, "modular_addition": ModularAddition}
ATTENTIONS = {"inverse_square": InverseSquare()}
ANALYSES = {"weight_sizes": Analysis(Options, table, None, digest, COLUMNS, ("weight_size",))}
MODELS = {"scaled_embedding": ScaledEmbedding}
METRICS = {"length_spread": length_spread}
OPTIMIZERS = {"sign_sgd": lambda cfg, parameters, rows: SignSgd(parameters, {"lr": cfg.lr})}
PAPERS = {"Nobody 2026": "Counting letters with one head"}
LAWS = {"letters_alike": Law({"samples": 40_000}, predicted, "letters in the alphabet", "chance", simulated=simulated)}
CLAIMS = {
    "nobody_small_weights": SMALL_WEIGHTS,
    "law_letters_alike": agrees(
        law="letters_alike",
        line=0.02,  # eight standard deviations of a share of 40,000
        statement="Two random letters are alike in one of as many cases as there are letters",
        source="Nobody 2026, eq. 1",
        control="a last letter that is drawn twice as often",
    ),
}
