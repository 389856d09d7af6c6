"""rankbench.commands.sweeps: which jobs the words of a sweep make."""

import re

import pytest
import yaml
from command_line import SMALLEST, refused, succeeds
from omegaconf import OmegaConf

from rankbench.commands.compose import as_keys
from rankbench.commands.composition import initialised, parsed
from rankbench.commands.resolvers import job_folder
from rankbench.commands.sweeps import jobs_of
from rankbench.config import plugins


@pytest.mark.parametrize("words", [[], ["--cfg", "job"]])
def test_a_word_without_values_is_one_line_and_makes_no_folder(words, tmp_path):
    line = refused("train", "-m", "model.layers=range(1,0)", "seed=0,1", *words, at=tmp_path)
    assert line == "rankbench train: model.layers=range(1,0): no values; give one or more"
    assert list(tmp_path.iterdir()) == []


def test_an_interval_without_a_search_is_one_line(tmp_path):
    line = refused("train", "-m", "optimizer.lr=interval(1,2)", at=tmp_path)
    said = "optimizer.lr=interval(1,2): is for search=optuna; give values, as in 1,2 or range(1,3)"
    assert line == f"rankbench train: {said}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["launcher", "sweeper"])
def test_an_unknown_launcher_or_sweeper_is_one_line_and_makes_no_folder(kind, tmp_path):
    line = refused("train", "-m", *SMALLEST, f"hydra.{kind}._target_=mine.Own", "seed=0,1", at=tmp_path)
    assert line.startswith(f"rankbench train: hydra.{kind}._target_=mine.Own: unknown; allowed are hydra._internal.")
    assert f".basic_{kind}.Basic{kind.title()}" in line
    assert list(tmp_path.iterdir()) == []


def test_a_glob_stands_for_the_choices_of_a_group(tmp_path):
    with initialised():
        models = [job[0].partition("=")[2] for job in jobs_of(parsed(["model=glob(san*)", "seed=0"]))]
    assert models == sorted(models) == [name for name in plugins.choices("model") if name.startswith("san")]
    first = yaml.safe_load(succeeds("train", "-m", "model=glob(san*)", "--cfg", "job", at=tmp_path).out)
    assert first["model"]["name"] == models[0]


def test_a_batch_of_minus_one_is_of_all_jobs_and_a_sweep_of_reports_makes_each(tmp_path, undrawn_here):
    words = [*SMALLEST, "trainer.steps=0", "figures=[]", "hydra.sweeper.max_batch_size=-1", "seed=0,1", "out=o"]
    assert "2 jobs, 2 finished" in succeeds("train", "-m", *words, at=tmp_path).out
    succeeds("report", "-m", "runs=o", "plot.column=single,double", "out=reports", at=tmp_path)
    assert len(list(tmp_path.glob("reports/*/report.html"))) == 2


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("", "3"),
        ("model.layers=6,seed=1", "3_model.layers=6,seed=1"),
        ("task.path=a/b", "3_task.path=a-b~ffff"),
        ("model.name=" + 100 * "x", f"3_model.name={89 * 'x'}~ffff"),
        (r"model.skip=$\{model.mlp\}", "3_model.skip=True"),
    ],
)
def test_the_folder_of_a_job_has_its_words_or_as_many_as_can_be_and_a_digest(words, folder):
    name = job_folder(3, words, _root_=OmegaConf.create({"model": {"mlp": True}}))
    assert re.sub("~[0-9a-f]{8}$", "~ffff", name) == folder
    assert "~" not in name or name != job_folder(3, f"{words}x")


def test_several_tables_are_drawn_in_turn(tmp_path):
    rows = ["run,task,model,seed,job_status,status,test_accuracy,model.layers"]
    rows += ["a,sorting,san,0,finished,finished,0.5,1", "b,sorting,san,0,finished,finished,0.6,2", ""]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sweep.csv").write_text("\n".join(rows))
    assert as_keys("plot", ["a.csv", "out=o", "b=c.csv"]) == ["-m", "out=o", "table=a.csv,'b=c.csv'"]
    succeeds("plot", "one/sweep.csv", "two/sweep.csv", "out=o", at=tmp_path)
    assert len(list((tmp_path / "o").glob("*/sweep.png"))) == 2
    line = refused("plot", "one/sweep.csv", "three/sweep.csv", "out=p", at=tmp_path)
    assert line.startswith("rankbench plot: table=three/sweep.csv: no such file") and not (tmp_path / "p").exists()
