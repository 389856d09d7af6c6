"""rankbench.commands.messages: real complaints of Hydra and OmegaConf, each as one line with key, value and what is
allowed."""

import pytest
from command_line import refused
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from refusals import refusal

from rankbench.commands.compose import compose
from rankbench.commands.composition import composed
from rankbench.commands.messages import explain, explaining, not_an_option
from rankbench.config.keys import ConfigError, listed, unknown
from rankbench.config.schema import conf_dir

PRESETS = len(list((conf_dir() / "experiment").glob("*.yaml")))


def explained(command, *words):
    """What explain says of the exception that composing these words really raises."""
    with pytest.raises((HydraException, OmegaConfBaseException)) as raised:
        composed(command, *words)
    line = explain(raised.value, command, list(words))
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "model.layers=1,2",
            "model.layers=1,2: several values; add -m to run one job for each, or write a list as [a,b]",
        ),
        ("seed=range(3)", "seed=range(3): several values; add -m to run one job for each, or write a list as [a,b]"),
        ("optimizer=adamm", "optimizer=adamm: unknown, did you mean adam?; allowed are adam, adamw, muon, sgd"),
        ("layers=4", "layers: unknown key, did you mean model.layers?"),
        ("trainer.lr=0.1", "trainer.lr: unknown key, did you mean optimizer.lr?"),
        ("optimizer=???", "optimizer=???: unknown; allowed are adam, adamw, muon, sgd"),
        ("experiment=zzz", f"experiment=zzz: unknown; `rankbench list` names all {PRESETS}"),
        ("model.layers=abc", "model.layers=abc: wants an integer"),
        ("optimizer.lr=fast", "optimizer.lr=fast: wants a number"),
        ("model.skip=maybe", "model.skip=maybe: wants true or false"),
        ("model.norm=null", "model.norm=null: null is not allowed here; allowed are none, pre, post, peri, ngpt"),
        ("claims=foo", "claims=foo: wants a list, as [a,b]"),
        ("optimizer.milestones=[a]", "optimizer.milestones[0]=a: wants an integer"),
        ("optimizer.milestones=[null]", "optimizer.milestones[0]=null: null is not allowed here"),
        ("model.name=[a,b]", "model.name=[a,b]: wants a text"),
        ("trainer=3", "trainer=3: is a group of keys; set one of them, as in trainer.<key>=<value>"),
        (
            "analysis.paths.repeats=3",
            "analysis.paths: this analysis is not chosen; add it to the command's list, as in analysis=[paths]",
        ),
        ("foo", "foo: not understood; give key=value, in quotes where the value holds brackets or commas"),
    ],
)
def test_lines_to_the_letter(words, line, monkeypatch):
    assert explained("train", words) == line
    monkeypatch.setenv("OC_CAUSE", "1")  # OmegaConf then keeps the causes of its errors, as under a debugger
    assert explained("train", words) == line


@pytest.mark.parametrize(
    ("words", "start", "keys"),
    [
        (["sead=1"], "sead: unknown key, did you mean seed?; allowed are seed, ", ["trainer", "optimizer"]),
        (["model.layer=1"], "model.layer: unknown key, did you mean layers?; ", ["heads", "init_gain"]),
        (["optimizer.l=1"], "optimizer.l: unknown key, did you mean lr?; ", ["weight_decay"]),
        (["trainer.step=1"], "trainer.step: unknown key, did you mean steps?; ", ["epochs"]),
        (["task.lenght=1"], "task.lenght: unknown key, did you mean length?; ", ["alphabet", "test_size"]),
        (["analysis=[paths]", "analysis.paths.repeat=1"], "analysis.paths.repeat: unknown key, did you mean", ["mlp"]),
        (["analysis.path.repeat=1"], "analysis.path: unknown key, did you mean paths?; allowed are ", ["residual"]),
        (["modell=san"], "modell: unknown key, did you mean model?; ", ["task"]),
    ],
)
def test_an_unknown_key_names_those_beside_it(words, start, keys):
    line = explained("train", *words)
    assert line.startswith(start)
    assert all(f" {key}" in line for key in keys)


def test_keys_are_those_of_the_command():
    assert "run" in explained("analyze", "sead=1").split("allowed are ")[1].split(", ")
    assert "run" not in explained("train", "sead=1").split("allowed are ")[1].split(", ")


def test_a_group_of_another_command_is_no_group_here():
    line = explained("analyze", "optimizer=sgd")
    assert line.startswith("optimizer: no such group; groups are ") and "schema" not in line and "model" in line


def test_an_option_that_is_a_key_is_told_how_it_is_typed():
    assert not_an_option("--steps", "train") == "--steps: unknown option; did you mean trainer.steps=<value>?"
    assert "-m, --cfg job" in not_an_option("--foo", "train")


def test_five_presets_near_an_unknown_one_are_named():
    line = explained("train", "experiment=dong_fig4")
    assert "similar names are dong_fig4_sorting, " in line and line.count(",") == 5


def test_a_config_error_and_errors_of_ours_pass():
    for error in (ConfigError("task.length=0: too short"), ValueError("a bug"), KeyError("a bug")):
        with pytest.raises(type(error)) as raised, explaining("train", []):
            raise error
        assert raised.value is error


def test_what_no_pattern_knows_is_still_one_line():
    assert explain(HydraException("something\n   new"), "train", []) == "something new"


@pytest.mark.parametrize("word", ["task=[null]", "task=${oc.decode:null}", "analysis=[2147483648]", "model=null"])
def test_a_choice_over_which_hydra_stumbles_is_named(word):
    line = refusal(compose, "train", "seed=3", word)
    assert line.startswith(f"{word}: a group needs one of its choices, as in model=san; groups are ")


@pytest.mark.parametrize("word", ["experiment=[demo,dong_fig4_sorting]", "+model=[san,lstm]"])
def test_several_choices_of_a_group_are_not_merged(word):
    assert refusal(compose, "train", word).startswith(f"{word}: several choices; give one, or with -m a job for each")


HEAD = "# @package _global_\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "model:\n\tlayers: 1\n", "mine.yaml, line 3: not readable as YAML (found character '\\t'"),
        (HEAD + "seed: 1\nseed: 2\n", "mine.yaml, line 3: not readable as YAML (found duplicate key seed); correct"),
        (HEAD + "# caf\xe9", "mine.yaml: not readable as YAML ('utf-8' codec can't decode byte 0xe9"),
        ("3", "mine.yaml: not readable as YAML (Invalid loaded object type: int)"),
        (HEAD + "defaults: [mine]\n", "a YAML file leads back to itself"),
        (HEAD + "defaults: san\n", "experiment=mine: its file's defaults are not a list of choices, as in `- override"),
        ("seed: 1\n", "experiment/mine.yaml: its keys are not at the top; let it begin with the line `# @package"),
        (HEAD + "modle: {layers: 1}\n", "experiment/mine.yaml: modle: unknown key, did you mean model?"),
        (HEAD + "model: {layer: 1}\n", "experiment/mine.yaml: model.layer: unknown key, did you mean layers?"),
        (HEAD + "model: {layers: two}\n", "experiment/mine.yaml: model.layers=two: wants an integer"),
        (HEAD + "model: {layers: }\n", "experiment/mine.yaml: model.layers=null: null is not allowed here"),
        (HEAD + "model.layers: 2\n", "experiment/mine.yaml: model.layers: keys are nested in a YAML file, as in model"),
        (HEAD + "model: san\n", "experiment/mine.yaml: model: is a group of keys; give these"),
        (HEAD + "analysis: [paths]\n", "in the file's defaults, as in `- override /analysis: [residual]`"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_one_line_that_names_the_file(text, said, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text, encoding="latin-1")
    assert said in refused("train", "--config-dir=conf", "experiment=mine", at=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["conf"]


def test_a_long_list_of_what_is_allowed_is_cut_and_an_empty_one_named():
    names = [f"name{number}" for number in range(100)]
    assert listed(names[:9]) == ", ".join(names[:9])
    line = unknown("claims", "nothing", names)
    assert unknown("report.x", "nothing", []) == "report.x=nothing: unknown; allowed are none"
    assert len(line) < 700 and line.endswith("name75, ... (100 in all)")


def test_the_innermost_cause_is_told():
    outer = HydraException("outer")
    outer.__cause__ = ValueError("inner\nline")
    assert explain(outer, "train", []) == "inner line"


def test_a_letter_that_hydra_does_not_know_is_named():
    line = refusal(compose, "train", "analysis=[é]")
    assert line == """analysis=[é]: not understood because of é; quote it, as in '["é"]'"""


@pytest.mark.parametrize("word", ["model.layers==3", "analysis=[paths", "a b=3"])
def test_an_override_that_cannot_be_parsed_is_named(word):
    assert explained("train", word).startswith(f"{word}: not understood; give key=value")
