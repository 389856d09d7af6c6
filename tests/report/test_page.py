"""`rankbench report`: what it finds, sums up and draws, and its page, parsed and opened in a real browser."""

import io
import itertools
import json
import os
import re
import time
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import yaml
from browser import PROGRAM, Browser
from hand_written import write_run
from refusals import refusal
from scipy import stats

from rankbench.analyses import ANALYSES
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.config.schema import FigureKeys
from rankbench.plots.captions import GEOMETRIC, OF_ONE_SEED, OTHERWISE, caption_of
from rankbench.plots.sweep import BASELINES, draw_sweep
from rankbench.plots.training import FIGURES
from rankbench.report.figures import figure_keys
from rankbench.report.jobs import find_runs, varying_keys
from rankbench.report.page import command_of, commits_of
from rankbench.report.report import gather
from rankbench.runs.run import Run
from rankbench.runs.tables import latex, markdown

NASTY = "<script>alert(1)&"
ENVIRONMENT = {
    "started": "2026-11-20T09:00:00+0000",
    "command": ["rankbench train", "model.heads=1", "analysis=[]", "hydra.job.config.x=[y]", "out=there"],
    "packages": {"torch": "9.8.7", "nasty": NASTY},
    "git": {"commit": "0123456789abcdef", "dirty": True},
    "device": "cpu",
}


def run_at(folder, heads=1, lr=0.1, status="finished", seeds=(0.5, 0.6, 0.9), model="san", **more):
    """A run's folder with these final accuracies."""
    config = {"model": {"name": model, "heads": heads}, "optimizer": {"lr": lr}, "out": str(folder), **more}
    numbers = [{"test_accuracy": value, "test_loss": 1 - value, "valid_loss": 2 - value} for value in seeds]
    write_run(folder, config, numbers, status)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Six finished runs in two keys, one of them with a nasty name, and three that did not end well; their report."""
    home = tmp_path_factory.mktemp("home")
    for number, (heads, lr) in enumerate((heads, lr) for heads in (1, 2, 10) for lr in (0.1, 0.2)):
        name = NASTY if number == 0 else f"{number}_a"
        claims = ["paths_sum_to_output", "dong_fig4_length_1_sorting"]
        more = {"claims": claims, "published": "dong_fig4_sorting"} if number == 1 else {}
        run_at(home / "runs" / name, heads, lr, seeds=np.array([0.5, 0.6, 0.9]) - number / 100, **more)
    run_at(home / "runs" / "7", 2, 0.2, "failed", seeds=())
    run_at(home / "runs" / "8", 2, 0.2, "diverged", seeds=(0.1,))
    run_at(home / "runs" / "9", 2, 0.2, "running", seeds=(0.1,))
    columns = {"run": "1_a", "task": "sorting", "model": "san", "seed": [0, 1, 2], "scheme": "frozen"}
    columns |= {"selection": "all", "path_length": 1, "subset_size": None, "accuracy": 0.5, "whole_accuracy": 0.99}
    columns |= {"majority_accuracy": 0.1, "position_majority_accuracy": 0.2, "remainder": 1e-15}
    pd.DataFrame(columns).to_csv(home / "runs" / "1_a" / "paths.csv", index=False)
    lines = gather(find_runs(str(home / "runs")), home / "report")
    (home / "said.txt").write_text("\n".join(lines))
    return home


class Page(HTMLParser):
    """Elements with their attributes, table cells, and whether every element that opens closes."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts, self.tables = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page(reported):
    return Page((reported / "report" / "report.html").read_text(encoding="utf-8"))


@pytest.mark.further
def test_summary_is_what_numpy_and_scipy_say(reported):
    summary = pd.read_csv(reported / "report" / "summary.csv")
    assert len(summary) == 6 and list(summary.columns[:3]) == ["model.heads", "optimizer.lr", "num_seeds"]
    row = summary[(summary["model.heads"] == 10) & (summary["optimizer.lr"] == 0.1)].iloc[0]
    values = np.array([0.5, 0.6, 0.9]) - 0.04
    mean = values.mean()
    of_logits = stats.t.interval(0.95, 2, np.log(mean / (1 - mean)), stats.sem(values) / (mean * (1 - mean)))
    losses = 1 - values
    of_losses = losses.mean() * np.exp(stats.t.interval(0.95, 2, 0, stats.sem(losses) / losses.mean()))
    # relative 1e-12: the same sums in another order
    assert row.test_accuracy_mean == pytest.approx(mean, rel=1e-12)
    ends = [row.test_accuracy_low95, row.test_accuracy_high95]
    assert ends == pytest.approx(1 / (1 + np.exp(-np.array(of_logits))), rel=1e-12)
    assert [row.test_loss_low95, row.test_loss_high95] == pytest.approx(of_losses, rel=1e-12)
    best = [row.test_accuracy_best, row.test_loss_best, row.valid_loss_best]
    assert best == pytest.approx([values.max(), 1 - values.max(), 2 - values.max()], rel=1e-12)
    assert set(summary.num_seeds) == {3}  # runs that failed, diverged or were interrupted do not count


@pytest.mark.further
def test_jobs_are_told_by_status(reported, page):
    said = (reported / "said.txt").read_text().splitlines()
    assert said[0].startswith("9 jobs, 6 finished") and {"7: failed", "8: diverged", "9: interrupted"} <= set(said)
    text = " ".join("".join(page.texts).split())
    assert "9 jobs: 6 finished 1 failed 1 diverged 1 interrupted" in text
    (runs,) = [table for table in page.tables if table[0][0] == "run" and "to repeat it" in table[0]]
    assert {row[0]: row[1] for row in runs[1:]}["9"] == "interrupted" and len(runs) == 10


def test_the_page_is_well_formed_and_needs_nothing_else(reported, page):
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert page.open == [] and ("meta", viewport) in page.elements
    text = (reported / "report" / "report.html").read_text()
    assert not re.search(r"https?:|//\w+\.\w|@import|<link|<img|<iframe", text)
    assert "losses, ranks, norms and residuals on the logarithmic one" in text
    assert not [attrs for _, attrs in page.elements if "src" in attrs]
    links = [attrs["href"] for tag, attrs in page.elements if tag == "a"]
    assert links and not [link for link in links if ":" in link or link.startswith("/")]
    names = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(names) == len(set(names))
    used = {attrs["href"][1:] for tag, attrs in page.elements if tag == "use"}
    assert used and used <= set(names)


def test_what_comes_from_files_is_escaped(page):
    assert [tag for tag, _ in page.elements].count("script") == 1  # the page's own
    cells = [cell for table in page.tables for row in table for cell in row]
    assert NASTY in cells and NASTY in page.texts
    assert "../runs/%3Cscript%3Ealert%281%29%26/" in [attrs.get("href") for _, attrs in page.elements]


def test_verdicts_environment_published_and_figures_are_there(reported, page):
    claims_of_the_page, checks = page.tables[:2]
    assert "dong_fig4_length_1_sorting" in claims_of_the_page[1][1]
    assert {row[0] for row in claims_of_the_page[1:]} <= {"held", "undecided", "failed"}
    assert "paths_sum_to_output" in checks[1][1] and checks[1][0] == "passed"
    text = "".join(page.texts)
    assert "9.8.7" in text and "0123456789ab with changes" in text and "2026-11-20T09:00:00" in text
    assert "authors' code, README settings" in text
    assert "rankbench report: sorting (san) by model.heads, optimizer.lr" in text
    assert "To repeat it: rankbench train model.heads=1 'analysis=[]'" in text
    assert [tag for tag, _ in page.elements].count("svg") == 3
    for name in ("sweep", "paths"):
        assert all((reported / "report" / f"{name}{kind}").stat().st_size for kind in (".png", ".pdf", ".svg", ".csv"))


def test_pages_of_a_figure_are_all_in_the_report_with_their_captions(tmp_path, undrawn_here):
    """30 values of a key are more panels than a file has; a report of fewer runs into the same folder removes it."""
    for number in range(30):
        run = run_at(tmp_path / "runs" / str(number), lr=number / 100)
        row = {"run": run.name, "task": "sorting", "model": "san", "seed": 0, "weights": "trained"}
        row |= {"relative_noise_floor": 2.0**-52}
        row |= {"layer": 0, "sublayer": "input", "relative_residual": 0.5}
        pd.DataFrame([row | {"variant": variant} for variant in ("full", "no_skip")]).to_csv(run / "residual.csv")
    lines = gather(find_runs(str(tmp_path / "runs")), tmp_path / "report")
    names = ["residual_1", "residual_2"]
    assert [name for name in names if f"-> {tmp_path / 'report' / name}.png, .pdf and .svg" in lines] == names
    assert not (tmp_path / "report" / "residual.png").exists()
    text = " ".join("".join(Page((tmp_path / "report" / "report.html").read_text()).texts).split())
    for values in ("0.0 to 0.23", "0.24 to 0.29"):
        assert re.search(
            f"residual; optimizer.lr={values}. Relative [^.]*. One seed, so no spread. Drawn from res", text
        )
    assert "Final test accuracy by optimizer.lr: mean over seeds; bars are its 95 % interval, of 3 seeds." in text
    gather(find_runs(str(tmp_path / "runs" / "?")), tmp_path / "report")
    assert {path.stem for path in (tmp_path / "report").glob("residual*")} == {"residual"}


def test_the_title_names_presets_budget_and_keys(tmp_path, undrawn_here):
    for number, preset in enumerate("abcd"):
        run = run_at(tmp_path / "runs" / preset, heads=number + 1)
        command = ["rankbench train", f"experiment={preset}", "budget=laptop"]
        (run / "environment.json").write_text(json.dumps(ENVIRONMENT | {"command": command}))
    gather(find_runs(str(tmp_path / "runs")), tmp_path / "report")
    title = "<title>rankbench report: a, b, c and 1 more at budget=laptop by model.heads</title>"
    assert title in (tmp_path / "report" / "report.html").read_text()


def test_the_command_repeats_the_run_elsewhere(tmp_path):
    run = run_at(tmp_path / "sweep" / "3_x")
    assert command_of(run) == "rankbench train model.heads=1 'analysis=[]'"
    (tmp_path / "sweep" / "multirun.yaml").write_text("")
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["model.heads=7", "out=x"]))
    assert command_of(run) == "rankbench train model.heads=7"
    (run / "environment.json").write_text("[")
    assert command_of(run) == ""


def test_the_page_has_what_a_run_was_continued_with(tmp_path):
    run = run_at(tmp_path / "run")
    later = {"git": {"commit": "fedcba9876543210", "dirty": False}, "packages": {"torch": "9.9.0"}}
    (run / "continued.json").write_text(json.dumps([{"step": 3, "started": "2026-11-21T09:00:00+0000", **later}]))
    assert commits_of([run]) == "0123456789ab with changes; fedcba987654"
    gather(find_runs(str(run)), tmp_path / "report")
    text = " ".join(" ".join(Page((tmp_path / "report" / "report.html").read_text()).texts).split())
    assert "0123456789ab with changes; fedcba987654" in text and "9.8.7; 9.9.0" in text
    (run / "continued.json").write_text("[")  # a page is useful without it
    assert commits_of([run]) == "0123456789ab with changes"
    changed = {"git": {"commit": "0123456789abcdef", "dirty": True}, "source": "5f3a9c01"}
    (run / "continued.json").write_text(json.dumps([{"step": 3, **changed}]))
    assert commits_of([run]) == "0123456789ab with changes; 0123456789ab with changes 5f3a9c"


def test_keys_that_vary_and_what_goes_with_them(tmp_path):
    jobs = [run_at(tmp_path / str(n), heads, 0.1, model=model, seed=n) for n, (heads, model) in enumerate(CHOICES)]
    assert varying_keys(jobs) == (["model"], {"model": ["model.heads"]})
    jobs.append(run_at(tmp_path / "4", heads=5, model="san"))
    assert varying_keys(jobs)[0] == ["model", "model.heads"]
    assert varying_keys(jobs[:1]) == ([], {})
    for job, kind in zip(jobs, ("png", "pdf", "svg"), strict=False):  # what is drawn and kept changes no number
        (job / "config.yaml").write_text(f"model: {{name: san}}\nfigures: [{kind}]\ntrainer: {{writers: [{kind}]}}\n")
    assert varying_keys(jobs[:3]) == ([], {})


def test_the_key_of_all_skips_stands_for_each(tmp_path):
    jobs = [tmp_path / str(number) for number in range(4)]
    for job, (skips, mlp) in zip(jobs, itertools.product((True, False), repeat=2), strict=True):
        job.mkdir()
        model = {"skips": skips, "skip": skips, "mlp": mlp, "mlp_skip": skips and mlp}
        (job / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    assert varying_keys(jobs) == (["model.mlp", "model.skips"], {"model.skips": ["model.mlp_skip", "model.skip"]})
    (jobs[0] / "config.yaml").write_text(yaml.safe_dump({"model": model | {"skips": None}}))
    assert varying_keys(jobs)[0] == ["model.mlp", "model.skip", "model.skips"]  # no MLP is skipped in any


CHOICES = [(1, "san"), (1, "san"), (2, "san_skip")]


def test_the_key_with_most_numbers_is_x():
    table = pd.DataFrame({"a": ["u", "v", "u"], "b": [1, 2, 2], "c": [1, 2, 3]})
    assert figure_keys(table, ["a", "b", "c"]) == ("c", "a", "b")
    assert figure_keys(table, ["a"]) == ("a", None, None)
    assert figure_keys(table, ["a", "b", "c"], FigureKeys("b", None, "c")) == ("b", "a", "c")


def test_the_figure_shows_means_and_intervals():
    values = {1: [0.1, 0.3], 100: [0.5, 0.9]}
    rows = [
        {"x": x, "s": s, "f": f, "seed": seed, "test_accuracy": value}
        for x, accuracies in values.items()
        for seed, value in enumerate(accuracies)
        for s in "ab"
        for f in range(4)
    ]
    figure = draw_sweep(pd.DataFrame(rows), "x", "s", "f")
    visible = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in visible] == [f"f={value}" for value in range(4)]
    assert visible[0].get_xscale() == "log"
    alone = draw_sweep(pd.DataFrame(rows)[lambda table: table.seed == 0], "x")
    assert [text.get_text() for text in alone.legends[0].get_texts()] == ["one seed"]
    line, _, (bars,) = visible[0].containers[1]
    np.testing.assert_allclose(line.get_ydata().astype(float), [0.2, 0.7])
    halfwidth = stats.t.ppf(0.975, 1) * 0.2 / (0.7 * 0.3)  # of the logit of .7; .2 is the standard error of the mean
    ends = 1 / (1 + np.exp(-(np.log(0.7 / 0.3) + np.array([-halfwidth, halfwidth]))))
    np.testing.assert_allclose(bars.get_segments()[1][:, 1], ends)
    low, high = visible[0].get_xlim()
    assert (low < line.get_xdata()).all() and (line.get_xdata() < high).all()


@pytest.mark.parametrize("role", ["x", "series", "facet"])
def test_booleans_are_words_in_every_role(role, tmp_path):
    rows = [
        {"flag": flag, "n": n, "s": s, "seed": 0, "test_accuracy": (1 + n + s + 3 * flag) / 10}
        for flag in (True, False)
        for n in (1, 2)
        for s in (0, 1)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "sweep.csv", index=False)
    table = pd.read_csv(tmp_path / "sweep.csv")
    assert table.flag.dtype == bool
    names = {role: "flag"} | dict(zip([name for name in ("x", "series", "facet") if name != role], "ns", strict=True))
    figure = draw_sweep(table, **names)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    texts_of_role = {
        "x": axes.get_xticklabels(),
        "series": figure.legends[0].get_texts(),
        "facet": [a.title for a in figure.axes],
    }
    prefix = "" if role == "x" else "flag="
    # in the order of their rows
    assert [text.get_text() for text in texts_of_role[role]] == [prefix + word for word in ("true", "false")]
    if role == "x":  # each with its own numbers, and no line from one word to the next
        (line,) = [candidate for candidate in axes.get_lines() if len(candidate.get_xdata()) == 2][:1]
        assert [y for _, y in sorted(zip(*line.get_data(), strict=True))] == [0.5, 0.2]
        assert line.get_linestyle() == "None"


@pytest.mark.parametrize(
    ("value", "best"), [("test_accuracy", [0.5, 0.9]), ("paths.accuracy", [0.5, 0.9]), ("test_loss", [0.1, 0.6])]
)
def test_the_best_of_the_seeds_is_drawn_where_it_is_asked_for(value, best):
    rows = [
        {"seed": seed, "x": x, value: number}
        for x, two in ((1, (0.1, 0.5)), (2, (0.9, 0.6)))
        for seed, number in enumerate(two)
    ]
    figure = draw_sweep(pd.DataFrame(rows), "x", value=value, statistic="best")
    (axes,) = figure.axes
    (line,) = [line for line in axes.get_lines() if len(line.get_xdata()) == 2]
    assert list(line.get_ydata()) == best
    assert axes.get_ylabel().endswith(", best seed")


@pytest.mark.parametrize(("apart", "scale"), [(0.1, "linear"), (2, "log")])
def test_bars_of_losses_stay_above_0_and_ticks_do_not_print_over_each_other(apart, scale):
    """Seeds far apart have an interval over orders of magnitude, and its axis is logarithmic."""
    rates = (1e-4, 1.1e-4, 1e-3, 3e-3, 1e-2)
    rows = [{"seed": seed, "lr": rate, "test_loss": 1 + apart * seed} for rate in rates for seed in (0, 1)]
    (axes,) = draw_sweep(pd.DataFrame(rows), "lr", value="test_loss").axes
    (_, _, (bars,)) = axes.containers[0]
    mean = 1 + apart / 2
    # with two seeds the standard error is half of their distance; 12.7 is Student's quantile
    ends = [mean * np.exp(sign * 12.706204736 * (apart / 2) / mean) for sign in (-1, 1)]
    assert all(segment[:, 1] == pytest.approx(ends, rel=1e-6) for segment in bars.get_segments())
    assert axes.get_yscale() == scale
    assert axes.get_xscale() == "log" and not set(rates[:2]) <= set(axes.get_xticks())


def test_runs_are_found_in_order_and_what_is_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^runs=latest: no run under .*"):
        find_runs("latest")
    for name in ("old/10", "old/2", "new"):
        run_at(tmp_path / "outputs" / "train" / name)
    (tmp_path / "outputs" / "train" / "old" / "²_notes").mkdir()  # no number that Python reads
    run_at(tmp_path / "outputs" / "bench" / "b", bench=["paths"])
    assert [path.name for path in find_runs("outputs/train/old")] == ["2", "10"]
    assert [path.name for path in find_runs("latest")] == ["new"]
    os.utime(tmp_path / "outputs" / "train" / "old" / "2" / "config.yaml", (time.time() + 1e6,) * 2)  # by a wrong clock
    assert [path.name for path in find_runs("latest")] == ["new"]
    assert len(find_runs("outputs")) == len(find_runs("outputs/*/*")) == 3
    with pytest.raises(ConfigError, match=r"^runs=nothing\*: no run there; "):
        find_runs("nothing*")
    job = tmp_path / "outputs" / "train" / "old" / "3"
    (job / ".hydra").mkdir(parents=True)
    (job.parent / "multirun.yaml").write_text("")
    assert find_runs("outputs/train/old")[1].resolve() == job.resolve()  # failed before it wrote a config
    assert "3: absent" in gather(find_runs("outputs/train/old"), tmp_path / "there")


def test_runs_of_a_list_are_those_of_each_folder_in_its_order(tmp_path, monkeypatch):
    for name in ("a", "b/0", "b/1", "c"):
        run_at(tmp_path / name)
    runs = find_runs(f"[{tmp_path}/c,{tmp_path}/b]")
    assert [str(run.relative_to(tmp_path)) for run in runs] == ["c", "b/0", "b/1"]
    assert find_runs(f"[{tmp_path}/c, {tmp_path}/b]") == runs
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_runs("[~/c,~/b]") == runs
    (tmp_path / "empty").mkdir()
    for lost in (f"{tmp_path}/d", f"{tmp_path}/d*", f"{tmp_path}/empty"):
        assert f": no run in {lost}; correct it, or leave it out" in refusal(find_runs, f"[{tmp_path}/c,{lost}]")
    with pytest.raises(ConfigError, match=r"a folder of 2 runs; give one of them, as in run=.*/b/0"):
        _ = Run(tmp_path / "b").config
    assert compose("report", f"runs=[{tmp_path}/c,{tmp_path}/b]").runs == f"[{tmp_path}/c,{tmp_path}/b]"


def test_names_in_a_list_of_runs_may_hold_commas(tmp_path):
    names = ["0_a=1,b=2", "0_a=1,b=2,c", "1_a=1,b= 3", "2"]
    for name in names:
        run_at(tmp_path / name)
    for some in (names, names[::-1], names[:1], names[1:3]):
        runs = find_runs(f"[{', '.join(f'{tmp_path}/{name}' for name in some)}]")
        assert [run.name for run in runs] == some
    assert ": no run in 3; correct it" in refusal(find_runs, f"[{tmp_path}/0_a=1,b=2,3]")


def test_markdown_and_latex_hold_the_table_whatever_is_in_it():
    table = pd.DataFrame({"a|b_c": ["x|y", "50% & $1 #_{}~^\\"], "n": [0.123456, np.nan]})
    lines = markdown(table).splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [3, 3, 3, 3]
    assert lines[2] == r"| x\|y | 0.1235 |"
    text = latex(table)
    assert text.count(r"\begin{tabular}{lr}") == text.count(r"\end{tabular}") == 1
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", row)) for row in rows] == [1, 1, 1]
    assert r"50\% \& \$1 \#\_\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in rows[2]
    assert not re.search(r"(?<!\\)[#$_%]", "".join(rows))


@pytest.mark.parametrize("name", [name for name, analysis in ANALYSES.items() if analysis.figure])
def test_every_figure_has_a_caption_in_words(name):
    captions = {num_seeds: caption_of(name, ANALYSES[name].figure, num_seeds) for num_seeds in (0, 1, 3, 11)}
    assert len(captions[0]) > 30 and all(caption.startswith(captions[0]) for caption in captions.values())
    assert not re.search(r"facet|`|\{|[,;.]\.", " ".join(captions.values()))
    assert all(caption.endswith(".") for caption in captions.values())
    if name == "head_rank":  # which draws two kinds of figures
        assert "errors" in captions[0] and "singular values" in captions[0]


def test_a_caption_says_what_the_spread_is():
    ends = {1: "One seed, so no spread.", 3: "are geometric means over 3 seeds; the seeds are drawn behind."}
    ends[11] = "geometric means over 11 seeds; bands are the 95 % interval of the mean."
    for num_seeds, end in ends.items():
        assert caption_of("residual", ANALYSES["residual"].figure, num_seeds).endswith(end)
    assert " Lines are means over 3 seeds;" in caption_of("paths", ANALYSES["paths"].figure, 3)
    # drawn by the function of dynamics
    assert GEOMETRIC["observed_states"] == GEOMETRIC["observed_attention"] == GEOMETRIC["dynamics"]
    assert set(OTHERWISE) | set(OF_ONE_SEED) | set(GEOMETRIC) <= {*FIGURES, *ANALYSES}


@pytest.mark.further
@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
def test_a_browser_sorts_a_table_and_paints_the_page(reported):
    from PIL import Image

    heading = """[...document.querySelectorAll("#runs + div th button")].find(x => x.textContent === "model.heads")"""
    with Browser((reported / "report" / "report.html").as_uri(), width=1200) as browser:
        for wanted in (sorted, lambda cells: sorted(cells, reverse=True)):
            browser.see(f"{heading}.click()")
            shown = Page(browser.see("document.documentElement.outerHTML"))
            (runs,) = [table for table in shown.tables if "to repeat it" in table[0]]
            heads = [int(row[2]) for row in runs[1:]]
            assert heads == wanted(heads) and len(set(heads)) == 3  # 2 before 10: as numbers
        corner = {}
        for name, look in {"light": (1200, False), "phone": (390, False), "dark": (1200, True)}.items():
            browser.look(*look)
            with Image.open(io.BytesIO(browser.screenshot())) as image:
                assert image.width == look[0]
                corner[name] = image.convert("L").getpixel((2, 2))
    assert corner["light"] == corner["phone"] == 255 and corner["dark"] < 40


def baselines_of(axes):
    """By label the heights at which constant answers are drawn."""
    levels = [item for item in (*axes.get_lines(), *axes.collections) if item.get_label() in BASELINES.values()]
    heights = [[*one.get_ydata()] if one in axes.lines else [y for (_, y), _ in one.get_segments()] for one in levels]
    return {item.get_label(): height for item, height in zip(levels, heights, strict=True)}


def test_constant_answers_are_drawn_beside_test_accuracies():
    rows = [
        {"x": x, "word": f"w{x}", "seed": seed, "test_accuracy": 0.5 + x / 10, "test_loss": 1.0}
        | {"majority_accuracy": 0.2 + seed / 100, "position_majority_accuracy": 0.1 * x}
        for x in (3, 4)
        for seed in (0, 1)
    ]
    table = pd.DataFrame(rows)
    (axes,) = draw_sweep(table, "x").axes
    of_position = pytest.approx([0.3, 0.4])
    expected = {"commonest class": pytest.approx([0.205, 0.205]), "commonest class of the position": of_position}
    assert expected == baselines_of(axes) == baselines_of(draw_sweep(table, "word").axes[0])
    assert baselines_of(draw_sweep(table, "x", value="test_loss").axes[0]) == {}
    # where lines differ in it, each has its own
    by_line = table.assign(size=table.seed + 1, position_majority_accuracy=0.1 * table.x)
    (axes,) = draw_sweep(by_line, "size", "word").axes
    dotted = [[*line.get_ydata()] for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert dotted == [pytest.approx([0.3, 0.3]), pytest.approx([0.4, 0.4])]
    # two that are the same are drawn once
    same = table.assign(position_majority_accuracy=table.majority_accuracy)
    assert set(baselines_of(draw_sweep(same, "x").axes[0])) == {"commonest class"}
