"""rankbench.commands.failures: how commands end that cannot go on, through no fault of ours."""

import errno
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar

import pandas as pd
import pytest
import torch
from breadth import some
from command_line import rankbench, refused, succeeds
from forked import begin, fork, until
from refusals import refusal

from rankbench.analyses import ANALYSES, Analysis
from rankbench.analysing import runner
from rankbench.analysing.subjects import _subject
from rankbench.commands import cli
from rankbench.commands.failures import leaving_nothing, refusal_of
from rankbench.config.keys import ConfigError, printable
from rankbench.config.schema import conf_dir
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.tasks import Batch, Finite, check_sample
from rankbench.training import loop
from rankbench.training.data import Stream

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
SIZES = ["model.layers=1", "model.width=8", "task.length=4", "task.alphabet=5", "task.train_size=20"]
SIZES += ["task.test_size=9"]
TINY = [*SIZES, "trainer.batch_size=8", "trainer.steps=2", "trainer.eval_every=2"]
MEASURED = ["analysis=[residual]", "analysis.residual.sequences=2", "analysis.residual.variants=[full]"]


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_a_standard_stream_does_its_work(closed, tmp_path):
    """Daemons and schedulers close them; Python then has None in their place, and the next file takes their number."""
    words = f'"{sys.executable}" -m rankbench __complete 1 train {closed}; echo $? >code'
    subprocess.run(["sh", "-c", words], cwd=tmp_path, capture_output=True, timeout=120, check=True)
    assert (tmp_path / "code").read_text() == "0\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_training_without_a_standard_stream_ends_well(name, tmp_path):
    def call():
        os.close({"stdout": 1, "stderr": 2}[name])
        setattr(sys, name, None)
        sys.argv = ["rankbench", "train", *TINY, "out=run"]
        cli.main()

    with fork(call, at=tmp_path, errors=tmp_path / "errors.txt") as process:
        assert process.wait() == 0
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    files = [path for path in (tmp_path / "run").iterdir() if path.is_file() and path.name != "train.log"]
    assert not any(b"test accuracy" in path.read_bytes() for path in files)


class Gone(io.StringIO):
    """An output whose reader has exited."""

    def write(self, _):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("words", [["-m", "seed=0,1"], []], ids=["sweep", "run"])
def test_a_reader_that_has_exited_ends_a_command_in_silence(words, tmp_path):
    errors = tmp_path / "errors.txt"

    def call():
        sys.stdout = Gone()
        sys.argv = ["rankbench", "train", *words, *TINY, "out=out"]
        cli.main()

    with fork(call, at=tmp_path, errors=errors) as process:
        assert process.wait() == 141
    assert "overrides" not in errors.read_text() and "rankbench" not in errors.read_text()


def test_a_letter_that_the_terminal_does_not_know_is_printed_by_its_number(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["rankbench", "explain", "effective_rank"])
    cli.main()
    assert b"formula: exp of the entropy of s / \\u03a3 s" in written.getvalue()


def test_a_wrong_backend_of_matplotlib_is_not_ours_to_refuse(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "nonsense")

    def call():
        sys.argv = ["rankbench", "--version"]
        cli.main()
        assert "MPLBACKEND" not in os.environ

    with fork(call, at=tmp_path, errors=tmp_path / "errors.txt") as process:
        assert process.wait() == 0


def test_memory_that_does_not_hold_torch_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "rankbench.runs.machine", _Full("rankbench.runs.machine"))
    assert str(refusal_of(MemoryError())).startswith("out of memory while starting; ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (type("TerminatedWorkerError", (RuntimeError,), {})("killed"), "cluster=joblib: a worker was killed, "),
        (OSError(errno.EMFILE, "Too many open files", "a"), "a: cannot be opened (Too many open files); `ulimit -n` r"),
    ],
    ids=["joblib", "files"],
)
def test_what_the_machine_does_not_give_is_one_line(error, said):
    assert str(refusal_of(error)).startswith(said)


class _Full(ModuleType):
    def __getattr__(self, _):
        raise MemoryError


def test_control_characters_and_lone_surrogates_are_escaped():
    assert printable("a\x1b[31m\udc80\u2028é\n") == r"a\x1b[31m\udc80\u2028é\n"
    assert str(ConfigError("a\nb\x07")) == r"a b\x07"


# --- signals ---------------------------------------------------------------------------------------------------------


def _waiting(*_, **__):
    open("waits", "w").close()
    time.sleep(100)


@pytest.mark.parametrize("kind", some([signal.SIGTERM, signal.SIGHUP], 2), ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("module", "name", "words", "line"),
    [
        (runner, "measure", ["analyze", *SIZES, *MEASURED], "interrupted; the same command with out=out continues"),
        (runner, "measure", ["train", *TINY, *MEASURED], "interrupted; the same command with out=out continues"),
        (loop, "_opened", ["train", *TINY], "interrupted; the same command with out=out continues"),
        (sys.modules["rankbench.tasks"], "check_sample", ["train", *TINY], "interrupted"),
    ],
    ids=["analyze", "analyses of a training", "begins", "starts"],
)
def test_a_signal_ends_a_command_as_an_interrupt_does(kind, module, name, words, line, tmp_path, monkeypatch):
    monkeypatch.setattr(module, name, _waiting)
    if name == "check_sample":
        monkeypatch.setattr("rankbench.commands.checks.check_corpus", _waiting)
    with begin(*words, "out=out", at=tmp_path, errors=tmp_path / "errors.txt") as process:
        until((tmp_path / "waits").exists, process)
        os.kill(process.pid, kind)
        os.kill(process.pid, kind)  # a closed terminal and its shell both send one
        assert process.wait() == 130
    assert process.last_line == f"rankbench {words[0]}: {line}"
    assert "Traceback" not in process.errors.read_text()


class Interrupted:
    """What is interrupted while it is deleted, where Python drops every exception."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_arrives_where_python_drops_it_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "measure", lambda *_, **__: Interrupted() and _waiting())
    with begin("analyze", *SIZES, *MEASURED, "out=out", at=tmp_path, errors=tmp_path / "errors.txt") as process:
        assert process.wait(60) == 130
    assert process.last_line == "rankbench analyze: interrupted; the same command with out=out continues"
    assert "ignored" not in process.errors.read_text()


def test_a_signal_that_a_library_makes_an_error_of_still_interrupts(tmp_path, monkeypatch):
    def compare(_):  # as dict does, whose keys are compared
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            raise ConfigError("seed: unknown key") from None

    monkeypatch.setattr(cli, "_dispatch", compare)
    with fork(cli.main, at=tmp_path, errors=tmp_path / "errors.txt") as process:
        assert process.wait() == 130
    assert process.last_line == "rankbench: interrupted"


def test_a_second_signal_changes_no_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_dispatch", lambda _: os.kill(os.getpid(), signal.SIGHUP))

    def call():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
        try:
            cli.main()
        finally:
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGHUP)

    with fork(call, at=tmp_path, errors=tmp_path / "errors.txt") as process:
        assert process.wait() == 130


def test_the_folder_of_another_command_stays(tmp_path):
    with pytest.raises(ConfigError), ExitStack() as other, leaving_nothing(tmp_path / "out"):
        other.enter_context(Run(tmp_path / "out").locked())
        raise ConfigError("out=out: another process is writing there")
    assert (tmp_path / "out" / ".lock").exists()


# --- a user's own code -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "raised", "number"),
    [
        ("def build():\n    return [][1]", "IndexError: list index out of range", 2),
        ("def build():\n    exit(0)", "SystemExit: 0", 2),
        ("raise SystemExit", "SystemExit", 1),
        ("import json\n\ndef build():\n    return json.loads('{')", "JSONDecodeError: ", 4),
        ("def build(:", "SyntaxError: ", 1),
        ("def build():\n    raise OSError(2, 'gone', 'file')", "FileNotFoundError: ", 2),
        ("def build():\n    raise ValueError('\\udc80\\x1b[31m')", r"ValueError: \udc80\x1b[31m", 2),
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_an_error_in_a_users_module_is_a_line_and_the_users_own_frames(body, raised, number, is_file, tmp_path):
    name = f"mine_{abs(hash((body, is_file)))}"
    (tmp_path / f"{name}.py").write_text(body + "\n")
    model = f"model={name}.py:build" if is_file else f"model={name}:build"
    result = rankbench("analyze", model, "analysis=[residual]", "out=out", at=tmp_path)
    line, *frames = result.err.splitlines()
    assert result.code == 1
    said = rf"rankbench analyze: (.*/)?{name}.py, line {number}: your own code raised {re.escape(raised)}"
    assert re.match(said, line)
    named = [frame for frame in frames if frame.startswith("  File ")]
    assert named and all(f"{name}.py" in frame for frame in named)
    assert not (tmp_path / "out").exists()


@pytest.mark.further
def test_an_error_in_a_plugins_analysis_does_not_stop_the_other_jobs_of_a_sweep(tmp_path, monkeypatch):
    code = """
from dataclasses import replace
from rankbench.analyses import ANALYSES as OURS

def table(subject, options):
    if subject.seed == 0:
        raise SystemExit
    return OURS["residual"].table(subject, options)

ANALYSES = {"residual_twice": replace(OURS["residual"], table=table)}
"""
    folder = tmp_path / "conf" / "analysis"
    folder.mkdir(parents=True)
    (tmp_path / "plug_that_exits.py").write_text(code)
    shipped = (conf_dir() / "analysis" / "residual.yaml").read_text()
    (folder / "residual_twice.yaml").write_text(shipped.replace("analysis.residual", "analysis.residual_twice"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    words = ["plugins=plug_that_exits", "analysis=[residual_twice]", "seed=0,1"]
    errors = tmp_path / "errors.txt"
    with begin("train", "-m", *TINY, *words, "out=sweep", at=tmp_path, errors=errors) as process:
        assert process.wait() == 1
    printed = errors.read_text()
    assert "plug_that_exits.py, line 7: your own code raised SystemExit; " in printed
    assert "Traceback" not in printed and "hydra" not in printed
    assert len(list(tmp_path.glob("sweep/*/residual_twice.csv"))) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "its table gave a NoneType"),
        ([1], "its table gave a list"),
        (pd.Series([1]), "its table gave a Series"),
        (pd.DataFrame(), "its table gave no rows"),
        (pd.DataFrame({"a": []}), "its table gave no rows"),
        (pd.DataFrame({"a": [1], "seed": [1]}), "its table gave seed"),
        (pd.DataFrame({"a": [1]}, pd.Index([2], name="b")), "its table gave the index b, which is no column (reset_"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "its table gave two columns a"),
        (pd.DataFrame({"a": ["b", None], "c": [1, [2]]}), "its table gave an entry of type list, neither a number"),
        (pd.DataFrame({"a": [1 + 2j]}), "its table gave an entry of type complex, neither a number nor a text"),
    ],
    ids=str,
)
def test_what_is_no_table_of_an_analysis_is_one_line(value, said, monkeypatch):
    @dataclass
    class Subject:
        seed: int = 0
        who: ClassVar[dict] = {"run": "a", "task": "b", "model": "c", "seed": 0}

    @dataclass
    class Options:
        """None."""

    monkeypatch.setitem(ANALYSES, "mine", Analysis(Options, lambda *_: value, None, str, {}, ()))
    line = refusal(runner.measure, "mine", {}, [Subject()])
    assert line.startswith(f"analysis=mine: {said}") and "; a table returns a DataFrame with rows, without run" in line


@pytest.mark.parametrize("part", ["digest", "figure"])
def test_what_is_no_digest_or_figure_is_one_line(part, tmp_path, monkeypatch):
    monkeypatch.setitem(ANALYSES, "residual", replace(ANALYSES["residual"], **{part: lambda *_: None}))
    result = rankbench("analyze", *SIZES, *MEASURED, "out=out", at=tmp_path)
    kind = {"digest": "str", "figure": "Figure"}[part]
    line = f"rankbench analyze: analysis=residual: its {part} gave a NoneType; return a {kind}"
    assert result.code == 1 and result.err.splitlines()[-1] == line


# --- a plug-in's task ------------------------------------------------------------------------------------------------

TOKENS, NUMBERS = torch.tensor([[0, 1, 4], [2, 3, -1]]), torch.zeros(2, 3, 5)


@dataclass(frozen=True)
class Mine:
    """A task with the batch that it is given."""

    batch: object
    target_kind: str = "classes"
    input_kind: ClassVar[str] = "tokens"
    name: ClassVar[str] = "mine"
    num_inputs: ClassVar[int] = 5
    num_outputs: ClassVar[int] = 5
    length: ClassVar[int] = 4
    padded: bool = True

    def sample(self, num_sequences, generator):
        assert num_sequences in (2, 100) and isinstance(generator, torch.Generator)
        return self.batch


@dataclass(frozen=True)
class Changing(Mine):
    """A task that gives its batch only if more than two sequences are asked for."""

    test_size: ClassVar[int] = 8
    train_size: ClassVar[None] = None

    def sample(self, num_sequences, generator):
        whole = Batch(TOKENS, TOKENS)
        return whole if num_sequences == 2 else self.batch


@dataclass(frozen=True)
class Counted(Finite, Mine):
    """A finite set, whose number of sequences is said to be three."""

    num_sequences: ClassVar[int] = 3
    train_size: ClassVar[int] = 1
    test_size: ClassVar[None] = None

    def sequences(self):
        return self.batch


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Mine(None), "gave a NoneType; return a Batch of two tensors"),
        (Mine((TOKENS, TOKENS)), "gave a tuple; "),
        (Mine(Batch(TOKENS, None)), "gave a Batch; return a Batch of two tensors"),
        (Mine(Batch(TOKENS, TOKENS[:, :2])), "gave targets of shape (2, 2); allowed are (2, 3), with up to "),
        (Mine(Batch(TOKENS[1:], TOKENS[1:])), "gave inputs of shape (1, 3); allowed are (2, 3)"),
        (Mine(Batch(TOKENS[:, 0], TOKENS[:, 0])), "gave inputs of shape (2,); allowed are (2, 4)"),
        (Mine(Batch(TOKENS.repeat(1, 2), TOKENS.repeat(1, 2))), "gave inputs of shape (2, 6); "),
        (Mine(Batch(TOKENS.float(), TOKENS)), "gave inputs of torch.float32; allowed is torch.int64"),
        (Mine(Batch(TOKENS + 1, TOKENS)), "gave inputs from 0 to 5; allowed are values from 0 to 4"),
        (Mine(Batch(TOKENS, TOKENS - 1)), "gave targets from -2 to 3; "),
        (Mine(Batch(TOKENS, TOKENS * 0 - 1)), "gave no target that is scored, but -1 or nan alone; give others"),
        (Mine(Batch(TOKENS, TOKENS), "numbers"), "gave targets of shape (2, 3); allowed are (2, 3, 5)"),
        (Mine(Batch(TOKENS, NUMBERS.long()), "numbers"), "gave targets of torch.int64; allowed is a floating"),
        (Mine(Batch(TOKENS, NUMBERS + math.inf), "numbers"), "gave targets that are not finite; only targets may"),
        (Mine(Batch(TOKENS, TOKENS), padded=False), "gave inputs of -1, but padded = False; set padded = True"),
        (Counted(Batch(TOKENS, TOKENS)), "gave inputs of shape (2, 3); allowed are (3, 3), with up to "),
    ],
)
def test_sequences_that_do_not_fit_their_task_are_one_line(task, said):
    source = "sequences" if isinstance(task, Counted) else "sample"
    assert refusal(check_sample, task).startswith(f"task=mine: {source} {said}")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (Batch(TOKENS, TOKENS), "gave inputs of shape (2, 3); allowed are (8, 3), with up to task.length=4 tokens"),
        (Batch(*[TOKENS.repeat(4, 1)[:, :1] + 4] * 2), "gave inputs from 4 to 6; allowed are values from 0 to 4"),
        (Batch(TOKENS.repeat(4, 1), TOKENS.repeat(4, 1) * 0 - 1), "gave 8 sequences without a target that is scored"),
    ],
)
def test_every_batch_of_a_plugins_task_is_checked(batch, said):
    check_sample(task := Changing(batch))
    machine = Machine(torch.device("cpu"), torch.float32, "fp32", 1)
    assert said in refusal(Stream, task, machine, [0], 8)
    assert refusal(_subject, "fresh", task, 0, {}, machine, None)  # of 1000 training sequences


def test_sequences_that_fit_their_task_pass():
    check_sample(Mine(Batch(TOKENS, TOKENS)))
    check_sample(Mine(Batch(TOKENS[:1].repeat(2, 1), TOKENS), padded=False))  # -1 among the targets alone
    check_sample(Mine(Batch(TOKENS, NUMBERS), "numbers"))


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_module_larger_than_the_memory_is_one_line_with_the_bytes(tmp_path):
    (tmp_path / "vast.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(10**7, 10**7)\n")
    line = refused("analyze", "model=vast.py:build", "analysis=[residual]", "out=out", at=tmp_path)
    assert line.startswith("rankbench analyze: out of memory (") and "400000000000000 bytes" in line
    assert re.search(r"; this machine has [\d.,]+ GiB$", line)
    assert succeeds("--version", at=tmp_path).out
