"""rankbench.commands.composition: what Hydra itself composes, with the YAML files merged once."""

import shlex

import hydra
import pytest
from breadth import some
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rankbench.commands.composition import _composition, composed, composed_here, initialised, name_folder
from rankbench.config import plugins
from rankbench.config.presets import described

OUT = "out=here"  # by default the time
EXCLUDED = "hydra.job.config.override_dirname.exclude_keys=[out,task]"
LINES = [
    "train",
    "train seed=3 model.layers=4 seed=5",
    "train model.layers=4 model=san task=char_lm hydra.run.dir=there",
    f"train seed=3 model.heads=1 task=sorting {EXCLUDED}",
    "train model.mlp_skip=${model.skip} optimizer.lr='1e-3' plugins=[] hydra.mode=MULTIRUN",
    "train model={layers:3,heads:2} device=cpu",
    "train model.layers=4 model={layers:3} model.heads=2",
    "train +model.extra=1 model.extra=2",
    "train ++model.layers=3 model.layers=2",
    "train analysis=[paths] analysis.paths.repeats=2 ~analysis.paths.repeats",
    "analyze run=latest seeds=[0,1] analysis=[residual] budget=smoke",
    "report runs=a report.value=[test_loss] report.where='a=1,b=2'",
    "plot table=a.csv",
    "data corpus=ptb",
]


def texts(command, words):
    """The config with Hydra's part as YAML, ours and Hydra's own."""
    with initialised():
        configs = composed_here(command, words), hydra.compose(command, list(words), return_hydra_config=True)
    return [OmegaConf.to_yaml(config) for config in configs]


@pytest.mark.parametrize("line", some(LINES, 2))
def test_hydra_composes_the_same(line, tmp_path, monkeypatch):
    command, *words = line.split()
    composed(command, *words)  # a later composition must not depend on the folder of an earlier one
    monkeypatch.chdir(tmp_path)
    ours, theirs = texts(command, [*words, OUT] if command != "data" else words)
    assert ours == theirs


@pytest.mark.parametrize("name", ["demo", "kim_fig4_charlm", "knob_norm_place", "dong_fig4_sorting"])
def test_hydra_composes_the_same_preset(name):
    words = [f"experiment={name}", "seed=3", "replicas=7", OUT]
    ours, theirs = texts(described()[name].verb, words)
    assert ours == theirs


def test_compositions_share_nothing():
    first = composed("train", "model.layers=3")
    first.model.heads = 64
    assert composed("train", "model.layers=3").model.heads != 64


@pytest.mark.parametrize("word", ["model.layers=many", "model.foo=3", "model=foo", "model@pkg=san", "seed=1,2"])
def test_hydra_refuses_the_same(word):
    raised = []
    for compose in (composed_here, lambda command, words: hydra.compose(command, words, return_hydra_config=True)):
        with initialised(), pytest.raises(HydraException) as error:
            compose("train", ["seed=3", word])
        raised.append((type(error.value), str(error.value)))
    assert raised[0] == raised[1]


def test_files_are_merged_once_until_one_changes(tmp_path, monkeypatch):
    (tmp_path / "experiment").mkdir()
    preset = tmp_path / "experiment" / "mine.yaml"
    preset.write_text("# @package _global_\nseed: 1\n")
    folders = [*plugins.folders(), tmp_path]
    monkeypatch.setattr(plugins, "folders", lambda: folders)
    (tmp_path / "experiment" / ".#mine.yaml").symlink_to("an editor's lock")
    assert composed("train", "experiment=mine").seed == 1
    merged = _composition.cache_info().misses
    assert [composed("train", "experiment=mine", f"replicas={n}").replicas for n in (1, 2)] == [1, 2]
    assert _composition.cache_info().misses == merged
    preset.write_text("# @package _global_\nseed: 20\n")
    assert composed("train", "experiment=mine").seed == 20


@pytest.mark.parametrize(
    ("line", "varied", "name"),
    [
        ("train", [], "_transformer"),
        ("train model=san", [], "_san"),
        ("train experiment=demo model.name=mine", [], "_demo"),
        ("train model.name='a b/c'", ["model.heads"], "_a-b-c"),
        ("train", ["model"], ""),
        ("train", ["experiment"], ""),
        ("analyze", ["checkpoint"], ""),
        ("train out=here", [], ""),
        ("analyze run=latest", [], ""),
        ("analyze checkpoint=hub/tiny-bert/", [], "_tiny-bert"),
        ("analyze module=mine/net.py:build", [], "_build"),
        ("report", [], ""),
    ],
)
def test_a_folder_has_its_time_and_its_name(line, varied, name):
    command, *words = shlex.split(line)
    with initialised():
        config = composed_here(command, words)
    before = config.out
    name_folder(config, varied)
    assert config.out == before + name
