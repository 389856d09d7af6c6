"""Analyses of networks at the edge of numbers: zero weights, sums that vanish, outputs that overflow."""

import copy
import dataclasses
import functools
import math
import re

import pytest
import torch
from breadth import some
from test_combinations import COUNTS, TASK_WORDS, TINY, WIDTHS, composed_once, config, small_options

from rankbench.analyses import ANALYSES, Foreign, Subject
from rankbench.analysing.runner import analyze, draw, options_of
from rankbench.analysing.subjects import check_finite, fresh_subjects, subjects_of_run
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.measures.jacobian_ascent import jacobian_norm
from rankbench.plots import Page
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.training.loop import train

# tables without a number that a network's size changes, or refused here
APART = ("rollout", "samples", "rank_theory", "laws", "curves", "dynamics", "path_counts", "lipschitz", "invertibility")
APART += ("speed", "signal_map")


@pytest.fixture(scope="module")
def cfg():
    return config("sorting", "transformer")


@pytest.fixture(scope="module")
def subject(cfg, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("trained") / "run")
    train(dataclasses.replace(cfg, analysis={}), run)
    (subject,) = subjects_of_run(run, Machine.prepare(compose("analyze", "precision=fp64")))
    return dataclasses.replace(subject, networks={"trained": subject.network})


def fresh(*words):
    """A config with small options, a subject with an untrained network in float64, and this network."""
    cfg = dataclasses.replace(composed_once("train", *words), analysis=small_options())
    (subject,) = fresh_subjects(cfg, Machine.prepare(composed_once("analyze", "precision=fp64")))
    (model,) = subject.networks.values()
    return cfg, subject, model


@functools.cache
def of_scale(factor):
    """The subject of a network without norms and MLPs whose states are `factor` times as large, its attention and
    logits being the same: a power of two, so that all its numbers but their exponents are the same."""
    words = ["task=sorting", "task.length=4", *COUNTS, *TINY, *WIDTHS, "model=san_skip", "model.bias=false"]
    cfg, subject, model = fresh(*words, "model.init_gain=0.5")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("read_in", "position")):
                parameter.mul_(factor)
            elif name.endswith("qkv.weight"):  # W_Q and W_K, not W_V
                parameter[: 2 * len(parameter) // 3].div_(factor)
            elif name == "read_out.weight":
                parameter.div_(factor)
    return cfg, subject


@pytest.mark.parametrize("factor", some([2.0**100, 2.0**-100], 2), ids=["1e30", "1e-30"])
@pytest.mark.parametrize("name", ["residual", "paths", "spectrum", "attention", "path_mass", "pruning", "independence"])
def test_what_is_relative_is_the_same_of_states_of_any_size(name, factor):
    """Numbers in units of the states are in these units; no other number differs, but for what an epsilon adds."""
    (cfg, plain), (_, scaled) = of_scale(1.0), of_scale(factor)
    wanted, table = (ANALYSES[name].table(subject, options_of(cfg)[name]) for subject in (plain, scaled))
    in_units = {"residual", "residual_frobenius", "noise_floor"} if name == "residual" else set()
    epsilon = (
        {"interaction", "accuracy", "loss"} if name in ("independence", "paths") else set()
    )  # of the read-out's norm
    assert len(table) == len(wanted)
    for column in wanted.select_dtypes("number"):
        if column in {*epsilon, "weights_sd"} or column.startswith(("covariance", "cross_gradient")):
            continue
        size = factor if column.removesuffix("_sd") in in_units else 1.0
        given, expected = table[column].to_numpy() / size, wanted[column].to_numpy()
        assert given == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True), column


def test_the_logarithms_of_states_of_any_size_move_with_them():
    (cfg, plain), (_, scaled) = of_scale(1.0), of_scale(2.0**100)
    wanted, table = (ANALYSES["collapse"].table(subject, options_of(cfg)["collapse"]) for subject in (plain, scaled))
    for column in ("log10_residual", "log10_measured"):
        assert (table[column] - wanted[column]).to_numpy() == pytest.approx(100 * math.log10(2), abs=1e-9)
    relative, expected = (rows.log10_relative_residual.to_numpy() for rows in (table, wanted))
    assert relative == pytest.approx(expected, abs=1e-9)


def changed(model, edge):
    """Weights at an edge, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if edge in ("zeros", "constant"):
                parameter.fill_({"zeros": 0.0, "constant": 0.1}[edge])
            elif edge == "rank one" and parameter.dim() == 2:
                u, s, vh = torch.linalg.svd(parameter, full_matrices=False)
                parameter.copy_(s[0] * u[:, :1] @ vh[:1])
            elif edge in ("1e30", "1e-30"):
                parameter.mul_(float(edge))


@pytest.mark.parametrize("edge", ["zeros", *some(["rank one", "constant", "1e30", "1e-30", "one token"], 2)])
@pytest.mark.parametrize("name", [name for name in ANALYSES if name not in APART])
@pytest.mark.filterwarnings("error:.*divide:RuntimeWarning", "ignore:An input array is constant")
@pytest.mark.usefixtures("unpainted", "rounded_once_here")
def test_an_edge_is_measured_and_drawn_or_refused_in_a_line(name, edge, tmp_path):
    """What is a ratio to an output of zeros is undefined, and an empty cell; no sum misses any of it."""
    task = "linear_regression" if edge == "one token" else "sorting"
    words = TASK_WORDS[task]
    if edge == "one token":
        words = [word for word in words if "points" not in word] + ["task.points=1", "task.start_points=1"]
    plain = ["model=transformer_no_norm", "model.init_gain=0.5"]
    cfg, subject, model = fresh(f"task={task}", *plain, *words, *TINY, *WIDTHS)
    changed(model, edge)
    subject = dataclasses.replace(subject, networks={"trained": model})
    try:
        check_finite([subject])
        table = ANALYSES[name].table(subject, options_of(cfg)[name]).assign(**subject.who)
    except ConfigError as error:
        assert edge == "1e30" and re.search("is not finite|overflow", str(error))
        return
    assert len(table) and isinstance(ANALYSES[name].digest(table), str)
    if edge == "zeros":
        for column in {"relative_residual", "norm_share", "mass", "share", "cosine"} & set(table):
            assert table[column].isna().all(), column
        assert name != "spectrum" or (table.remainder == 0).all()
    draw({name: [Page(table, None, "")]}, tmp_path, None, (".png",))


# what is a floor or a check itself, a spread, or the difference of two logarithms
NOT_MEASURED = re.compile("floor|remainder|_sd$|^disagreement$|^slack")


@pytest.mark.parametrize("edge", some(["rank one", "constant"], 2))
@pytest.mark.parametrize("name", [name for name in ANALYSES if name not in {*APART, "pruning"} - {"invertibility"}])
@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_a_number_that_rounding_makes_is_marked(name, edge):
    """Of float64 numbers of order 1 what is below 1e-13 is rounding, and the row says so."""
    words = ["task=sorting", "task.length=4", *COUNTS, *TINY, *WIDTHS, "model=transformer_no_norm"]
    cfg, subject, model = fresh(*words)
    changed(model, edge)
    table = ANALYSES[name].table(subject, options_of(cfg)[name])
    marks = table[[column for column in table if column.endswith("below_floor")]]
    is_marked = (marks > 0).any(axis=1)
    for column in table.select_dtypes("number"):
        if NOT_MEASURED.search(column):
            continue
        if column.startswith("sigma_"):
            is_marked = table.numerical_rank < int(column.removeprefix("sigma_"))
        size = table[column].abs()
        assert is_marked[(size > 0) & (size < 1e-13)].all(), column


@pytest.mark.parametrize("words", [[], ["model.mix_attention=100"]], ids=["rows of 1", "rows of 100"])
def test_distances_of_attention_weights_are_known_to_their_floor(words):
    """In float32 they differ from those in float64 by no more."""
    cfg, subject, model = fresh("task=sorting", "task.length=6", *COUNTS, *TINY, *WIDTHS, "model=transformer", *words)
    wanted = ANALYSES["attention"].table(subject, options_of(cfg)["attention"])
    single = dataclasses.replace(subject, networks={"initialised": copy.deepcopy(model).float()})
    table = ANALYSES["attention"].table(single, options_of(cfg)["attention"])
    for name in ("distance_to_uniform", "distance_to_identity"):
        assert ((table[name] - wanted[name]).abs() <= table.distance_noise_floor).all(), name
    assert (table.distance_noise_floor < 1e-4 * table.distance_to_identity).all()


def test_an_inverse_is_at_its_floor_only_where_it_has_converged(cfg, subject):
    options = dataclasses.replace(options_of(cfg)["invertibility"], coefficients=[0.1, 0.9], iterations=40)
    table = ANALYSES["invertibility"].table(subject, options)
    relative = table.noise_floor / (table.error / table.relative_error)
    assert relative.dropna().between(1e-16, 1e-12).all()
    assert (table.below_floor == (table.error <= table.noise_floor)).all() and set(table.below_floor) == {0, 1}


def test_sums_that_miss_the_output_are_told_of_ours_and_refused_of_others(cfg, subject, monkeypatch):
    """As where a norm magnifies rounding; here all rounding counts as a miss."""
    monkeypatch.setattr("rankbench.tape.sums.ROUNDING", 0.0)
    options = options_of(cfg)["spectrum"]
    assert (ANALYSES["spectrum"].table(subject, options).remainder > 0).all()
    foreign = Subject("mine", 0, foreign=Foreign("mine", "own", subject.modules, subject.example))
    with pytest.raises(ConfigError, match="the sums by length miss"):
        ANALYSES["spectrum"].table(foreign, options)


def test_a_jacobian_that_overflows_has_no_norm():
    x = torch.ones(2, dtype=torch.float64)
    for p in ("2", "inf"):
        assert jacobian_norm(lambda x: x * 2, x, p) == pytest.approx(2)
        assert math.isnan(jacobian_norm(lambda x: (x * 1e200) * 1e200, x, p))
        assert math.isnan(jacobian_norm(lambda x: (x * 1e-200 * 1e200 * 1e200) * 1e200 * 1e-300, x, p))


def test_a_network_whose_output_overflows_is_one_line(cfg, subject, tmp_path):
    weight = subject.network.read_out.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(1e308)
    try:
        with pytest.raises(ConfigError, match=r"^model=\w+: the output of seed 0, trained, is not finite, so there "):
            analyze(cfg, [subject], tmp_path)
        checkpoint = dataclasses.replace(subject, foreign=Foreign("mine", "own", subject.networks, subject.example))
        with pytest.raises(ConfigError, match="nothing to measure; check that its weights are finite, or try"):
            check_finite([checkpoint])
    finally:
        weight.data.copy_(before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["bounds", "collapse", "invertibility", "lipschitz"])
def test_what_is_measured_in_float64_reads_coordinates_of_any_precision(name):
    """Two of them gave float64 networks the coordinates of precision=fp32, which torch refuses to multiply."""
    words = [*TASK_WORDS["circle_arcs"], *TINY, *WIDTHS, "model=transformer_no_norm"]
    cfg, subject, model = fresh("task=circle_arcs", *words)
    options = options_of(cfg)[name]
    options = dataclasses.replace(options, network=True) if name == "invertibility" else options
    single = subject.test.to("cpu", torch.float32)
    subject = dataclasses.replace(subject, test=single, networks={"initialised": copy.deepcopy(model).float()})
    assert len(ANALYSES[name].table(subject, options))


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_an_lstm_without_information_samples_every_character_alike(tmp_path, value):
    (tmp_path / "text.txt").write_text("a few words of a text\nand a second line of it\n" * 40)
    words = ["model=lstm", "task=char_lm", f"task.path={tmp_path / 'text.txt'}", "model.width=8", "model.layers=1"]
    words += [f"task.{split}_size=null" for split in ("train", "valid", "test")]
    cfg = compose("analyze", "analysis=[samples]", *words)
    (subject,) = fresh_subjects(cfg, Machine.prepare(compose("analyze", "precision=fp64")))
    with torch.no_grad():
        for parameter in subject.network.parameters():
            parameter.fill_(value)
    table = ANALYSES["samples"].table(subject, options_of(cfg)["samples"])
    of_one_character = table.log_likelihood / table.characters
    assert of_one_character.to_numpy() == pytest.approx(-math.log(subject.task.num_outputs), rel=1e-12)
