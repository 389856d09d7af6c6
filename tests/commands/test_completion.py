"""rankbench.commands.completion: what Tab offers, from the functions and from a real bash."""

import os
import shutil
import subprocess
import sys

import pytest
from command_line import ROOT, python
from omegaconf import OmegaConf

from rankbench.commands import completion, compose
from rankbench.commands.cli import COMMANDS
from rankbench.commands.completion import candidates, script
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, entries
from rankbench.config.schema import SCHEMAS, conf_dir


def choices(group):
    return {f"{group}={path.stem}" for path in (conf_dir() / group).glob("*.yaml")}


@pytest.mark.parametrize("words", [[], [""]])
def test_commands_first(words):
    assert set(COMMANDS) < set(candidates(words))


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["tr"], {"train"}),
        (["--v"], {"--version"}),
        (["zz", ""], set()),
        (["--version", ""], set()),
        (["train", "m"], {"model=", "model."}),
        (["train", "model.la"], {"model.layers=", "model.latent_width="}),
        (["train", "trainer.st"], {"trainer.steps="}),
        (["train", "sch"], set()),  # the schemas are not for users
        (["train", "model.mlp="], {"model.mlp=true", "model.mlp=false"}),
        (["train", "model.heads=1", "seed="], set()),
        (["train", "-m", "model=san,san_"], {"model=san,san_mlp", "model=san,san_skip"}),
        (["report", "exp"], {"experiment="}),  # it has no model
        (["report", "mo"], set()),
        (["analyze", "r"], {"run=", "replicas="}),
        (["train", "model.norm=p"], {"model.norm=peri", "model.norm=pre", "model.norm=post"}),
        (["train", "seed=1", "model.la"], {"model.layers=", "model.latent_width="}),
        (["train", "analysis=[paths]", "analysis.paths.readout"], {"analysis.paths.readout="}),
        # lists, options and keys to explain
        (["train", "analysis=[pa"], {"analysis=[path_counts", "analysis=[path_mass", "analysis=[paths"}),
        (["train", "analysis=[residual,path_c"], {"analysis=[residual,path_counts"}),
        (["train", "trainer.writers=[wandb,m"], {"trainer.writers=[wandb,mlflow"}),
        (["train", "trainer.steps=[1"], set()),
        (["train", "--c"], {"--cfg", "--config-dir"}),
        (["train", "--cfg", "j"], {"job"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["explain", "model.norm_"], {"model.norm_affine", "model.norm_kind", "model.norm_scale"}),
        (["explain", "analysis.curves."], {"analysis.curves.splits"}),
        (["report", "experiment=dong_claim"], {"experiment=dong_claim31"}),
    ],
)
def test_candidates(words, completions):
    assert set(candidates(words)) == completions


@pytest.mark.parametrize("group", ["model", "task", "optimizer", "experiment", "analysis"])
def test_choices_of_a_group(group):
    assert set(candidates(["train", f"{group}="])) == choices(group) != set()


def test_a_preset_after_a_plus():
    assert set(candidates(["train", "+experiment="])) == {f"+{word}" for word in choices("experiment")}


@pytest.mark.parametrize(
    ("command", "key", "choices"),
    [
        (command, entry.name, entry.key.choices)
        for command, schema in SCHEMAS.items()
        for entry in entries(schema)
        if entry.key.choices and entry.type != list[str]
    ],
)
def test_values_of_an_enumerated_key(command, key, choices):
    assert candidates([command, f"{key}="]) == [f"{key}={value}" for value in choices]


@pytest.mark.parametrize(
    "words",
    [
        ["train"],
        ["analyze", "task=convex_hull"],
        ["train", "experiment=demo"],
        ["train", "+experiment=dong_fig4_sorting_code"],  # begins with another preset
        ["analyze", "experiment=paths_norm_place"],  # begins with what several share
        ["train", "experiment=demo", "analysis=[spectrum,laws]", "task=char_lm"],
        ["analyze", "analysis=pruning"],
        ["report"],
    ],
)
def test_the_keys_are_those_that_hydra_composes(words):
    command, *others = words
    composed = compose.composed(command, *compose.as_keys(command, others))
    unread = {"hydra", *(name for name in ("optimizer", "trainer") if command == "analyze")}  # a preset brings them
    groups = {*plugins.groups_of(command), *(["experiment"] if command == "report" else [])}
    names = {name for name in leaves(composed) if name.partition(".")[0] not in unread}
    assert set(completion._names(command, others, "")) == names | groups


def leaves(config, prefix=""):
    for name in config:
        node = config._get_node(name)
        yield from leaves(node, f"{prefix}{name}.") if OmegaConf.is_dict(node) else [f"{prefix}{name}"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a run, and a sweep of two jobs, the second of which is the newest; and one that is no run."""
    jobs = ("one", "heads/0_model.heads=1", "heads/1_model.heads=2")
    for number, name in enumerate(jobs):
        folder = tmp_path / "outputs" / "train" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        os.utime(folder, (number, number))
    (tmp_path / "outputs" / "train" / "heads" / "multirun.yaml").touch()
    (tmp_path / "$(touch evil)").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_and_folders(home):
    heads = "outputs/train/heads"
    jobs = [f"{heads}/1_model.heads=2", f"{heads}/0_model.heads=1", "outputs/train/one"]
    names = ("latest", heads, *jobs, "$(touch evil)/", "outputs/")
    assert candidates(["analyze", "run="]) == [f"run={name}" for name in names]
    assert candidates(["report", "runs="]) == [f"runs={name}" for name in names]
    assert candidates(["analyze", f"run={heads}/0"]) == [f"run={jobs[1]}", f"run={jobs[1]}/"]
    assert candidates(["train", "out=outputs/tr"]) == ["out=outputs/train/"]
    assert candidates(["train", "out=nowhere/"]) == candidates(["train", "out=/proc/1/fd/x/"]) == []


def test_presets_of_plugins_that_are_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "example_plugin"))
    monkeypatch.setattr(plugins, "FOUND", {})
    assert "experiment=counting" not in candidates(["report", "experiment=c"])
    assert "experiment=counting" in candidates(["report", "plugins=lettercount", "experiment=c"])


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "more"]])
def test_another_shell_is_refused(words):
    with pytest.raises(ConfigError, match="^" + ": ".join([*words, "of which shell"])):
        script(words)


LINES = {
    "rankbench tra": ["train"],
    "rankbench train optimizer=": sorted(choices("optimizer")),
    "rankbench train model.norm=p": ["model.norm=peri", "model.norm=post", "model.norm=pre"],
    "rankbench train -m model.lay": ["model.layers="],
    "rankbench analyze run=outputs/train/heads/0": [
        f"run=outputs/train/heads/0_model.heads=1{end}" for end in ("", "/")
    ],
    "rankbench train zz": [],
    "rankbench train out=$": ["out=$(touch evil)/"],
}


def in_a_shell(home, shell, program):
    """What a shell prints that has our script and is given these lines."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    shim = home / "rankbench"
    shim.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m rankbench "$@"\n')
    shim.chmod(0o755)
    (home / "script").write_text(script([shell]))
    plain = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    environment = {**os.environ, "PATH": f"{home}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb"}
    how = {"cwd": home, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([shell, *plain, "-c", program], input="".join(f"{line}\n" for line in LINES), **how)
    assert done.returncode == 0, done.stderr
    assert not (home / "evil").exists()
    return [sorted(filter(None, line.split("|"))) for line in done.stdout.splitlines()]


@pytest.mark.further
def test_in_bash(home):
    """bash gives a function the words cut at =, and inserts what follows the last one."""
    program = """
set -e -o pipefail
breaks=$COMP_WORDBREAKS
source ./script
[[ "$COMP_WORDBREAKS" == "$breaks" && "$breaks" == *=* ]]  # those of other commands stay as they were
complete -p rankbench | grep -q -- '-F _rankbench_complete'
while IFS= read -r line; do
    COMP_LINE=$line; COMP_POINT=${#line}
    compopt() { :; }  # works only while readline completes
    COMPREPLY=()
    _rankbench_complete || true
    printf '%s|' "${COMPREPLY[@]}"; echo
done
"""
    assert in_a_shell(home, "bash", program) == [
        sorted(word[len(line.split()[-1].rpartition("=")[0]) + 1 if "=" in line else 0 :] for word in words)
        for line, words in LINES.items()
    ]


def test_in_zsh(home):
    program = """
setopt err_exit
compdef() { :; }
source ./script
compadd() { [[ $1 == -S ]] && shift 2; shift; for word in "$@"; do printf '%s|' "$word"; done }
_files() { :; }
while IFS= read -r line; do
    words=(${=line}); CURRENT=${#words}
    _rankbench_complete || true
    echo
done
"""
    assert in_a_shell(home, "zsh", program) == [sorted(words) for words in LINES.values()]


def test_in_fish(home):
    program = """
source ./script
while read -l line
    set -l all (complete -C "$line")
    echo (string join '|' $all)
end
"""
    # fish completes what is between quotes or escapes by itself: a lone $ is a variable to it
    assert in_a_shell(home, "fish", program)[:-1] == [sorted(words) for words in LINES.values()][:-1]


def test_a_completion_loads_nothing_that_takes_long():
    """What a hand waits for at every Tab: Hydra alone takes three times as long to import as all that is loaded now."""
    heavy = ("hydra", "omegaconf", "torch", "numpy", "pandas", "importlib.metadata")
    program = f"""
import sys
from rankbench.commands.completion import candidates
for words in (["tr"], ["train", ""], ["train", "model."], ["train", "experiment="], ["analyze", "run="]):
    assert candidates(words), words
    print(*(name for name in {heavy} if name in sys.modules))
"""
    done = python("-c", program)
    assert done.returncode == 0 and done.stdout.split() == [], done.stderr
