"""Every analysis with every task and with every model: refused before anything is written, or measured."""

import dataclasses
import functools

import pytest
import torch
from breadth import some
from refusals import refusal

from rankbench.analyses import ANALYSES
from rankbench.analysing.runner import check_analyses, options_of
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.config.schema import KEYS, conf_dir
from rankbench.model import initial_model, skeleton
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.seeds import generator_for
from rankbench.tasks import TASKS, Corpus, build_task
from rankbench.training.loop import train

pytestmark = pytest.mark.usefixtures("rounded_once")

MODELS = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))
COUNTS = ["task.train_size=32", "task.test_size=32"]  # independence needs 30 sequences
TASK_WORDS = {
    "sorting": ["task.length=4", *COUNTS],
    "memorization": ["task.length=4", "task.vocabulary=9", COUNTS[0]],
    "convex_hull": ["task.points=4", *COUNTS],
    "circle_arcs": ["task.points=32"],
    "char_lm": ["task.length_limit=8", "task.valid_size=4", *COUNTS, "model.mask=causal"],
    "nearest_neighbor": ["task.points=4", "task.dimension=6", *COUNTS],
    "linear_regression": ["task.points=4", "task.dimension=3", *COUNTS, "task.curriculum_every=null"],
    "backcopy": ["task.length=4", *COUNTS, "model.mask=causal"],
    "retrieval": ["task.points=4", "task.dimension=6", *COUNTS],
}
TASK_WORDS["linear_regression"] += ["task.start_dimension=3", "task.start_points=4", "model.mask=causal"]
TINY = ["model.layers=2", "trainer.steps=1", "trainer.batch_size=4", "trainer.eval_every=1", "replicas=1"]
WIDTHS = ["model.width=6", "model.heads=2"]
SMALL_OPTIONS = {
    "residual": ["sequences=2"],
    "collapse": ["sequences=2"],
    "bounds": ["sequences=2"],
    "paths": ["sequences=2", "repeats=1", "subset_sizes=[2]"],
    "independence": [
        "sequences=30",
        "tokens=1",
        "paths_per_length=1",
        "probes=2",
        "hessian_sequences=2",
        "max_paths=9",
    ],
    "path_mass": ["sequences=2"],
    "pruning": ["sequences=2", "selection_sequences=2", "random_orders=1"],
    "rollout": ["steps=2"],
    "samples": ["number=1"],
    "lipschitz": ["sequences=1"],
    "invertibility": ["tokens=[3]", "sequences=2", "iterations=1", "coefficients=[0.5]", "ranges=[[0,1]]"],
    "attention": ["sequences=2"],
    "spectrum": ["sequences=4", "resamples=100"],
    "histograms": ["tokens=3", "sequences=2"],
    "signal_map": ["sequences=2"],
    "laws": ["tokens=3", "layers=2", "samples=1"],
    "speed": ["batch_size=2", "rounds=1"],
    "rank_theory": ["dimensions=[3]", "ranks=[1]", "heads=[1]", "errors=[]", "votes=[1]", "samples=2", "matrices=2"],
}
SMALL_OPTIONS["rank_theory"] += ["tokens=[3]"]
OPTION_WORDS = [f"analysis=[{','.join(ANALYSES)}]"]
OPTION_WORDS += [f"analysis.{name}.{word}" for name, words in SMALL_OPTIONS.items() for word in words]

REFUSED = {  # beside rollout and samples, which each have one task
    "lstm": {name for name in ANALYSES if ANALYSES[name].needs & {"attention", "sublayers"}},
    "contractive_l2": {"collapse", "bounds"},
    "causal_contractive_l2": {"collapse", "bounds"},
    **{model: {"collapse", "bounds"} for model in ("cosine", "sigmoid", "relu", "differential")},
    "causal_l2_matched": {"bounds", "independence"},
    **{model: {"bounds"} for model in ("l2", "l2_tied", "causal_l2", "causal_l2_tied")},
}


# Models that differ in what analyses read of them; the others share their code, and measuring them is `slow`
MEASURED = {"transformer", "lstm", "differential"}


def task_of(model):
    return "nearest_neighbor" if model.startswith("amsel") else "sorting"


composed_once = functools.cache(compose)  # nothing here changes a config


@functools.cache
def small_options():
    """The options of every analysis, small: most of a composition, and the same for every task and model."""
    return compose("train", *OPTION_WORDS).analysis


@functools.cache
def config(task, model, *keys):
    words = [f"task={task}", f"model={model}", *TASK_WORDS[task], *TINY, *(WIDTHS if model != "lstm" else WIDTHS[:1])]
    if model.startswith("amsel"):
        words.remove("model.heads=2")
    if model == "differential":
        words.append("model.head_width=4")  # an even one
    if model != "lstm":
        words.append("trainer.dynamics_every=1")
    return dataclasses.replace(compose("train", *words, *keys), analysis=small_options())


def refusals(cfg):
    """The analyses that are refused before anything is written, each in one line."""
    refused = set()
    for name, options in cfg.analysis.items():
        try:
            alone = dataclasses.replace(cfg, analysis={name: options})
            check_analyses(alone, alone)
        except ConfigError as error:
            refused.add(name)
            assert "\n" not in str(error)
    return refused


def measures_all_but(refused, cfg, folder):
    """All other analyses measure the trained network."""
    run = Run(folder / "run")
    train(dataclasses.replace(cfg, analysis={}), run)
    (subject,) = subjects_of_run(run, Machine.prepare(composed_once("analyze")))
    subject = dataclasses.replace(subject, networks={"trained": subject.network})
    for name, options in options_of(cfg).items():
        if name not in refused:
            assert len(ANALYSES[name].table(subject, options)), name


@pytest.mark.parametrize(
    ("task", "model"),
    [*((task, "transformer") for task in TASKS if task != "sorting"), *((task_of(model), model) for model in MODELS)],
)
def test_an_analysis_is_refused_before_anything_is_written(task, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_task = {"rollout"} - ({"rollout"} if task == "circle_arcs" else set())
    of_task |= {"samples"} - ({"samples"} if task == "char_lm" else set())
    assert refusals(config(task, model)) == of_task | REFUSED.get(model, set())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.further
@pytest.mark.parametrize(
    ("task", "model"),
    [
        *some(((task, "transformer") for task in TASKS if task != "sorting"), 2),
        *(pytest.param(task_of(m), m, marks=() if m in MEASURED else pytest.mark.slow) for m in MODELS),
    ],
)
@pytest.mark.filterwarnings("ignore:An input array is constant")  # of networks that hardly differ
def test_an_analysis_that_is_not_refused_measures(task, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = config(task, model)
    measures_all_but(refusals(cfg), cfg, tmp_path)


# Choices of the model's keys that need another key's; then values of the keys that have no choices
TOGETHER = {
    "attention=contractive_l2": "contraction=1 tied_qk=true",
    "attention=differential": "head_width=4",
    "positions=concatenated": "read_in=identity",
    "read_in=identity": "positions=concatenated",
    "mask=window": "window=1",
    "hyper_connections=free": "norm=pre",
    "hyper_connections=doubly_stochastic": "norm=pre",
}
CHOICES = {
    f"{key.removeprefix('model.')}={choice}"
    for key, about in KEYS.items()
    if key.startswith("model.") and key != "model.kind"
    for choice in about.choices or ()
}
VALUES = {"head_width=1", "value_width=2", "kv_groups=1", "latent_width=2", "temperature=0.5", "exclusive=true"}
VALUES |= {"mix_attention=0.5 mix_identity=0.3 mix_uniform=0.2", "skip=false", "skip_scale=0.7 branch_scale=2"}
VALUES |= {"mlp=false", "mlp_ratio=2", "mlp_skip=false", "norm_affine=false", "bias=false", "value_residual=0.5"}
VALUES |= {
    "embedding_skip=0.3",
    "shared_layers=true",
    "dropout=0.1",
    "embedding_norm=true",
    "attention_init=0.1",
    "attention=l2 tied_qk=true",
}
QUICK = {"hyper_connections=free mask=window latent_width=2"}


@pytest.mark.further
@pytest.mark.parametrize(
    "words", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in sorted(CHOICES | VALUES | QUICK)]
)
@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_an_analysis_is_refused_before_or_measures_whatever_the_models_keys(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [f"model.{word}" for part in words.split() for word in (part, *TOGETHER.get(part, "").split())]
    task = "convex_hull" if "read_in=" in " ".join(keys) else "sorting"  # tokens have no coordinates
    cfg = config(task, "transformer", *keys)
    refused = refusals(cfg)
    assert {"rollout", "samples"} <= refused and "residual" not in refused
    assert list(tmp_path.iterdir()) == []
    measures_all_but(refused, cfg, tmp_path)


@pytest.mark.further
@pytest.mark.parametrize("name", TASKS)
@torch.no_grad()
def test_a_model_is_refused_before_or_runs(name):
    task, fit = build_task(config(name, "transformer").task), []
    batch = task.splits()["test"][:2] if isinstance(task, Corpus) else task.sample(2, generator_for(0, "test"))
    inputs = batch.to("cpu", torch.float32).inputs
    assert batch.targets.is_floating_point() == (task.target_kind == "numbers")
    for model in MODELS:
        cfg = config(task_of(model), model).model
        try:
            skeleton(cfg, task)
        except ConfigError:
            continue
        fit.append(model)
        assert initial_model(cfg, task, 0)(inputs).shape[-1] == task.num_outputs
    reads_points = {"amsel", "amsel_d15", "amsel_d20"}
    causal = {model for model in MODELS if model.startswith("causal")} | {"lstm"}
    wanted = {
        **dict.fromkeys(("char_lm", "backcopy"), causal),
        "linear_regression": causal - {"lstm"},  # reads coordinates
        **{task: set(MODELS) - {"lstm"} for task in ("nearest_neighbor", "retrieval")},
        **{task: set(MODELS) - reads_points for task in ("sorting", "memorization")},
    }
    of_coordinates = set(MODELS) - reads_points - {"lstm"}
    assert set(fit) == wanted.get(name, of_coordinates)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["analysis=[head_rank]", "analysis.head_rank.heads=0"], "analysis.head_rank.heads=0: leaves nothing"),
        (["analysis=[pruning]", "analysis.pruning.max_paths=8"], "analysis.pruning.max_paths=8: the network has 729"),
        (["analysis=[pruning]", "model.layers=700"], "the network has 9.66e+333 paths"),
        (["analysis=[independence]", "task.test_size=29"], "analysis=independence: needs at least 30 test sequences"),
        (["analysis=[independence]", "model.weight_norm=sigma"], "analysis=independence: needs heads with parameters"),
        (["analysis=[independence]", "model.kv_groups=1"], "analysis=independence: needs heads with parameters"),
        (["analysis=[independence]", "model.shared_layers=true"], "analysis=independence: needs heads with parameters"),
        (["analysis=[bounds]", "model.mix_uniform=0.5"], "analysis=bounds: needs the softmax of dot products alone"),
        (["analysis=[invertibility]", "analysis.invertibility.network=true"], "analysis.invertibility.network=true: "),
        (["analysis=[lipschitz]", "analysis.lipschitz.cap=1"], "cap=1.0: only tied L2 attention has a bound"),
        (
            ["analysis=[lipschitz]", "analysis.lipschitz.radii=[0.1]", "model.attention=cosine"],
            "analysis.lipschitz.radii: layer 1 has attention cosine",
        ),
        (["analysis=[histograms]", "model=contractive_l2", "model.contraction_keys=9"], "model.contraction_keys=9: "),
        (
            ["analysis=[invertibility]", "model=contractive_l2", "model.contraction_keys=9"],
            "model.contraction_keys=9: ",
        ),
        (["model=contractive_l2", "model.contraction_keys=7"], "model.contraction_keys=7: here a query may see 8 keys"),
        (["task=char_lm", "model.mask=causal", "analysis=[samples]", "analysis.samples.begin='%'"], "% are not"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_options_and_sizes_rule_out_is_refused_before(words, said):
    cfg = compose("train", *words)
    assert said in refusal(check_analyses, cfg, cfg)
