"""rankbench.tasks.char_lm and all that trains on it: texts against their own lines, batches, losses and samples against
plain loops, the schedule against the paper's formula, claims on tables made by hand.

Shapes: S seed, B batch, N token.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from breadth import some
from drawn import transformer
from interrupted import during_step
from refusals import refusal
from shipped import task_of

from rankbench.analyses import ANALYSES, Subject, curves, samples
from rankbench.analysing.runner import analyze
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.compose import compose
from rankbench.commands.resolvers import noam_peak
from rankbench.config.keys import ConfigError, typed
from rankbench.config.schema import OptimizerConfig
from rankbench.judging import published
from rankbench.model import build_model, initial_model
from rankbench.plots.curves import draw_curves
from rankbench.plots.style import GREY
from rankbench.report.joined_tables import summarise
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.runs.tables import read_table
from rankbench.seeds import generator_for
from rankbench.tasks import build_task
from rankbench.tasks import char_lm as grammar
from rankbench.tasks.task import ABSENT, Batch
from rankbench.training.batches import batches_of_epoch, chunks_by_length, padded_lengths
from rankbench.training.loop import train
from rankbench.training.optimizers import learning_rate
from rankbench.training.seeds_side_by_side import Training

PTB = Path(__file__).resolve().parents[3] / "shared" / "data" / "ptb"
STEPS = ["trainer.batch_size=8", "trainer.steps=12", "trainer.eval_every=4", "trainer.checkpoint_every=5"]
STEPS += ["optimizer.lr=0.01", "precision=fp64", "model.width=16"]
TEXT = ["task=char_lm", "task.train_size=37", "task.valid_size=11", "task.test_size=13", *STEPS]
# float64 sums in another order, over a dozen steps of a rule that divides by a gradient's size
SAME = {"rtol": 1e-9, "atol": 1e-9}


char_lm = functools.partial(task_of, "char_lm")


def all_of(path, **changes):
    return char_lm(**{"path": str(path), "train_size": None, "valid_size": None, "test_size": None, **changes})


def config(*overrides):
    return compose("train", *TEXT, "model=causal", "model.heads=2", *overrides)


@pytest.fixture
def text(tmp_path):
    """A folder with three splits: blanks at the ends, blank lines, `<unk>`, and sentences of different lengths."""
    train = [f"{'ab' * (number % 7)}c <unk> {'d' * (number % 3)}e" for number in range(30)]
    (tmp_path / "train.txt").write_text("\n \n".join(f" {line}  " for line in train) + "\n")
    (tmp_path / "valid.txt").write_text("abc e\ncab <unk>\n")
    (tmp_path / "test.txt").write_text("e d c\n")
    return tmp_path, train


# --- texts ------------------------------------------------------------------------------------------------------------


def test_the_docstrings_example(tmp_path):
    (tmp_path / "text").write_text("abb\nabbb\nabb\nabb\n")
    batch = all_of(tmp_path / "text", held_out=0.2).splits()["train"]
    assert batch.inputs.tolist() == [[2, 0, 1, 1, ABSENT], [2, 0, 1, 1, 1]]
    assert batch.targets.tolist() == [[0, 1, 1, 2, ABSENT], [0, 1, 1, 1, 2]]


@pytest.mark.parametrize("unk", ["characters", "symbol"])
def test_a_folder_of_three_splits_comes_back_as_it_is_written(text, unk):
    folder, train = text
    task = all_of(folder, unk=unk)
    splits = task.splits()
    assert [task.decode(row) for row in splits["train"].targets] == train
    assert [task.decode(row) for row in splits["valid"].inputs] == ["abc e", "cab <unk>"]
    letters = set("abcde ") | (set("<unk>") if unk == "characters" else {"\ufffd"})
    assert set(task.alphabet) == letters and task.num_inputs == task.num_outputs == len(letters) + 1
    as_read = [line if unk == "characters" else line.replace("<unk>", "?") for line in train]
    assert (splits["train"].inputs != ABSENT).sum(1).tolist() == [len(line) + 1 for line in as_read]


def test_each_target_is_the_next_input_and_the_last_one_the_end():
    task = char_lm()
    end = len(task.alphabet)
    for split in task.splits().values():
        for inputs, targets in zip(split.inputs[:50].tolist(), split.targets[:50].tolist(), strict=True):
            length = len([token for token in inputs if token != ABSENT])
            assert inputs[0] == end and targets[: length - 1] == inputs[1:length] and targets[length - 1] == end
            assert inputs[length:] == targets[length:] == [ABSENT] * (len(inputs) - length)


def test_one_file_is_split_in_the_order_of_its_lines(tmp_path):
    lines = [f"line {number}" for number in range(100, 140)]
    (tmp_path / "text").write_text("\n".join(lines))
    task = all_of(tmp_path / "text", held_out=0.1)
    decoded = {name: [task.decode(row) for row in split.targets] for name, split in task.splits().items()}
    assert decoded == {"train": lines[:32], "valid": lines[32:36], "test": lines[36:]}


def test_the_mark_of_utf8_at_the_beginning_is_no_character(tmp_path):
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / encoding).write_text("ab\nba\naa\n", encoding=encoding)
        assert all_of(tmp_path / encoding, held_out=0.1).alphabet == "ab"


def test_long_sentences_are_cut_off(tmp_path):
    (tmp_path / "text").write_text("abcdef\nab\nabcdef\nabcdef\n")
    task = all_of(tmp_path / "text", held_out=0.2, length_limit=4)
    batch = task.splits()["train"]
    assert [task.decode(row) for row in batch.targets] == ["abcd", "ab"]  # no end: it is not there yet
    assert batch.inputs.shape[1] == 4 == task.length


def test_sizes_choose_the_same_sentences_whoever_asks(text):
    folder, train = text
    task = all_of(folder, train_size=10)
    kept = [task.decode(row) for row in task.splits()["train"].targets]
    lines = iter(train)
    assert len(kept) == 10 and all(line in lines for line in kept)  # in the order of the lines
    assert kept != train[:10]
    assert torch.equal(task.splits()["train"].inputs, all_of(folder, train_size=10).splits()["train"].inputs)


def test_unseen_characters_are_refused_or_read_as_unknown(text):
    folder, _ = text
    (folder / "test.txt").write_text("e z\n")
    assert "1 characters are not in the training sentences (z)" in refusal(all_of(folder).splits)
    task = all_of(folder, unk="symbol")
    assert task.decode(task.splits()["test"].targets[0]) == "e <unk>"


def test_the_mark_of_what_is_unknown_is_a_character_like_others_where_nothing_is(tmp_path):
    (tmp_path / "text").write_text("a\ufffdb\n" * 5)
    for unk, read in (("characters", "a\ufffdb"), ("symbol", "a<unk>b")):
        task = all_of(tmp_path / "text", held_out=0.2, unk=unk)
        assert task.decode(task.splits()["test"].targets[0]) == read


def test_a_changed_file_is_read_again(text):
    folder, _ = text
    task = all_of(folder)
    assert len(task.splits()["valid"].inputs) == 2
    (folder / "valid.txt").write_text("abc\n" * 5)
    assert len(task.splits()["valid"].inputs) == 5


def test_a_text_that_does_not_do_is_refused(tmp_path):
    for name, content, said in (
        ("empty", b"\n \n", "no line with a sentence"),
        ("bytes", b"\xff\xfe\x00a", "not a text in UTF-8"),
        ("short", b"ab\nba\n", "2 sentences are too few"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            all_of(tmp_path / name).splits()
    (tmp_path / "long").write_text("ab\n" * 50)
    assert "there are only 44 sentences" in refusal(all_of(tmp_path / "long", train_size=45).splits)
    assert "train.txt is missing; or give one text file" in refusal(all_of(tmp_path).splits)


def test_a_line_as_long_as_a_book_is_cut_off_before_it_is_encoded(tmp_path):
    """A list of all of its characters would take 8 bytes for each, and half a minute for 50 MB."""
    size = 1_000_000
    (tmp_path / "text").write_text("abcde\n" * 8 + "abcde" * (size // 5) + "\nabcde" * 2)
    tracemalloc.start()
    train = all_of(tmp_path / "text", held_out=0.05).splits()["train"]
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert train.inputs[8].tolist() == [5, *itertools.islice(itertools.cycle(range(5)), 287)]
    assert train.targets[8].tolist() == list(itertools.islice(itertools.cycle(range(5)), 288))
    assert largest < 5 * size
    (tmp_path / "text").write_text("abcde" * (size // 5))
    assert "1 sentences are too few to hold out 1 twice" in refusal(all_of(tmp_path / "text").splits)


@pytest.mark.further
@pytest.mark.skipif(not PTB.is_dir(), reason="the Penn Treebank is not here")
def test_the_penn_treebank():
    """Counts by Python's own string functions; 49 characters, and the paper's limit of 288 cuts less than one in a
    hundred sentences."""
    task = all_of(PTB)
    splits = task.splits()
    for split, batch in splits.items():
        lines = [line.strip() for line in (PTB / f"{split}.txt").read_text().splitlines()]
        lengths = [min(len(line) + 1, 288) for line in lines]
        assert (batch.inputs != ABSENT).sum(1).tolist() == lengths == (batch.targets != ABSENT).sum(1).tolist()
        assert sum(len(line) + 1 > 288 for line in lines) < 0.01 * len(lines)
        assert task.decode(batch.targets[7]) == lines[7]
    assert len(task.alphabet) == 49
    assert [len(splits[name].inputs) for name in ("train", "valid", "test")] == [42068, 3370, 3761]


# --- the grammar ------------------------------------------------------------------------------------------------------


def _phrase(words):
    """Takes a noun phrase off a list of words; its number and its log-probability, or None."""
    singulars = {noun: "one" for noun in grammar.NOUNS}
    plurals = {grammar.PLURALS.get(noun, f"{noun}s"): "many" for noun in grammar.NOUNS}
    determiner, adjective = words.pop(0), math.log(1 - grammar.ADJECTIVE_SHARE)
    if words[0] in grammar.ADJECTIVES:
        words.pop(0)
        adjective = math.log(grammar.ADJECTIVE_SHARE / len(grammar.ADJECTIVES))
    number = (singulars | plurals)[words.pop(0)]
    assert determiner in grammar.DETERMINERS[number]
    return number, adjective - math.log(2 * len(grammar.DETERMINERS[number]) * len(grammar.NOUNS))


def _verb(words, number, choices):
    word = words.pop(0)
    assert word in [choice + "s" * (number == "one") for choice in choices]
    return -math.log(len(choices))


def log_probability(sentence):
    """Of a sentence of the grammar, by a parser that knows nothing of how sentences are drawn."""
    words = sentence.replace("at night", "at_night").replace("by the river", "by_the_river").split()
    number, total = _phrase(words)
    if words[0] == "that":
        words.pop(0)
        inner, more = _phrase(words)
        total += math.log(grammar.CLAUSE_SHARE) + more + _verb(words, inner, grammar.WITH_OBJECT)
    else:
        total += math.log(1 - grammar.CLAUSE_SHARE)
    if words[0].removesuffix("s") in grammar.WITH_OBJECT:
        total += math.log(grammar.OBJECT_SHARE) + _verb(words, number, grammar.WITH_OBJECT) + _phrase(words)[1]
    else:
        total += math.log(1 - grammar.OBJECT_SHARE) + _verb(words, number, grammar.WITHOUT_OBJECT)
        if words[0] != ".":
            assert words.pop(0).replace("_", " ") in grammar.ADVERBS
            total += math.log(grammar.ADVERB_SHARE / len(grammar.ADVERBS))
        else:
            total += math.log(1 - grammar.ADVERB_SHARE)
    assert words == ["."]
    return total


def entropy_of_the_grammar():
    """In nats a sentence, from the choices that a sentence makes on average."""

    def of(share):
        return -share * math.log(share) - (1 - share) * math.log(1 - share)

    determiners = sum(math.log(len(choices)) for choices in grammar.DETERMINERS.values()) / 2
    phrase = math.log(2) + determiners + of(grammar.ADJECTIVE_SHARE) + math.log(len(grammar.NOUNS))
    phrase += grammar.ADJECTIVE_SHARE * math.log(len(grammar.ADJECTIVES))
    with_object = math.log(len(grammar.WITH_OBJECT)) + phrase
    adverb = of(grammar.ADVERB_SHARE) + grammar.ADVERB_SHARE * math.log(len(grammar.ADVERBS))
    without = math.log(len(grammar.WITHOUT_OBJECT)) + adverb
    clause = of(grammar.CLAUSE_SHARE) + grammar.CLAUSE_SHARE * with_object
    share = grammar.OBJECT_SHARE
    return phrase + clause + of(share) + share * with_object + (1 - share) * without


def test_every_sentence_is_one_of_the_grammar_and_has_its_entropy():
    sentences = grammar.generated(4000, generator_for(0, "test"))
    surprises = np.array([-log_probability(sentence) for sentence in sentences])
    # mean surprise is the entropy, up to four standard errors: the seed is fixed, so the test cannot flicker
    assert abs(surprises.mean() - entropy_of_the_grammar()) < 4 * surprises.std() / len(surprises) ** 0.5
    assert len(set(sentences)) > 0.9 * len(sentences)  # only the shortest come twice


def test_losses_of_counts_are_those_counted_by_hand(text):
    """Each pair counts once more than it occurs. The beginning is a symbol before others, the end one behind others.
    Sentences are cut off, or each symbol would stand before others as often as behind them."""
    folder, _ = text
    task = all_of(folder, length_limit=5)

    def pairs_of(split):
        pairs = zip(split.inputs.flatten().tolist(), split.targets.flatten().tolist(), strict=True)
        return [(before, symbol) for before, symbol in pairs if symbol != ABSENT]

    symbols = range(task.num_outputs)
    counts = collections.Counter([*itertools.product(symbols, repeat=2), *pairs_of(task.splits()["train"])])
    test, unigram, bigram = task.splits()["test"], [], []
    for before, symbol in pairs_of(test):
        bigram.append(-math.log(counts[before, symbol] / sum(counts[before, other] for other in symbols)))
        unigram.append(-math.log(sum(counts[other, symbol] for other in symbols) / counts.total()))
    wanted = {"unigram_loss": sum(unigram) / len(unigram), "bigram_loss": sum(bigram) / len(bigram)}
    assert task.counted_losses(test) == pytest.approx(wanted, rel=1e-12)


def test_generated_splits_differ_and_are_the_same_for_all():
    splits = [[tuple(map(tuple, split.inputs.tolist())) for split in char_lm().splits().values()] for _ in range(2)]
    assert splits[0] == splits[1] and len({rows[:200] for rows in splits[0]}) == 3


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lengths():
    return torch.randint(1, 9, (203,), generator=torch.Generator().manual_seed(0)) * 8


@pytest.mark.parametrize("batch_size", [1, 16, 300])
def test_an_epoch_has_each_sequence_once_in_batches_of_similar_length(lengths, batch_size):
    epoch = batches_of_epoch(lengths, batch_size, [0, 1, 7], epoch=3)
    for seed_index in range(3):
        rows = torch.cat([rows_SB[seed_index] for _, rows_SB in epoch])
        assert rows.sort().values.tolist() == list(range(203))
        for width, rows_SB in epoch:
            assert lengths[rows_SB[seed_index]].max() == width
    # as little padding as any cut of the sorted sequences has
    padding = sum(rows_SB.shape[1] * width for width, rows_SB in epoch) - int(lengths.sum())
    ordered = lengths.sort().values.split(batch_size)
    assert padding == sum(len(part) * int(part[-1]) for part in ordered) - int(lengths.sum())


def test_batches_do_not_depend_on_who_goes_side_by_side(lengths):
    together = batches_of_epoch(lengths, 16, [4, 5], epoch=0)
    alone = batches_of_epoch(lengths, 16, [5], epoch=0)
    assert [width for width, _ in together] == [width for width, _ in alone]
    assert all(torch.equal(a[1], b[0]) for (_, a), (_, b) in zip(together, alone, strict=True))
    other = batches_of_epoch(lengths, 16, [5], epoch=1)
    assert [width for width, _ in alone] != [width for width, _ in other]
    assert any(not torch.equal(a, b) for (_, a), (_, b) in zip(alone, other, strict=True))


def test_chunks_hold_every_sequence_within_their_room():
    task = char_lm(pad_to=8)
    test = task.splits()["test"]
    chunks = chunks_by_length(test, 8, 1000)
    assert all(chunk.inputs.numel() <= 1000 and chunk.inputs.shape[1] % 8 == 0 for chunk in chunks[:-1])
    texts = [task.decode(row) for chunk in chunks for row in chunk.targets]
    assert sorted(texts) == sorted(task.decode(row) for row in test.targets)
    assert len(chunks_by_length(test, 8, 1)) == len(test.inputs)  # none fits: one at a time
    assert padded_lengths(test, 8).tolist() == [
        min(-(-length // 8) * 8, test.inputs.shape[1]) for length in (test.inputs != ABSENT).sum(1).tolist()
    ]


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_is_a_plain_loop(tmp_path):
    """One seed of two, against torch's own Adam over the same batches, sentence by sentence without any padding."""
    cfg = config("replicas=2", "trainer.steps=7", "trainer.eval_every=7")
    train(cfg, Run(tmp_path / "run"))
    task = build_task(cfg.task)
    splits, model = task.splits(), initial_model(cfg.model, task, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    order = [
        rows_SB[0]
        for epoch in range(2)  # of five batches
        for _, rows_SB in batches_of_epoch(padded_lengths(splits["train"], 8), 8, [1], epoch)
    ]

    def total(batch):
        loss, count = 0.0, 0
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            length = int((inputs != ABSENT).sum())
            loss = loss + F.cross_entropy(model(inputs[None, :length])[0], targets[:length], reduction="sum")
            count += length
        return loss / count

    for rows in order[:7]:
        optimizer.zero_grad()
        total(splits["train"][rows]).backward()
        optimizer.step()
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv").query("seed == 1 and step == 7").set_index("split").loss
    for split in ("valid", "test"):
        assert metrics[split] == pytest.approx(total(splits[split]).item(), rel=1e-9)


@pytest.mark.parametrize(
    "model", some(["causal", "causal_l2_tied", "causal_contractive_l2", "causal_l2_matched", "lstm"], 4)
)
def test_seeds_side_by_side_are_seeds_alone(tmp_path, model):
    cfg = compose("train", *TEXT, f"model={model}", "trainer.steps=4", "model.dropout=0.2", "replicas=2")
    train(cfg, Run(tmp_path / "both"))
    both = Run(tmp_path / "both").weights()
    for index in range(2):
        alone = dataclasses.replace(cfg, seed=index, replicas=1)
        train(alone, Run(tmp_path / str(index)))
        for name, weight in Run(tmp_path / str(index)).weights().items():
            torch.testing.assert_close(weight[0], both[name][index], **SAME)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_graph_serves_many_widths(graphs):
    weights = {}
    for compile in ("true", "false"):
        words = ["model.layers=1", "task.pad_to=1", "trainer.batch_size=3", f"trainer.compile={compile}"]
        cfg = config(*words, "replicas=2")
        training = Training(cfg, build_task(cfg.task), Machine.prepare(cfg), [0, 1])
        widths = set()
        for _ in range(12):
            widths.add(training.batch().inputs.shape[-1])
            training.update()
        weights[compile] = training.weights()
    # short rows of attention, longer ones, and the single sequence at the end of an epoch
    assert len(widths) > 8 and len(graphs) == 3
    torch.testing.assert_close(weights["true"], weights["false"], **SAME)


def test_summary_reads_the_test_at_the_best_validation_step(tmp_path):
    cfg = config("optimizer.lr=2", "replicas=3", "trainer.eval_every=1")  # so high that it goes up and down
    summary = train(cfg, Run(tmp_path / "run"))
    metrics = read_table(tmp_path / "run" / "metrics.csv")
    steps = []
    for row in summary["seeds"]:
        rows_of_seed = metrics[metrics.seed == row["seed"]].set_index("step")
        valid, test = (rows_of_seed[rows_of_seed.split == split].loss for split in ("valid", "test"))
        assert row["best_step"] == valid.idxmin() and row["valid_loss"] == valid.min()
        assert row["test_loss"] == test[valid.idxmin()]
        assert row["test_bits"] == pytest.approx(row["test_loss"] / math.log(2), rel=1e-15)
        assert "test_accuracy" not in row
        steps.append(row["best_step"])
    assert min(steps) < 12  # the last evaluation is not always the best one
    final = pd.DataFrame(summary["seeds"]).assign(job_status="finished", task="char_lm", model="causal")
    means = summarise(final, []).iloc[0]
    assert means.valid_loss_best == final.valid_loss.min() < final.valid_loss.mean()
    assert means.valid_loss_mean == pytest.approx(final.valid_loss.mean(), rel=1e-15)


def test_interrupted_training_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    cfg = config("replicas=2", "model.dropout=0.1")
    whole = train(cfg, Run(tmp_path / "whole"))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        during_step(patch, 9, Mock(side_effect=KeyboardInterrupt))  # rows of step 8 come after the checkpoint of step 5
        train(cfg, Run(tmp_path / "parts"))
    assert train(cfg, Run(tmp_path / "parts"))["seeds"] == whole["seeds"]


REGRESSION = ["task=nearest_neighbor", "task.queries=separate", "task.train_size=37", "task.test_size=13", *STEPS]


@pytest.mark.parametrize(
    "words",
    [["model=causal", *TEXT], ["model=lstm", *TEXT], REGRESSION],  # of the last one targets are scored alone
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("accumulate", [2, 3, 8, 50])
def test_accumulated_gradients_are_those_of_the_whole_batch(words, accumulate):
    results = []
    for passes in (1, accumulate):
        cfg = compose("train", *words, "model.dropout=0.3", "replicas=2", f"trainer.accumulate={passes}")
        training = Training(cfg, build_task(cfg.task), Machine.prepare(cfg), [0, 1])
        results.append(training.gradients(training.batch()))
    (scores, gradients), (in_parts, parts) = results
    for whole, part in zip((*scores, *gradients), (*in_parts, *parts), strict=True):
        # float64 sums in another order; numbers have no accuracy
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12, equal_nan=True)


def test_a_model_that_sees_the_future_is_refused():
    for words in (["model=transformer"], ["model=causal", "model.mask=none"]):
        cfg = compose("train", "task=char_lm", *words)
        assert refusal(build_model, cfg.model, build_task(cfg.task)).endswith("would see; use model.mask=causal")


@pytest.mark.parametrize(("gamma", "width", "warmup"), [(1.0, 512, 4000), (0.2, 128, 300), (2.0, 64, 1)])
def test_the_schedule_is_the_papers(gamma, width, warmup):
    lr = noam_peak(gamma, width, warmup)
    cfg = OptimizerConfig(lr=lr, schedule="inverse_sqrt", warmup=warmup)
    for step in (1, 2, warmup - 1, warmup, warmup + 1, 10 * warmup, 100_000):
        if step >= 1:
            rate = gamma / math.sqrt(width) * min(step**-0.5, step * warmup**-1.5)
            assert learning_rate(cfg, step - 1, 200_000) == pytest.approx(rate, rel=1e-13)


def test_at_laptop_scale_the_peak_rate_falls_with_the_root_of_the_number_of_layers():
    words = ["experiment=kim_lstm", "model=causal"]
    peaks = [
        compose("train", *words, f"budget={budget}", f"model.layers={layers}").optimizer.lr
        for budget in ("laptop", "paper")
        for layers in (1, 4)
    ]
    assert peaks == pytest.approx([2 / (64 * 200) ** 0.5, 1 / (64 * 200) ** 0.5, *[1 / (512 * 4000) ** 0.5] * 2])


@pytest.mark.slow
def test_a_small_network_comes_near_the_entropy_of_the_grammar(tmp_path):
    """From above, as nothing can be below it but by chance; memorising nothing, as the training set is large. With
    sinusoidal positions 600 steps end .18 nats above it, 1,500 .06."""
    words = ["model.width=48", "model.layers=2", "task.train_size=20000", "task.valid_size=300", "task.test_size=300"]
    words += ["trainer.batch_size=32", "trainer.steps=1500", "trainer.eval_every=500", "optimizer.lr=0.003"]
    cfg = config("precision=fp32", *words)
    (summary_row,) = train(cfg, Run(tmp_path / "run"))["seeds"]
    task = build_task(cfg.task)
    test = task.splits()["test"]
    characters = int((test.targets != ABSENT).sum())
    best = -sum(log_probability(task.decode(row)) for row in test.targets) / characters
    assert best < summary_row["test_loss"] < best + 0.15


# --- samples ----------------------------------------------------------------------------------------------------------


class Parrot(torch.nn.Module):
    """Logits of the next character that depend on the last one alone: a Markov chain with known probabilities."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, inputs):
        return self.logits[inputs]


def test_sentences_follow_the_model_and_the_temperature():
    logits = torch.tensor(
        [[0.0, 1.0, -1.0], [0.5, -0.5, 0.0], [1.0, 0.0, -2.0]], dtype=torch.float64
    )  # a, b, begin/end
    model, begin = Parrot(logits), torch.full((4000, 1), 2)
    for temperature in (1.0, 0.5):
        written, log_likelihood = samples.write(model, begin, 12, temperature, torch.Generator().manual_seed(0))
        share = (written[:, 0] == 0).double().mean().item()
        expected = (logits[2] / temperature).softmax(0)[0].item()
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)  # standard errors; fixed seed
        for row, recorded in zip(written[:200].tolist(), log_likelihood[:200].tolist(), strict=True):
            states = [2, *(token for token in row if token != ABSENT)]
            assert 2 not in states[1:-1] and row == states[1:] + [ABSENT] * (len(row) - len(states) + 1)
            by_hand = sum(logits[a].log_softmax(0)[b].item() for a, b in itertools.pairwise(states))
            assert recorded == pytest.approx(by_hand, abs=1e-12)
        assert written.shape[1] <= 12
    greedy, _ = samples.write(model, begin[:3], 4, 5e-324, torch.Generator())  # logits over it overflow
    assert greedy.tolist() == [[0, 1, 0, 1]] * 3


@pytest.mark.further
@pytest.mark.parametrize("name", ["causal", "lstm"])
def test_the_table_of_samples(tmp_path, name):
    cfg = compose("train", *TEXT, f"model={name}", "task.length_limit=60", "trainer.steps=2")
    run = Run(tmp_path / "run")
    train(cfg, run)
    (subject,) = subjects_of_run(run, Machine.prepare(cfg))
    options = samples.Options(4, [1.0, 0.2], "the ")
    table = samples.table(subject, options)
    assert len(table) == 2 * 2 * 4 and table.text.str.startswith("the ").all()
    for row in table.itertuples():
        numbers = torch.tensor([[len(subject.task.alphabet), *subject.task.encode(row.text)]])
        model = subject.networks[row.weights]
        log_likelihoods = model(numbers[:, : subject.task.length]).log_softmax(-1)[0]
        targets = [*numbers[0, 1:].tolist(), *([len(subject.task.alphabet)] if row.ended else [])]
        positions = range(4, len(targets))  # behind `the `
        assert row.characters == len(positions)
        wanted = sum(log_likelihoods[n, targets[n]].item() for n in positions)
        assert row.log_likelihood == pytest.approx(wanted, abs=1e-9)
    assert table.equals(samples.table(subject, options))
    digest = samples.digest(table.assign(**subject.who))
    assert digest.splitlines()[1:] == [f"  {text}" for text in table.text[:3]]


def test_what_cannot_be_begun_with_is_refused(sorting_task, model_config):
    model = initial_model(model_config(), sorting_task(), 0)
    batch = Batch(torch.zeros(1, 8).long(), torch.zeros(1, 8).long())
    lm = char_lm(length_limit=4)
    subject = Subject("run", 0, lm, batch, batch, {"initialised": model})
    assert "its characters % are not" in refusal(samples.table, subject, samples.Options(1, [1.0], "%"))
    assert "as long as" in refusal(samples.table, subject, samples.Options(1, [1.0], "a cat"))


# --- curves, their figure and their claims ----------------------------------------------------------------------------


def test_the_table_of_curves(tmp_path):
    cfg = config("replicas=2", "trainer.eval_every=3", "optimizer.lr=0.3")
    run = Run(tmp_path / "run")
    summary = train(cfg, run)
    metrics = pd.read_csv(run.folder / "metrics.csv")
    for subject, summary_row in zip(subjects_of_run(run, Machine.prepare(cfg)), summary["seeds"], strict=True):
        table = curves.table(subject, curves.Options(["valid", "test"]))
        rows_of_seed = metrics[(metrics.seed == subject.seed) & (metrics.split != "train")].reset_index(drop=True)
        pd.testing.assert_frame_equal(table[["step", "split", "loss"]], rows_of_seed[["step", "split", "loss"]])
        first = table.iloc[0]
        assert (first.best_step, first.test_loss) == (summary_row["best_step"], summary_row["test_loss"])
        assert first.test_bits == pytest.approx(summary_row["test_bits"], rel=1e-15)
        sentences = [subject.task.decode(targets) for targets in subject.test.targets]
        ended = sum(len(sentence) < subject.task.length for sentence in sentences)  # the others are cut off
        characters = sum(map(len, sentences))
        assert 0 < ended <= len(sentences)
        counted = subject.task.counted_losses(subject.test)
        assert {name: first[name] for name in counted} == counted
        wanted = first.test_loss * (characters + ended) / characters
        assert first.test_loss_per_character == pytest.approx(wanted, rel=1e-12) and first.width == cfg.model.width
        line = curves.digest(table.assign(seed=subject.seed)).splitlines()[1]
        assert f"{first.test_loss:.4f}, {wanted:.4f} nats per character, {first.test_bits:.4f} bits per symbol" in line
        speed = metrics[(metrics.seed == subject.seed) & (metrics.split == "train")].set_index("step").tokens_per_second
        for step, times in table.groupby("step").microseconds_per_token:
            if step in speed.index[1:]:  # what is before and in the first interval is left out
                assert times.tolist() == pytest.approx([1e6 / speed[step]] * 2, rel=1e-12)
            else:
                assert times.isna().all()
        assert table.microseconds_per_token.notna().sum() == 2 * (len(speed) - 1) > 0
        sizes = {name: weight[0].numel() for name, weight in run.weights().items()}
        assert first.parameters == sum(sizes.values()) and (first.variant, first.layers) == ("causal", 1)


@pytest.mark.parametrize("kept", [1, 2])
def test_an_evaluation_that_a_kill_cut_short_is_not_the_best(kept):
    losses = pd.DataFrame({"step": [0, 0, 5, 5], "split": ["valid", "test"] * 2, "loss": [3.0, 3.1, 2.0, 2.1]})
    curve = losses.assign(accuracy=0.5, tokens_per_second=math.nan).iloc[: 2 + kept]
    subject = Subject("a run", 0, curve=curve, networks={"trained": transformer()})
    table = curves.table(subject, curves.Options(["valid", "test"]))
    assert set(table.test_loss) == {2.1 if kept == 2 else 3.1} and len(table) == len(curve)


def test_curves_of_a_task_without_a_validation_set(tmp_path):
    cfg = compose("train", "trainer.steps=4", "trainer.eval_every=2", "model.layers=1", "task.train_size=200")
    run = Run(tmp_path / "run")
    train(cfg, run)
    (subject,) = subjects_of_run(run, Machine.prepare(cfg))
    table = curves.table(subject, curves.Options(["test"]))
    assert table.best_step.unique().tolist() == [4] and set(table.split) == {"test"}
    assert "(one seed)" in curves.digest(table.assign(seed=0))
    assert not {"test_loss_per_character", "bigram_loss"} & {*table}
    fresh = dataclasses.replace(subject, curve=None)
    assert "needs metrics.csv of a training" in refusal(curves.table, fresh, curves.Options(["test"]))


def test_curves_options():
    assert "splits=dev: unknown" in refusal(typed, curves.Options, {"splits": ["dev", "test"]}, "analysis.curves")
    assert "add it to the list" in refusal(curves.Options, ["train"])


def by_hand(losses, seeds=3, times=None):
    """A table of curves: losses by (variant, layers), the same for every seed but for a hundredth of a nat; times on a
    machine that gets slower, for every variant alike."""
    rows = []
    for (variant, layers), loss in losses.items():
        for seed in range(seeds):
            final = loss + 0.001 * seed
            facts = {"variant": variant, "layers": layers, "test_loss": final, "seed": seed}
            facts |= {"split": "test", "accuracy": 0.5, "test_bits": 1}
            time = (times or {}).get(variant, 10.0) * layers
            for step in range(0, 50, 10):
                microseconds = time * (1 + step / 10) if step > 10 else math.nan
                loss_there = final + 1 / (step + 1)
                rows.append(facts | {"step": step, "loss": loss_there, "microseconds_per_token": microseconds})
    return pd.DataFrame(rows)


def test_the_figure_draws_what_the_table_says():
    figure_of_one = draw_curves(by_hand({("causal", 1): 1.0}))
    assert len(figure_of_one.axes) == 1
    table = by_hand({("causal", 1): 1.0, ("causal_l2", 1): 1.1, ("causal", 2): 0.9}, times={"causal_l2": 12.0})
    left, middle, right = draw_curves(table, published("kim_table2"), "model").axes
    drawn = sorted(tuple(line.get_ydata().round(9)) for line in left.lines if len(line.get_ydata()))
    means = table.groupby(["variant", "layers", "step"]).loss.mean().unstack()
    assert drawn == sorted(tuple(row) for row in means.round(9).to_numpy())
    values = [line.get_ydata().tolist() for line in middle.lines if line.get_linestyle() != "None"]
    assert [pytest.approx([1.001, 0.901]), pytest.approx([1.101])] == values
    marks = [line for line in middle.lines if line.get_marker() != "None" and line.get_fillstyle() == "full"]
    assert [1.164, 0.989, 0.954, 0.943, 0.940] in [list(line.get_ydata()) for line in marks]
    assert pytest.approx([1.2]) in [line.get_ydata().tolist() for line in right.lines]
    low, high = left.get_ylim()
    assert low <= table.loss.min() and table.loss.max() <= high  # the first losses, too
    colours = [line.get_color() for line in middle.lines if line.get_label() in ("causal", "causal L2")]
    (alone,) = draw_curves(by_hand({("causal_l2", 1): 1.1}).assign(unigram_loss=3.0, bigram_loss=2.4)).axes
    assert len(colours) == 2 and alone.lines[0].get_color() == colours[1]  # as beside other variants
    levels = {line.get_label(): line.get_ydata()[0] for line in alone.lines if line.get_color() == GREY}
    assert levels == {"frequencies of symbols": 3.0, "frequencies of pairs": 2.4}
    lstm = draw_curves(by_hand({("causal", 1): 1.0, ("lstm", 1): 1.1}), published("kim_table2")).axes[1]
    (level,) = [line for line in lstm.lines if line.get_label() == "LSTM (Kim et al., text)"]
    assert list(level.get_ydata()) == [1.0, 1.0] and level.get_linestyle() == ":"
    for variant, label, printed in (
        ("lstm", "LSTM (Kim et al., text)", 1.0),
        ("causal", "causal (Kim et al., Table 2)", 0.989),
    ):
        (alone,) = draw_curves(by_hand({(variant, 2): 1.1}), published("kim_table2")).axes
        levels = {line.get_label(): line.get_ydata()[0] for line in alone.lines if line.get_linestyle() == ":"}
        assert levels == {label: printed} and alone.get_ylim()[0] < printed


def test_a_pause_between_two_steps_leaves_the_interval_of_times_above_zero():
    table = by_hand({("causal_l2", 1): 1.1, ("causal_l2_tied", 1): 1.2})
    table = pd.concat([table.assign(step=table.step + 50 * number) for number in range(5)], ignore_index=True)
    last = (table.variant == "causal_l2_tied") & (table.step == table.step.max())
    table.loc[last, "microseconds_per_token"] *= 1000
    times = draw_curves(table).axes[2]
    assert 0 < times.dataLim.y0 < times.dataLim.y1


@pytest.mark.further
def test_analyses_without_a_figure_leave_none(tmp_path):
    cfg = config("trainer.steps=2", "analysis=[curves,samples]", "analysis.samples.number=2")
    run = Run(tmp_path / "run")
    train(cfg, run)
    lines = analyze(cfg, subjects_of_run(run, Machine.prepare(cfg)), run.folder)
    assert (run.folder / "samples.csv").exists() and not (run.folder / "samples.png").exists()
    assert (run.folder / "curves.png").exists() and not any("samples.png" in line for line in lines)
    assert ANALYSES["samples"].figure is None
    assert json.loads((run.folder / "summary.json").read_text())["seeds"][0]["valid_loss"] > 0
