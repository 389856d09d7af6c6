"""rankbench.commands.completion: what Tab offers, from the functions and from a real bash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankbench.commands.cli import COMMANDS
from rankbench.commands.completion import candidates, script
from rankbench.config import SCHEMAS, conf_dir
from rankbench.keys import ConfigError, entries

ROOT = Path(__file__).resolve().parent.parent


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
        (["zz"], set()),
        (["zz", ""], set()),
        (["--version", ""], set()),
        (["train", "m"], {"model=", "model."}),
        (["train", "model.la"], {"model.layers=", "model.latent_width="}),
        (["train", "trainer.st"], {"trainer.steps="}),
        (["train", "sch"], set()),  # the schemas are not for users
        (["train", "zz"], set()),
        (["analyze", "r"], {"run=", "replicas="}),
        (["train", "model=sa"], {"model=san", "model=san_mlp", "model=san_skip"}),
        (["train", "model.norm="], {"model.norm=none", "model.norm=pre", "model.norm=post"}),
        (["train", "model.norm=p"], {"model.norm=pre", "model.norm=post"}),
        (["train", "model.norm=x"], set()),
        (["train", "-m", "model.no"], {"model.norm=", "model.norm_affine=", "model.norm_kind="}),
        (["train", "seed=1", "model.la"], {"model.layers=", "model.latent_width="}),
        (["train", "analysis=[paths]", "analysis.paths.readout"], {"analysis.paths.readout="}),
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


@pytest.mark.parametrize("words", [["train", ""], ["train", "-m", ""], ["train", "model=san", ""]])
def test_after_a_space_come_groups_and_keys(words):
    completions = set(candidates(words))
    assert {"model=", "model.", "task=", "optimizer=", "trainer.", "seed=", "replicas=", "experiment="} <= completions
    assert not [word for word in completions if word.startswith(("hydra", "schema"))]


def test_hydras_own_keys_on_request():
    assert "hydra.sweep." in candidates(["train", "hydra."])


def test_script_knows_bash_only():
    assert script(["bash"]).startswith("_rankbench_complete() {")
    for words in ([], ["zsh"], ["bash", "more"]):
        with pytest.raises(ConfigError, match="only bash"):
            script(words)


def test_in_bash(tmp_path):
    shim = tmp_path / "rankbench"
    shim.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m rankbench "$@"\n')
    shim.chmod(0o755)
    (tmp_path / "script").write_text(script(["bash"]))
    lines = {
        "rankbench tra": ["train"],
        "rankbench train optimizer=": sorted(choices("optimizer")),
        "rankbench train model.norm=p": ["model.norm=post", "model.norm=pre"],
        "rankbench train -m model.lay": ["model.layers="],
        "rankbench train zz": [],
    }
    program = """
set -e -o pipefail
source ./script
complete -p rankbench | grep -q -- '-F _rankbench_complete'
while IFS= read -r line; do
    read -r -a COMP_WORDS <<<"$line"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$line; COMP_POINT=${#line}
    compopt() { :; }  # works only while readline completes
    COMPREPLY=()
    _rankbench_complete || true
    echo "${COMPREPLY[*]}"
done
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        cwd=tmp_path,
        env=environment,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [sorted(line.split()) for line in done.stdout.split("\n")[:-1]] == list(lines.values())
