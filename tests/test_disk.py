"""Full disks, power cuts, special files and vanishing folders: one line says what is wrong, and training goes on to the
numbers that it would have had.

A limit on the size of files stands for a full disk: the kernel refuses the same writes, also in the middle of a row.
"""

import functools
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.figure
import pytest
from breadth import some
from command_line import SMALLEST, succeeds
from forked import begin
from interrupted import assert_same_run, contents, during_step, train_until_saved
from limits import limited
from power_cuts import power_cuts, restore
from refusals import refusal

import rankbench.runs.files
import rankbench.training.loop
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.plots.figure import save
from rankbench.progress import logging_to
from rankbench.runs.files import WriteError, append, write_text
from rankbench.runs.records import checksum
from rankbench.runs.run import Run
from rankbench.runs.tables import read_table
from rankbench.tasks.corpora import sentences_in
from rankbench.training.journal import StepsFile
from rankbench.training.loop import Interrupted, train
from rankbench.training.seeds_side_by_side import METRICS

pytestmark = pytest.mark.usefixtures("rounded_once")
TINY = [*SMALLEST, "trainer.steps=20", "trainer.eval_every=2", "trainer.checkpoint_every=4", "replicas=2"]


largest_file = functools.partial(limited, resource.RLIMIT_FSIZE)


@pytest.fixture(scope="module")
def cfg():
    return compose("train", *TINY, "trainer.dynamics_every=5")


@pytest.fixture(scope="module")
def reference(cfg, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("reference") / "run")
    train(cfg, run)
    return run


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_rows_are_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a\n1\n")
    with largest_file(10), pytest.raises(WriteError) as error:
        append(path, "22222\n33333\n")
    assert path.read_text() == "a\n1\n"
    assert str(error.value) == f"{path}: could not be written (File too large); the file is kept as it was"
    append(path, "22222\n")
    assert path.read_text() == "a\n1\n22222\n"


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_that_does_not_fit_leaves_the_earlier_one(tmp_path, kept):
    path = tmp_path / "table.csv"
    if kept:
        path.write_text("a\n1\n")
    before = contents(tmp_path)
    with (
        largest_file(1000),
        pytest.raises(WriteError, match=f"^{path}: could not be written .File too large.; ") as error,
    ):
        write_text(path, "a" * 2000)
    assert str(error.value).endswith("the file is kept as it was" if kept else "no part of it is left")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", [".png", ".pdf", ".svg"])
def test_a_figure_that_does_not_fit_is_named(tmp_path, kind):
    figure = matplotlib.figure.Figure()
    figure.subplots().plot([1, 2])
    with largest_file(1000), pytest.raises(WriteError, match=f"{tmp_path}/figure{kind}: could not be written"):
        save(figure, tmp_path / "figure", (kind,))
    assert contents(tmp_path) == {}


# the tensors of a checkpoint, those of a training state, rows of layers.csv in the middle of training
@pytest.mark.further
@pytest.mark.parametrize("num_bytes", some([3_000, 8_000, 16_000], 2))
def test_training_stops_at_a_full_disk_in_one_line_and_goes_on(tmp_path, cfg, reference, num_bytes):
    run = Run(tmp_path / "run")
    with largest_file(num_bytes), pytest.raises(WriteError) as error:
        train(cfg, run)
    message = str(error.value)
    assert message.startswith(str(run.folder)) and "could not be written (File too large" in message
    state = run.state()
    kept = "it has no checkpoint yet" if state is None else f"its checkpoint of step {state[1]['step']} is kept"
    assert message.endswith(kept) and "\n" not in message
    assert not list(run.folder.glob(".*.part")) and not list(run.folder.glob(".tmp*"))
    for table in run.folder.glob("*.csv"):
        assert table.read_text().endswith("\n")
    train(cfg, run)
    assert_same_run(run, reference)


def test_a_log_that_does_not_fit_ends_in_one_line(tmp_path, capsys):
    log = logging.getLogger("rankbench.somewhere")
    with largest_file(150), logging_to(tmp_path / "a.log"):
        for number in range(5):
            log.info("line %d", number)
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if line.startswith("line ")] == [f"line {number}" for number in range(5)]
    assert [line for line in printed if not line.startswith("line ")] == [
        f"{tmp_path}/a.log: the log ends here (File too large)"
    ]


# Hydra's own record, the run's checkpoint, the table of an analysis
@pytest.mark.further
@pytest.mark.parametrize(
    ("file_size", "file", "continues", "analyses"),
    [
        pytest.param(500, "run/.hydra/config.yaml", False, "[]", marks=pytest.mark.slow),
        (8_000, "run/checkpoint.safetensors", True, "[]"),
        pytest.param(30_000, "run/", True, "[residual]", marks=pytest.mark.slow),
    ],
)
def test_a_command_on_a_full_disk_ends_in_one_line_and_goes_on(tmp_path, file_size, file, continues, analyses):
    words = ["train", *TINY, "model.width=16", "out=run", f"analysis={analyses}"]
    with begin(*words, at=tmp_path, errors=tmp_path / "errors.txt", limits=largest_file(file_size)) as failed:
        assert failed.wait() == 1
    printed, line = failed.errors.read_text(), failed.last_line
    assert "Traceback" not in printed and "Error executing" not in printed
    assert line.startswith(f"rankbench train: {file}") and "could not be written (File too large" in line
    assert line.endswith("the same command with out=run continues") == continues
    succeeds(*words, at=tmp_path)
    assert Run(tmp_path / "run").status == "finished"
    assert (tmp_path / "run" / "residual.png").exists() == (analyses == "[residual]")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_on_a_full_disk_is_one_line(tmp_path):
    command = [sys.executable, "-m", "rankbench", "--help"]
    environment = os.environ | {"PYTHONPATH": str(Path(rankbench.training.loop.__file__).parents[2])}
    with open("/dev/full", "w") as full:
        failed = subprocess.run(command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert failed.returncode == 1
    assert failed.stderr == "rankbench: standard output: could not be written (No space left on device)\n"


# --- signals and folders that vanish ---------------------------------------------------------------------------------


@pytest.mark.further
def test_a_hangup_stops_training_as_a_termination_does(tmp_path, monkeypatch, cfg, reference):
    """A closed terminal and its shell both send the signal, so it comes twice."""
    run, before = Run(tmp_path / "run"), signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored in tests under nohup
    try:
        with monkeypatch.context() as patch:
            during_step(patch, 6, lambda: [signal.raise_signal(signal.SIGHUP) for _ in range(2)])
            with pytest.raises(Interrupted, match="stopped at step 6 of 20"):
                train(cfg, run)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    train(cfg, run)
    assert_same_run(run, reference)


def test_a_hangup_is_ignored_under_nohup(tmp_path, monkeypatch, cfg, reference):
    run, before = Run(tmp_path / "run"), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    during_step(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGHUP))
    try:
        train(cfg, run)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert_same_run(run, reference)


def test_a_second_interrupt_ends_training_within_the_step(tmp_path, monkeypatch, cfg, reference):
    run = Run(tmp_path / "run")

    def interrupt_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the first one's handler runs before the second signal is sent
        raise AssertionError("the step went on")

    with monkeypatch.context() as patch:
        # a shell may start tests in the background, where interrupts are ignored
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        during_step(patch, 6, interrupt_twice)
        with pytest.raises(KeyboardInterrupt):
            train(cfg, run)
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert run.status == "running" and run.state()[1]["step"] == 4
    train(cfg, run)
    assert_same_run(run, reference)


@pytest.mark.parametrize("step", [6, 7, 20])  # an evaluation, none, the last
def test_a_folder_that_vanishes_is_one_line(tmp_path, monkeypatch, cfg, step):
    run = Run(tmp_path / "run")
    during_step(monkeypatch, step, lambda: shutil.rmtree(run.folder))
    with pytest.raises(ConfigError, match=f"^out={run.folder}: the folder vanished during training, before step .*$"):
        train(cfg, run)
    assert not run.folder.exists()


# --- a power cut -----------------------------------------------------------------------------------------------------


@pytest.mark.further
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_whatever_a_power_cut_leaves(tmp_path, every):
    """The reference writes 2 checkpoints. Rows that were not synced before their checkpoint would be lost for good."""
    few = ["trainer.steps=3", "trainer.checkpoint_every=1", "trainer.dynamics_every=3", "replicas=1"]
    cfg = compose("train", *TINY, *few)
    reference = Run(tmp_path / "reference")
    reference.folder.mkdir()
    with power_cuts(reference.folder) as left:
        train(cfg, reference)
    assert len(left) > 30
    for number, files in enumerate(left[::every]):
        run = Run(tmp_path / f"run{number}")
        restore(files, run.folder)
        train(cfg, run)
        assert_same_run(run, reference)


@pytest.mark.parametrize("name", some(["metrics", "layers"], 2))
@pytest.mark.parametrize("change", ["lost", "doubled", "cut"])
def test_rows_that_the_checkpoint_does_not_count_are_one_line(tmp_path, cfg, reference, name, change):
    run = Run(tmp_path / "run")
    train_until_saved(cfg, run, 8)
    assert run.status == "running"
    path = run.folder / f"{name}.csv"
    whole = path.read_text()
    header, first, second, *rows = whole.splitlines()
    changed = {"lost": [first, *rows], "doubled": [first, first, second, *rows], "cut": [first[:5], second, *rows]}
    path.write_text("\n".join([header, *changed[change]]) + "\n")
    line = refusal(train, cfg, run)
    had = len(rows) + {"lost": 1, "doubled": 3, "cut": 1}[change]
    counts = f"has {had} rows up to step 8, but the checkpoint there counts {len(rows) + 2}; "
    assert line.startswith(f"{path}: {counts}")
    path.write_text(whole)
    train(cfg, run)
    assert_same_run(run, reference)


# --- special files ---------------------------------------------------------------------------------------------------


READERS = {  # file of a run, and what opens it
    "config.yaml": lambda run: run.config,
    "summary.json": lambda run: run.summary(),
    "checkpoint.safetensors": Run.weights,
    "training_state.safetensors": Run.state,
    "metrics.csv": lambda run: StepsFile(run.folder / "metrics.csv", METRICS, 0, {}),
    "layers.csv": lambda run: read_table(run.folder / "layers.csv"),
    ".lock": lambda run: run.locked().__enter__(),
    "train.log": lambda run: logging_to(run.folder / "train.log").__enter__(),
    "text.txt": lambda run: sentences_in(run.folder / "text.txt"),
}


# a folder given as a text has a message of its own
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in READERS
        for kind in ("pipe", "device", "folder")
        if (name, kind) != ("text.txt", "folder")
    ],
)
def test_only_regular_files_are_opened(tmp_path, name, kind):
    """The opening of a pipe would wait for its writer, and /dev/zero has no end."""
    path = tmp_path / name
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    assert f"{path}: not a regular file" in refusal(READERS[name], Run(tmp_path))


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.csv", "layers.csv"])
def test_a_file_of_gibibytes_is_one_line(tmp_path, name):
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)  # a sparse file: its size without its bytes
    message = f"{tmp_path / name}: 1048576 MiB; the files of a run .* at most (64|1024) MiB"
    with pytest.raises(ConfigError, match=message):
        READERS[name](Run(tmp_path))
    assert checksum(tmp_path / name) is None


@pytest.mark.parametrize("task", ["char_lm", "memorization"])
def test_a_text_larger_than_the_memory_is_one_line(tmp_path, task):
    path = tmp_path / "text.txt"
    path.touch()
    os.truncate(path, 1 << 42)
    cfg = compose("train", f"task={task}", f"task.path={path}")
    with pytest.raises(ConfigError, match=f"task.path.*{path}: 4096 GiB, and this machine has .* of memory"):
        train(cfg, Run(tmp_path / "run"))
