"""The Python API: beside what the command leaves, in a program with a Hydra app of its own, and line by line."""

import dataclasses
import importlib.util
import io
import json
import logging
import os
import pickle
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import hydra
import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from breadth import some
from command_line import ROOT, python, succeeds
from forked import fork
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase, getbase
from interrupted import during_step
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from refusals import refusal

import rankbench as rb
from rankbench.analyses import ANALYSES, dynamics
from rankbench.commands.compose import compose
from rankbench.runs.tables import RUN_COLUMNS, family, read_table

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
SMALL = ["model.layers=2", "model.width=8", "task.length=4", "task.alphabet=5", "task.train_size=20"]
SMALL += ["task.test_size=10"]
STEPS = ["trainer.steps=4", "trainer.batch_size=10", "trainer.eval_every=2", "trainer.dynamics_every=2"]
TRAINED = [*SMALL, *STEPS, "replicas=2", "analysis=[residual]"]
FEW = {"subset_sizes": [2], "repeats": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)


@pytest.fixture(scope="module")
def run(home):
    """A small run of two seeds, trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        return rb.Run((home / rb.train(*TRAINED).folder).resolve())


@pytest.fixture(scope="module")
def sweep(home):
    """Two runs whose number of heads differs."""
    for heads in (1, 2):
        rb.train(*TRAINED, f"model.heads={heads}", "model.layers=1", out=home / "sweep" / f"heads_{heads}")
    return home / "sweep"


def numbers(table):
    """A table without the name of its run and the columns of wall-clock times."""
    return table.drop(columns=["run", "seconds", "tokens_per_second"], errors="ignore")


# --- the package -----------------------------------------------------------------------------------------------------


def test_importing_rankbench_loads_nothing_heavy(tmp_path):
    heavy = ("torch", "pandas", "numpy", "hydra", "omegaconf", "matplotlib")
    program = f"""
import sys
import rankbench
print([name for name in {heavy} if name in sys.modules], dir(rankbench) == sorted([*rankbench.__all__, "__version__"]))
"""
    done = python("-c", program, at=tmp_path)
    assert done.stdout == "[] True\n", done.stderr


def test_no_module_can_take_the_place_of_a_function():
    """Importing a submodule sets an attribute of its package."""
    assert [name for name in rb.__all__ if importlib.util.find_spec(f"rankbench.{name}")] == []
    for name in rb.__all__:
        assert getattr(rb, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = rb.tarin


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "rankbench" / "py.typed").exists()


@pytest.mark.further
def test_the_blocks_of_the_documents_run(tmp_path, monkeypatch):
    """Those about watching a training: tests/test_observe.py."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "PYTHON.md").read_text()
    block, tape, _, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert '"experiment=demo", "replicas=3"' in block
    names, preset = {}, '"experiment=demo"'
    exec(block.replace(preset, f'{preset}, "budget=smoke", "model.layers=2", "task.test_size=50"'), names)
    assert names["run"].status == "finished" and sorted(set(names["run"].metrics.seed)) == [0, 1, 2]
    assert set(names["tables"]) == {"residual", "paths"}
    assert isinstance(names["figure"], Figure)
    assert [path.name for path in Path("outputs").iterdir()] == ["train"]
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    names |= {"model": encoder, "inputs": torch.ones(1, 3, 8)}
    exec(tape, names)
    assert set(names["tables"]) == {"spectrum", "attention"}
    assert len(names["sums"].by_length_KBND) == 2 and names["sums"].remainder < 1e-5  # float32
    (weights_BM, values_BMK) = names["kept"][1]
    q_BNK, k_BNK, v_BNK = encoder.self_attn.in_proj_weight.mul(1).chunk(3)
    states_BND, biases = names["inputs"], encoder.self_attn.in_proj_bias.chunk(3)
    q, k, v = ((states_BND @ w.T + b)[..., 4:] for w, b in zip((q_BNK, k_BNK, v_BNK), biases, strict=True))
    torch.testing.assert_close(weights_BM, (q[:, -1:] @ k.mT / 2).softmax(-1)[:, 0])
    torch.testing.assert_close(values_BMK, v)


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_leaves_what_the_command_leaves(run, tmp_path):
    succeeds("train", *TRAINED, "out=of_the_command", at=tmp_path)
    command = rb.Run(tmp_path / "of_the_command")
    names = {path.name for path in command.folder.iterdir()}
    assert {path.name for path in run.folder.iterdir()} == names - {".hydra"}
    pd.testing.assert_frame_equal(numbers(run.metrics), numbers(command.metrics))
    pd.testing.assert_frame_equal(numbers(run.table("residual")), numbers(command.table("residual")))
    assert dataclasses.replace(run.config, out="") == dataclasses.replace(command.config, out="")
    weights = [(trained.folder / "checkpoint.safetensors").read_bytes() for trained in (run, command)]
    assert weights[0] == weights[1]
    assert "step 4/4: test accuracy" in (run.folder / "train.log").read_text()


@pytest.mark.further
def test_the_record_names_the_command_line_that_does_the_same(run, sweep):
    def recorded(run):
        return json.loads((run.folder / "environment.json").read_text())["command"]

    assert recorded(run) == ["rankbench train", *TRAINED]
    assert recorded(rb.load(sweep / "heads_1"))[-1] == f"out={sweep}/heads_1"


def test_a_finished_run_is_returned_as_it_is(run):
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.suffix in (".csv", ".safetensors")}
    again = rb.train(*TRAINED, out=run.folder)
    assert again == run
    assert all((run.folder / name).read_bytes() == content for name, content in before.items())
    assert refusal(rb.train, *TRAINED, "seed=3", out=run.folder).startswith("seed=3: the run in ")


@pytest.mark.further
def test_an_interrupted_run_continues(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        during_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt, match=r"stopped at step 2 of 4; the same call with out='.*' continues"):
            rb.train(*TRAINED, out=tmp_path / "run")
    assert rb.load(tmp_path / "run").status == "running"
    again = rb.train(*TRAINED, out=tmp_path / "run")
    assert again.status == "finished"
    pd.testing.assert_frame_equal(numbers(again.metrics), numbers(run.metrics))


def test_nothing_is_left_behind(home):
    def state():
        logger = logging.getLogger("rankbench")
        return os.getcwd(), torch.get_num_threads(), GlobalHydra.instance().hydra, logger.level, logger.handlers[:]

    torch.set_num_threads(2)
    before = state()
    try:
        rb.train(*SMALL, *STEPS, out="one")
        rb.analyze("one", "residual", threads=1)
        refusal(rb.train, "model.layers=0")
        assert state() == before
    finally:
        torch.set_num_threads(1)


def app(_):
    """The job of a user's program, which is a Hydra app."""

    def state():
        own = GlobalHydra.instance()
        return own, own.hydra, HydraConfig.get(), JobRuntime.instance().get("name"), getbase(), os.getcwd()

    before = state()
    for out in ("a", "b"):
        assert rb.train(*SMALL, *STEPS, out=out).status == "finished"
    assert all(now is then or now == then for now, then in zip(state(), before, strict=True))
    assert hydra.compose(overrides=["+a=3"]) == {"a": 3}
    Path("well").touch()


@pytest.mark.further
def test_it_works_inside_a_hydra_app(tmp_path):
    def started():
        """Hydra and OmegaConf have nothing of rankbench's yet, and the app is the program that was started."""
        for kind in (GlobalHydra, HydraConfig, JobRuntime, Plugins, VersionBase):
            Singleton._instances.pop(kind, None)
        OmegaConf.clear_resolvers()
        sys.argv, app.__module__ = ["app.py"], "__main__"
        hydra.main(version_base="1.2", config_path=None)(app)()

    with fork(started, at=tmp_path, errors=tmp_path / "errors.txt") as process:
        assert process.wait() == 0, process.errors.read_text()
    assert (tmp_path / "well").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model=sann"], ["model=sann: unknown, did you mean san?; allowed are "]),
        (["model.layers=0"], ["model.layers=0: out of range"]),
        (["demo"], ["demo: not understood; give key=value"]),
        (["task=char_lm", "task.path=nowhere.txt"], ["nowhere.txt"]),
        ([{"model": "san"}], ["{'model': 'san'}: not an override"]),
        (["-m", "model.layers=1"], ["-m: a sweep; run `rankbench train -m model.layers=1` ", "rankbench.load_sweep"]),
        (["model.layers=1,2"], ["model.layers=1,2: a sweep; run `rankbench train -m model.layers=1,2` "]),
        (["experiment=knob_lambda_skip"], ["rankbench train -m exp", "or give one value for model.skip_scale"]),
        (["cluster=slurm"], ["cluster=slurm: "]),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_leaves_nothing(words, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(rb.train, *words)
    assert all(part in line for part in parts), line
    assert list(tmp_path.iterdir()) == []


def test_a_preset_that_sweeps_is_one_run_where_its_keys_have_one_value():
    assert compose("train", "experiment=knob_lambda_skip", "model.skip_scale=0.5").model.skip_scale == 0.5


# --- load ------------------------------------------------------------------------------------------------------------


def test_load_finds_a_run_by_its_folder_and_the_newest(run, tmp_path, monkeypatch):
    assert rb.load(run.folder) == rb.load(str(run.folder)) == run
    monkeypatch.chdir(tmp_path)
    assert "run=latest: no run with a checkpoint" in refusal(rb.load, "latest")
    newest = rb.train(*SMALL, *STEPS, "replicas=1")
    assert rb.load("latest") == newest


@pytest.mark.further
def test_load_refuses_what_is_no_run(home, sweep):
    assert refusal(rb.load, "nowhere").startswith("run=nowhere: no config.yaml there; give the folder of a run")
    assert "rankbench.load_sweep reads them" in refusal(rb.load, sweep)
    (home / "file").write_text("")
    assert "no config.yaml there" in refusal(rb.load, "file")


def test_a_sweep_has_its_varied_keys_in_every_table(sweep):
    runs = rb.load_sweep(sweep)
    assert runs.keys == ["model.heads"] and len(runs) == 2
    assert [run.config.model.heads for run in (*runs, runs[0], runs[1])] == [1, 2, 1, 2]
    for table, table_of_run in (
        (runs.table("residual"), lambda run: run.table("residual")),
        (runs.metrics, lambda run: run.metrics),
    ):
        parts = [table_of_run(run).assign(**{"model.heads": run.config.model.heads}) for run in runs]
        pd.testing.assert_frame_equal(table, pd.concat(parts, ignore_index=True))
    final = runs.final
    assert list(final["model.heads"]) == [1, 1, 2, 2] and set(final.status) == {"finished"}
    accuracy = [seed["test_accuracy"] for run in runs for seed in run.summary()["seeds"]]
    assert list(final.test_accuracy) == accuracy
    said = "residul: no run has such a table, did you mean residual?; there are layers, m"
    assert said in refusal(runs.table, "residul")
    assert refusal(rb.load_sweep, "nowhere").startswith("runs=nowhere: no run there")


# --- analyze ---------------------------------------------------------------------------------------------------------


@pytest.mark.further
def test_analyze_returns_the_tables_that_the_command_writes(run, home, tmp_path):
    before = sorted(home.rglob("*"))
    tables = rb.analyze(run, "residual", "paths", sequences=4, paths=FEW)
    assert sorted(home.rglob("*")) == before  # nothing is written
    written = rb.analyze(str(run.folder), "residual", "paths", sequences=4, paths=FEW, out=tmp_path / "out")
    assert [(name, table.attrs["analysis"]) for name, table in tables.items()] == [
        (x, x) for x in ("residual", "paths")
    ]
    for name, table in tables.items():
        pd.testing.assert_frame_equal(written[name], table)
        pd.testing.assert_frame_equal(read_table(tmp_path / "out" / f"{name}.csv"), table)
        assert (tmp_path / "out" / f"{name}.png").exists()
    command = json.loads((tmp_path / "out" / "environment.json").read_text())["command"]
    assert command[:2] == ["rankbench analyze", "analysis=[residual,paths]"]
    options = ["analysis.residual.sequences=4", "analysis.paths.sequences=4", "analysis.paths.subset_sizes=[2]"]
    assert command[2:] == [f"run={run.folder}", *options, "analysis.paths.repeats=2", f"out={tmp_path / 'out'}"]


def test_the_recorded_words_of_an_analysis_compose_to_its_config(run, tmp_path):
    """Also those of NumPy's numbers."""
    of_numpy = {"sequences": np.int64(3), "subset_sizes": np.arange(2, 4), "repeats": 2}
    rb.analyze(run, "paths", schemes=["frozen"], paths=of_numpy, readout="raw", out=tmp_path / "out")
    command, *words = json.loads((tmp_path / "out" / "environment.json").read_text())["command"]
    recorded = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert command == "rankbench analyze" and dataclasses.asdict(compose("analyze", *words)) == recorded
    assert recorded["analysis"]["paths"]["subset_sizes"] == [2, 3]


@pytest.mark.further
def test_options_go_to_the_analyses_that_have_them(run):
    tables = rb.analyze(run, "path_counts", "paths", sequences=3, paths=FEW)
    tables_of_one = rb.analyze(run, "paths", paths=FEW | {"sequences": 3})
    pd.testing.assert_frame_equal(tables["paths"], tables_of_one["paths"])
    all_of_them = rb.analyze(run, "paths", paths=FEW)["paths"]
    assert not all_of_them.accuracy.equals(tables_of_one["paths"].accuracy)


@pytest.mark.further
def test_a_fresh_model_comes_from_a_list_of_words():
    table = rb.analyze([*SMALL, "model=san", "replicas=2"], "residual", precision="fp32")["residual"]
    assert set(table.run) == {"fresh"} and set(table.model) == {"san"} and set(table.seed) == {0, 1}
    assert set(table.dtype) == {"float32"}
    names = rb.analyze([*SMALL, "experiment=dong_fig5_path_lengths"])
    assert list(names) == ["path_counts"]


def test_what_cannot_be_analysed_is_one_line(run, home):
    before = sorted(home.rglob("*"))
    said = "sequence=3: no option of residual, path_counts, did you mean sequences?; allowed are variants"
    assert refusal(rb.analyze, run, "residual", "path_counts", sequence=3).startswith(said)
    assert "analysis.paths.sequences=many: wants an integer" in refusal(rb.analyze, run, "paths", sequences="many")
    assert "analysis.paths.length: unknown key" in refusal(rb.analyze, run, "paths", paths={"length": 3})
    assert "analysis=path: unknown, did you mean paths?" in refusal(rb.analyze, run, "path")
    assert "go in a list: ['model=san']" in refusal(rb.analyze, "model=san", "paths")
    assert refusal(rb.analyze, ["run=x"], "paths").startswith("run=x: not in the list; give the folder as subject")
    assert refusal(rb.analyze, ["out=x"], "paths").startswith("out=x: not in the list; give the folder as out=")
    assert "nothing to analyse; give a run, " in refusal(rb.analyze, 3, "paths")
    assert "the folder of a training run" in refusal(rb.analyze, run, "paths", out=run.folder)
    assert "device=tpu: unknown, did you mean cpu?" in refusal(rb.analyze, run, "paths", device="tpu")
    assert "a sweep" in refusal(rb.analyze, ["model.layers=1,2"], "paths")
    assert sorted(home.rglob("*")) == before


def test_analyses_are_refused_by_the_runs_own_model(tmp_path):
    run = rb.Run(tmp_path / "run")
    run.begin(compose("train", "task=char_lm", "model=lstm"), {})
    run.save_weights({"any": torch.zeros(1)})
    said = "needs attention heads; model.kind=lstm does not fit; use curves, samples"
    assert said in refusal(rb.analyze, run, "residual")


# --- plot ------------------------------------------------------------------------------------------------------------


# a small subject and small options for every analysis that the trained run is too small for
LIPSCHITZ = {"layer": "l2", "tokens": [3], "starts": 2, "steps": 2, "keep": 1}
SUBJECTS = {
    "independence": ([*SMALL, "task.test_size=30"], {"sequences": 30, "hessian_sequences": 2, "probes": 2}),
    "rollout": (["task=circle_arcs", *SMALL[:2]], {"steps": 10}),
    "samples": (["task=char_lm", "model=causal", "task.length_limit=10", *SMALL[:2]], {"number": 1}),
    "head_rank": (["task=nearest_neighbor", *SMALL[:2], "task.test_size=5"], {}),
    "rank_theory": (SMALL, {"dimensions": [4], "ranks": [1], "heads": [1], "votes": [1], "samples": 5, "tokens": [4]}),
    "laws": (SMALL, {"law": "cesaro"}),
    "lipschitz": (SMALL, LIPSCHITZ),
    "invertibility": (
        SMALL,
        {"tokens": [3], "sequences": 2, "iterations": 2, "coefficients": [0.5], "ranges": [[0, 1]]},
    ),
    "histograms": (SMALL, {"tokens": 4, "sequences": 2}),
    "paths": (None, FEW),
    "pruning": (None, {"random_orders": 1, "counts": 3}),
}


# further subjects, whose tables have the columns that those of SUBJECTS lack
UNCOUNTED = [*SMALL, "uncounted=[first]"]
STREAMS = [*SMALL, "model.norm=pre", "model.hyper_connections=free"]
MODULE = (torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(), torch.rand(3, 4, 8))
ALONE = ["layers=1", "width=8", "value_width=8", "head_reduction=sum", "skip=false", "mlp=false", "norm=none"]
NEAREST = ["dimension=8", "points=2", "mode=nearest", "queries=separate", "test_size=5"]
HEADS_ALONE = ["task=nearest_neighbor", "model=amsel", "model.mask=others"]
HEADS_ALONE += [*(f"model.{word}" for word in ALONE), *(f"task.{word}" for word in NEAREST)]
MORE = {
    "residual": [(UNCOUNTED, {"views": ["without_sinks"]}), (STREAMS, {}), (*MODULE, {})],
    "paths": [([*UNCOUNTED, "model.positions=none"], FEW), (*MODULE, {})],
    "spectrum": [(UNCOUNTED, {"resamples": 100})],
    "attention": [([*UNCOUNTED, "model.attention=sigmoid"], {})],
    "collapse": [([*UNCOUNTED, "model.init_gain=0.1"], {})],
    "bounds": [([*UNCOUNTED, "model.norm_kind=l2norm"], {})],
    "path_mass": [(UNCOUNTED, {}), (*MODULE, {})],
    "pruning": [(UNCOUNTED, {"random_orders": 1, "counts": 2})],
    "dynamics": [(None, {"metrics": list(dynamics.METRICS)})],
    "lipschitz": [(UNCOUNTED, LIPSCHITZ), (None, {"norms": ["2"], "sequences": 1, "radii": [0.01]})],
    "invertibility": [(None, SUBJECTS["invertibility"][1])],
    "histograms": [(None, SUBJECTS["histograms"][1])],
    "head_rank": [(HEADS_ALONE, {})],
}
TEXT = ["task=char_lm", "model=causal", *SMALL[:2], "trainer.steps=2", "trainer.batch_size=4", "trainer.eval_every=1"]
TEXT += ["task.train_size=8", "task.valid_size=4", "task.test_size=4", "task.unk=symbol"]


@pytest.mark.further
@pytest.mark.parametrize("name", some(ANALYSES, 2))
def test_every_column_is_explained_and_tells_the_table(name, run, tmp_path):
    first = SUBJECTS.get(name, (None, {}))
    subjects = [first, *MORE.get(name, [])]
    if name == "curves":
        subjects.append((rb.train(*TEXT, out=tmp_path / "text"), {}))
    columns, written, tables = ANALYSES[name].columns, {*RUN_COLUMNS}, []
    for subject, *inputs, options in subjects:
        table = rb.analyze(run if subject is None else subject, *inputs, name, **options)[name]
        assert list(table.attrs["columns"]) == list(table)
        written |= {column if column in columns else family(column) for column in table}
        tables.append(table)
    assert written == {*RUN_COLUMNS, *columns}
    assert all(meaning.endswith(".") for meaning in columns.values())
    bare = tables[0].copy()  # a table is known by its columns
    fitting = [other for other, analysis in ANALYSES.items() if set(analysis.recognised_by) <= set(bare.columns)]
    assert fitting == [name]
    bare.attrs = {}
    if ANALYSES[name].figure is None:
        assert f"analysis={name}: has no figure" in refusal(rb.plot, bare)
    else:
        assert isinstance(rb.plot(bare), Figure)


def test_a_figure_is_free_to_be_changed_shown_and_saved(run):
    figure = rb.plot(run.table("residual"))
    figure.axes[0].set_title("mine")
    for kind, begins in (("png", b"\x89PNG"), ("pdf", b"%PDF-"), ("svg", b"<?xml")):
        file = io.BytesIO()
        figure.savefig(file, format=kind)
        assert file.getvalue().startswith(begins)
    assert pickle.loads(pickle.dumps(figure)).axes[0].get_title() == "mine"
    canvas = FigureCanvasSVG(figure)  # stands for a window's or a widget's
    assert figure.canvas is canvas
    assert "matplotlib.pyplot" not in sys.modules or not matplotlib.pyplot.get_fignums()


@pytest.mark.further
def test_a_notebook_shows_a_figure(run, monkeypatch):
    class Formatter(dict):
        def for_type(self, kind, function):
            self[kind] = function

    png = Formatter()
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"image/png": png}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    figure = rb.plot(run.table("residual"))
    assert png[Figure](figure).startswith(b"\x89PNG")
    png[Figure] = None  # pyplot's own, when it has drawn
    rb.plot(run.table("residual"))
    assert png[Figure] is None


@pytest.mark.further
def test_the_figure_of_several_runs_has_a_panel_for_each(sweep):
    runs = rb.load_sweep(sweep)
    table = runs.table("residual")
    titles = [axes.get_title() for axes in rb.plot(table).axes]
    assert [title for title in titles if "2 heads" in title] and len(titles) == 4
    assert len(rb.plot(table[table["model.heads"] == 1], facet="seed").axes) == 4
    final = rb.plot(runs.final)
    assert final.axes[0].get_xlabel() == "heads"
    assert "no key that varies" in refusal(rb.plot, rb.load_sweep(sweep / "heads_1").final)


def test_published_numbers_are_drawn_by_name(run):
    tables = rb.analyze(run, "paths", paths=FEW)
    before, after = rb.plot(tables["paths"]), rb.plot(tables["paths"], published="dong_fig4_sorting_code")

    def labels(figure):
        return {text.get_text() for text in figure.legends[0].get_texts()}

    assert any("authors' code" in label for label in labels(after) - labels(before))


def test_what_cannot_be_drawn_is_one_line(run):
    table = run.table("residual")
    said = "table: its columns are not those of an analysis; name it with analysis=, one of "
    assert said in refusal(rb.plot, pd.DataFrame({"a": [1]}))
    assert "analysis=paths: not its table, which has a column scheme" in refusal(rb.plot, table, analysis="paths")
    assert "analysis=sweep: not its table, which has a column job_status" in refusal(rb.plot, table, analysis="sweep")
    assert "analysis=path: unknown, did you mean paths?" in refusal(rb.plot, table, analysis="path")
    assert "facet=heads: unknown, did you mean head?" in refusal(rb.plot, table, facet="heads")
    assert "published=dong: unknown; allowed are " in refusal(rb.plot, table, published="dong")
    assert "the table has no rows" in refusal(rb.plot, table[:0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: rb.train("task=sorting", out="a\0b"),
        lambda: rb.train("task=sorting", "out='a\0b'"),
        lambda: rb.analyze(["model=san"], "residual", out="a\0b"),
        lambda: rb.analyze(["model=san", "model.name='\0'"], "residual"),
        lambda: rb.observe(torch.nn.Linear(2, 2), torch.zeros(1, 3, 2), out="a\0b"),
    ],
)
def test_a_null_byte_is_one_line_and_leaves_nothing(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rb.ConfigError, match=r"^\S+='.*\\x00.*': holds a null byte; leave it out$"):
        call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda run: rb.plot(None), "plot: table=None; give a DataFrame"),
        (lambda run: rb.plot("residual.csv"), "plot: table='residual.csv': is of type str; give a DataFrame"),
        (lambda run: rb.plot(run.table("residual"), facet=3), "plot: facet=3: is of type int; give a text or None"),
        (lambda run: rb.by_layer(run), "by_layer: table is of type Run; give a DataFrame"),
        (lambda run: rb.train(3), "3: not an override; give texts"),
        (lambda run: rb.train("seed=1", out=3), "train: out=3: is of type int; give a text, a path or None"),
        (lambda run: rb.train("seed=1", out=""), "out=: is empty; leave it out, or give a folder"),
        (lambda run: rb.train("out=a", out="b"), "out=a: the keyword out=b also names a folder"),
        (lambda run: rb.load(None), "load: folder=None; give a text or a path"),
        (lambda run: rb.load(""), "run=: is empty; give the folder of a run"),
        (lambda run: rb.load(run.folder, plugins=[3]), "load: plugins=[3]: is of type list; give a text or a list of"),
        (lambda run: rb.load_sweep([run.folder]), "load_sweep: folder=["),
        (lambda run: rb.analyze(run, ["residual", "paths"]), "analyze: an analysis is of type list; give names, as in"),
        (lambda run: rb.analyze(torch.nn.Linear(2, 2)), "Linear: needs inputs; as in analyze(module, inputs, "),
        (lambda run: rb.analyze(run, "residual", residual=3), "residual: is an analysis; give its options by name"),
        (lambda run: rb.analyze(run, "residual", sequences=pd.DataFrame()), "sequences is of type DataFrame; give a"),
        (lambda run: run.table(["paths"]), "table: name=['paths']: is of type list; give a text"),
        (lambda run: rb.Run(None), "Run: folder is of type NoneType; give a text or a path"),
        (lambda run: rb.load_sweep(run.folder)[0:1], "__getitem__: number is of type slice; give a whole number"),
    ],
)
def test_an_argument_that_cannot_be_is_one_line(call, said, run):
    assert refusal(call, run).startswith(said)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda table: table.drop(columns="seed"),
        lambda table: table.set_index("layer"),
        lambda table: table.assign(relative_residual="abc"),
        lambda table: table.loc[:, [*table.columns, "layer"]],
    ],
)
def test_a_table_that_lost_a_column_or_its_numbers_is_refused_in_one_line(spoil, run, tmp_path):
    table = spoil(run.table("residual"))
    assert refusal(rb.plot, table, analysis="residual").startswith("analysis=residual: cannot be drawn (")


def test_sparse_inputs_and_a_column_twice_are_one_line(run):
    sparse = torch.zeros(1, 3, 2).to_sparse()
    assert "give dense ones, as x.to_dense()" in refusal(rb.analyze, torch.nn.Linear(2, 2), sparse, "spectrum")
    table = run.table("residual")
    twice = table.loc[:, [*table.columns, "layer"]]
    assert refusal(rb.by_layer, twice) == "by_layer: a table with two columns layer; drop one"


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_module_with_nan_or_compiled_by_torch_jit_is_one_line():
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    torch.nn.init.constant_(layer.linear1.weight, torch.nan)
    line = refusal(rb.analyze, torch.nn.Sequential(layer), torch.randn(2, 3, 4), "residual")
    assert line.endswith("nan or infinite entries, all must be finite; check inputs and weights")
    scripted = torch.jit.trace(torch.nn.Linear(4, 4), torch.zeros(1, 3, 4))
    line = refusal(rb.analyze, scripted, torch.zeros(1, 3, 4), "residual")
    assert line == "rankbench.analyze: a module compiled by torch.jit cannot be read; give the one that it was made of"


def test_numpys_integers_and_texts_for_paths_are_taken(run):
    assert rb.Run(str(run.folder)).table("residual").equals(run.table("residual"))
    with rb.observe(torch.nn.Linear(2, 2), torch.zeros(1, 3, 2), every=np.int64(3), out="numpy") as watch:
        assert watch.every == 3
