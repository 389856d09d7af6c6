"""rankbench.config.plugins: what the package in tests/example_plugin brings, named or installed."""

import json
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from command_line import SMALLEST, refused, succeeds
from matplotlib.text import Text
from refusals import refusal

import rankbench as rb
from rankbench.analyses import ANALYSES, dynamics, residual
from rankbench.analysing.runner import TRIED
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.check import checked
from rankbench.commands.completion import candidates
from rankbench.commands.compose import as_keys, compose, load_plugins, resolve
from rankbench.commands.composition import composed
from rankbench.commands.explain import explained
from rankbench.commands.listing import listing
from rankbench.commands.new import created
from rankbench.commands.usage import usage
from rankbench.config import model, plugins, schema
from rankbench.config.keys import ConfigError
from rankbench.judging import CLAIMS, PAPERS, figures_published, judge
from rankbench.judging.claim import paper_of
from rankbench.measures.law import LAWS
from rankbench.measures.states import STATE_METRICS
from rankbench.model import KINDS, initial_model
from rankbench.model.modules import build
from rankbench.model.weighting_check import check_weighting
from rankbench.model.weightings import ATTENTIONS, Softmax, Start, Weighting, dot_products, hidden_as
from rankbench.report.report import gather
from rankbench.report.scoreboard import scoreboard
from rankbench.runs.machine import Machine
from rankbench.runs.tables import read_table
from rankbench.tasks import TASKS, build_task
from rankbench.training.layers import DYNAMICS
from rankbench.training.optimizers import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
EXAMPLE = Path(__file__).parents[1] / "example_plugin"
NAMED = "plugins=[lettercount]"
NUMBERS = "source,figure,where,series,x,value,unit\n"
PRESET = "conf/experiment/mine.yaml"


@contextmanager
def process(*path):
    """What a process has that has taken no plug-in yet and finds modules in these folders, too."""
    state = [TASKS, ANALYSES, ATTENTIONS, OPTIMIZERS, *(registry.data for registry in (CLAIMS, LAWS, PAPERS))]
    state += [KINDS, STATE_METRICS, model.KINDS, residual.COLUMNS, dynamics.COLUMNS, dynamics.METRICS, DYNAMICS]
    state += [model.ATTENTIONS, schema.OPTIMIZERS, plugins.FOUND, plugins.LOADED, sys.path]
    before = [held.copy() for held in state]
    sys.path[:] = [*map(str, path), *sys.path]
    _forget_modules()  # `mine` may be of another test file
    try:
        yield
    finally:
        for held, old in zip(state, before, strict=True):
            held.clear()
            held.extend(old) if isinstance(held, list) else held.update(old)
        _forget_modules()


def _forget_modules():
    for name in ("lettercount", "mine", "evil"):
        sys.modules.pop(name, None)


def written(folder, files):
    """Write these files, by their path in the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with process(EXAMPLE):
        return rb.train(NAMED, "experiment=counting", out=tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A new process that finds modules in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with process(tmp_path):
        TRIED.clear()
        check_weighting.cache_clear()
        yield tmp_path


@pytest.fixture
def example(elsewhere):
    """The same process, which finds the example, too."""
    sys.path.append(str(EXAMPLE))
    return elsewhere


def test_task_analysis_and_preset_of_a_named_plugin(run):
    assert run.config.plugins == ["lettercount"] and run.config.task["name"] == "letter_count"
    sizes = run.table("weight_sizes").query("weights == 'trained'").set_index("parameter").weight_size
    weights = {name: weight[0].double().square().sum().sqrt().item() for name, weight in run.weights().items()}
    assert sizes.to_dict() == pytest.approx(weights, rel=1e-12) and weights


def test_a_claim_of_a_plugins_paper_is_judged_beside_its_published_number(run, elsewhere):
    (verdict,) = read_table(run.folder / "verdicts.csv").to_dict("records")
    assert (verdict["claim"], verdict["outcome"], verdict["published"]) == ("nobody_small_weights", "held", 2.5)
    sizes = run.table("weight_sizes")
    assert verdict["measured"] == pytest.approx(sizes.weight_size.max(), rel=1e-12)
    sys.path.append(str(EXAMPLE))
    with pytest.raises(ConfigError, match=r"^claims=nobody_small_weights: unknown"):
        rb.analyze(["model=san", "claims=[nobody_small_weights]"], "residual")
    tables = rb.analyze(run, "paths", plugins="lettercount", sequences=4, repeats=1)
    assert paper_of(verdict["source"]) == "Nobody 2026"
    assert "letter_count_weights" in figures_published()
    figure = rb.plot(tables["paths"], published="letter_count_weights")
    assert any("Nobody" in text.get_text() for text in figure.findobj(Text))
    with pytest.raises(ConfigError, match=r"^published=letter_count: unknown, did you mean letter_count_weights"):
        rb.plot(tables["paths"], published="letter_count")


@pytest.mark.further
def test_a_law_of_a_plugin_is_judged_and_drawn(example):
    words = [NAMED, "model=san", "model.layers=1", "replicas=5", "claims=[law_letters_alike]"]
    table = rb.analyze(words, "laws", law="letters_alike", out=example / "laws")["laws"]
    (verdict,) = read_table(example / "laws" / "verdicts.csv").to_dict("records")
    assert (verdict["claim"], verdict["outcome"]) == ("law_letters_alike", "held")
    assert (example / "laws" / "laws.png").exists()
    assert rb.plot(table).axes[0].get_xlabel() == "letters in the alphabet"
    # letters that are alike more often than they should be
    off = table.assign(value=table.value + 0.05 * (table.curve == "simulated"))
    assert judge("law_letters_alike", off)[0]["outcome"] == "failed"
    assert "letters_alike" in usage("analyze", [NAMED, "analysis.laws.law"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source,figure\nmine,fig1\n", "has the columns source, figure; they must be source, figure, where, "),
        (f"{NUMBERS}me,kim_table2,,a,1,2,nats\n", "figure kim_table2 exists already"),
        (f"{NUMBERS}me,f,,a,1,2,nats\nme,f,,a,two,2,nats\n", "x in row 2 is two, not a number"),
        (f"{NUMBERS}me,f,,a,1,,nats\n", "value in row 1 is empty"),
        (f"{NUMBERS}me,f,,a,1,2\nme,f,,a,1,2,nats,new\n", "cannot be read "),
        ("", "cannot be read "),
    ],
)
def test_published_numbers_that_do_not_fit_are_refused(elsewhere, text, said):
    written(elsewhere, {"mine.py": "TASKS = {}", "published.csv": text})
    with pytest.raises(ConfigError, match=f"published.csv: {said}"):
        checked(["plugins=mine"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("trainer: {stepz: 3}", "^experiment/mine.yaml: trainer.stepz: unknown key, did you mean steps?"),
        ("published: fig7", "^published=fig7: no published numbers; "),
        (
            "hydra: {sweeper: {params: {model: 'san,transformer', model.heads: '1,2,x'}}}",
            "^model.heads=x: wants an int",
        ),
    ],
)
def test_a_preset_that_cannot_run_is_refused(elsewhere, lines, said):
    begin = "# @package _global_\nmodel: {layers: 2}\n"
    written(elsewhere, {"mine.py": "", PRESET: begin})
    assert checked(["plugins=mine"]).startswith("experiment=mine: composes, and is allowed, at budget=smoke, ")
    written(elsewhere, {PRESET: begin + lines})
    with pytest.raises(ConfigError, match=said):
        checked(["plugins=mine"])


def test_a_plugin_may_be_called_as_the_file_of_a_network(elsewhere):
    network = "import torch\ndef network():\n    return torch.nn.Linear(2, 2), torch.ones(1, 2)"
    written(elsewhere, {"networks/mine.py": network, "mine.py": "is_plugin = True"})
    (elsewhere / "conf").mkdir()
    build("networks/mine.py:network")
    load_plugins(["mine"])
    assert sys.modules["mine"].is_plugin


def test_a_finite_set_is_split_anew_by_each_seed_without_an_overlap(example):
    words = [NAMED, "task=modular_addition", "model=transformer", "model.layers=1", "trainer.steps=6"]
    words += ["trainer.batch_size=5", "trainer.eval_every=3", "replicas=2"]  # 5 batches are an epoch
    run = rb.train(*words, out=example / "run")
    metrics = run.metrics.set_index(["seed", "step", "split"]).accuracy
    task = TASKS["modular_addition"]("modular_addition", 7, 25, None)
    trained_on = set()
    for seed, subject in enumerate(subjects_of_run(run, Machine.prepare(compose("analyze", "precision=fp64")))):
        splits = {"train": subject.train, "test": subject.test}
        pairs = {name: set(map(tuple, batch.inputs[:, :2].tolist())) for name, batch in splits.items()}
        assert len(pairs["train"]) == 25 and len(pairs["test"]) == 24 == task.num_test
        assert not pairs["train"] & pairs["test"]
        for batch in splits.values():
            assert (batch.targets[:, 2] == batch.inputs[:, :2].sum(1) % 7).all() and (batch.targets[:, :2] == -1).all()
        # the same split as in training: the recorded accuracy is that of these sequences
        right = subject.network(subject.test.inputs)[:, 2].argmax(-1) == subject.test.targets[:, 2]
        assert metrics[seed, 6, "test"] == pytest.approx(right.double().mean().item())
        trained_on.add(frozenset(pairs["train"]))
    assert len(trained_on) == 2
    drawn = task.sample(500, torch.Generator().manual_seed(0))
    assert len(drawn.inputs.unique(dim=0)) == 49
    tables = rb.analyze(run, "paths", plugins="lettercount", sequences=4, repeats=1)
    assert tables["paths"].remainder.max() < 1e-13


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task.train_size=49"], "task.train_size=49: task.name=modular_addition has 49 sequences in all"),
        (["task.train_size=40", "task.test_size=10"], "task.test_size=10: of 49 sequences task.train_size=40 leaves 9"),
        (["task.modulus=1000000"], "beyond_memory=false: needs at least"),  # all other pairs are test sequences
    ],
)
def test_a_split_that_a_finite_set_does_not_have_is_refused(example, words, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        rb.train(NAMED, "task=modular_addition", "model.layers=1", *words, out=example / "run")
    assert not (example / "run").exists()


@pytest.mark.further
def test_an_attention_of_a_plugin_trains_and_its_paths_add_up(example):
    words = [NAMED, "model=inverse_square", "model.layers=2", "model.mask=causal", "task.length=4", "trainer.steps=2"]
    run = rb.train(*words, "trainer.eval_every=1", "trainer.batch_size=4", out=example / "run")
    (log_s_1,) = run.weights()["blocks.1.attention.own.log_s"]
    assert log_s_1.item() != 0  # it began there, and has learned
    tables = rb.analyze(run, "paths", plugins="lettercount", sequences=2, repeats=1)
    assert tables["paths"].remainder.max() < 1e-13
    line = refusal(rb.analyze, run, "collapse", plugins="lettercount")
    assert line.startswith("model.attention=inverse_square: residual coordinates follow dot, l2 alone")
    line = refusal(rb.analyze, run, "bounds", plugins="lettercount")
    assert "analysis=bounds: needs the softmax of dot products alone" in line


def test_an_update_rule_of_a_plugin_trains(example):
    words = [NAMED, "model=transformer", "model.layers=1", "optimizer.name=sign_sgd", "optimizer.lr=0.01"]
    words += ["optimizer.schedule=constant", "optimizer.warmup=0", "trainer.steps=1", "trainer.batch_size=4"]
    run = rb.train(*words, "trainer.eval_every=1", out=example / "run")
    before = initial_model(run.config.model, build_task(run.config.task), 0).state_dict()
    moved = torch.cat([(weight[0] - before[name]).abs().flatten() for name, weight in run.weights().items()])
    assert (moved > 0).float().mean() > 0.5 and moved[moved > 0].sub(0.01).abs().max() < 1e-6
    with pytest.raises(ConfigError, match=r"^optimizer.name=sign: unknown, .*muon, sign_sgd$"):
        compose("train", NAMED, "optimizer.name=sign")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("lambda: None", "too many positional arguments; it is called with cfg, parameters, rows"),
        ("lambda cfg, parameters, rows: None", "gave a NoneType; return a torch.optim.Optimizer"),
    ],
)
def test_what_is_no_update_rule_is_refused(elsewhere, rule, said):
    (elsewhere / "mine.py").write_text(f"OPTIMIZERS = {{'own': {rule}}}")
    with pytest.raises(ConfigError, match=f"^optimizer.name=own: {said}"):
        rb.train("plugins=mine", "optimizer.name=own", out=elsewhere / "run")
    with pytest.raises(ConfigError, match=f"^optimizer.name=own: {said}"):
        checked(["plugins=mine"])
    assert not (elsewhere / "run").exists()


@pytest.mark.further
def test_a_model_and_a_metric_of_a_plugin(example, monkeypatch):
    monkeypatch.setattr("rankbench.training.compiling.REPAID_AFTER", 2)  # the fused step is not for such a model
    words = [NAMED, "model.kind=scaled_embedding", "model.layers=2", "trainer.steps=2", "trainer.batch_size=4"]
    words += ["task=letter_count", "trainer.eval_every=2", "trainer.dynamics_every=2"]
    run = rb.train(*words, out=example / "run")
    assert run.step == "plain"
    own = initial_model(run.config.model, build_task(run.config.task), 0)
    plain = initial_model(compose("train", NAMED, *words[2:]).model, build_task(run.config.task), 0)
    letters = torch.tensor([[0, 1, 2, 0]])
    torch.testing.assert_close(own.embed(letters), 48**0.5 * plain.embed(letters))
    tables = rb.analyze(run, "residual", "paths", plugins="lettercount", sequences=4, repeats=1)
    assert tables["paths"].remainder.max() < 1e-12
    states = tables["residual"].query("sublayer == 'input' and weights == 'initialised' and variant == 'full'")
    batch = subjects_of_run(run, Machine.prepare(compose("analyze", "precision=fp64")))[0].test[:4]
    lengths_BN = own.double().embed(batch.inputs).norm(dim=-1)
    wanted = (lengths_BN.amax(-1) / lengths_BN.amin(-1)).mean().item()
    assert states.length_spread.to_list() == pytest.approx([wanted], rel=1e-12)
    assert tables["residual"].attrs["columns"]["length_spread"] == "Longest token over the shortest."
    assert run.table("layers").length_spread.notna().any()


def test_a_run_that_goes_on_with_another_version_of_its_plugin_records_it(elsewhere):
    file = elsewhere / "mine.py"
    own = "from rankbench.model.transformer import Transformer\nclass Mine(Transformer): pass\nMODELS = {'mine': Mine}"
    for steps, text in ((1, own), (2, own), (3, f"{own}\n# another version")):
        file.write_text(text)
        with process(elsewhere):
            words = ["plugins=mine", "model.kind=mine", "model.layers=1", f"trainer.steps={steps}", "figures=[]"]
            run = rb.train(*words, out=elsewhere / "run")
            recorded = json.loads((run.folder / "environment.json").read_text())["plugins"]
            assert (run.folder / "continued.json").exists() == (steps == 3)
    [part] = json.loads((run.folder / "continued.json").read_text())
    assert part["step"] == 2 and part["plugins"] != recorded


def test_a_run_imports_nothing_that_its_reader_has_not_named(run, elsewhere):
    copied = elsewhere / "copied"
    shutil.copytree(run.folder, copied)
    config = yaml.safe_load((copied / "config.yaml").read_text())
    (copied / "config.yaml").write_text(yaml.safe_dump(config | {"plugins": ["evil"]}))
    (elsewhere / "evil.py").write_text("raise SystemExit('imported')")
    assert rb.load(copied).config.plugins == ["evil"]
    with pytest.raises(ConfigError, match=r"^run=.*copied: this run needs plugins=\[evil\], .*add plugins=\[evil\]$"):
        rb.analyze(copied, "residual")
    for words in (["analysis=[evil_table]"], ["analysis.evil_table.power=2"]):
        said = refused("analyze", f"run={copied}", *words, at=elsewhere)
        assert said.endswith("if you trust it, add plugins=[evil]") and "this run needs plugins=[evil]" in said
    assert "evil" not in sys.modules
    sys.path.append(str(EXAMPLE))
    tables = rb.analyze(run, "weight_sizes", plugins="lettercount", power=1)
    assert len(tables["weight_sizes"]) == len(run.table("weight_sizes"))


@pytest.mark.further
def test_a_run_that_cannot_be_read_without_its_plugin_says_so(elsewhere):
    words = ["model=inverse_square", "task=letter_count", "model.layers=1", "trainer.steps=1", "trainer.batch_size=4"]
    with process(EXAMPLE):
        folder = rb.train(NAMED, *words, out=elsewhere / "run").folder
    for read in (lambda: rb.load(folder), lambda: rb.analyze(folder, "residual")):
        assert "run: this run needs plugins=[lettercount], whose code is imported only" in refusal(read)
    left_out = "tables of plug-ins that are not named are left out; to read them, add plugins=[lettercount]"
    (report := elsewhere / "report").mkdir()
    assert left_out in gather([folder], report)
    sys.path.append(str(EXAMPLE))
    assert rb.load(folder, plugins="lettercount").config.model.attention == "inverse_square"
    assert left_out not in gather([folder], report)


def test_an_installed_plugin_needs_no_naming(elsewhere):
    shutil.copytree(EXAMPLE / "lettercount", elsewhere / "lettercount")
    metadata = elsewhere / "lettercount-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lettercount\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[rankbench.plugins]\nletters = lettercount\n")
    assert candidates(["train", "task=letter"]) == ["task=letter_count"]
    assert "lettercount" not in sys.modules  # Tab reads its YAML files alone
    assert compose("train", "experiment=counting").analysis == {"weight_sizes": {"power": 2.0}}
    assert "letter_count" in TASKS and "weight_sizes" in ANALYSES
    assert compose("train", "model.attention=inverse_square").model.attention == "inverse_square"
    assert candidates(["train", "plugins="]) == ["plugins=lettercount"]


def test_choices_and_refusals_name_those_of_a_plugin(example):
    assert candidates(["train", "plugins=lettercount", "experiment=cou"]) == ["experiment=counting"]
    assert "sorting, " in (text := usage("train", as_keys("train", ["plugins=lettercount"]))) and "letter_count" in text
    assert f"plug-in lettercount: {EXAMPLE / 'lettercount' / 'conf'}" in text
    assert "inverse_square" in usage("train", [NAMED, "model.attention"])
    with pytest.raises(ConfigError, match=r"^model.attention=inverse: unknown, .*sparse, inverse_square$"):
        compose("train", NAMED, "model.attention=inverse")
    assert "task.alphabet=3 " in (text := usage("train", [NAMED, "experiment=counting", "task"]))
    assert "Number of letters in the alphabet." in text and "task.label" not in text
    assert as_keys("train", ["plugins=null"]) == ["plugins=[]"]
    with pytest.raises(ConfigError, match=r"^task=letter_cuont: unknown, did you mean letter_count\?"):
        compose("train", NAMED, "task=letter_cuont")


def test_a_job_takes_the_plugins_of_its_config(example):
    words = as_keys("train", [NAMED, "task=letter_count"])
    config = composed("train", *words)
    plugins.FOUND.clear()  # as in a worker process, which gets the composed config
    assert resolve(config, words).task["alphabet"] == 3 and "letter_count" in TASKS


FIELD = "from dataclasses import dataclass\n@dataclass\nclass A:\n    size: int"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "no such module here; install it"),
        ({"mine.py": "import nowhere"}, r"cannot be imported \(ModuleNotFoundError: No module named 'nowhere'\)"),
        ({"mine.py": "raise SystemExit(3)"}, r"cannot be imported \(SystemExit: 3\)"),
        (
            {"mine.py": ""},
            "not a plug-in; a plug-in has a dict TASKS, ANALYSES, ATTENTIONS, MODELS, METRICS, OPTIMIZERS, CLAIMS, "
            "LAWS or PAPERS, or next to it a folder conf or a file published.csv",
        ),
        ({"mine.py": "TASKS = {'a': 3}"}, "TASKS is not a dict with values that are classes; fix it"),
        ({"mine.py": "TASKS = {'a': int, 'sorting': int}"}, "TASKS has sorting, which exists already"),
        ({"mine.py": "ANALYSES = {'b': int}"}, "ANALYSES is not a dict with values of type Analysis"),
        ({"mine.py": "TASKS = {'a': int}"}, "TASKS: a: is not a dataclass, whose fields are keys"),
        ({"mine.py": f"{FIELD} = 3\nTASKS = {{3: A}}"}, "TASKS has the name 3; give a text"),
        ({"mine.py": f"{FIELD} = 3\nTASKS = {{'a': A}}"}, "TASKS: a.size: is no key; write size: <type> = key"),
        *(
            (
                {"mine.py": f"{FIELD.replace('int', type_)} = 3\nTASKS = {{'a': A}}"},
                r"TASKS: a.size: has the type .*; allowed are int, float, bool, str, list\[<type>\] and dict",
            )
            for type_ in ("set", "list", "list[set]", "dict[int, int]", "dict[str, set]", "int | str | None")
        ),
        (
            {"mine.py": f"from __future__ import annotations\n{FIELD} = 3\nTASKS = {{'a': A}}"},
            "TASKS: a.size: its type is a text; leave out `from __future__",
        ),
        ({"mine.py": "TASK = {'a': int}"}, r"has a dict TASK, did you mean TASKS\?; give it another name"),
        (
            {"mine.py": f"from rankbench.analyses import Analysis\n{FIELD} = 3\nAnalysis(A, None, None, None, [], ())"},
            r"cannot be imported \(ConfigError: options.size: is no key",
        ),
        ({"mine.py": "CLAIMS = {'mine': 'that it is so'}"}, "CLAIMS is not a dict with values of type Claim"),
        ({"mine.py": "PAPERS = {'Dong et al. 2021': ''}"}, "PAPERS has Dong et al. 2021, which exists already"),
        ({"mine.py": "class A: pass\nMODELS = {'mine': A}"}, "MODELS is not a dict with values of type Transformer"),
        ({"mine.py": "ATTENTIONS = {'mine': len}"}, "ATTENTIONS is not a dict with values of type Weighting"),
        (
            {"mine.py": "from rankbench.model.weightings import Relu\nATTENTIONS = {'relu': Relu()}"},
            "ATTENTIONS has relu, which exists already",
        ),
        ({"mine.py": "", "conf/task/sorting.yaml": ""}, ".*conf/task/sorting.yaml exists already"),
    ],
)
def test_what_is_no_plugin_ends_in_one_line(elsewhere, files, said):
    written(elsewhere, files)
    before = list(TASKS), list(ANALYSES)
    with pytest.raises(ConfigError, match=rf"^plugins=\[mine\]: {said}") as error:
        load_plugins(["mine"])
    assert error.value.frames.startswith(f'  File "{elsewhere}/mine.py", line ') or "cannot be imported" not in said
    assert (list(TASKS), list(ANALYSES)) == before
    load_plugins()  # the next command has forgotten it


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("lambda states: 1.0", "METRICS: one has no docstring; say what it measures"),
        ("one", "METRICS: one gives 1.0 for 3 matrices; give 3 numbers"),
        ("share", "METRICS: share gives a matrix another number alone than beside others"),
    ],
)
def test_a_metric_that_is_none_is_refused_and_forgotten(elsewhere, code, said):
    name = code if code.isidentifier() else "one"
    text = 'def one(states):\n    """One."""\n    return 1.0\n'
    text += 'def share(states):\n    """One."""\n    return (x := states.whole.length_BN1.mean((1, 2))) / x.sum()\n'
    (elsewhere / "mine.py").write_text(f'{text}METRICS = {{"{name}": {code}}}')
    for _ in range(2):
        assert refusal(load_plugins, ["mine"]).startswith(said)
        assert name not in STATE_METRICS


@pytest.mark.further
def test_presets_of_plugins_are_listed_explained_and_reported(run, example, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    assert "counting" not in listing([])
    assert "\n  counting " in listing([NAMED])
    entry = "\n  counting\n      rankbench train; one CPU core: 1 second\n      One head that counts letters"
    assert entry in listing([NAMED, "letters"])
    assert "counting" in explained(["analysis.weight_sizes.power"])
    folder = example / "outputs" / "train" / "mine"
    shutil.copytree(run.folder, folder)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "hydra.yaml").write_text("hydra: {runtime: {choices: {experiment: counting}}}")
    (example / "page").mkdir()
    assert scoreboard("counting", example / "page")[0].startswith("1 of 1 presets run")
    pages = [page.read_text() for page in (example / "page").glob("*.html")]
    assert any("Counting letters with one head" in page for page in pages)


def test_a_preset_without_comments_is_listed_by_its_name(elsewhere):
    written(elsewhere, {"mine.py": "TASKS = {}", PRESET: "# @package _global_\nseed: 3\n"})
    assert "\n  mine\n" in listing(["plugins=mine"])
    assert compose("train", "plugins=mine", "experiment=mine").seed == 3
    assert "list seed=1: takes words to search for, and plugins=" in refusal(listing, ["seed=1"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"# caf\xe9\nseed: 3\n", ": not readable as YAML ('utf-8' codec can't decode byte"),
        (b"# A preset.\nseed: {\n", ", line 3: not readable as YAML ("),
        (b"- seed\n", ": not readable as YAML (it holds no keys); correct the file"),
    ],
)
def test_a_yaml_file_that_cannot_be_read_is_named_by_the_lists(elsewhere, content, said):
    written(elsewhere, {"mine.py": "TASKS = {}", PRESET: content})
    for text_of, words in ((listing, []), (explained, ["seed"])):
        assert refusal(text_of, ["plugins=mine", *words]).startswith(f"{elsewhere / PRESET}{said}")


@pytest.mark.usefixtures("undrawn_here")
def test_the_lock_of_an_editor_is_no_preset(elsewhere):
    (elsewhere / "mine.py").write_text("TASKS = {}")
    (elsewhere / "conf" / "experiment").mkdir(parents=True)
    (elsewhere / "conf" / "experiment" / ".#mine.yaml").symlink_to("me@here.123")
    assert ".#mine" not in listing(["plugins=mine"])
    succeeds("train", "-m", "plugins=mine", *SMALLEST, "trainer.steps=1", "seed=0,1", "out=sweep", at=elsewhere)


class Scores(Weighting):
    """Weights in proportion to exp of the scores, which each subclass spoils in its own way."""

    def powers(self, q_BHNK, k_BHMK):
        return dot_products(q_BHNK, k_BHMK, 1.0).exp()

    def weights(self, q_BHNK, k_BHMK, seen_NM, heads):
        powers_BHNM = hidden_as(0.0, self.powers(q_BHNK, k_BHMK), seen_NM)
        return powers_BHNM / powers_BHNM.sum(-1, keepdim=True)


class Blind(Scores):
    def weights(self, q_BHNK, k_BHMK, seen_NM, heads):
        return super().weights(q_BHNK, k_BHMK, None, heads)


class Leaking(Scores):
    stochastic = False

    def weights(self, q_BHNK, k_BHMK, seen_NM, heads):
        powers_BHNM = self.powers(q_BHNK, k_BHMK)
        return hidden_as(0.0, powers_BHNM / powers_BHNM.sum(-1, keepdim=True), seen_NM)


class Halved(Scores):
    def weights(self, q_BHNK, k_BHMK, seen_NM, heads):
        return super().weights(q_BHNK, k_BHMK, seen_NM, heads) / 2


class OfAllHeads(Scores):
    def powers(self, q_BHNK, k_BHMK):
        summed_B1NM = dot_products(q_BHNK, k_BHMK, 1.0).sum(-3, keepdim=True)
        return summed_B1NM.exp().expand(*q_BHNK.shape[:-1], k_BHMK.shape[-2])


class Flat(Scores):
    def weights(self, q_BHNK, k_BHMK, seen_NM, heads):
        return super().weights(q_BHNK, k_BHMK, seen_NM, heads).mean(-3)


class WideGate(Scores):
    def gate(self, q_BHNK, heads):
        return q_BHNK.sigmoid()


class Unused(Scores):
    def parameters(self, heads):
        return {"slope": Start((1,), lambda value, generator: value.zero_())}


class NotFused(Softmax):
    weights = Scores.weights

    def powers(self, q_BHNK, k_BHMK):
        return dot_products(q_BHNK, k_BHMK, 1.0).square()


@pytest.mark.parametrize(
    ("weighting", "said"),
    [
        (Blind(), "a key that a query does not see has a weight of .* under model.mask=causal; use hidden_as"),
        (Leaking(), "a query's weights change with a key that it does not see under model.mask=causal"),
        (Halved(), "a row of P sums to 0.5, with entries from .* under model.mask=none"),
        (OfAllHeads(), "a head's weights depend on the other heads; set by_head=False"),
        (Flat(), r"weights gave \(2, 5, 5\); wanted is a tensor of shape \(2, 2, 5, 5\)"),
        (WideGate(), r"gate gave \(2, 2, 5, 4\); wanted is a tensor of shape \(2, 2, 5\)"),
        (Unused(), "its parameter slope gets no gradient, so it is never used"),
        (NotFused(), "torch's fused kernel on its factors does not give P v under model.mask=none; set fusible=False"),
    ],
)
def test_an_attention_that_breaks_its_promises_is_refused(elsewhere, monkeypatch, weighting, said):
    monkeypatch.setitem(ATTENTIONS, "spoilt", weighting)
    monkeypatch.setattr(model, "ATTENTIONS", [*model.ATTENTIONS, "spoilt"])
    with pytest.raises(ConfigError, match=f"^model.attention=spoilt: {said}"):
        check_weighting("spoilt")
    check_weighting("kernel")  # one that keeps them


@pytest.mark.further
def test_a_run_tries_what_it_takes_from_a_plugin_before_it_begins(elsewhere):
    created(["plugin", "mine"])
    file = elsewhere / "mine" / "__init__.py"
    docstring, changes = '"""A row for each parameter."""', "its table changes the module that it measures"
    zeroed = "[value.data.zero_() for module in subject.modules.values() for value in module.parameters()]"
    for old, new, said in (
        (
            '"weight_size": value',
            '"size": value',
            "analysis=mine_weights: its table has the column size, which its col",
        ),
        (docstring, "[module.train() for module in subject.modules.values()]", f"analysis=mine_weights: {changes}"),
        (docstring, zeroed, f"analysis=mine_weights: {changes}"),
        ("generator=generator)\n", ")\n", "task=mine_reversal: sample drew other sequences from the same generator"),
        (
            "def num_outputs",
            "def outputs",
            r"plugins=\[mine\]: rankbench fails with what it brings \(AttributeError: 'R",
        ),
        ("@ heads.own", "* heads.own", r"model.attention=mine_gated: gate gave \(2, 2, 5, 4\)"),
    ):
        text = file.read_text()
        file.write_text(text.replace(old, new))
        for attempt in (
            lambda: rb.train("plugins=mine", "experiment=mine", "budget=smoke", out=elsewhere / "run"),
            lambda: checked(["plugins=mine"]),
        ):
            TRIED.clear()
            with process(elsewhere), pytest.raises(ConfigError, match=f"^{said}"):
                attempt()
        assert not (elsewhere / "run" / "config.yaml").exists()
        file.write_text(text)
        check_weighting.cache_clear()


@pytest.mark.further
def test_the_skeleton_of_a_plugin_passes_its_own_tests(elsewhere):
    assert "rankbench check plugins=mine" in created(["plugin", "mine"])
    own = {}
    exec((elsewhere / "mine" / "test_mine.py").read_text(), own)
    tests = [own[name] for name in own if name.startswith("test_")]
    assert len(tests) == 2
    own["test_what_it_brings_keeps_its_promises"]()
    own["test_its_preset_trains_and_measures"](elsewhere)
    for words, said in (
        (["plugin", "mine"], "new plugin mine: .*/mine exists already; give another name"),
        (["plugin", "json"], "new plugin json: a module of this name is installed"),
        (["plugin", "my-own"], "new plugin my-own: not the name of a module"),
        (["plugin", "class"], "new plugin class: a word of Python"),
        (["task", "mine"], "new task mine: not understood; use `rankbench new plugin NAME`"),
    ):
        with pytest.raises(ConfigError, match=f"^{said}"):
            created(words)


@pytest.mark.further
def test_what_the_example_brings_keeps_its_promises(example):
    lines = checked([NAMED])
    for line in ("task=letter_count: ", "model.attention=inverse_square: ", "optimizer.name=sign_sgd: a training step"):
        assert f"\n{line}" in f"\n{lines}"
    assert "2 of CLAIMS read\n" in lines and lines.endswith("2 published numbers read")
    assert "\nexperiment=counting: composes" in lines
    assert refusal(checked, ["task=sorting"]).startswith("check task=sorting: takes plugins=")
