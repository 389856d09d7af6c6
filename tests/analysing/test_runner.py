"""rankbench.analysing.runner and subjects: files left, what is computed again, and whose weights are measured."""

import copy
import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from breadth import some
from refusals import refusal
from safetensors.torch import load_file

import rankbench
from rankbench import plots
from rankbench.analyses import ANALYSES
from rankbench.analysing import runner as module
from rankbench.analysing.runner import analyze, analyze_into, draw, judge_all, options_of
from rankbench.analysing.subjects import fresh_subjects, subjects_of_run
from rankbench.commands.compose import resolve
from rankbench.commands.composition import composed as compose_words
from rankbench.config.keys import ConfigError
from rankbench.judging import CLAIMS
from rankbench.model import initial_model
from rankbench.runs.files import write_json
from rankbench.runs.machine import Machine, source_digest
from rankbench.runs.run import Run
from rankbench.runs.tables import read_table
from rankbench.seeds import generator_for
from rankbench.tasks import build_task
from rankbench.training.loop import train

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
TINY = ["replicas=2", "seed=5", "model.layers=1", "model.width=8", "task.length=4", "task.alphabet=5", "figures=[]"]
TINY += ["task.train_size=20", "task.test_size=10", "analysis=[residual,paths]", "analysis.residual.variants=[full]"]
TINY += ["analysis.residual.sequences=4", "analysis.paths.subset_sizes=[2]", "analysis.paths.repeats=2"]
PNG = "figures=[png]"
TRAINING = ["trainer.steps=5", "trainer.batch_size=10", "trainer.eval_every=5", "optimizer.lr=0.01"]


@functools.cache
def composed(command, overrides):
    return resolve(compose_words(command, *TINY, *(TRAINING if command == "train" else []), *overrides))


def config(*overrides, command="analyze"):
    return copy.deepcopy(composed(command, overrides))


def paths_alone(*overrides):
    cfg = config(*overrides)
    return dataclasses.replace(cfg, analysis={"paths": cfg.analysis["paths"]})


def machine():
    return Machine.prepare(config())


@pytest.fixture(scope="module")
def fresh():
    return fresh_subjects(config(), machine())


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "a run")
    train(config(command="train"), run)
    return run


@pytest.fixture
def run(trained_once, tmp_path):
    """A trained run of two seeds, free to be spoilt."""
    shutil.copytree(trained_once.folder, tmp_path / "a run")
    return Run(tmp_path / "a run")


@pytest.fixture
def calls(monkeypatch):
    """(analysis, seed) of every table that is computed."""
    measured = []
    for name, analysis in dict(ANALYSES).items():

        def counted(subject, options, name=name, table=analysis.table):
            measured.append((name, subject.seed))
            return table(subject, options)

        monkeypatch.setitem(ANALYSES, name, dataclasses.replace(analysis, table=counted))
    return measured


BOTH = [("residual", 5), ("residual", 6), ("paths", 5), ("paths", 6)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- analyze ----------------------------------------------------------------------------------------------------------


def test_analyze_leaves_tables_figures_and_a_record(tmp_path, fresh, calls):
    lines = analyze(config(PNG), fresh, tmp_path)
    assert calls == BOTH
    wanted = {f"{name}.{suffix}" for name in ("residual", "paths") for suffix in ("csv", "png")}
    assert {path.name for path in tmp_path.iterdir()} == {"analyses.json", *wanted}
    assert (tmp_path / "paths.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "analyses.json").read_text())
    assert list(record) == ["residual", "paths"]
    for name, options in options_of(config()).items():
        assert record[name]["options"] == dataclasses.asdict(options)
        assert record[name]["seconds"] >= 0
    for name in ("residual", "paths"):
        for suffix in ("csv", "png"):
            assert str(tmp_path / f"{name}.{suffix}") in "\n".join(lines)
        assert ANALYSES[name].digest(read_table(tmp_path / f"{name}.csv")) in lines


@pytest.mark.parametrize("begins", [{"pdf": b"%PDF", "svg": b"<?xml"}, {}])
def test_figures_are_saved_in_the_types_asked_for(begins, tmp_path, fresh):
    cfg = paths_alone(f"figures=[{','.join(begins)}]")
    lines = analyze(cfg, fresh, tmp_path)
    files = {path.suffix[1:]: path for path in tmp_path.glob("paths.*") if path.suffix != ".csv"}
    assert set(files) == set(begins) and all(files[kind].read_bytes().startswith(begins[kind]) for kind in begins)
    line = f"-> {tmp_path / 'paths.pdf'} and {tmp_path / 'paths.svg'}"
    assert (line in lines) == bool(begins) and "-> " not in lines


def test_a_table_holds_every_subject_in_full_precision(tmp_path, fresh):
    analyze(config(), fresh, tmp_path)
    options = options_of(config())
    for name in ("residual", "paths"):
        table = read_table(tmp_path / f"{name}.csv")
        assert list(table.columns[:4]) == ["run", "task", "model", "seed"]
        assert table.seed.unique().tolist() == [5, 6] and (table.run == "fresh").all()
        for subject in fresh:
            rows_of_seed = table[table.seed == subject.seed].iloc[:, 4:].reset_index(drop=True)
            again = ANALYSES[name].table(subject, options[name])
            # the digits that were written are those of the float64: no tolerance
            pd.testing.assert_frame_equal(rows_of_seed, again, check_dtype=False, rtol=0, atol=0)


def test_what_is_there_with_the_same_options_is_not_computed_again(tmp_path, fresh, calls, caplog):
    caplog.set_level("INFO", "rankbench")
    first = analyze(config(PNG), fresh, tmp_path)
    assert f"{tmp_path / 'paths.csv'} is computed\n" in caplog.text
    files = contents(tmp_path)
    calls.clear()
    assert analyze(config(PNG), fresh, tmp_path) == first
    assert calls == [] and contents(tmp_path) == files  # figures too, byte for byte
    assert f"{tmp_path / 'paths.csv'} is up to date (same options, networks" in caplog.text


@pytest.mark.parametrize(
    ("change", "computed", "words"),
    [
        ("options", BOTH[2:], "options changed"),
        ("residual.csv", BOTH[:2], "the file is gone"),
        (
            "analyses.json",
            BOTH,
            "analyses.json does not record the file",
        ),  # a kill between a table and its record leaves it without one
        ("source_digest", BOTH, "rankbench's source changed"),
        ("__version__", BOTH, "rankbench's version changed"),
    ],
)
def test_what_changed_is_computed_again_and_that_alone(
    tmp_path, fresh, calls, monkeypatch, caplog, change, computed, words
):
    caplog.set_level("INFO", "rankbench")
    analyze(config(), fresh, tmp_path)
    calls.clear(), caplog.clear()
    cfg = config(*(["analysis.paths.repeats=1"] if change == "options" else []))
    if "." in change:
        (tmp_path / change).unlink()
    elif change != "options":
        monkeypatch.setattr(module, change, {"source_digest": lambda: "other", "__version__": "9.8.7"}[change])
    analyze(cfg, fresh, tmp_path)
    assert calls == computed and f"{tmp_path / computed[-1][0]}.csv is computed again: {words}" in caplog.text
    assert read_table(tmp_path / "paths.csv").repeat.max() == (0 if change == "options" else 1)
    calls.clear()
    analyze(cfg, fresh, tmp_path)
    assert calls == []


@pytest.mark.further
@pytest.mark.parametrize("begun_by", ["analyze", "train"])
def test_an_analysis_of_a_folder_in_which_another_is_at_work_is_refused(begun_by, tmp_path, run, monkeypatch):
    into = run.folder if begun_by == "train" else tmp_path / "analysed"
    cfg = config(f"out={into}")
    of_training = config(command="train")
    work = {"analyze": lambda: module.analyze_into(cfg), "train": lambda: module.analyze_trained(of_training, run)}
    measure, refusals = module.measure, []

    def measure_and_begin_others(*arguments):
        monkeypatch.setattr(module, "measure", measure)
        for another in work.values() if begun_by == "train" else [work["analyze"]]:
            before = contents(into)
            refusals.append(refusal(another))
            assert contents(into) == before
        return measure(*arguments)

    monkeypatch.setattr(module, "measure", measure_and_begin_others)
    work[begun_by]()
    assert len(refusals) == (2 if begun_by == "train" else 1)
    for line in refusals:
        assert f"out={into}: another process is writing there; wait for it, or give another folder" in line
    work[begun_by]()  # the lock goes with its holder


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def killed_behind_a_seed(tmp_path, fresh, calls, monkeypatch):
    """The folder of an analysis of paths that ended when its first seed was measured, and a look at what is kept.

    Every seed is kept, however short it took.
    """
    monkeypatch.setattr(module, "SECONDS_KEPT", -1)
    paths = ANALYSES["paths"]

    def measured_before_the_end(subject, options):
        if subject.seed == 6:
            raise Killed
        return paths.table(subject, options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setitem(ANALYSES, "paths", dataclasses.replace(paths, table=measured_before_the_end))
        analyze(paths_alone(), fresh, tmp_path)
    assert calls == [("paths", 5)] and not (tmp_path / "paths.csv").exists()
    calls.clear()
    return tmp_path


def test_a_stopped_analysis_goes_on_behind_the_last_seed_that_it_measured(
    killed_behind_a_seed, tmp_path_factory, fresh, calls, caplog
):
    caplog.set_level("INFO", "rankbench")
    at_once = tmp_path_factory.mktemp("at once")
    analyze(paths_alone(), fresh, killed_behind_a_seed)
    assert calls == [("paths", 6)] and "seed 5 was measured before (1 of 2)" in caplog.text
    analyze(paths_alone(), fresh, at_once)
    assert (killed_behind_a_seed / "paths.csv").read_bytes() == (at_once / "paths.csv").read_bytes()
    for folder in killed_behind_a_seed, at_once:
        assert not (folder / "paths.unfinished").exists()


@pytest.mark.parametrize("change", ["options", "code", "table", "record", "torn", "gone"])
def test_seeds_of_another_analysis_or_that_changed_are_measured_again(
    killed_behind_a_seed, tmp_path_factory, fresh, calls, monkeypatch, change
):
    cfg, kept = paths_alone(), killed_behind_a_seed / "paths.unfinished"
    match change:
        case "options":
            cfg = paths_alone("analysis.paths.repeats=1")
        case "code":
            monkeypatch.setattr(module, "source_digest", lambda: "other")
        case "table":
            table = kept / "1.csv"
            table.write_text(table.read_text().replace("5", "4", 1))
        case "record":
            write_json(kept / "kept.json", {"files": []})
        case "torn":
            (kept / "kept.json").write_text('{"key": ')
        case "gone":
            (kept / "kept.json").unlink()
    analyze(cfg, fresh, killed_behind_a_seed)
    assert calls == [("paths", 5), ("paths", 6)] and not kept.exists()
    at_once = tmp_path_factory.mktemp("at once")
    analyze(cfg, fresh, at_once)
    assert (killed_behind_a_seed / "paths.csv").read_bytes() == (at_once / "paths.csv").read_bytes()


def test_seeds_that_took_no_time_leave_no_files(tmp_path, fresh, monkeypatch):
    def refused(*_):
        raise AssertionError

    monkeypatch.setattr(module.KeptSeeds, "keep", refused)
    analyze(config(), fresh, tmp_path)
    monkeypatch.setattr(module, "SECONDS_KEPT", -1)
    with pytest.raises(AssertionError):  # the control: it would have been called
        analyze(config(), fresh, tmp_path / "other")


def test_the_source_digest_sees_every_file_of_the_package(tmp_path, monkeypatch):
    """Of a copy of the package: a changed comment in one file and a new file."""
    package = tmp_path / "rankbench"
    shutil.copytree(Path(rankbench.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    digest, analyses = source_digest.__wrapped__, package / "analyses"
    before = digest()
    monkeypatch.setattr("rankbench.runs.machine.__file__", str(package / "runs" / "machine.py"))
    assert digest() == before
    with (analyses / "residual.py").open("a") as source:
        source.write("# changed")
    changed = digest()
    (analyses / "new.py").touch()
    assert len({before, changed, digest()}) == 3 and digest() == digest()


@pytest.mark.further
@pytest.mark.parametrize("task", ["char_lm", "memorization"])
def test_another_text_under_the_same_path_is_analysed_again(tmp_path, calls, task, caplog):
    """The second text has the same sentences with other letters, so that sizes, numbers and networks are the same."""
    if task == "memorization":
        pytest.importorskip("sentencepiece")
    caplog.set_level("INFO", "rankbench")
    text, sentences = tmp_path / "text.txt", ["abab ba", "baab", "bb aab", "aabb ab", "ab ba b", "bab a"]
    words = ["analysis=[residual]", f"task.path={text}"]
    words += ["task.vocabulary=6"] if task == "memorization" else ["task.held_out=0.2", "task.train_size=null"]
    words += ["task.length=5", "task.train_size=4"] if task == "memorization" else ["task.length_limit=5"]
    words += [] if task == "memorization" else ["task.valid_size=null", "task.test_size=null", "model.mask=causal"]

    def analysed():
        calls.clear(), caplog.clear()
        own = [word for word in TINY if word.split(".")[0] in ("replicas=2", "seed=5", "model")]
        cfg = resolve(compose_words("analyze", *own, f"task={task}", *words, "analysis.residual.sequences=2"))
        analyze(cfg, fresh_subjects(cfg, Machine.prepare(cfg)), tmp_path)
        return len(calls)

    text.write_text("\n".join(sentences))
    assert [analysed(), analysed()] == [2, 0]
    assert json.loads((tmp_path / "analyses.json").read_text())["residual"]["corpus"] is not None
    text.write_text("\n".join(sentences).replace("a", "c"))
    assert analysed() == 2 and "residual.csv is computed again: the corpus changed" in caplog.text
    assert analysed() == 0


@pytest.mark.further
@pytest.mark.parametrize(
    "changes",
    some([["seed=7"], ["model.layers=2"], ["task.test_size=9"], ["precision=fp32"]], 2),
    ids=lambda words: words[0],
)
def test_another_model_in_the_same_folder_gets_numbers_of_its_own(tmp_path, fresh, changes):
    """`out=` names one folder twice: what the first model left there is not what the second one is."""
    own, both = tmp_path / "own", tmp_path / "both"
    own.mkdir(), both.mkdir()
    cfg = config(*changes)
    other = fresh_subjects(cfg, Machine.prepare(cfg))
    analyze(config(), fresh, both)
    analyze(cfg, other, both)
    analyze(cfg, other, own)
    assert (both / "paths.csv").read_bytes() == (own / "paths.csv").read_bytes()


def test_no_figure_and_no_verdict_of_earlier_rows_is_left_beside_a_table(tmp_path, fresh):
    analyze(paths_alone(PNG, "claims=[paths_sum_to_output]"), fresh, tmp_path)
    before = contents(tmp_path)
    analyze(paths_alone(), fresh, tmp_path)  # the same rows
    assert contents(tmp_path) == before and {"paths.png", "verdicts.csv", "statements.csv"} < before.keys()
    analyze(paths_alone("analysis.paths.repeats=1"), fresh, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"paths.csv", "analyses.json"}


def test_a_folder_with_a_table_of_other_networks_is_refused(tmp_path):
    (tmp_path / "there").mkdir()
    cfg = dataclasses.replace(paths_alone(), out=str(tmp_path / "there"))
    analyze_into(cfg)
    before = contents(tmp_path / "there")
    residual_alone = {"residual": config().analysis["residual"]}
    of_other_seeds = dataclasses.replace(cfg, seed=7, analysis=residual_alone)
    said = "there: holds paths.csv of other networks or seeds; give another folder, or measure it again, as in"
    assert refusal(analyze_into, of_other_seeds).endswith(f"{said} analysis=[residual,paths]")
    assert contents(tmp_path / "there") == before
    analyze_into(dataclasses.replace(cfg, analysis=residual_alone))
    analyze_into(dataclasses.replace(of_other_seeds, analysis={**residual_alone, **cfg.analysis}))
    for name in ("paths", "residual"):
        assert set(read_table(tmp_path / f"there/{name}.csv").seed) == {7, 8}


def test_claims_leave_verdicts(tmp_path, fresh):
    cfg = config("claims=[paths_sum_to_output,dong_fig4_length_0_no_information]")
    lines = analyze(cfg, fresh, tmp_path)
    verdicts = read_table(tmp_path / "verdicts.csv")
    assert verdicts.claim.tolist() == ["paths_sum_to_output", *["dong_fig4_length_0_no_information"] * 2]
    # two seeds are too few, but for an exact sum
    assert verdicts.outcome.tolist() == ["passed", "undecided", "undecided"] and (verdicts.num_seeds == 2).all()
    statements = read_table(tmp_path / "statements.csv")
    assert statements.claim.tolist() == cfg.claims and statements.num_settings.tolist() == [1, 2]
    assert str(tmp_path / "verdicts.csv") in lines[-1] and str(tmp_path / "statements.csv") in lines[-1]
    assert all(name in line for name, line in zip(cfg.claims, lines[-3:-1], strict=True))


def test_a_job_of_a_sweep_says_nothing_of_claims_about_other_jobs(tmp_path, fresh, monkeypatch):
    table = ANALYSES["paths"].table(fresh[0], options_of(config())["paths"]).assign(seed=fresh[0].seed)
    of_another = dataclasses.replace(CLAIMS["paths_sum_to_output"], applies=lambda rows: False)
    monkeypatch.setitem(CLAIMS, "of_another", of_another)
    claims = ["paths_sum_to_output", "of_another"]
    alone, of_job = (judge_all(claims, {"paths": table}, tmp_path, None, is_job=is_job) for is_job in (False, True))
    assert "of_another" in alone[1] and "the table has no rows for this claim" in alone[1] and len(alone) == 3
    assert of_job == [alone[0], alone[2]]


def test_each_value_of_a_facet_is_judged_and_drawn(tmp_path, fresh, monkeypatch):
    cfg, drawn = config("claims=[paths_sum_to_output]", "published=dong_fig4_sorting"), []
    table = ANALYSES["paths"].table(fresh[0], options_of(cfg)["paths"]).assign(seed=fresh[0].seed)
    both = pd.concat([table.assign(**{"task.label": label}) for label in ("position", "value")], ignore_index=True)
    paths = ANALYSES["paths"]
    spied = dataclasses.replace(paths, figure=lambda *given: drawn.append(given) or paths.figure(*given))
    monkeypatch.setitem(ANALYSES, "paths", spied)
    pages = {"paths": [plots.Page(both, "task.label", "")]}
    files = draw(pages, tmp_path, cfg.published, (".png",))
    lines = judge_all(cfg.claims, {"paths": both}, tmp_path, "task.label")
    assert read_table(tmp_path / "verdicts.csv")["where"].tolist() == ["task.label=position", "task.label=value"]
    ((given, published, facet),) = drawn
    assert given is both and facet == "task.label" and set(published.figure) == {"dong_fig4_sorting"}
    assert "passed in both settings; the closest is task.label=position" in lines[0]
    assert len(lines) == 1 + 1 and tmp_path / "paths.png" in files["paths"]


# --- options_of -------------------------------------------------------------------------------------------------------


def test_a_refusal_comes_before_any_file(tmp_path, fresh):
    with pytest.raises(ConfigError):
        analyze(dataclasses.replace(config(), claims=["no such claim"]), fresh, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_claim_names_an_analysis():
    assert {claim.table for claim in CLAIMS.values()} <= set(ANALYSES)


# --- subjects ---------------------------------------------------------------------------------------------------------


def same_weights(model, weights):
    state = model.state_dict()
    assert state.keys() == weights.keys()
    return all(torch.equal(state[name], weights[name].double()) for name in state)


def test_subjects_have_the_weights_of_the_checkpoint_and_those_that_training_began_with(run):
    cfg, task = run.config, build_task(run.config.task)
    stacked = load_file(run.folder / "checkpoint.safetensors")
    subjects = subjects_of_run(run, machine())
    assert [subject.seed for subject in subjects] == [5, 6] and {subject.run for subject in subjects} == {"a run"}
    for index, subject in enumerate(subjects):
        assert list(subject.networks) == ["trained", "initialised"]
        assert same_weights(subject.networks["trained"], {name: weight[index] for name, weight in stacked.items()})
        assert same_weights(subject.networks["initialised"], initial_model(cfg.model, task, subject.seed).state_dict())
        assert not same_weights(subject.networks["trained"], initial_model(cfg.model, task, subject.seed).state_dict())
        assert all(p.dtype == torch.float64 and p.device.type == "cpu" for p in subject.network.parameters())
        for purpose, batch, size in (("train", subject.train, 20), ("test", subject.test, 10)):
            wanted = task.sample(size, generator_for(subject.seed, purpose))
            assert torch.equal(batch.inputs, wanted.inputs) and torch.equal(batch.targets, wanted.targets)


@pytest.mark.further
def test_chosen_seeds_have_the_rows_that_they_have_among_all(run, tmp_path):
    (tmp_path / "all").mkdir(), (tmp_path / "second").mkdir()
    analyze(config(), subjects_of_run(run, machine()), tmp_path / "all")
    second = subjects_of_run(run, machine(), [6])
    assert [subject.seed for subject in second] == [6]
    analyze(config(), second, tmp_path / "second")
    for name in ("residual", "paths"):
        of_all = read_table(tmp_path / "all" / f"{name}.csv")
        of_second = of_all[of_all.seed == 6].reset_index(drop=True)
        pd.testing.assert_frame_equal(read_table(tmp_path / "second" / f"{name}.csv"), of_second, check_exact=True)


def test_the_test_accuracy_of_the_run_is_the_whole_accuracy_of_the_table(run, tmp_path):
    """Two ways to one number: what training printed (float32) and what the analysis measures (float64)."""
    analyze(config(), subjects_of_run(run, machine()), run.folder)
    table = read_table(run.folder / "paths.csv")
    recorded = {row["seed"]: row["test_accuracy"] for row in run.summary()["seeds"]}
    # no token of these 40 a seed is so near a tie that the precision decides
    assert table.groupby("seed").whole_accuracy.first().to_dict() == pytest.approx(recorded, abs=1e-6)


@pytest.mark.further
def test_a_float64_run_is_measured_with_its_own_weights(tmp_path):
    """Two ways to one number: training's last look at the layers and the analysis, both in float64."""
    last = ["precision=fp64", "trainer.dynamics_every=5", "trainer.dynamics_sequences=4", "model.norm=pre"]
    run = Run(tmp_path / "run")
    train(config(*last, command="train"), run)
    analyze(config(), subjects_of_run(run, machine()), run.folder)
    layers, residual = read_table(run.folder / "layers.csv"), read_table(run.folder / "residual.csv")
    axes = ["seed", "layer", "sublayer", "head"]
    layers = layers[layers.step == 5].set_index(axes).sort_index()
    residual = residual[residual.weights == "trained"].set_index(axes).sort_index()
    metrics = ["relative_residual", "effective_rank", "attention_entropy", "attention_effective_rank"]
    # the same operations on the same numbers; weights rounded to float32 would differ by 1e-8
    pd.testing.assert_frame_equal(residual[metrics], layers[metrics], rtol=1e-12, atol=1e-15)


def test_an_endless_stream_is_sampled_for_the_baselines(tmp_path, monkeypatch):
    monkeypatch.setattr("rankbench.analysing.subjects.BASELINE_SEQUENCES", 33)
    subject, _ = fresh_subjects(config("task.train_size=null"), machine())
    assert subject.train.inputs.shape == (33, 4)


def test_fresh_subjects_are_initial_models(fresh):
    cfg = config()
    task = build_task(cfg.task)
    assert [subject.seed for subject in fresh] == [5, 6]
    for subject in fresh:
        assert list(subject.networks) == ["initialised"] and subject.who["run"] == "fresh"
        assert same_weights(subject.network, initial_model(cfg.model, task, subject.seed).state_dict())


def test_a_training_that_has_not_finished_is_said(run, caplog):
    summary = json.loads((run.folder / "summary.json").read_text())
    for status, count in (("finished", 0), ("running", 1), ("failed", 1)):
        (run.folder / "summary.json").write_text(json.dumps(summary | {"status": status}))
        caplog.clear()
        subjects_of_run(run, machine())
        assert caplog.text.count(f"the training of {run.folder} has not finished") == count


def test_a_diverged_seed_is_left_out_and_named_and_if_all_have_the_run_is_refused(run, caplog):
    summary, second = run.summary(), run.weights()["read_out.bias"][1].double()
    summary["seeds"][0]["status"] = "diverged"
    write_json(run.folder / "summary.json", summary)
    (subject,) = subjects_of_run(run, machine())
    assert subject.seed == 6 and torch.equal(subject.network.read_out.bias, second)
    assert [record.levelname for record in caplog.records if "seed 5" in record.message] == ["WARNING"]
    summary["seeds"][1]["status"] = "diverged"
    write_json(run.folder / "summary.json", summary)
    line = refusal(subjects_of_run, run, machine())
    assert str(run.folder) in line and "every seed diverged" in line


def test_a_seed_without_a_test_loss_is_refused(run):
    """As of a file that was edited: nothing says whether its training had converged."""
    lines = (run.folder / "metrics.csv").read_text().splitlines(keepends=True)
    (run.folder / "metrics.csv").write_text("".join(line for line in lines if ",6,test," not in line))
    line = refusal(subjects_of_run, run, machine())
    assert line.startswith(f"{run.folder / 'metrics.csv'}: has no row of seed 6 and split test; put back the file")
    assert len(subjects_of_run(run, machine(), [5])) == 1


@pytest.mark.parametrize("change", ["another shape", "one less", "one more", "fewer seeds"])
def test_weights_that_do_not_fit_the_config_are_refused(run, change):
    weights = run.weights()
    if change == "another shape":
        weights["read_out.bias"] = weights["read_out.bias"][:, :-1].clone()
    elif change == "one less":
        del weights["read_out.bias"]
    elif change == "fewer seeds":
        weights = {name: weight[:1].clone() for name, weight in weights.items()}
    else:
        weights["another"] = weights["read_out.bias"].clone()
    run.save_weights(weights)
    run.record_files(["checkpoint.safetensors"])
    line = refusal(subjects_of_run, run, machine())
    assert all(part in line for part in (str(run.folder), "checkpoint.safetensors", "config.yaml"))


def test_a_moved_folder_analyses_to_the_same_numbers(run, tmp_path):
    analyze(config(), subjects_of_run(run, machine()), run.folder)
    tables = {name: read_table(run.folder / f"{name}.csv") for name in ("residual", "paths")}
    for name in ("residual", "paths"):
        (run.folder / f"{name}.csv").unlink()
    (tmp_path / "elsewhere").mkdir()
    moved = Run(Path(shutil.move(run.folder, tmp_path / "elsewhere" / "a moved run")))
    analyze(config(), subjects_of_run(moved, machine()), moved.folder)
    for name, before in tables.items():
        after = read_table(moved.folder / f"{name}.csv")
        assert set(after.run) == {"a moved run"}
        pd.testing.assert_frame_equal(after.drop(columns="run"), before.drop(columns="run"), rtol=0, atol=0)
