"""rankbench.commands.finished_jobs: a sweep's command knows its finished jobs without composing them, and no others."""

import json
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from command_line import SMALLEST, rankbench, refused, succeeds

from rankbench.commands import composition, finished_jobs, start, sweeps
from rankbench.config import plugins
from rankbench.plots import style
from rankbench.runs import machine

pytestmark = pytest.mark.usefixtures("undrawn")
WORDS = [
    *(*SMALLEST, "trainer.steps=2", "trainer.eval_every=1", "analysis=[residual]"),
    *("analysis.residual.sequences=2", "claims=[dong_claim31]", "model.heads=1,2,4", "out=sweep"),
]
SWEEP = ["train", "-m", *WORDS]


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory):
    """A folder with a finished sweep of three jobs, which took 1, 2 and 3 minutes, and what its command printed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        clock = iter((0, 60, 180, 360))
        patch.setattr(sweeps, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        result = succeeds(*SWEEP, at=folder)
    shutil.copytree(folder / "sweep", folder / "whole")
    return folder, result


@pytest.fixture
def at(finished_sweep):
    """The folder with the sweep as its command left it."""
    folder = finished_sweep[0]
    shutil.rmtree(folder / "sweep")
    shutil.copytree(folder / "whole", folder / "sweep")
    return folder


@pytest.fixture
def composed(monkeypatch):
    """The words of the jobs that are composed, in a list that grows."""
    composed_words = []

    def counted(command, words):
        composed_words.append([word for word in words if not word.startswith("hydra.")])
        return composition.composed_here(command, words)

    for module in (sweeps, start):
        monkeypatch.setattr(module, "composed_here", counted)
    return composed_words


def composed_jobs(words):
    """The heads of the jobs whose configs were composed."""
    heads = [word.partition("=")[2] for job in words for word in job if word.startswith("model.heads=")]
    return sorted({text for text in heads if "," not in text})  # those with commas are of the sweep itself


def job(at, heads):
    return next(at.glob(f"sweep/*_model.heads={heads}"))


def test_the_time_that_is_left_is_that_of_the_jobs_so_far(finished_sweep):
    lines = [line for line in finished_sweep[1].err.splitlines() if "left" in line]
    assert lines == ["2 jobs left, about 2 min", "1 job left, about 1.5 min"]


@pytest.mark.further
def test_the_same_command_composes_no_finished_job_and_prints_the_same_lines(finished_sweep, at, composed):
    before = {path: path.read_bytes() for path in at.glob("sweep/*/*.*") if path.is_file() and path.suffix != ".log"}
    result = succeeds(*SWEEP, at=at)
    assert composed_jobs(composed) == [] and len(composed) <= 2  # of the sweep itself
    assert result.out == finished_sweep[1].out and "dong_claim31" in result.out
    jobs = [f"sweep/{number}_model.heads={heads}" for number, heads in enumerate((1, 2, 4))]
    lines = [line for line in result.err.splitlines() if "trained already" in line]
    assert lines == [f"{folder} is trained already" for folder in jobs]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.further
def test_a_longer_sweep_composes_the_new_job_alone_twice(at, composed):
    out = succeeds(*SWEEP[:-2], "model.heads=1,2,4,8", "out=sweep", at=at).out
    assert composed_jobs(composed) == ["8"]
    assert sum("model.heads=8" in words for words in composed) == 2  # once to check it, once to run it
    lines = [line for line in out.splitlines() if line.startswith("job ")]
    assert lines == [f"job {number} of 4: model.heads={heads}" for number, heads in enumerate((1, 2, 4, 8), 1)]
    assert list(pd.read_csv(at / "sweep/sweep.csv")["model.heads"]) == [1, 2, 4, 8]


def spoil(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "residual.csv").unlink(),
        lambda folder: spoil(folder / "residual.csv", "initialised", "trained"),
        lambda folder: (folder / finished_jobs.RECORD).unlink(),
        lambda folder: (folder / finished_jobs.RECORD).write_text("no JSON"),
        lambda folder: (folder / finished_jobs.RECORD).write_text("[1]"),
        lambda folder: spoil(folder / finished_jobs.RECORD, '"lines": [', '"lines": [1, '),
        lambda folder: spoil(folder / finished_jobs.RECORD, '"files": {', '"files": {"/dev/zero": null, '),
    ],
)
def test_a_job_whose_folder_changed_has_not_finished(damage, at):
    folder = job(at, 2)
    made_from = json.loads((folder / finished_jobs.RECORD).read_text())["recipe"]
    assert finished_jobs.finished_job(folder, made_from).name == "model.heads=2"
    assert finished_jobs.finished_job(folder, "another") is None
    damage(folder)
    assert finished_jobs.finished_job(folder, made_from) is None


@pytest.mark.further
def test_a_job_whose_folder_changed_is_composed_and_made_whole_again(finished_sweep, at, composed):
    table, whole = job(at, 2) / "residual.csv", (job(at, 2) / "residual.csv").read_bytes()
    spoil(table, "initialised", "trained")
    assert succeeds(*SWEEP, at=at).out == finished_sweep[1].out
    assert composed_jobs(composed) == ["2"] and table.read_bytes() == whole
    composed.clear()
    succeeds(*SWEEP, at=at)
    assert composed_jobs(composed) == []


def test_another_config_in_the_folder_is_refused_as_before(at):
    config = job(at, 2) / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"seed": 5}))
    said = "rankbench train: seed=0: the run in sweep/1_model.heads=2 was begun with seed=5; give the same"
    assert refused(*SWEEP, at=at).startswith(said)
    assert "trainer.batch_size=4: the run in" in refused(*SWEEP, "trainer.batch_size=4", at=at)


def test_all_that_a_job_depends_on_belongs_to_its_surroundings(tmp_path, monkeypatch):
    hydra = composition.composed("train", "optimizer=sgd", return_hydra_config=True).hydra
    digests = [finished_jobs.surroundings(hydra) for _ in range(2)]
    assert digests[0] == digests[1] is not None
    for change in (
        lambda: monkeypatch.setattr(finished_jobs, "__version__", "0.0.0"),
        lambda: monkeypatch.setattr(machine, "packages", lambda: {"torch": "0"}),
        lambda: monkeypatch.setattr(machine, "source_digest", lambda: "other code"),
        lambda: monkeypatch.setattr(plugins, "digest", lambda: "another plug-in"),
        lambda: monkeypatch.setitem(style.STYLE, "font.size", 99),
        lambda: monkeypatch.setattr(finished_jobs, "_yaml_files", lambda _: "other choices"),
        lambda: monkeypatch.chdir(tmp_path),
        lambda: hydra.overrides.hydra.append("hydra.verbose=true"),
    ):
        change()
        digests.append(finished_jobs.surroundings(hydra))
        assert digests[-1] not in digests[:-1]


def test_what_the_words_do_not_say_is_no_recipe(tmp_path):
    assert finished_jobs.recipe(0, ["model.mlp_skip=${model.skip}"], "around") is None
    assert finished_jobs.recipe(0, ["seed=1"], None) is None
    recipes = [
        finished_jobs.recipe(*job)
        for job in [(0, ["a=1"], "x"), (1, ["a=1"], "x"), (0, ["a=2"], "x"), (0, ["a=1"], "y")]
    ]
    assert len(set(recipes)) == 4
    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    plain = finished_jobs._yaml_files([str(tmp_path)])
    (tmp_path / "mine.yaml").write_text("seed: 2\n")
    assert None is not finished_jobs._yaml_files([str(tmp_path)]) != plain
    (tmp_path / "mine.yaml").write_text("seed: ${oc.env:SEED}\n")
    assert finished_jobs._yaml_files([str(tmp_path)]) is None


@pytest.mark.further
def test_a_changed_corpus_is_read_again(tmp_path, composed):
    (tmp_path / "text.txt").write_text("a few words of a text\nand a second line of it\n" * 40)
    words = ["train", "-m", "task=char_lm", "task.path=text.txt", "model.mask=causal", *SMALLEST[:2]]
    words += [f"task.{split}_size=null" for split in ("train", "valid", "test")]
    words += ["trainer.steps=2", "trainer.batch_size=4", "model.heads=1,2", "out=sweep"]
    succeeds(*words, at=tmp_path)
    composed.clear()
    succeeds(*words, at=tmp_path)
    assert composed_jobs(composed) == []
    (tmp_path / "text.txt").unlink()
    assert "text.txt" in refused(*words, at=tmp_path)


@pytest.mark.further
def test_a_job_that_failed_runs_again_and_the_others_do_not(tmp_path, monkeypatch, composed):
    from rankbench.training import loop

    words = ["train", "-m", *WORDS[:9], "analysis=[]", "seed=0,1,2", "out=sweep"]
    train = loop._train

    def failing(cfg, *args):
        if cfg.seed == 1:
            raise RuntimeError("a bug")
        return train(cfg, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_train", failing)
        with pytest.raises(RuntimeError, match="a bug"):
            rankbench(*words, at=tmp_path)
    composed.clear()
    assert "3 jobs, 3 finished" in succeeds(*words, at=tmp_path).out
    assert {word for job in composed for word in job if word in ("seed=0", "seed=1", "seed=2")} == {"seed=1"}
