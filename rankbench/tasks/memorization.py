"""Random labels of sentences, to be learned by heart (Dong et al. 2021, sec. 4.3).

Shapes: B batch, N token.
"""

import io
import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch

from rankbench.config.keys import ConfigError, key
from rankbench.tasks.corpora import sentences_in
from rankbench.tasks.task import ABSENT, Batch

log = logging.getLogger(__name__)

SHORTEST = 2  # tokens of the shortest sentence: a single token has nothing else to attend to, and is always of rank one
MOST_GENERATED = 2**24  # different tokens that torch.multinomial draws from


@dataclass(frozen=True)
class Memorization:
    """Sentences of up to `length` tokens; each token has one of `classes` random classes. Tested on the training set.

    path: a text file with one sentence a line. A SentencePiece model trained on the text cuts it into at most
    `vocabulary` different pieces (fewer if the text does not support more). Blank lines, repeated lines and sentences
    of one token are left out; sentences longer than `length` are cut off. Each seed draws its train_size sentences from
    the rest. null: generated sentences of a uniform length from 2 on. Their tokens 0, 1, 2 ... are independent, with
    probabilities proportional to 1, 2^-s, 3^-s ... where s = zipf_exponent.

    Targets do not depend on the inputs. Shorter sentences end in ABSENT, like this one of 3 tokens with length 5:

        inputs: 17 4 17 -1 -1        targets: 1 0 0 -1 -1
    """

    name: str = key("Name of the task.")
    path: str | None = key("Text file, one sentence a line (needs the extra `text`). null: generated tokens.")
    vocabulary: int = key("Number of different tokens; for a text, the largest number of pieces.", at_least=2)
    length: int = key("Length of the longest sentence.", unit="tokens", at_least=SHORTEST)
    classes: int = key("Number of classes of the random labels.", at_least=2)
    zipf_exponent: float = key("s in the frequencies 1, 2^-s, 3^-s ... of generated tokens. 0: all equal.", at_least=0)
    train_size: int = key("Size of the training set, which is also the test set.", unit="sentences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = True
    test_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.path is not None:
            self._check_size(self.train_size)
        elif self.vocabulary > MOST_GENERATED:
            raise ConfigError(
                f"task.vocabulary={self.vocabulary}: out of range; of generated tokens allowed are values to "
                f"{MOST_GENERATED}"
            )

    @property
    def num_inputs(self) -> int:
        """Number of pieces, or of generated tokens."""
        return self.vocabulary if self.path is None else self._text().num_pieces

    @property
    def num_outputs(self) -> int:
        return self.classes

    @property
    def files(self) -> list[Path]:
        """The file that the sentences come from; none for generated sentences."""
        return [] if self.path is None else [Path(self.path)]

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        draw = self._generated if self.path is None else self._read
        inputs_BN = torch.full((num_sequences, self.length), ABSENT)
        for row_N, tokens_N in zip(inputs_BN, draw(num_sequences, generator), strict=True):
            row_N[: len(tokens_N)] = tokens_N[: self.length]
        targets_BN = torch.randint(self.classes, inputs_BN.shape, generator=generator)
        return Batch(inputs_BN, targets_BN.masked_fill_(inputs_BN == ABSENT, ABSENT))

    def _generated(self, num_sequences: int, generator: torch.Generator) -> list[torch.Tensor]:
        shares = torch.arange(1, self.vocabulary + 1, dtype=torch.float64) ** -self.zipf_exponent
        lengths = torch.randint(SHORTEST, self.length + 1, (num_sequences,), generator=generator).tolist()
        tokens = torch.multinomial(shares, sum(lengths), replacement=True, generator=generator)
        return list(tokens.split(lengths))

    def _read(self, num_sequences: int, generator: torch.Generator) -> list[torch.Tensor]:
        self._check_size(num_sequences)
        sentences = self._text().sentences
        chosen = torch.randperm(len(sentences), generator=generator)[:num_sequences]
        return [torch.tensor(sentences[number]) for number in chosen]

    def _check_size(self, num_sequences: int) -> None:
        if num_sequences > (num_available := len(self._text().sentences)):
            raise ConfigError(
                f"task.train_size={num_sequences}: task.path={self.path} has only {num_available} different sentences "
                f"of 2 tokens or more; allowed are 1 to {num_available}"
            )

    def _text(self) -> "Text":
        assert self.path is not None  # the sentences are those of a file
        changed = os.stat(self.path).st_mtime_ns if os.path.exists(self.path) else 0
        return tokenised(self.path, changed, self.vocabulary)


@dataclass(frozen=True)
class Text:
    """The different sentences of a file as indices of pieces, and the number of pieces."""

    sentences: list[tuple[int, ...]]
    num_pieces: int


@lru_cache(maxsize=8)
def tokenised(path: str, changed: int, vocabulary: int) -> Text:
    """Cut the text by a SentencePiece model (unigram, Kudo 2018) trained on all of it; depends only on the file.

    changed: the file's modification time, so that the cache notices a new text under the same path. ConfigError for a
    file that is not a text, a text without sentences, a vocabulary that is too small, or a missing library.
    """
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            f"task.path={path}: needs the library sentencepiece; pip install 'rankbench[text]', or task.path=null"
        ) from None
    lines = list(dict.fromkeys(sentences_in(Path(path))))
    if any("\0" in line for line in lines):
        raise ConfigError(f"task.path: {path}: not a text, as it holds a null byte; give one sentence a line, or null")
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            vocab_size=vocabulary,
            hard_vocab_limit=False,  # allow fewer pieces if the text does not have more
            max_sentence_length=1 << 30,  # bytes; longer lines would be left out of training
            bos_id=-1,
            eos_id=-1,
            num_threads=1,  # always sum in the same order
            minloglevel=2,
        )
    except RuntimeError as error:
        why = str(error).splitlines()[0].rpartition("] ")[2]  # drop the location in SentencePiece's code
        raise ConfigError(f"task.vocabulary={vocabulary}: SentencePiece refuses task.path={path}: {why}") from None
    pieces = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    cut = dict.fromkeys(map(tuple, pieces.encode(lines)))
    sentences = [tokens for tokens in cut if len(tokens) >= SHORTEST]
    log.info("%s: %d sentences, %d pieces (at most %d)", path, len(sentences), pieces.get_piece_size(), vocabulary)
    return Text(sentences, pieces.get_piece_size())
