"""The presets in conf/experiment: each composes at every budget, says what it costs, and runs at budget=smoke."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pandas as pd
import pytest
from omegaconf import OmegaConf, open_dict

from rankbench.commands.compose import compose, register, resolve
from rankbench.config import BUDGETS, conf_dir
from rankbench.report.preset_runs import presets

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
COMMANDS = {name: (line.split() or [""])[1] for name, line in presets().items()}  # train | analyze


def jobs(name, *words, most=None):
    """The preset's configs, one for each job of its sweep; of a large one the first `most`."""
    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        base, command = [f"experiment={name}", *words], COMMANDS[name]
        config = hydra.compose(command, base, return_hydra_config=True)
        params = config.hydra.sweeper.get("params") or {}
        if not params:
            with open_dict(config):
                del config["hydra"]
            return [resolve(config)]
        varied = [[f"{key}={value}" for value in str(text).split(",")] for key, text in params.items()]
        choices = itertools.islice(itertools.product(*varied), most)
        return [resolve(hydra.compose(command, [*base, *choice])) for choice in choices]


def test_there_are_presets():
    assert "demo" in PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_composes_at_every_budget_and_budgets_are_ordered(name):
    from rankbench.analyses import ANALYSES
    from rankbench.claims import CLAIMS
    from rankbench.commands.callback import check_everything

    def updates(cfg):
        each = cfg.trainer.steps
        if each is None:
            each = cfg.trainer.epochs * (cfg.task["train_size"] or 1) / cfg.trainer.batch_size
        return each * cfg.replicas

    sums, first = {}, {}
    for budget in BUDGETS:  # of a sweep the first job: all of them run at budget=smoke
        (cfg,) = jobs(name, f"budget={budget}", most=1)
        check_everything(cfg)
        assert cfg.analysis and cfg.budget == budget
        first[budget] = cfg
        if COMMANDS[name] == "train":
            sums[budget] = updates(cfg)
    if sums:
        assert sums["smoke"] < sums["laptop"] <= sums["paper"]
    (without,), paper = jobs(name, most=1), first["paper"]
    paper.budget = None
    paper.out = without.out  # the time of day
    assert paper == without
    stated = OmegaConf.load(conf_dir() / "experiment" / f"{name}.yaml").get("claims", [])
    assert set(paper.analysis) <= set(ANALYSES)
    assert set(paper.claims) <= set(CLAIMS) and list(paper.claims) == list(stated)
    assert {CLAIMS[claim].table for claim in paper.claims} <= set(paper.analysis)


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_comment_is_the_command_and_its_cost(name):
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    match = re.fullmatch(rf"# rankbench (?:train|analyze) experiment={name}\s{{2,}}(.+)", lines[1])
    assert match and re.search(r"minute|second|hour", match[1])


def test_a_preset_runs_the_analyses_that_the_words_name():
    """Although it sets keys of the others, which bring them into the config."""
    words = ["experiment=dong_fig2_checkpoints", "claims=[]"]
    assert list(compose("analyze", *words).analysis) == ["residual", "collapse", "path_counts"]
    assert list(compose("analyze", *words, "analysis=[residual,path_counts]").analysis) == ["residual", "path_counts"]
    assert list(compose("analyze", *words, "analysis=path_counts").analysis) == ["path_counts"]
    one_more = compose("analyze", *words, "analysis=[residual]", "analysis.collapse.sequences=2").analysis
    assert set(one_more) == {"residual", "collapse"}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PRESETS)
def test_runs_at_budget_smoke(name, tmp_path):
    command = [sys.executable, "-m", "rankbench", COMMANDS[name], f"experiment={name}", "budget=smoke"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    configs = jobs(name, "budget=smoke")
    (folder,) = (tmp_path / "outputs" / COMMANDS[name]).iterdir()
    for claim in configs[0].claims:
        assert re.search(
            rf"^(held|partly held|failed|undecided|passed|broken) +(check )?{claim}\b", done.stdout, re.MULTILINE
        )
    assert (folder / "verdicts.csv").exists() == bool(configs[0].claims)
    of_jobs = [path for path in folder.iterdir() if (path / "summary.json").exists()]
    assert len(of_jobs) == (0 if len(configs) == 1 else len(configs))
    for run_folder in (folder, *of_jobs):
        for analysis in configs[0].analysis:
            table = pd.read_csv(run_folder / f"{analysis}.csv")
            assert len(table)
            assert [column for column in table if table[column].isna().all()] == []
            for suffix in ("png", "pdf"):
                assert (run_folder / f"{analysis}.{suffix}").stat().st_size > 1000
