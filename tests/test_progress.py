"""rankbench.progress: where there is a bar, and what logging leaves behind."""

import io
import logging

import pytest

from rankbench import progress
from rankbench.progress import bar, counted, logging_to

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


def test_long_work_has_a_bar_or_lines_with_the_time_left(monkeypatch, caplog):
    seconds = iter([0.0, 0.0, 50.0, 100.0, 150.0, 200.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "rankbench"):
        assert list(counted([10, 10, 10, 10], 40, "paths: sequences", int)) == [10, 10, 10, 10]
    # one a minute, and none at the end
    assert caplog.messages == ["paths: sequences: 20 of 40, about 1.67 min left"]
    monkeypatch.setattr(progress.sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1e9)
    list(counted(range(3), 3, "paths: sequences"))
    assert "paths: sequences" in terminal.getvalue() and len(caplog.messages) == 1
