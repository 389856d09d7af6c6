"""rankbench.progress: where there is a bar, and what logging leaves behind."""

import io
import logging

import pytest

from rankbench import progress
from rankbench.progress import bar, logging_to

log = logging.getLogger("rankbench.somewhere")


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Cell(io.StringIO):
    """Stands for ipykernel's stream, which is no terminal either."""


Cell.__module__ = "ipykernel.iostream"


@pytest.mark.parametrize(("stream", "disabled"), [(Terminal(), False), (Cell(), False), (io.StringIO(), True)])
def test_a_bar_shows_on_a_terminal_and_in_a_notebook(monkeypatch, stream, disabled):
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with bar(range(2), desc="working") as working:
        assert working.disable == disabled
        list(working)
    assert ("working" in stream.getvalue()) != disabled


def test_the_log_goes_to_the_file_and_to_the_terminal_and_leaves_the_logger_as_it_was(tmp_path, capsys):
    logger = logging.getLogger("rankbench")
    before = (logger.level, list(logger.handlers))
    with logging_to(tmp_path / "new" / "a.log"):
        log.info("first")
    assert (logger.level, list(logger.handlers)) == before
    assert (tmp_path / "new" / "a.log").read_text().endswith(" INFO first\n")
    assert capsys.readouterr().err == "first\n"


def test_the_log_can_leave_the_terminal_out(tmp_path, capsys):
    with logging_to(tmp_path / "a.log", to_terminal=False):
        log.info("first")
    assert (tmp_path / "a.log").read_text().endswith(" INFO first\n")
    assert capsys.readouterr().err == ""
