"""rankbench.tasks.corpora: corpora from a server of our own, with checksums that fit and that do not."""

import hashlib
import http.server
import os
import threading
from functools import partial

import pytest
from refusals import refusal

from rankbench.tasks import build_task, corpora

TEXTS = {"train": "a b\nb a\n", "valid": "b\n", "test": "a a\n"}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The corpus `tiny` on a server of this machine: (the folder that is served, the paths that were asked for)."""
    folder, asked = tmp_path / "served", []
    folder.mkdir()
    for split, text in TEXTS.items():
        (folder / f"{split}.txt").write_text(text)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sums = {split: hashlib.sha256(text.encode()).hexdigest() for split, text in TEXTS.items()}
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setitem(corpora.CORPORA, "tiny", corpora.CorpusSource(address, sums, "a note"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield folder, asked
        server.shutdown()


def test_a_corpus_is_fetched_once(served, tmp_path):
    folder, asked = tmp_path / "new" / "tiny", served[1]
    corpora.fetch("tiny", folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        f"{split}.txt": text for split, text in TEXTS.items()
    }
    assert sorted(asked) == ["/test.txt", "/train.txt", "/valid.txt"]
    corpora.fetch("tiny", folder)
    assert len(asked) == 3


def test_a_damaged_file_is_fetched_again(served, tmp_path):
    corpora.fetch("tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "valid.txt").write_text("half a fi")
    corpora.fetch("tiny", tmp_path / "tiny")
    assert (tmp_path / "tiny" / "valid.txt").read_text() == TEXTS["valid"]


def test_a_file_that_has_changed_at_its_address_is_refused(served, tmp_path):
    (served[0] / "test.txt").write_text("somebody else's\n")
    assert "test.txt: not the file that was pinned" in refusal(corpora.fetch, "tiny", tmp_path / "tiny")
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == ["train.txt", "valid.txt"]


def test_without_a_network_it_says_so_in_one_line(monkeypatch, tmp_path):
    source = corpora.CorpusSource("http://127.0.0.1:9", {"train": "0" * 64}, "")  # nobody listens there
    monkeypatch.setitem(corpora.CORPORA, "nowhere", source)
    line = refusal(corpora.fetch, "nowhere", tmp_path / "corpus")
    assert "could not be fetched" in line and "train.txt, valid.txt and test.txt" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(served, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "could not be fetched" in refusal(corpora.fetch, "tiny", tmp_path / "closed" / "tiny")


def test_an_unknown_corpus_is_refused(tmp_path):
    assert "corpus=pbt: unknown, did you mean ptb" in refusal(corpora.fetch, "pbt", tmp_path)


def test_a_task_finds_a_fetched_corpus_by_its_name(served):
    keys = {"held_out": 0.1, "unk": "characters", "length_limit": 20, "pad_to": 8}
    sizes = {"train_size": None, "valid_size": None, "test_size": None}
    task = build_task({"name": "char_lm", "path": "tiny", **keys, **sizes})
    assert "fetch it with `rankbench data corpus=tiny`" in refusal(task.splits)
    corpora.fetch("tiny", corpora.folder_of("tiny"))
    assert task.alphabet == " ab"
    assert {split: len(batch.inputs) for split, batch in task.splits().items()} == {"train": 2, "valid": 1, "test": 1}
    (corpora.folder_of("tiny") / "valid.txt").write_text(TEXTS["valid"] + "one line more\n")
    assert "valid.txt: changed since it was fetched; `rankbench data corpus=tiny` " in refusal(task.splits)
