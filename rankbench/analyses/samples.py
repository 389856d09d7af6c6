"""Sentences that a language model writes, character by character (task=char_lm).

Shapes: B sentence, N character so far, C class.
"""

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import WEIGHTS
from rankbench.config.keys import ConfigError, key
from rankbench.model.lstm import Lstm
from rankbench.model.transformer import Transformer
from rankbench.seeds import generator_for
from rankbench.tasks.char_lm import CharLm
from rankbench.tasks.task import ABSENT

SHOWN = 3  # sentences in the digest
GREEDY = 1e-300  # a temperature that only the largest logit survives; logits over smaller ones could overflow


@dataclass(frozen=True)
class Options:
    """Which sentences are written."""

    number: int = key("Number of sentences for each temperature.", at_least=1)
    temperatures: list[float] = key("The logits are divided by them; small ones are greedy.", above=0, nonempty=True)
    begin: str = key("Beginning of every sentence.")


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each sentence."""
    task = subject.task
    begin_N = torch.tensor([len(task.alphabet), *_begin(task, options)])
    rows = []
    for weights, model in subject.networks.items():
        for temperature in options.temperatures:
            generator = generator_for(subject.seed, f"samples {temperature}")
            begin_BN = begin_N.expand(options.number, -1)
            written_BN, log_likelihood_B = write(model, begin_BN, task.length_limit, temperature, generator)
            for number, (written_N, log_likelihood) in enumerate(zip(written_BN, log_likelihood_B, strict=True), 1):
                sentence_N = written_N[written_N != ABSENT]
                row = {"weights": weights, "temperature": temperature, "sample": number}
                row["text"] = options.begin + task.decode(sentence_N)
                row["ended"] = bool(sentence_N[-1] == len(task.alphabet))
                rows.append(row | {"log_likelihood": log_likelihood.item(), "characters": len(sentence_N)})
    return pd.DataFrame(rows)


@torch.no_grad()
def write(
    model: Transformer | Lstm, begin_BN: Tensor, limit: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Continuations of `begin_BN`, (B, M), ABSENT after a sentence's end, and their log-likelihoods at temperature 1.

    A sentence ends with the last class, or when its input is `limit` characters long. Draws come from `generator` on
    the CPU, at each character one for every sentence, also for those that have ended.
    """
    device = next(model.parameters()).device
    inputs_BN, written, log_likelihood_B = begin_BN.to(device), [], torch.zeros(len(begin_BN), dtype=torch.float64)
    running_B = torch.ones(len(begin_BN), dtype=torch.bool)
    while running_B.any() and inputs_BN.shape[1] <= limit:
        logits_BC = model(inputs_BN)[:, -1].double().cpu()
        next_B = (logits_BC / max(temperature, GREEDY)).softmax(-1).multinomial(1, generator=generator).squeeze(1)
        steps_B = logits_BC.log_softmax(-1).gather(1, next_B[:, None]).squeeze(1)
        log_likelihood_B += steps_B.where(running_B, torch.zeros(()).double())
        written.append(next_B.where(running_B, torch.tensor(ABSENT)))
        running_B &= next_B != logits_BC.shape[-1] - 1
        # characters after the end of a sentence are drawn too, and ignored
        inputs_BN = torch.cat([inputs_BN, next_B[:, None].to(device)], dim=1)
    return torch.stack(written, dim=1), log_likelihood_B


def digest(table: pd.DataFrame) -> str:
    """The first sentences of the first seed, for a terminal."""
    rows = table[(table.weights == table.weights.iloc[0]) & (table.seed == table.seed.min())]
    texts = rows.text.fillna("")[:SHOWN]  # pandas reads an empty text in a CSV as missing
    return "\n".join([f"written by {rows.model.iloc[0]} ({rows.weights.iloc[0]}):", *(f"  {text}" for text in texts)])


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for a task without text, and for an impossible beginning."""
    if not isinstance(task := subject.task, CharLm):
        raise ConfigError(f"analysis=samples: needs a task with text; task.name={task.name} has none; use task=char_lm")
    if options.begin:  # otherwise the text need not be read
        _begin(task, options)


def _begin(task: CharLm, options: Options) -> list[int]:
    """The characters that every sentence begins with."""
    begin = task.encode(options.begin)
    if len(begin) + 1 >= task.length_limit:
        raise ConfigError(f"analysis.samples.begin: as long as task.length_limit={task.length_limit}; shorten it")
    return begin


COLUMNS = {
    **WEIGHTS,
    "temperature": "Divides the logits.",
    "sample": "Number of the sentence, from 1.",
    "text": "The sentence.",
    "ended": "Whether it ended within task.length_limit.",
    "log_likelihood": "Of the characters that the network wrote, at temperature 1 (nats).",
    "characters": "How many it wrote, the end included.",
}
ANALYSIS = Analysis(Options, table, None, digest, COLUMNS, ("log_likelihood",), {"task"}, check)
