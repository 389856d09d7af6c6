"""rankbench.commands.cli: the commands as a user types them, run in this process; a few subprocesses prove the real
thing."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import webbrowser
from pathlib import Path

import pandas as pd
import pytest
import yaml
from breadth import some
from command_line import ROOT, python, rankbench, refused, succeeds
from forked import begin, until
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

import rankbench as rb
from rankbench import __version__
from rankbench.commands import checks, cli, composition
from rankbench.commands.compose import as_keys, resolve
from rankbench.commands.composition import composed
from rankbench.config.keys import ConfigError
from rankbench.config.schema import conf_dir
from rankbench.runs.sweep import Job, Sweep
from rankbench.runs.tables import RUN_COLUMNS
from rankbench.training import loop

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
TINY = [
    *("model.layers=2", "model.width=16", "task.length=4", "task.train_size=40", "task.test_size=20"),
    *("trainer.steps=3", "trainer.eval_every=2"),
]
SHORT = ["analysis.residual.variants=[full]", "analysis.paths.repeats=1", "analysis.paths.subset_sizes=[2]"]
SHORT_RESIDUAL = ["analysis=[residual]", "analysis.residual.sequences=2", "analysis.residual.variants=[full]"]


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
@pytest.mark.parametrize("folder", ["/proc/x", "/proc/x/run", "file", "file/inside"])
def test_an_output_folder_that_cannot_be_made_is_named_with_its_key(tmp_path, folder):
    (tmp_path / "file").write_text("mine")
    line = refused("train", *TINY, f"out={folder}", at=tmp_path)
    assert re.fullmatch(rf"rankbench train: out={folder}: .*; give a(nother)? folder", line)
    assert (tmp_path / "file").read_text() == "mine"


def results_of(folder):
    """Hashes of everything but logs and Hydra's own record."""
    return {name: value for name, value in hashes(folder).items() if not name.startswith(".") and name[-4:] != ".log"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder in which one run of two seeds has been trained and analysed."""
    folder = tmp_path_factory.mktemp("home")
    words = ["train", *TINY, "replicas=2", "analysis=[residual,paths]", *SHORT]
    result = succeeds(*words, "claims=[paths_sum_to_output]", at=folder)
    (folder / "said.txt").write_text(result.out)
    return folder


@pytest.fixture(scope="module")
def trained(home):
    """That run's folder; a test that writes to it copies it first."""
    (folder,) = (home / "outputs" / "train").iterdir()
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copied")


# --- one composition a command --------------------------------------------------------------------------------------


@pytest.mark.further
@pytest.mark.parametrize(
    ("words", "num_compositions", "num_jobs"),
    [([], 1, 1), (["-m", "model.heads=1,2"], 2, 2), (["-m", "model=san,san_skip"], 3, 2)],
)
@pytest.mark.usefixtures("undrawn_here")
def test_files_are_merged_once_for_all_jobs_that_choose_the_same(
    words, num_compositions, num_jobs, tmp_path, monkeypatch
):
    """Those of a sweep once for the sweep and once for its jobs, whose mode its command sets."""
    calls, compose = [], composition.hydra.compose

    def counted(*arguments, **options):
        calls.append(arguments)
        return compose(*arguments, **options)

    composition._composition.cache_clear()
    monkeypatch.setattr(composition.hydra, "compose", counted)
    succeeds("train", *TINY, *words, "analysis=[]", "out=o", at=tmp_path)
    assert len(calls) == num_compositions
    assert num_jobs == 1 or sum((folder / "metrics.csv").exists() for folder in (tmp_path / "o").iterdir()) == num_jobs


# --- help, version, unknown commands ---------------------------------------------------------------------------------


@pytest.mark.further
def test_help_composing_and_a_list_of_runs_load_neither_torch_nor_too_much(tmp_path):
    (tmp_path / "outputs" / "train" / "a").mkdir(parents=True)
    program = """
import sys
from rankbench.commands.cli import main

def call(line):
    sys.argv = line.split()
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, line

call("rankbench --help")
assert "Examples:" in main.__globals__["USAGE"]
loaded = [name for name in ("hydra", "omegaconf", "torch", "pandas", "matplotlib") if name in sys.modules]
assert not loaded, loaded
for line in ("rankbench train --help", "rankbench analyze --help", "rankbench train --cfg job"):
    call(line)
    loaded = [name for name in ("torch", "pandas", "matplotlib") if name in sys.modules]
    assert not loaded, (line, loaded)
call("rankbench list")
assert "rankbench.runs.run" in sys.modules and "torch" not in sys.modules
"""
    done = python("-c", program, at=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.further
def test_training_loads_no_compiler_and_collects_garbage_once_it_works(tmp_path):
    """Each of the two takes a fifth of the time until the first step. Garbage of a command is not kept by the next."""
    program = """
import gc, sys
from rankbench.commands import cli
from rankbench.training.seeds_side_by_side import Training

collects, frozen, update = [], [], Training.update
Training.update = lambda self: collects.append(gc.isenabled()) or update(self)
for rule, steps in (("adam", 2), ("adam", 3), ("muon", 1), ("sgd", 1)):  # the second lengthens the first
    words = f"model.layers=1 trainer.steps={steps} replicas=2 optimizer={rule} analysis=[] figures=[] out={rule}"
    words += " task.train_size=40 task.test_size=20 trainer.batch_size=8"
    sys.argv = ["rankbench", "train", *words.split()]
    cli.main()
    frozen.append(gc.get_freeze_count())
loaded = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
print(collects, gc.isenabled(), max(frozen) == frozen[0] > 0, loaded, file=sys.stderr)
"""
    done = python("-c", program, at=tmp_path)
    assert done.stderr.splitlines()[-1] == f"{[True] * 5} True True []", done.stderr


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_help_names_every_command(words, tmp_path):
    printed = succeeds(*words, at=tmp_path).out
    for name, what in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", printed, re.MULTILINE)


@pytest.mark.parametrize("command", cli.TEXTS)
def test_help_of_a_command_that_prints_a_text(command, tmp_path):
    printed = succeeds(command, "--help", at=tmp_path).out
    assert printed.startswith(f"Usage: rankbench {command}")
    if command in ("explain", "check", "new"):
        assert succeeds(command, at=tmp_path).out == printed


def test_version(tmp_path):
    assert succeeds("--version", at=tmp_path).out == f"rankbench {__version__}\n"


@pytest.mark.parametrize(("word", "meant"), [("trian", "train"), ("exlain", "explain"), ("zzzzzz", ""), ("--foo", "")])
def test_an_unknown_command_is_one_line(word, meant, tmp_path):
    line, near = refused(word, at=tmp_path), f", did you mean {meant}?" if meant else ""
    assert line == f"rankbench: {word}: unknown command{near}; commands are {', '.join([*cli.COMMANDS, *cli.TEXTS])}"


@pytest.mark.further
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("runs=nowhere", "runs=nowhere: no run there; give a run's or a sweep's folder, a glob, or runs=latest"),
        (
            "model.heads=3",
            "model: unknown key; allowed are out, plugins, statistic, plot, runs, scoreboard, pages, report",
        ),
        ("pages=docs", "pages=docs: the pages cover all presets; add experiment=all"),
        ("report.x=nothing", "report.x=nothing: no key of these runs; those that vary are none"),
        ("out=", "out=: is empty; leave it out, or give a folder"),
        ("runs=", "runs=: no run there; give a run's or a sweep's folder, a glob, or runs=latest"),
        ("runs=[]", "runs=[]: no run in an empty name; correct it, or leave it out"),
        ("out=outputs/train/{run}", "out=outputs/train/{run}: the folder of a run; give report a folder of its own"),
    ],
)
def test_a_report_that_cannot_be_is_one_line(word, said, home, trained):
    line = refused("report", word.format(run=trained.name), at=home)
    assert line == f"rankbench report: {said.format(run=trained.name)}"
    assert not (home / "outputs" / "report").exists()


def test_python_m_rankbench_runs_from_another_folder(tmp_path):
    done = python("-m", "rankbench", "train", "seed=7", "--cfg", "job", at=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert yaml.safe_load(done.stdout)["seed"] == 7
    assert list(tmp_path.iterdir()) == []


def documented():
    """The rankbench command lines of the usage text and of the documents, but for those that need an extra's plugin."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pages.remove(ROOT / "docs" / "BENCHMARKS.md")  # a record of other commits
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    examples = cli.USAGE.partition("Examples:")[2].splitlines()
    examples += re.findall(r"^    (rankbench .*)", text, re.MULTILINE)
    lines = [line.partition(" #")[0].strip() for line in examples]
    lines = [line for line in lines if "cluster=" not in line and "search=optuna" not in line]
    of_a_preset = re.compile(r"rankbench (train|analyze) experiment=\w+( budget=\w+)?$")
    lines = [line for line in lines if not of_a_preset.match(line)]  # tests/test_presets.py composes those
    return sorted({line for line in lines if re.match(r"rankbench (train|analyze|report|plot)\b", line)})


@pytest.mark.parametrize("line", documented())
def test_every_documented_command_composes(line):
    command, *words = shlex.split(line)[1:]
    overrides = [word for word in as_keys(command, words) if not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    if not any(override.is_sweep_override() for override in parsed):
        jobs = [overrides]
    else:
        assert "-m" in words, "a sweep needs -m"
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    for job in jobs:
        resolve(composed(command, *job))


def test_the_usage_has_examples():
    assert len([line for line in documented() if line in cli.USAGE]) >= 4


# --- train -----------------------------------------------------------------------------------------------------------


@pytest.mark.further
def test_train_leaves_the_folder_that_the_contract_promises(trained):
    names = {path.name for path in trained.iterdir()}
    promised = {"config.yaml", "environment.json", "metrics.csv", "checkpoint.safetensors", "summary.json", "train.log"}
    promised.add("training_state.safetensors")  # more steps begin there
    promised |= {f"{name}.{kind}" for name in ("metrics", "residual", "paths") for kind in ("csv", "png")}
    assert promised | {".hydra", "verdicts.csv"} <= names
    assert not [name for name in names if name.endswith((".part", ".pkl", ".pt"))]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{6}_transformer", trained.name)
    assert (trained / "residual.png").read_bytes()[:4] == b"\x89PNG"


def test_train_records_config_machine_and_summary(trained):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["model"]["layers"] == 2 and config["replicas"] == 2 and config["model"]["mlp_skip"] is True
    assert Path(config["out"]).name == trained.name
    environment = json.loads((trained / "environment.json").read_text())
    assert environment["command"] == ["rankbench train", *environment["command"][1:]]
    assert "model.layers=2" in environment["command"] and environment["packages"]["torch"]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["status"] == "finished" and [row["seed"] for row in summary["seeds"]] == [0, 1]
    accuracy, loss = (sum(row[f"test_{name}"] for row in summary["seeds"]) / 2 for name in ("accuracy", "loss"))
    line = f"step 3/3: test accuracy {accuracy:.3f}, loss {loss:.3f} nats (mean of 2 seeds)\n"
    assert line in (trained / "train.log").read_text()


@pytest.mark.further
def test_of_many_seeds_the_lowest_and_the_highest_score_are_printed(tmp_path):
    words = ("budget=smoke", "replicas=21", "trainer.steps=1", "analysis=[]", "out=many")
    said = succeeds("train", *words, at=tmp_path).out
    final = [row["test_accuracy"] for row in json.loads((tmp_path / "many" / "summary.json").read_text())["seeds"]]
    assert f" (mean of 21 seeds: {min(final):.3f} to {max(final):.3f})\n" in said


def test_train_says_accuracy_folder_figures_and_verdicts(home, trained):
    said = (home / "said.txt").read_text()
    assert list(pd.read_csv(trained / "residual.csv").columns[:4]) == RUN_COLUMNS
    final = [row["test_accuracy"] for row in json.loads((trained / "summary.json").read_text())["seeds"]]
    assert f"test accuracy {sum(final) / 2:.3f} (mean of 2 seeds: {final[0]:.3f} {final[1]:.3f})" in said
    for path in ("residual.csv", "paths.png", "verdicts.csv"):
        assert f"outputs/train/{trained.name}/{path}" in said
    passed = r"^passed +check paths_sum_to_output: .* differ by [\d.]+e-1\d .*, the worst of 2 seeds"
    assert re.search(passed, said, re.MULTILINE)
    look = f"look at: outputs/train/{trained.name}/paths.png; next: rankbench report runs=latest"
    assert said.strip().endswith(look)


@pytest.mark.further
def test_the_same_command_into_the_same_folder_changes_no_result(trained, tmp_path):
    copied = shutil.copytree(trained, tmp_path / trained.name)
    words = ["train", *TINY, "replicas=2", "analysis=[residual,paths]", *SHORT, "claims=[paths_sum_to_output]"]
    before = results_of(copied)
    result = succeeds(*words, f"out={trained.name}", at=tmp_path)
    assert "is trained already" in result.err
    after = results_of(copied)
    assert before.pop("config.yaml") and after.pop("config.yaml")  # `out` is another
    assert after == before


def test_another_config_into_a_runs_folder_is_one_line_and_touches_nothing(copied, tmp_path):
    before = hashes(copied)
    line = refused("train", *TINY, "replicas=2", "seed=5", "out=copied", at=tmp_path)
    assert line.startswith("rankbench train: seed=5: ") and "seed=0" in line and "out=" in line
    assert hashes(copied) == before


def test_plus_experiment_equals_experiment(tmp_path):
    plain = succeeds("train", "experiment=demo", "--cfg", "job", at=tmp_path).out
    assert succeeds("train", "+experiment=demo", "--cfg", "job", at=tmp_path).out == plain
    assert succeeds("train", "--cfg", "job", at=tmp_path).out != plain


def test_the_config_of_a_sweep_is_that_of_its_first_job(tmp_path):
    first = succeeds("train", "model.layers=3", "model=san", "--cfg", "job", at=tmp_path).out
    assert "layers: 3" in first
    words = ["model.layers=3,2", "-m", "--cfg", "job", "model=san,transformer"]
    assert succeeds("train", *words, at=tmp_path).out == first


# --- analyze ---------------------------------------------------------------------------------------------------------


def measured(folder, name="residual"):
    """A table without the column that names the folder."""
    return pd.read_csv(folder / f"{name}.csv").drop(columns="run")


def newest(at, kind="analyze"):
    return max((at / "outputs" / kind).iterdir(), key=lambda path: path.name)


@pytest.mark.further
def test_analyze_latest_and_by_folder_give_what_train_gave(home, trained):
    words = ["analyze", "analysis=[residual,paths]", *SHORT]
    result = succeeds(*words, "run=latest", at=home)
    folder = newest(home)
    assert f"-> outputs/analyze/{folder.name}/residual.csv" in result.out
    files = {path.name for path in folder.iterdir()}
    promised = {f"{name}.{kind}" for name in ("residual", "paths") for kind in ("csv", "png")}
    assert promised | {"config.yaml", "environment.json", "summary.json", "analyze.log"} <= files
    summary = json.loads((folder / "summary.json").read_text())
    seeds = [{"seed": seed, "status": "finished"} for seed in (0, 1)]
    wanted = {"status": "finished", "run": str(trained.resolve()), "analyses": ["residual", "paths"], "seeds": seeds}
    checksums = {name: value for name, value in hashes(folder).items() if name.endswith(".csv")}
    assert summary == wanted | {"format": 1, "files": checksums}
    succeeds(*words, f"run=outputs/train/{trained.name}", "out=again", at=home)
    for name in ("residual", "paths"):
        # the same weights in the same precision: nothing is random but by seed
        pd.testing.assert_frame_equal(pd.read_csv(folder / f"{name}.csv"), pd.read_csv(trained / f"{name}.csv"))
        pd.testing.assert_frame_equal(pd.read_csv(home / "again" / f"{name}.csv"), pd.read_csv(trained / f"{name}.csv"))


def test_analyze_without_a_run_measures_fresh_models(tmp_path):
    words = [word for word in TINY if not word.startswith("trainer.")]
    words += ["model=${nothing}", "model=san"]  # the last choice counts
    succeeds("analyze", *words, "replicas=2", "seed=4", *SHORT_RESIDUAL, at=tmp_path)
    table = pd.read_csv(newest(tmp_path) / "residual.csv")
    assert set(table.run) == {"fresh"} and set(table.seed) == {4, 5} and set(table.weights) == {"initialised"}
    assert set(table.model) == {"san"} and table.layer.max() == 2
    assert json.loads((newest(tmp_path) / "summary.json").read_text())["run"] is None


@pytest.mark.further
@pytest.mark.usefixtures("undrawn_here")
def test_seeds_that_a_sweep_measures_apart_are_joined_as_if_measured_together(tmp_path):
    succeeds("train", *TINY, "replicas=3", "seed=5", "figures=[]", "out=run", at=tmp_path)
    words = ["run=run", *SHORT_RESIDUAL, "figures=[]"]
    succeeds("analyze", *words, "out=together", at=tmp_path)
    succeeds("analyze", "-m", *words, "seeds=[5],[6,7]", "out=apart", at=tmp_path)
    together, apart = (pd.read_csv(tmp_path / name / "residual.csv") for name in ("together", "apart"))
    assert together.seed.unique().tolist() == [5, 6, 7]
    pd.testing.assert_frame_equal(apart.drop(columns="run"), together.drop(columns="run"), check_exact=True)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["seeds=[0,4]"], "seeds=[0, 4]: the seeds of {run} are 0 to 1"),
        (["seeds=[]"], "seeds=[]: name at least one"),
        (None, "seeds=[0]: chooses among the seeds of a run; give run= (fresh weights: seed= and replicas=)"),
    ],
)
def test_seeds_that_a_run_does_not_have_are_refused(words, line, trained, tmp_path):
    words = ["seeds=[0]"] if words is None else [f"run={trained}", *words]
    assert refused("analyze", *words, at=tmp_path) == "rankbench analyze: " + line.format(run=trained)
    assert list(tmp_path.iterdir()) == []


def test_a_run_brings_its_own_model_into_a_sweep(trained, tmp_path):
    words = ["analysis=[residual]", "analysis.residual.variants=[full]", "analysis.residual.sequences=2,3"]
    line = refused("analyze", "-m", f"run={trained}", "model.layers=3", *words, at=tmp_path)
    assert line.startswith(f"rankbench analyze: model.layers=3: the run in run={trained} has its own ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.further
def test_another_run_into_an_analysis_folder_takes_the_place_of_the_first(trained, tmp_path):
    succeeds("analyze", f"run={trained}", *SHORT_RESIDUAL, "out=A", at=tmp_path)
    shutil.copytree(trained, tmp_path / "other")
    succeeds("analyze", "run=other", *SHORT_RESIDUAL, "out=A", at=tmp_path)
    assert set(pd.read_csv(tmp_path / "A" / "residual.csv").run) == {"other"}
    assert Path(json.loads((tmp_path / "A" / "summary.json").read_text())["run"]).name == "other"


# --- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.further
def test_a_sweep_makes_a_folder_a_job_and_gathers_them(tmp_path):
    words = ["train", "-m", *TINY, "model.heads=1,2", "analysis=[residual,paths]", *SHORT]
    result = succeeds(*words, "claims=[paths_sum_to_output,knob_exclusive_keeps]", at=tmp_path)
    sweep = newest(tmp_path, "train")
    jobs = ["0_model.heads=1", "1_model.heads=2"]
    assert sweep.name.endswith("_transformer") and "look at" not in result.out
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == jobs
    for number, job in enumerate(jobs):
        config = yaml.safe_load((sweep / job / "config.yaml").read_text())
        assert config["model"]["heads"] == number + 1
        assert (sweep / job / "checkpoint.safetensors").exists()
    table = pd.read_csv(sweep / "sweep.csv")
    assert list(table.run) == jobs and list(table.job_status) == ["finished", "finished"]
    assert list(table.seed) == [0, 0] and list(table["model.heads"]) == [1, 2]
    for name in ("residual", "paths"):
        gathered = pd.read_csv(sweep / f"{name}.csv")
        assert list(gathered.columns[:4]) == RUN_COLUMNS and "model.heads" in gathered
        parts = []
        for number in (0, 1):
            parts.append(pd.read_csv(sweep / jobs[number] / f"{name}.csv"))
            parts[-1]["model.heads"] = number + 1
        pd.testing.assert_frame_equal(gathered, pd.concat(parts, ignore_index=True)[list(gathered.columns)])
        assert (sweep / f"{name}.png").stat().st_size > 0 and (sweep / f"{name}.pdf").stat().st_size > 0
    verdicts = pd.read_csv(sweep / "verdicts.csv")
    assert list(verdicts["where"])[:2] == list(verdicts["where"])[2:] == ["model.heads=1", "model.heads=2"]
    # a claim that compares jobs waits for all of them
    assert list(verdicts.claim)[2:] == ["knob_exclusive_keeps"] * 2  # for each number of heads
    assert all(list(pd.read_csv(sweep / job / "verdicts.csv").claim) == ["paths_sum_to_output"] for job in jobs)
    assert "check paths_sum_to_output: passed in both settings; the closest is model.heads=" in result.out
    assert [line for line in result.out.splitlines() if line.startswith("job ")] == [
        "job 1 of 2: model.heads=1",
        "job 2 of 2: model.heads=2",
    ]
    for name in ("sweep.csv", "summary.csv", "summary.md", "summary.tex", "sweep.svg", "report.html"):
        assert (sweep / name).stat().st_size > 0
    again = succeeds("report", "out=again", at=tmp_path)
    assert again.out.startswith(f"runs=latest: {sweep.relative_to(tmp_path)}\n")
    # the command writes what the sweep's end wrote
    for name in ("sweep.csv", "summary.csv", "residual.csv", "verdicts.csv", "paths.png", "paths.svg"):
        assert (tmp_path / "again" / name).read_bytes() == (sweep / name).read_bytes(), name
    # the last job can be found without its name
    succeeds("analyze", "run=latest", *SHORT_RESIDUAL, "out=latest", at=tmp_path)
    assert json.loads((tmp_path / "latest" / "summary.json").read_text())["run"] == str((sweep / jobs[1]).resolve())


@pytest.mark.further
@pytest.mark.usefixtures("undrawn_here")
def test_a_sweep_of_other_configs_is_refused_as_a_whole(tmp_path):
    words = ["train", "-m", *TINY, "figures=[]", "model.heads=1,2", "out=sweep"]
    succeeds(*words, at=tmp_path)
    before = hashes(tmp_path)
    message = refused(*words, "optimizer.lr=0.5", at=tmp_path)
    assert "optimizer.lr=0.5: the run in sweep/0_model.heads=1 was begun with optimizer.lr=" in message
    message = refused(*words[:-2], "model.heads=2,1", "out=sweep", at=tmp_path)
    assert "holds another sweep, whose job 0 is 0_model.heads=1 and not 0_model.heads=2" in message
    message = refused("train", *TINY, "out=sweep", at=tmp_path)
    assert "out=sweep: the folder of a sweep; give the run a folder of its own" in message
    message = refused(*words[:-1], "out=sweep/0_model.heads=1", at=tmp_path)
    assert "out=sweep/0_model.heads=1: the folder of a run; give the sweep a folder of its own" in message
    assert hashes(tmp_path) == before


@pytest.mark.further
@pytest.mark.usefixtures("undrawn_here")
def test_a_key_that_is_fixed_first_and_varied_then_is_in_the_names_of_the_jobs(tmp_path):
    succeeds("train", "-m", *TINY, "trainer.steps=0", "model.layers=1,3", "figures=[]", "out=sweep", at=tmp_path)
    names = sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert names == ["0_model.layers=1", "1_model.layers=3"]


@pytest.mark.further
@pytest.mark.usefixtures("undrawn_here")
def test_a_reference_to_another_key_is_each_jobs_own(tmp_path):
    """Every job's words, folder and config hold its own value, so that the same command skips what is finished."""
    words = ["train", "-m", *TINY, "model.skip=true,false", "model.mlp_skip=${model.skip}"]
    words += ["model.mlp_ratio=${model.heads}", "model.layers=1", "trainer.steps=0", "figures=[]", "out=sweep"]
    succeeds(*words, at=tmp_path)
    jobs = json.loads((tmp_path / "sweep" / "jobs.json").read_text())
    for number, (job, skip) in enumerate(zip(jobs, ("True", "False"), strict=True)):
        assert job["folder"] == f"{number}_model.skip={skip}"
        assert {f"model.skip={skip}", f"model.mlp_skip={skip}", "model.mlp_ratio=2.0"} <= set(job["overrides"])
        config = yaml.safe_load((tmp_path / "sweep" / job["folder"] / "config.yaml").read_text())["model"]
        assert (str(config["skip"]), str(config["mlp_skip"])) == (skip, skip)
    before = hashes(tmp_path / "sweep" / jobs[1]["folder"])
    result = succeeds(*words, at=tmp_path)
    assert result.err.count("is trained already") == 2
    after = hashes(tmp_path / "sweep" / jobs[1]["folder"])
    assert {name for name in before if before[name] != after[name]} <= {"train.log"}


def raising(error):
    """A function that raises this, whatever it is given."""

    def broken(*_, **__):
        raise error

    return broken


def fail_with_two_heads(monkeypatch, error):
    """Have the trainings of networks with two heads raise this."""
    trained = loop.train

    def failing(cfg, *words):
        return raising(error)() if cfg.model.heads == 2 else trained(cfg, *words)

    monkeypatch.setattr(loop, "train", failing)


@pytest.mark.further
@pytest.mark.parametrize("job_fails", some([True, False], 2))
def test_a_report_that_fails_at_the_end_of_a_sweep_fails_the_command(job_fails, tmp_path, monkeypatch):
    monkeypatch.setattr("rankbench.report.figures.draw_sweep", raising(TypeError("no such\nfigure")))
    if job_fails:
        fail_with_two_heads(monkeypatch, ConfigError("weights lost"))
    result = rankbench("train", "-m", *TINY, "model.heads=1,2", "out=sweep", at=tmp_path)
    assert result.code == 1
    line, *other = [line for line in result.err.splitlines() if line.startswith("rankbench train: ")]
    assert other == (["rankbench train: weights lost"] if job_fails else [])
    assert "the sweep's report failed (TypeError: no such figure)" in line
    assert "`rankbench report runs=sweep` makes the report again" in line
    assert (tmp_path / "sweep" / "0_model.heads=1" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "sweep" / "report.html").exists()
    monkeypatch.undo()
    succeeds("report", "runs=sweep", "out=report", at=tmp_path)
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.usefixtures("undrawn_here")
def test_a_sweep_is_gathered_whatever_one_of_its_jobs_raises(tmp_path, monkeypatch):
    fail_with_two_heads(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):  # a fault of ours keeps its traceback
        rankbench("train", "-m", *TINY, "model.heads=1,2", "out=sweep", at=tmp_path)
    assert list(pd.read_csv(tmp_path / "sweep" / "sweep.csv").job_status) == ["finished", "absent"]
    assert (tmp_path / "sweep" / "report.html").exists()


@pytest.mark.parametrize("words", [[], ["-m", "seed=0,1"]])
def test_a_check_that_fails_by_a_fault_of_ours_ends_the_command(words, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "check_everything", raising(OSError("disk full")))
    assert refused("train", *TINY, *words, at=tmp_path) == "rankbench train: disk full"
    monkeypatch.setattr(checks, "check_everything", raising(KeyError("x")))  # keeps its traceback
    with pytest.raises(KeyError, match="x"):
        rankbench("train", *TINY, *words, at=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.further
def test_analyses_of_unlike_runs_are_told_apart_by_what_the_runs_differ_in(tmp_path):
    """Neither the runs nor the options of an analysis are pooled: `run` and `analysis` were keys that no table had."""
    for skip in ("true", "false"):
        succeeds("train", *TINY, "figures=[]", f"model.skip={skip}", f"out={skip}", at=tmp_path)
    words = ["analyze", "-m", "run=true,false", "analysis=[residual]", "analysis.residual.variants=[full]"]
    succeeds(*words, "analysis.residual.sequences=2,3", "out=sweep", at=tmp_path)
    succeeds("report", "runs=sweep", "out=report", at=tmp_path)
    for folder in (tmp_path / "sweep", tmp_path / "report"):
        table = pd.read_csv(folder / "residual.csv", dtype=str)
        values_of_run = table.groupby("run", sort=False)[["model.skip", "analysis.residual.sequences"]].agg(set)
        assert [next(iter(values)) for values in values_of_run["model.skip"]] == ["true", "true", "false", "false"]
        assert [next(iter(values)) for values in values_of_run["analysis.residual.sequences"]] == ["2", "3", "2", "3"]
        drawn = (folder / "residual.svg").read_text()
        for text in ("weights · skip<", "weights · no skip<", "sequences 2", "sequences 3"):
            assert text in drawn


@pytest.mark.further
def test_the_scoreboard_shows_what_has_been_run(tmp_path, monkeypatch):
    for preset in ("all", "kim_fig5"):
        assert f"experiment={preset}: not run yet under" in refused("report", f"experiment={preset}", at=tmp_path)
    assert not list(tmp_path.iterdir())
    words = ["experiment=demo", "budget=smoke", "trainer.steps=2", "model.layers=1", "figures=[]", *SHORT]
    succeeds("train", *words, at=tmp_path)
    assert "\n* demo " in succeeds("list", at=tmp_path).out  # a complete run is marked
    result = succeeds("report", "experiment=demo", "out=board", at=tmp_path)
    assert result.out.startswith("1 of 1 presets run; 1 undecided, 1 passed\n")
    table = pd.read_csv(tmp_path / "board" / "scoreboard.csv")
    assert list(table.claim) == ["dong_fig4_whole_sorting", "paths_sum_to_output"] and set(table.scale) == {"smoke"}
    assert "experiment=dmo: unknown, did you mean demo?" in refused("report", "experiment=dmo", at=tmp_path)
    for word in ("plot.column=single", "report.x=model.layers", "report.watch=true"):
        line = refused("report", "experiment=demo", word, at=tmp_path)
        assert word in line and "the runs have drawn" in line
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    succeeds("report", "experiment=demo", "out=board", "report.open=true", at=tmp_path)
    assert opened == [(tmp_path / "board" / "scoreboard.html").as_uri()]


# --- bad input -------------------------------------------------------------------------------------------------------

# What is typed after `rankbench train`, and what the line holds: key, value got, what is allowed or what to do. One of
# each kind; test_messages.py has more of Hydra's complaints, tests/config/test_schema.py every choice and range.
BAD = [
    # misspelt keys
    ("+foo=1", ["foo: unknown key", "seed"]),
    ("+task.foo=1", ["task.foo: unknown key", "length"]),
    ("hydra.foo=1", ["hydra.foo: unknown key"]),
    # unknown choices
    ("model=sann", ["model=sann: ", "did you mean san?", "transformer_no_skip"]),
    ("analysis=[pathz]", ["analysis=pathz: ", "did you mean paths?", "residual"]),
    ("model.norm=Pre", ["model.norm=Pre: ", "did you mean pre?", "none, pre, post"]),
    ("analysis=[residual] analysis.residual.variants=[foo]", ["analysis.residual.variants=foo: ", "full, no_mlp"]),
    ("claims=[foo]", ["claims=foo: ", "paths_sum_to_output"]),
    ("claims=[paths_sum_to_output]", ["claims=paths_sum_to_output: ", "analysis=paths"]),
    ("published=foo", ["published=foo: ", "dong_fig4_sorting"]),
    # wrong types
    ("model.layers=", ["model.layers=: wants an integer"]),
    ("analysis=[residual] analysis.residual.variants=3", ["analysis.residual.variants=3: wants a list"]),
    # null
    ("task.length=null", ["task.length=null: null is not allowed"]),
    ("out=null", ["out=null: null is not allowed"]),
    ("out=", ["out=: is empty; leave it out"]),
    # what does not go together
    ("analysis=[samples]", ["analysis=samples: needs a task with text; task.name=sorting has none; use task=char_lm"]),
    ("analysis=[rollout]", ["analysis=rollout: needs a task with a trajectory", "use task=circle_arcs"]),
    ("-m analysis=[residual],[bounds] model=l2", ["analysis=bounds: needs the softmax of dot products alone"]),
    ("task=convex_hull model=lstm", ["model.kind=lstm: reads tokens, and this task has coordinates"]),
    ("task=linear_regression", ["model.mask=none: ", "use model.mask=causal"]),
    ("device=cuda", ["device=cuda: ", "device=cpu"]),  # GPUs are hidden
    ("task=retrieval trainer.steps=null trainer.epochs=2", ["trainer.epochs=2: fresh sequences", "give trainer.steps"]),
    ("task=circle_arcs objective=test_accuracy", ["objective=test_accuracy: ", "allowed are test_loss, train_seconds"]),
    ("task=circle_arcs trainer.target_accuracy=0.9", ["trainer.target_accuracy=0.9: ", "use null"]),
    # out of range
    ("seed=99999999999999999999", ["seed=99999999999999999999: out of range"]),
    ("task.length=0", ["task.length=0: out of range", "values from 2"]),
    # not an override at all
    ("foo", ["foo: not understood; give key=value"]),
    ("~foo", ["Could not delete from config. 'foo'"]),
    ("~seed", ["seed: has no value; give it one, or leave ~seed out"]),
    ("~model", ["model: has no value; give it one, or leave ~model out"]),
    ("seed=???", ["seed: has no value; give it one, or leave seed=??? out"]),
    ("=3", ["=3: a group needs one of its choices"]),
    ("model.width=${nowhere}", ["model.width: ", "nowhere"]),
    ("-m foo", ["foo: not understood; give key=value"]),
    ("-m modell.layers=1,2", ["modell: ", "did you mean model?"]),
    ("-m model=sann,san", ["model=sann: ", "did you mean"]),
    ("-m model.layers=0 seed=0,1", ["model.layers=0: out of range"]),
    # a preset of another command
    ("experiment=dong_claim31", ["experiment=dong_claim31: trains nothing; use `rankbench analyze experiment="]),
    # references that lead nowhere or to what a key cannot be, and groups in groups
    ("claims=${oc.decode:null}", ["claims=null: null is not allowed here"]),
    ("experiment=dong_fig4_sorting_settings budget=tiny", ["budget=tiny: unknown; allowed are smoke, laptop, paper"]),
    ("budget=${nowhere}", ["budget: Interpolation key 'nowhere' not found"]),
    ("budget=${oc.decode:'[1'}", ["budget: GrammarParseError"]),
    ("-m seed=1,2 hydra.sweep.dir=${nowhere}", ["hydra.sweep.dir: Interpolation key"]),
    ("++analysis.paths=3", ["analysis.paths=3: is a group of keys"]),
    ("analysis=[[paths]]", ["analysis=[[paths]]: a list of a group's choices holds names alone"]),
    ("--config-name=analyze", ["--config-name: not an option of rankbench"]),
    ("--config-dir=nowhere", ["--config-dir nowhere: no such folder; give one with YAML files"]),
    ("--config-dir=. hydra.searchpath=[a]", ["hydra.searchpath: holds the folder of --config-dir already"]),
    ("--run seed=1", ["--run: not an option of rankbench; options are -m, --cfg job"]),
    ("seed=1 --resolve", ["The --resolve flag can only be used in conjunction with --cfg or --help"]),
    ("--info seed=1", ["argument --info/-i: invalid choice: 'seed=1'", "options are -m, --cfg job"]),
    # very long
    (f"seed={'9' * 5000}", ["seed=9", "too many digits"]),
    (f"model.norm={'y' * 5000}", ["model.norm=y", " ... ", "none, pre, post"]),
]


@pytest.mark.parametrize(("typed", "parts"), some(BAD, 2), ids=[typed[:60] for typed, _ in BAD])
def test_bad_input_is_one_line_and_makes_no_folder(typed, parts, tmp_path, command="train"):
    line = refused(command, *typed.split(), at=tmp_path)
    assert len(line) < 3000  # a long list of what is allowed stays whole
    assert line.startswith(f"rankbench {command}: {parts[0]}")
    for part in parts:
        assert part in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("run=missing", ["run=missing: no config.yaml there", "run=latest"]),
        ("run=latest", ["run=latest: no run with a checkpoint", "rankbench train"]),
        ("trainer.steps=3", ["trainer.steps: analyze does not train", "rankbench train"]),
        ("optimizer=sgd", ["optimizer: no such group", "task"]),
        ("analysis.residual.sequences=0", ["analysis.residual.sequences=0: out of range; allowed are values from 1"]),
        ("analysis=[curves]", ["analysis=curves: needs a training of ours; a fresh network does not fit; give run="]),
        ("analysis=[dynamics]", ["analysis=dynamics: needs a training of ours; a fresh network does not fit"]),
        (
            "experiment=dong_claim31 experiment=demo",  # the last preset counts
            ["experiment=demo: trains what it measures; use `rankbench train experiment=demo`"],
        ),
        ("inputs=a.npy", ["inputs=a.npy: says how to read a network that is not ours; leave it out"]),
        ("model=pretrained", ["model=pretrained: which one? give model.path=<hub id or local folder>"]),
        ("tokens=9", ["tokens=9: says how to read a network that is not ours; leave it out"]),
        ("masked=.1", ["masked=0.1: says how to read a network that is not ours; leave it out"]),
        ("special_tokens=[0]", ["special_tokens=[0]: says how to read a network that is not ours; leave it out"]),
    ],
)
def test_bad_input_to_analyze(typed, parts, tmp_path):
    test_bad_input_is_one_line_and_makes_no_folder(typed, parts, tmp_path, "analyze")


@pytest.mark.parametrize(
    ("name", "said"),
    [("rollout", "task.name=sorting has none"), ("dynamics", "needs trainer.dynamics_every, "), ("bounds", "")],
)
def test_an_analysis_that_does_not_fit_the_run_is_refused_before_a_folder_is_made(copied, tmp_path, name, said):
    if name == "bounds":  # the run's own model counts, not the one that analyze has by default
        text = (copied / "config.yaml").read_text()
        (copied / "config.yaml").write_text(text.replace("attention: dot", "attention: l2"))
    assert f"analysis={name}: needs" in (line := refused("analyze", "run=copied", f"analysis=[{name}]", at=tmp_path))
    assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["copied"]


@pytest.mark.parametrize("out", ["out=o", "out=new/o", "analysis=[residual]"])
def test_a_refusal_after_the_folder_is_made_leaves_none(out, copied, tmp_path):
    (copied / "metrics.csv").write_text("step,seed\n")
    line = refused("analyze", "run=copied", out, at=tmp_path)
    assert line.startswith("rankbench analyze: copied/metrics.csv: has no column split; put back the file")
    with pytest.raises(ConfigError):
        rb.analyze(copied, "residual", out=tmp_path / "o")
    assert [path.name for path in tmp_path.iterdir()] == ["copied"]


def test_a_runs_own_learning_curve_is_drawn_and_a_table_without_rows_refused(copied, tmp_path):
    succeeds("plot", "copied/metrics.csv", "out=o", at=tmp_path)
    assert (tmp_path / "o" / "metrics.png").exists()
    header = "run,task,model,seed,layer,relative_residual\n"
    (copied / "residual.csv").write_text(header)
    line = refused("plot", "copied/residual.csv", "out=p", at=tmp_path)
    assert line == "rankbench plot: table=copied/residual.csv: has no rows to draw"


def test_hydras_record_is_no_run_in_a_folder_without_a_config(copied, tmp_path):
    (copied / ".hydra").mkdir(exist_ok=True)
    (copied / "config.yaml").rename(copied / ".hydra" / "config.yaml")
    assert "run=copied: no config.yaml there; give the folder" in refused("analyze", "run=copied", at=tmp_path)


def test_refused_jobs_of_a_sweep_leave_no_folders_and_each_says_why(copied, tmp_path):
    for name, rows in {"worse": "step,seed\n", "worst": "step,split\n"}.items():
        shutil.copytree(copied, tmp_path / name)
        (tmp_path / name / "metrics.csv").write_text(rows)
    result = rankbench("analyze", "-m", "run=worse,copied,worst", "analysis=[curves]", "out=o", at=tmp_path)
    assert result.code == 1 and "2_run=worst: missing" in result.out
    assert "worse/metrics.csv: has no column split" in result.err.splitlines()[-1]
    assert "run=worst analysis=[curves] out=o failed, too: worst/metrics.csv: has no column seed" in result.err
    assert [path.name for path in (tmp_path / "o").iterdir() if path.is_dir()] == ["1_run=copied"]


def test_a_sweep_ends_with_the_batch_in_which_a_job_failed(copied, tmp_path):
    for name in ("first", "worse"):
        shutil.copytree(copied, tmp_path / name)
    (tmp_path / "worse" / "metrics.csv").write_text("step,seed\n")
    words = ["run=worse,first,copied", "analysis=[curves]", "hydra.sweeper.max_batch_size=2", "out=o"]
    result = rankbench("analyze", "-m", *words, at=tmp_path)
    assert result.code == 1 and "has no column split" in result.err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "o").iterdir() if path.is_dir()] == ["1_run=first"]


def test_a_refusal_takes_nothing_from_a_folder_that_was_there(copied, tmp_path):
    (copied / "metrics.csv").write_text("step,seed\n")
    (tmp_path / "o").mkdir()
    refused("analyze", "run=copied", "out=o", at=tmp_path)
    assert (tmp_path / "o" / "analyze.log").exists()


def test_analyze_takes_a_preset(tmp_path):
    words = ["experiment=demo", "budget=smoke", "--cfg", "job", "--resolve"]
    assert "replicas: 2" in succeeds("analyze", *words, at=tmp_path).out
    assert "trainer" not in refused("analyze", "experiment=demo", "analysis=[pathz]", at=tmp_path)


def test_an_empty_name_of_checkpoints_is_not_taken_for_none(tmp_path):
    assert "data: checkpoints=: unknown; allowed are all, " in refused("data", "checkpoints=", at=tmp_path)


def test_options_may_follow_the_words(tmp_path):
    assert "Defaults List" in succeeds("train", "seed=1", "--info", at=tmp_path).out


# --- tracebacks and interruptions ------------------------------------------------------------------------------------


def test_hydra_full_error_raises_for_debugging(tmp_path):
    with pytest.raises(HydraException):
        rankbench("train", "model.layers=abc", at=tmp_path, full_error="1")
    assert rankbench("train", "model.layers=abc", at=tmp_path, full_error="0").code == 1


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("rankbench.commands.train.run", raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        rankbench("train", *TINY, at=tmp_path)


def test_the_folder_of_an_interrupted_analysis_is_said_as_a_shell_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rankbench.analysing.runner.measure", raising(KeyboardInterrupt))
    result = rankbench("analyze", *TINY[:-2], "out=my own", at=tmp_path)
    line = "rankbench analyze: interrupted; the same command with 'out=my own' continues"
    assert result.code == 130 and result.err.splitlines()[-1] == line


def test_interrupted_training_says_how_to_go_on(tmp_path):
    words = [word for word in TINY if not word.startswith("trainer.steps")]
    metrics = tmp_path / "run" / "metrics.csv"
    words = ["train", *words, "trainer.steps=10000000", "out=run"]
    with begin(*words, at=tmp_path, errors=tmp_path / "errors.txt") as process:
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4, process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 130
    assert "Traceback" not in process.errors.read_text()
    assert re.fullmatch(r"rankbench train: stopped at step \d+ of 10000000; .* out=run continues", process.last_line)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "running"
    assert (tmp_path / "run" / "training_state.safetensors").exists()


# --- conf in a wheel --------------------------------------------------------------------------------------------------


def test_conf_dir_prefers_the_packaged_folder(tmp_path, monkeypatch):
    from rankbench.config import schema

    package = tmp_path / "site" / "rankbench"
    package.mkdir(parents=True)
    monkeypatch.setattr(schema, "__file__", str(package / "config" / "schema.py"))
    (tmp_path / "site" / "conf").mkdir()
    assert schema.conf_dir.__wrapped__() == tmp_path / "site" / "conf"  # a checkout
    (package / "conf").mkdir()
    assert schema.conf_dir.__wrapped__() == package / "conf"  # a wheel, whatever stands beside it


# --- presets and printed folders -------------------------------------------------------------------------------------


def test_the_list_names_every_preset_with_its_command(tmp_path):
    listed = rankbench("list", "_", at=tmp_path).out  # a sign that every name or claim has
    for path in (conf_dir() / "experiment").glob("*_*.yaml"):
        verb = path.read_text().split("# rankbench ")[1].split()[0]
        assert f"\n  {path.stem}\n      rankbench {verb}; " in f"\n{listed}"


@pytest.mark.parametrize("name", ["é", "~b", "it's", 'a"b', "x#1", "y[1]", "z{2}", "a(b)", "a b", "d=1"])
def test_a_folder_of_any_name_is_written_and_the_printed_command_reads_it(name, tmp_path, undrawn_here):
    said = succeeds("train", *TINY, "trainer.steps=0", "figures=[]", f"out={name}", at=tmp_path).out
    assert (tmp_path / name / "metrics.csv").exists()
    words = shlex.split(said.partition("next: rankbench ")[2])
    assert words == ["report", f"runs={name}"]
    succeeds(*words, "out=report", at=tmp_path)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["out=~/b"], "/home/me/b"),
        (["model.name=é"], "é"),
        (["out=${oc.env:HOME}/b"], "${oc.env:HOME}/b"),
        (["out=m s, t"], "m s, t"),  # a comma is a part of the folder's name
        (["-m", "out=m s, t"], "m s, t"),
        (["run=now/3_model=san"], "now/3_model=san"),  # as it was printed
        (["run=now/3_model=san,it's"], "now/3_model=san,it's"),
        (["-m", "run=a,b"], ["a", "b"]),
        (["-m", "run=é,~b"], ["é", "~b"]),
        (["-m", "out=a[1]'"], "a[1]'"),
        (["out=${oc.env:HOME}/é"], "${oc.env:HOME}/é"),
    ],
)
def test_what_hydra_would_misread_is_quoted_for_it(words, value, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (override,) = OverridesParser.create().parse_overrides(as_keys("analyze", words)[len(words) - 1 :])
    got = override.value()
    assert value == ([getattr(x, "text", x) for x in got.list] if override.is_sweep_override() else got)


@pytest.mark.parametrize("value", ["${oc.decode:'-2'}", '${oc.decode:"-2"}', "${oc.decode:'[2'", "${a"])
def test_the_quotes_in_an_interpolation_are_left_to_hydra(value, tmp_path):
    assert as_keys("train", [f"replicas={value}", f"out={value}"]) == [f"replicas={value}", f"out={value}"]
    if value.endswith("}"):
        assert "train: replicas=-2: out of range" in refused("train", f"replicas={value}", at=tmp_path)


def test_a_sweeps_folder_stands_for_every_run_in_it_that_has_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["0_model=san,it's", "1_model=san_mlp", "10_model=san_skip", "2_young"]
    Sweep(tmp_path / "heads").list_jobs([Job(name, ()) for name in names])
    for name in names[:3]:
        (tmp_path / "heads" / name).mkdir()
        (tmp_path / "heads" / name / "checkpoint.safetensors").touch()
    multirun, word, other = as_keys("analyze", ["run=heads", "analysis=[paths]"])
    assert (multirun, other) == ("-m", "analysis=[paths]")
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.is_sweep_override()
    assert [value.text for value in override.value().list] == [f"heads/{name}" for name in names[:3]]
    assert as_keys("analyze", [f"run='heads/{names[1]}'"]) == [f"run='heads/{names[1]}'"]
    assert as_keys("analyze", ["run=nowhere"]) == ["run=nowhere"]


@pytest.mark.parametrize("word", ["out=a.csv", "published=a.csv", "plot.style=a.csv", "job"])
def test_only_a_path_typed_alone_is_a_table(word):
    assert as_keys("plot", ["summary.json", word]) == ["table=summary.json", word]
    assert as_keys("plot", ["0_model.layers=2/residual.csv"]) == ["table='0_model.layers=2/residual.csv'"]
