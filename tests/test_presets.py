"""The presets in conf/experiment: each composes at every budget, says what it costs, and runs at budget=smoke."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from breadth import some
from omegaconf import OmegaConf

from rankbench.commands import composition
from rankbench.commands.compose import compose, resolve
from rankbench.config.presets import described, presets
from rankbench.config.schema import BUDGETS, conf_dir
from rankbench.judging import published

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
COMMANDS = {name: (line.split() or [""])[1] for name, line in presets().items()}  # train | analyze


def composed(name, *words, **options):
    """The preset's config as Hydra composes it, with further words, unresolved."""
    return composition.composed(COMMANDS[name], f"experiment={name}", *words, **options)


def words_of_jobs(with_hydra, budget):
    """The words that tell the jobs of the preset's sweep apart, in order; of a preset without a sweep, none, once."""
    with_hydra.budget = budget
    params = with_hydra.hydra.sweeper.get("params") or {}
    return itertools.product(*([f"{key}={value}" for value in str(text).split(",")] for key, text in params.items()))


def test_there_are_presets():
    assert "demo" in PRESETS


@pytest.mark.parametrize("name", some(PRESETS, 3))
@pytest.mark.parametrize("budgets", some([["smoke", "paper"], list(BUDGETS)], 2), ids=len)
def test_composes_at_every_budget_and_budgets_are_ordered(name, budgets):
    from rankbench.analyses import ANALYSES
    from rankbench.commands.checks import check_everything
    from rankbench.judging import CLAIMS

    def updates(cfg):
        each = cfg.trainer.steps
        if each is None:
            each = cfg.trainer.epochs * (cfg.task["train_size"] or 1) / cfg.trainer.batch_size
        return each * cfg.replicas

    sums, first = {}, {}
    with_hydra, of_first_job = composed(name, return_hydra_config=True), functools.cache(composed)
    for budget in budgets:
        job = of_first_job(name, *next(words_of_jobs(with_hydra, budget)))  # all jobs run at budget=smoke
        job.budget = budget
        first[budget] = cfg = resolve(job)
        check_everything(cfg)
        assert cfg.analysis and cfg.budget == budget
        if COMMANDS[name] == "train":
            sums[budget] = updates(cfg)
    if sums:
        assert sums["smoke"] < sums.get("laptop", sums["paper"]) <= sums["paper"]
    if "laptop" in budgets:  # without a budget, the same values as with paper: equal words give equal configs
        plain = {}
        for budget in ("paper", None):
            job = of_first_job(name, *next(words_of_jobs(with_hydra, budget)))
            job.budget = budget
            plain[budget] = OmegaConf.to_container(job, resolve=True) | {"budget": None}
        assert plain["paper"] == plain[None]
    paper = first["paper"]
    stated = OmegaConf.load(conf_dir() / "experiment" / f"{name}.yaml").get("claims", [])
    assert set(paper.analysis) <= set(ANALYSES)
    assert set(paper.claims) <= set(CLAIMS) and list(paper.claims) == list(stated)
    assert {CLAIMS[claim].table for claim in paper.claims} <= set(paper.analysis)


@pytest.mark.parametrize("name", PRESETS)
def test_the_first_comment_is_the_command_and_its_cost(name):
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    match = re.fullmatch(rf"# rankbench (?:train|analyze) experiment={name}(?: \S.*?)?\s{{2,}}(.+)", lines[1])
    assert match and re.search(r"minute|second|hour", match[1])


def test_presets_on_a_given_network():
    assert [name for name, preset in described().items() if preset.of_given_network] == [
        "atlas",
        "dong_fig2_checkpoints",
        "spectrum",
    ]


@pytest.mark.further
def test_a_preset_runs_the_analyses_that_the_words_name():
    """Although it sets keys of the others, which bring them into the config."""
    words = ["experiment=dong_fig2_checkpoints", "claims=[]"]
    assert list(compose("analyze", *words).analysis) == ["residual", "collapse", "path_counts"]
    assert list(compose("analyze", *words, "analysis=[residual,path_counts]").analysis) == ["residual", "path_counts"]
    assert list(compose("analyze", *words, "analysis=path_counts").analysis) == ["path_counts"]
    one_more = compose("analyze", *words, "analysis=[residual]", "analysis.collapse.sequences=2").analysis
    assert set(one_more) == {"residual", "collapse"}


# columns of a preset's tables that have no number: errors are those of tasks whose targets are numbers
EMPTY = {"qiu_gated_sink": {"evaluation", "examples", "error"}}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PRESETS)
def test_runs_at_budget_smoke(name, tmp_path):
    command = [sys.executable, "-m", "rankbench", COMMANDS[name], f"experiment={name}", "budget=smoke"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    if described()[name].of_given_network:  # tests/analysing/test_checkpoints.py and test_pretrained.py give one
        assert done.returncode == 1 and not (tmp_path / "outputs").exists()
        assert f"experiment={name}: measures a network that you give; use `rankbench analyze" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    jobs = words_of_jobs(composed(name, return_hydra_config=True), "smoke")
    configs = [resolve(composed(name, "budget=smoke", *words)) for words in jobs]
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
            if "task=" not in run_folder.name:  # a job of one task of several may lack what another's has
                assert {column for column in table if table[column].isna().all()} <= EMPTY.get(name, set())
            figures = [run_folder / f"{analysis}.png", *run_folder.glob(f"{analysis}_[0-9].png")]  # one, or numbered
            assert {path.stat().st_size > 1000 for path in figures if path.exists()} == {True}


@pytest.mark.parametrize("name", ["amsel_rank_vs_heads", "amsel_learned_m", "amsel_role_of_n"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_farthest_point_is_learned_without_weight_decay(name, budget):
    assert resolve(composed(name, f"budget={budget}")).optimizer.weight_decay == 0


@pytest.mark.parametrize("rank", [1, 64])
def test_the_role_of_n_is_that_of_the_slides_networks(rank):
    """Two layers, 64 copies of the 64 / r heads, averaged; 200,000 steps of 256 at a rate of .005."""
    cfg = resolve(composed("amsel_role_of_n", f"model.head_width={rank}"))
    assert cfg.model.heads * rank == 64 * cfg.model.width == 64 * cfg.task["dimension"] == 64 * 64
    assert (cfg.model.layers, cfg.model.head_reduction, cfg.replicas) == (2, "mean", 5)
    assert (cfg.optimizer.lr, cfg.trainer.steps, cfg.trainer.batch_size) == (0.005, 200_000, 256)
    laptop = resolve(composed("amsel_role_of_n", "budget=laptop", "model.head_width=4"))
    assert laptop.model.heads * 4 == 16 * laptop.model.width == 16 * 16 and laptop.optimizer.lr == 0.005


def of_kim(row):
    return {f"model={row.series}", f"model.layers={row.x:g}"}


CELLS = {  # of a published number: the words of the job that has it, if one has
    "kim_table1_speed": lambda row: None if math.isnan(row.x) else of_kim(row),
    "kim_table3_fixed_lr": lambda row: None if math.isnan(row.x) else of_kim(row),
    "kim_table2": lambda row: of_kim(row._replace(x=1) if math.isnan(row.x) else row),
    "amsel_learned_m": lambda row: {f"model.heads={row.x:g}"},
    "amsel_rank_vs_heads": lambda row: {
        {"copies=1": "model=amsel", "copies=d^0.5": "model=amsel_d15", "copies=d": "model=amsel_d20"}[row.series],
        f"model.head_width={64 * row.x:g}",
        f"model.{row.where}",
    },
    "amsel_role_of_n": lambda row: {f"model.head_width={64 * row.x:g}", f"task.points={row.series.removeprefix('N=')}"},
}


@pytest.mark.parametrize("name", CELLS)
def test_a_sweep_at_paper_scale_has_every_published_cell(name):
    jobs = list(map(set, words_of_jobs(composed(name, return_hydra_config=True), "paper")))
    cells = list(filter(None, map(CELLS[name], published(name).itertuples())))
    assert cells and [cell for cell in cells if cell not in jobs] == []
