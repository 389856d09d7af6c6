"""The next character of a sentence (Kim et al. 2021, sec. 5.3), on a text with one sentence a line.

Shapes: B sentence, N character.
"""

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rankbench.config.keys import ConfigError, key
from rankbench.seeds import generator_for
from rankbench.tasks.corpora import CORPORA, SPLITS, check_files, folder_of, sentences_in
from rankbench.tasks.task import ABSENT, Batch, Corpus, is_scored

log = logging.getLogger(__name__)

UNKNOWN_WORD = "<unk>"
UNKNOWN = "\ufffd"  # the character that replaces `<unk>` with unk=symbol
NUM_NAMED = 5  # unseen characters that an error names


@dataclass(frozen=True)
class CharLm(Corpus):
    """Predict the next character at each position of a sentence, and the end after the last character.

    The alphabet is that of the training sentences: characters 0 .. V-1 in the order of their code points. V is the
    beginning in the inputs and the end in the targets. With the alphabet a b, the sentence `abb` and length 5:

        inputs: 2 0 1 1 -1        targets: 0 1 1 2 -1

    The end is a symbol like the characters: this sentence has 3 characters and 4 predicted symbols. The loss is nats
    per predicted symbol.

    Generated sentences come from the grammar below. In a text, blanks at the ends of lines and blank lines are ignored.
    unk=symbol replaces each `<unk>` by one character, and likewise each character of the other splits that does not
    occur in the training sentences; unk=characters refuses such a text. Sentences are drawn at random, the same for all
    seeds.
    """

    name: str = key("Name of the task.")
    path: str | None = key(
        "Text, one sentence a line: ptb, one file, or a folder with train.txt, valid.txt, test.txt. null: generated."
    )
    held_out: float = key("Share of one file's lines held out to validate, and again to test.", above=0, below=0.5)
    unk: str = key("How `<unk>` is read: as five characters, or as one symbol.", choices=("characters", "symbol"))
    length_limit: int = key("Length at which sentences are cut off, beginning included.", unit="characters", at_least=2)
    pad_to: int = key("Batches are padded to a multiple of this.", unit="characters", at_least=1)
    train_size: int | None = key("Size of the training set. null: the whole text.", unit="sentences", at_least=1)
    valid_size: int | None = key("Size of the validation set. null: the whole text.", unit="sentences", at_least=1)
    test_size: int | None = key("Size of the test set. null: the whole text.", unit="sentences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    padded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for split in SPLITS:
            if self.size_of(split) is None and self.path is None:
                raise ConfigError(f"task.{split}_size=null: generated sentences have no end; give a number")
        if self.path is not None and self.path not in CORPORA and not os.path.exists(self.path):
            raise ConfigError(
                f"task.path={self.path}: no such file or folder; give one, null, or one of {', '.join(CORPORA)}"
            )

    @property
    def files(self) -> list[Path]:
        """The files that the sentences come from; none for generated sentences."""
        return [] if self.path is None else _files(self.path)

    def size_of(self, split: str) -> int | None:
        """Number of sentences of a split; None for all."""
        return getattr(self, f"{split}_size")

    @property
    def alphabet(self) -> str:
        return self._read()[0]

    @property
    def num_inputs(self) -> int:
        """Size of the alphabet, plus one: for the beginning in the inputs, for the end in the targets."""
        return len(self.alphabet) + 1

    num_outputs = num_inputs

    @property
    def length(self) -> int:
        return self.length_limit

    def splits(self) -> dict[str, Batch]:
        """The splits train, valid and test, in the order of the lines; ConfigError for missing or unsuitable texts."""
        return self._read()[1]

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        """Draw sentences of the training set with replacement."""
        train = self.splits()["train"]
        return train[torch.randint(len(train.inputs), (num_sequences,), generator=generator)]

    def encode(self, text: str) -> list[int]:
        """Encode the characters of a text as numbers; ConfigError for a character outside the alphabet."""
        text = text.replace(UNKNOWN_WORD, UNKNOWN) if self.unk == "symbol" else text
        if missing := sorted(set(text) - set(self.alphabet)):
            raise ConfigError(f"{text}: its characters {' '.join(missing)} are not in the training sentences")
        return [self.alphabet.index(character) for character in text]

    def decode(self, characters_N: Tensor) -> str:
        """Text of a sentence's inputs or targets, without beginning, end and padding."""
        known = [number for number in characters_N.tolist() if 0 <= number < len(self.alphabet)]
        text = "".join(self.alphabet[number] for number in known)
        return text.replace(UNKNOWN, UNKNOWN_WORD) if self.unk == "symbol" else text

    def symbols_per_character(self, batch: Batch) -> float:
        """Ratio of predicted symbols to predicted characters. A loss per symbol times this ratio is nats per character,
        the nats for the ends of sentences included."""
        symbols = int(is_scored(batch.targets).sum())
        return symbols / (symbols - int((batch.targets == len(self.alphabet)).sum()))

    def counted_losses(self, batch: Batch) -> dict[str, float]:
        """Losses of a batch without a network, in nats per symbol. unigram_loss: from the frequency of each symbol in
        the training set; bigram_loss: from its frequency after the symbol before it. Each pair counts once more, so
        that none is impossible."""
        num_symbols = self.num_outputs
        pairs_P, pairs_Q = (
            (split.inputs * num_symbols + split.targets)[is_scored(split.targets)].cpu()
            for split in (self.splits()["train"], batch)
        )
        counts_IO = 1 + torch.bincount(pairs_P, minlength=num_symbols**2).view(num_symbols, num_symbols).double()
        unigram_O, bigram_IO = counts_IO.sum(0) / counts_IO.sum(), counts_IO / counts_IO.sum(1, keepdim=True)
        logs = {"unigram_loss": unigram_O.log().expand_as(bigram_IO), "bigram_loss": bigram_IO.log()}
        return {name: -log_IO.flatten()[pairs_Q].mean().item() for name, log_IO in logs.items()}

    def _read(self) -> tuple[str, dict[str, Batch]]:
        return encoded(self, tuple(file.stat().st_mtime_ns for file in self.files))


def _files(path: str) -> list[Path]:
    """Files of task.path: three splits, or a single file; ConfigError if a file is missing."""
    source = folder_of(path) if path in CORPORA else Path(path)
    if source.is_file():
        return [source]
    files = [source / f"{split}.txt" for split in SPLITS]
    for file in files:
        if not file.is_file():
            fetch = f"fetch it with `rankbench data corpus={path}`" if path in CORPORA else "or give one text file"
            raise ConfigError(f"task.path={path}: {file} is missing; {fetch}")
    return files


@lru_cache(maxsize=4)
def encoded(task: CharLm, changed: tuple[int, ...]) -> tuple[str, dict[str, Batch]]:
    """The alphabet and the splits of a task. changed: the modification times of its files."""
    texts = {split: _chosen(lines, task.size_of(split), split) for split, lines in _texts(task).items()}
    alphabet = "".join(sorted(set().union(*texts["train"]) | ({UNKNOWN} if task.unk == "symbol" else set())))
    unseen = sorted(set().union(*texts["valid"], *texts["test"]) - set(alphabet))
    if unseen and task.unk == "characters":
        named = " ".join(unseen[:NUM_NAMED]) + (" ..." if len(unseen) > NUM_NAMED else "")
        raise ConfigError(
            f"task.path={task.path}: {len(unseen)} characters are not in the training sentences ({named}); "
            "use more training sentences, or read such characters as <unk> with task.unk=symbol"
        )
    numbers = {character: number for number, character in enumerate(alphabet)}
    splits = {split: _batch(lines, numbers, task.length_limit, split) for split, lines in texts.items()}
    return alphabet, splits


def _texts(task: CharLm) -> dict[str, list[str]]:
    """All sentences of each split."""
    if task.path is None:
        return {split: generated(task.size_of(split) or 0, generator_for(0, f"text {split}")) for split in SPLITS}
    if task.path in CORPORA:
        check_files(task.path, folder_of(task.path))
    texts = [sentences_in(file) for file in _files(task.path)]
    if task.unk == "symbol":
        texts = [[line.replace(UNKNOWN_WORD, UNKNOWN) for line in lines] for lines in texts]
    if len(texts) == 1:
        (whole,) = texts
        held_out = math.ceil(task.held_out * len(whole))
        if len(whole) < 3 or len(whole) <= 2 * held_out:
            raise ConfigError(f"task.path={task.path}: {len(whole)} sentences are too few to hold out {held_out} twice")
        texts = [whole[: -2 * held_out], whole[-2 * held_out : -held_out], whole[-held_out:]]
    return dict(zip(SPLITS, texts, strict=True))


def _chosen(lines: list[str], size: int | None, split: str) -> list[str]:
    if size is None:
        return lines
    if size > len(lines):
        raise ConfigError(
            f"task.{split}_size={size}: there are only {len(lines)} sentences; give at most that number, or null"
        )
    kept = torch.randperm(len(lines), generator=generator_for(0, f"kept {split}"))[:size]
    return [lines[number] for number in kept.sort().values]


def _batch(lines: list[str], numbers: dict[str, int], limit: int, split: str) -> Batch:
    if cut := sum(len(line) + 1 > limit for line in lines):
        log.info("%s: %d of %d sentences cut off at %d characters", split, cut, len(lines), limit)
    boundary, unknown = len(numbers), numbers.get(UNKNOWN)
    sentences = []
    for line in lines:
        kept = line[:limit]  # a line can be far longer than its row
        characters = [boundary, *(numbers.get(character, unknown) for character in kept), boundary]
        sentences.append(torch.tensor(characters[: limit + 1]))
    inputs_BN = pad_sequence([sentence[:-1] for sentence in sentences], batch_first=True, padding_value=ABSENT)
    targets_BN = pad_sequence([sentence[1:] for sentence in sentences], batch_first=True, padding_value=ABSENT)
    return Batch(inputs_BN, targets_BN)


# --- The generated corpus: a grammar in which a verb agrees with its subject across a clause -------------------------

DETERMINERS = {"one": ("a", "the", "this", "every"), "many": ("some", "the", "these", "two")}
ADJECTIVES = ("small", "old", "quiet", "clever", "hungry", "green")
NOUNS = ("cat", "gardener", "robot", "child", "wolf", "king", "painter", "bird")
PLURALS = {"child": "children", "wolf": "wolves"}
WITH_OBJECT = ("see", "follow", "like", "paint", "find", "help")
WITHOUT_OBJECT = ("sleep", "run", "sing", "wait", "smile")
ADVERBS = ("slowly", "again", "at night", "by the river")
ADJECTIVE_SHARE, CLAUSE_SHARE, OBJECT_SHARE, ADVERB_SHARE = 0.4, 0.3, 0.6, 0.3


def generated(num_sentences: int, generator: torch.Generator) -> list[str]:
    """Sentences such as `the small cats that a king sees sleep at night .`

    sentence = subject [that noun-phrase verb] verb-phrase . ; a noun phrase is a determiner, in two of five cases an
    adjective, and a noun. All choices are independent and uniform, except that 3 of 10 subjects have a clause, 6 of 10
    verb phrases an object, and 3 of 10 other verb phrases an adverb. Every sentence can be parsed in only one way, so
    its probability is the product of the choices' probabilities.
    """
    draws = torch.rand(num_sentences, 20, generator=generator, dtype=torch.float64)
    return [_sentence(iter(row)) for row in draws.tolist()]


def _sentence(draws: Iterator[float]) -> str:
    def one_of(choices: tuple[str, ...]) -> str:
        return choices[int(next(draws) * len(choices))]

    def noun_phrase() -> tuple[str, list[str]]:
        number = one_of(("one", "many"))
        words = [one_of(DETERMINERS[number])]
        if next(draws) < ADJECTIVE_SHARE:
            words.append(one_of(ADJECTIVES))
        noun = one_of(NOUNS)
        return number, [*words, noun if number == "one" else PLURALS.get(noun, f"{noun}s")]

    def verb(choices: tuple[str, ...], number: str) -> str:
        return one_of(choices) + ("s" if number == "one" else "")

    number, words = noun_phrase()
    if next(draws) < CLAUSE_SHARE:
        others, inner = noun_phrase()
        words += ["that", *inner, verb(WITH_OBJECT, others)]
    if next(draws) < OBJECT_SHARE:
        words += [verb(WITH_OBJECT, number), *noun_phrase()[1]]
    else:
        words.append(verb(WITHOUT_OBJECT, number))
        if next(draws) < ADVERB_SHARE:
            words.append(one_of(ADVERBS))
    return " ".join([*words, "."])
