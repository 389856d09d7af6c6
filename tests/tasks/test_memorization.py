"""rankbench.tasks.memorization: texts against SentencePiece's own decoding, generated tokens against Zipf's law."""

import functools
import os
import sys

import pytest
import scipy.stats
import torch
from refusals import refusal
from shipped import task_of

from rankbench.config.keys import ConfigError
from rankbench.seeds import generator_for
from rankbench.tasks.memorization import tokenised
from rankbench.tasks.task import ABSENT

SENTENCE = "the cat saw a dog and then this small dog ran to that old barn near our river"


memorization_task = functools.partial(task_of, "memorization")


@pytest.fixture
def text(tmp_path):
    """Forty sentences of three to six words, with a blank and a repeated line."""
    words, generator = SENTENCE.split(), torch.Generator().manual_seed(0)
    lines = []
    for number in range(40):
        order = torch.randperm(len(words), generator=generator)[: 3 + number % 4]
        lines.append(" ".join(words[index] for index in order))
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join([*lines[:5], "", "   ", lines[0], *lines[5:]]) + "\n")
    return path


def rows(batch):
    """(tokens, targets) of each sequence without its padding."""
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        tokens = [token for token in inputs if token != ABSENT]
        assert inputs == tokens + [ABSENT] * (len(inputs) - len(tokens))  # absent ones stand behind
        assert [target == ABSENT for target in targets] == [token == ABSENT for token in inputs]
        yield tuple(tokens), targets[: len(tokens)]


# --- generated sentences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5])
def test_generated_tokens_follow_zipfs_law(exponent):
    task = memorization_task(vocabulary=50, zipf_exponent=exponent, length=20)
    tokens = task.sample(2000, generator_for(0, "train")).inputs.flatten()
    counts = torch.bincount(tokens[tokens != ABSENT], minlength=50)
    weights = [rank**-exponent for rank in range(1, 51)]
    expected = [counts.sum().item() * weight / sum(weights) for weight in weights]
    # enough in each cell for the chi-squared law; the seed is fixed, so the test cannot flicker
    assert min(expected) > 20 and scipy.stats.chisquare(counts.numpy(), expected).pvalue > 1e-3


def test_lengths_are_uniform_from_two_on():
    batch = memorization_task(vocabulary=50, length=9).sample(4000, generator_for(0, "train"))
    counts = torch.bincount((batch.inputs != ABSENT).sum(1), minlength=10)
    assert counts[:2].sum() == 0 and scipy.stats.chisquare(counts[2:].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("classes", [2, 5])
def test_labels_are_uniform_and_do_not_depend_on_the_token(classes):
    task = memorization_task(vocabulary=3, length=20, classes=classes, zipf_exponent=0.0)
    batch = task.sample(1000, generator_for(0, "train"))
    table = torch.zeros(3, classes, dtype=torch.int64)
    for tokens, targets in rows(batch):
        for token, target in zip(tokens, targets, strict=True):
            table[token, target] += 1
    assert scipy.stats.chisquare(table.sum(0).numpy()).pvalue > 1e-3
    assert scipy.stats.chi2_contingency(table.numpy()).pvalue > 1e-3


# --- texts ------------------------------------------------------------------------------------------------------------


def decoded(task, path):
    """The sentences of a text as a model of SentencePiece, trained here, gives them back."""
    return tokenised(str(path), path.stat().st_mtime_ns, task.vocabulary)


def test_sentences_are_those_of_the_file_each_once(text):
    task = memorization_task(path=str(text), train_size=40)
    lines = {line for line in text.read_text().splitlines() if line.strip()}
    assert len(lines) == 40
    batch = task.sample(40, generator_for(0, "train"))
    drawn = [tokens for tokens, _ in rows(batch)]
    assert len(set(drawn)) == 40 and set(drawn) == set(decoded(task, text).sentences)
    assert max(map(max, drawn)) < task.num_inputs


def test_pieces_give_the_text_back(text):
    """With a model trained by the library's other interface, through files."""
    import sentencepiece

    lines = list(dict.fromkeys(line for line in text.read_text().splitlines() if line.strip()))
    clean = text.with_name("clean.txt")
    clean.write_text("\n".join(lines) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        f"--input={clean} --model_prefix={text.with_name('model')} --vocab_size=60 --hard_vocab_limit=false "
        "--bos_id=-1 --eos_id=-1 --num_threads=1 --minloglevel=2"
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{text.with_name('model')}.model")
    task = memorization_task(path=str(text), vocabulary=60, train_size=1)
    corpus = decoded(task, text)
    assert [pieces.decode(list(tokens)) for tokens in corpus.sentences] == lines
    assert task.num_inputs == corpus.num_pieces == pieces.get_piece_size() <= 60


def test_longer_sentences_are_cut_off(text):
    long, short = (memorization_task(path=str(text), length=length, train_size=40) for length in (64, 4))
    whole, cut = (task.sample(40, generator_for(0, "train")) for task in (long, short))
    assert cut.inputs.shape == (40, 4) and torch.equal(cut.inputs, whole.inputs[:, :4])


def test_the_vocabulary_is_as_large_as_the_text_allows(text):
    small, large = (memorization_task(path=str(text), vocabulary=size, train_size=1) for size in (30, 30522))
    assert small.num_inputs <= 30 < large.num_inputs < 200


def test_a_changed_file_is_read_again(text):
    task = memorization_task(path=str(text), train_size=1)
    before = task.num_inputs
    text.write_text("xylophones quietly juggle vexing problems\nwizards bake\n")
    os.utime(text, ns=(1, 1))  # whatever the clock's resolution
    assert task.num_inputs != before and len(decoded(task, text).sentences) == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no line with a sentence"),
        (b"\n  \n\n", "no line with a sentence"),
        (b"\x7fELF\x02\x01\x01\x00\x00", "not a text, as it holds a null byte"),
        ("naïve".encode("latin-1"), "not a text in UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert refusal(memorization_task, path=str(path), train_size=1).startswith(f"task.path: {path}: {says}")


def test_paths_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    for path, says in ((tmp_path, "Is a directory"), (tmp_path / "nowhere", "No such file or directory")):
        line = refusal(memorization_task, path=str(path), train_size=1)
        assert line == f"task.path: {path}: {says}; give a text file, or null"


def test_more_sentences_than_there_are_are_refused(text):
    with pytest.raises(ConfigError, match=r"^task.train_size=41: .* has only 40 different sentences .* 1 to 40$"):
        memorization_task(path=str(text), train_size=41)
    with pytest.raises(ConfigError, match="has only 40"):
        memorization_task(path=str(text), train_size=40).sample(41, generator_for(0, "train"))


def test_more_generated_tokens_than_can_be_drawn_are_refused():
    assert memorization_task(vocabulary=2**24, length=2).sample(2, generator_for(0, "train")).inputs.shape == (2, 2)
    said = "task.vocabulary=16777217: out of range; of generated tokens allowed are values to 16777216"
    assert refusal(memorization_task, vocabulary=2**24 + 1) == said


def test_a_vocabulary_smaller_than_the_alphabet_is_refused_in_one_line(text):
    message = refusal(memorization_task, path=str(text), vocabulary=5, train_size=1)
    assert message.startswith(f"task.vocabulary=5: SentencePiece refuses task.path={text}: Vocabulary size")
    assert ".cc" not in message


def test_without_the_library_a_text_is_refused_and_generated_sentences_work(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    tokenised.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'rankbench\[text\]', or task.path=null$"):
        memorization_task(path=str(text), train_size=1)
    assert memorization_task(train_size=2).sample(2, generator_for(0, "train")).inputs.shape == (2, 128)
