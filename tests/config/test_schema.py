"""rankbench.config.schema: what is refused is refused in one line that helps; what is shipped is accepted."""

import copy
import dataclasses
import math
import re
from dataclasses import dataclass

import pytest
from command_line import python
from omegaconf import OmegaConf
from refusals import refusal

from rankbench.analyses import ANALYSES
from rankbench.commands import compose
from rankbench.commands.compose import resolve
from rankbench.commands.composition import register
from rankbench.config import keys
from rankbench.config.compatibility import check
from rankbench.config.keys import ConfigError, as_typed, closest, entries, typed
from rankbench.config.schema import KEYS, SCHEMAS, ModelConfig, OptimizerConfig, TrainerConfig, conf_dir
from rankbench.tasks import TASKS, build_task
from rankbench.tasks.corpora import CORPORA

CHOICES = {name: key.choices for name, key in KEYS.items() if key.choices}
RANGES = {name: (key.at_least, key.at_most) for name, key in KEYS.items() if key.at_least is not None}
# The command that has the key, where train has it not
HOLDERS = {
    entry.name: command
    for command in ("report", "data", "analyze")
    for entry in entries(SCHEMAS[command])
    if entry.name not in {of_train.name for of_train in entries(SCHEMAS["train"])}
}


def shipped(group):
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def composed(*overrides, command="train"):
    return compose.composed(command, *overrides)


@pytest.fixture(scope="module")
def default():
    return resolve(composed())


@pytest.fixture
def cfg(default):
    """The default config, free to be changed."""
    return copy.deepcopy(default)


def holder_of(key, cfg):
    """A config that has the key."""
    return resolve(composed(command=HOLDERS[key])) if key in HOLDERS else cfg


def put(cfg, key, value):
    *parts, last = key.split(".")
    for part in parts:
        cfg = getattr(cfg, part)
    assert hasattr(cfg, last)
    setattr(cfg, last, value)


# --- allowed values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", CHOICES)
def test_a_value_off_the_list_is_refused(cfg, key):
    cfg = holder_of(key, cfg)
    put(cfg, key, "zzz")
    message = refusal(check, cfg)
    assert message.startswith(f"{key}=zzz: unknown; allowed are ")
    assert message.partition("; or, ")[0].endswith(", ".join(CHOICES[key]))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, allowed in CHOICES.items() for value in allowed])
def test_every_value_on_the_list_passes(cfg, key, value):
    cfg = holder_of(key, cfg)
    put(cfg, key, value)
    if key in HOLDERS:
        return check(cfg)
    # what these need beside them
    cfg.model.window = 2 if cfg.model.mask == "window" else None
    if cfg.model.attention == "contractive_l2":
        cfg.model.tied_qk, cfg.model.contraction = True, 1.0
    if cfg.model.hyper_connections != "none":
        cfg.model.norm = "pre"
    cfg.optimizer.milestones = [10] if cfg.optimizer.schedule == "multistep" else []
    if cfg.model.kind == "lstm":
        cfg = resolve(composed("model=lstm"))
    check(cfg)


def just_outside(limit, direction):
    return limit + direction if isinstance(limit, int) else math.nextafter(limit, direction * math.inf)


@pytest.mark.parametrize("key", RANGES)
def test_a_value_out_of_range_is_refused(cfg, key):
    smallest, largest = RANGES[key]
    wrong = [just_outside(smallest, -1), just_outside(largest, 1), math.nan, math.inf, -math.inf]
    cfg = holder_of(key, cfg)
    for value in wrong:
        put(cfg, key, value)
        message = refusal(check, cfg)
        finite = "" if math.isfinite(value) else "finite "
        assert message.startswith(f"{key}={value}: out of range; allowed are {finite}values from ")
        low, high = message.split(" from ")[1].split(" (")[0].split(" to ")
        assert (float(low), float(high)) == (smallest, largest)


@pytest.mark.parametrize("key", RANGES)
def test_the_ends_of_a_range_pass(cfg, key):
    for value in RANGES[key]:
        changed = copy.deepcopy(holder_of(key, cfg))
        put(changed, key, value)
        # what goes with some of them: one of steps and epochs; window needs its mask; heads divide the width
        if key == "trainer.epochs":
            changed.trainer.steps = None
        if key == "model.window":
            changed.model.mask = "window"
        if key in ("model.heads", "model.width"):
            changed.model.head_width = 3
        if key == "model.kv_groups":
            changed.model.heads, changed.model.head_width = value, 3
        if key.startswith("model.contraction"):
            changed.model.attention, changed.model.tied_qk = "contractive_l2", True
            changed.model.contraction = changed.model.contraction or 1.0
        if key == "model.mlp_ratio":
            changed.model.width = 2000
        check(changed)


def test_what_a_key_names_is_what_the_code_has():
    assert KEYS["corpus"].choices == tuple(CORPORA)


def test_every_number_of_the_config_has_a_range(cfg):
    # lists and null defaults included: a new number without a range shows here
    of_analyze = dataclasses.fields(resolve(composed(command="analyze")))
    numbers = {field.name for field in of_analyze if field.type in (int, float, int | None, list[int] | None)}
    for prefix, part in {"": cfg, "model.": cfg.model, "optimizer.": cfg.optimizer, "trainer.": cfg.trainer}.items():
        for field in dataclasses.fields(part):
            if field.type in (int, float, int | None, float | None, list[float], list[int]):
                numbers.add(prefix + field.name)
    assert numbers == set(RANGES)


# --- what goes with what ---------------------------------------------------------------------------------------------

# words, and how the line begins ... and what else it has
COMBINATIONS = [
    ("model.width=51", "model.width=51: ... by model.heads=2; choose a multiple of 2, or set model.head_width"),
    ("model.mask=window", "model.window=null: model.mask=window ... set model.window"),
    ("model.window=3", "model.window=3: only model.mask=window has a window; got model.mask=none"),
    ("model.window=3 model.mask=causal", "model.window=3: only model.mask=window has a window; got model.mask=causal"),
    ("model.mlp=false model.mlp_skip=true", "model.mlp_skip=true: ... set model.mlp=true or model.mlp_skip=false"),
    ("model.mlp_ratio=0.01 model.width=40", "model.mlp_ratio=0.01: ... model.width=40; allowed are ratios from 0.025"),
    ("model.query_gains=[2] model.tied_qk=true", "model.query_gains=[2.0]: ... set model.tied_qk=false"),
    ("model.query_gains=[2] model.weight_norm=sigma", "model.query_gains=[2.0]: ... set model.weight_norm=none"),
    ("model.heads=3 model.kv_groups=2", "model.kv_groups=2: does not divide model.heads=3 into equal groups"),
    ("model.kv_groups=1 model.tied_qk=true", "model.kv_groups=1: cannot be combined with model.tied_qk=true"),
    ("model.latent_width=2 model.tied_qk=true", "model.latent_width=2: cannot be combined with model.tied_qk=true"),
    ("model.latent_width=2 model.values=zero", "model.latent_width=2: cannot be combined with model.values=zero"),
    ("model.value_width=3 model.weight_norm=sigma", "model.value_width=3: ... with model.weight_norm=sigma; use none"),
    ("optimizer.cap=1 model.weight_norm=sigma", "optimizer.cap=1.0: with model.weight_norm=sigma a matrix has"),
    ("optimizer.milestones=[-5]", "optimizer.milestones=[-5]: out of range; allowed are values from 0"),
    ("trainer.epochs=2", "trainer.steps=1000 trainer.epochs=2.0: give exactly one of the two ... null"),
    ("trainer.steps=null", "trainer.steps=null trainer.epochs=null: give exactly one of the two"),
    ("optimizer.schedule=multistep", "optimizer.milestones=[]: optimizer.schedule=multistep ... [1000,2000]"),
    # attention
    ("model.contraction=1", "model.contraction=1.0: only model.attention=contractive_l2 has one; got dot"),
    ("model=l2 model.contraction_keys=3", "model.contraction_keys=3: only model.attention=contractive_l2 has one"),
    ("model.attention=contractive_l2 model.tied_qk=true", "model.contraction=null: model.attention=contractive_l2"),
    ("model=contractive_l2 model.tied_qk=false", "model.tied_qk=false: model.attention=contractive_l2"),
    ("model=contractive_l2 model.mask=others", "model.mask=others: model.attention=contractive_l2"),
    ("model=contractive_l2 model.values=zero", "model.values=zero: model.attention=contractive_l2"),
    ("model=contractive_l2 model.init_gain=0", "model.init_gain=0.0: model.attention=contractive_l2"),
    ("model=contractive_l2 model.mix_attention=0", "model.mix_attention=0.0: model.attention=contractive_l2"),
    ("model=contractive_l2 model.exclusive=true", "model.exclusive=true: ... _l2 has no Lipschitz constant"),
    ("model.weight_norm=sigma model.values=zero", "model.values=zero: model.weight_norm=sigma divides"),
    ("model.weight_norm=sigma model.init_gain=0", "model.init_gain=0.0: model.weight_norm=sigma divides"),
    ("model.weight_norm=sigma model.mlp_gain=0", "model.mlp_gain=0.0: model.weight_norm=sigma divides"),
    # several streams, and layers with the same parameters
    ("model.value_residual=0.5 model.embedding_skip=1", "model.value_residual=0.5 model.embedding_skip=1.0: only one"),
    ("model=contractive_l2 model.value_residual=0.5", "model.value_residual=0.5: ... for values of two layers; use l2"),
    ("model.value_residual=0.5 model.exclusive=true", "model.value_residual=0.5: ... the values of a single layer"),
    ("model.hyper_connections=free", "model.hyper_connections=free: ... use model.norm=pre, peri or none"),
    (
        "model.norm=pre model.hyper_connections=free model.skip=false",
        "model.hyper_connections=free: ... set model.skip=true",
    ),
    ("model.norm_scale=depth model.norm=none", "model.norm_scale=depth: ... no norm to scale; set model.norm=pre"),
    ("model.value_residual=0.5 model.shared_layers=true", "model.value_residual=0.5: makes layers differ"),
    ("model.norm_scale=depth model.shared_layers=true", "model.norm_scale=depth: makes layers differ"),
    # LSTMs
    ("model=lstm model.shared_layers=true", "model.shared_layers=true: an LSTM has no such part"),
    ("model=lstm model.heads=2", "model.heads=2: an LSTM has no such part; model=lstm leaves it at 1"),
    ("model=lstm model.skip=true", "model.skip=true: an LSTM has no such part; model=lstm leaves it at false"),
    ("model=lstm model.temperature=2", "model.temperature=2.0: an LSTM has no such part"),
    ("model=lstm model.init=bert", "model.init=bert: not for an LSTM; allowed are pytorch, glorot"),
    ("model=lstm optimizer=muon", "optimizer.name=muon optimizer.cap=null: muon and the cap are for the matrices of a"),
    ("model=lstm optimizer.cap=1", "optimizer.name=adam optimizer.cap=1.0: muon and the cap are for the matrices of a"),
    ("model=lstm trainer.compile=true", "trainer.compile=true: torch cannot compile an LSTM"),
    ("model=lstm trainer.dynamics_every=5", "trainer.dynamics_every=5: an LSTM has no attention"),
]


@pytest.mark.parametrize(("words", "said"), COMBINATIONS)
def test_what_does_not_go_together_is_refused(words, said):
    line = refusal(compose.compose, "train", *words.split())
    beginning, _, rest = said.partition(" ... ")
    assert line.startswith(beginning) and rest in line


@pytest.mark.parametrize(
    "changes",
    [
        {"model.width": 50, "model.heads": 4, "model.head_width": 7},
        {"model.mask": "window", "model.window": 0},
        {"model.mlp": False, "model.mlp_skip": False},
        {"model.mlp": False, "model.mlp_skip": False, "model.mlp_ratio": 0.001},  # no MLP, no hidden unit needed
        {"trainer.steps": None, "trainer.epochs": 0.5},
        {"optimizer.schedule": "multistep", "optimizer.milestones": [5]},
        {"device": "cuda", "trainer.compile": "true", "precision": "fp64"},
    ],
)
def test_what_goes_together_passes(cfg, changes):
    for key, value in changes.items():
        put(cfg, key, value)
    check(cfg)


# --- one key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "value", "said"),
    [
        ({"at_least": 2}, 1, "k=1: out of range; allowed are values from 2"),
        ({"above": 0, "below": 0.5}, 0.5, "k=0.5: out of range; allowed are values above 0 and below 0.5"),
        ({"between": (1, 4)}, 5, "k=5: out of range; allowed are values from 1 to 4"),
        ({"at_least": 1, "unit": "steps"}, 0, "k=0: out of range; allowed are values from 1 (steps)"),
        ({"at_least": 2, "why": "one has no rank"}, 1, "k=1: out of range; allowed are values from 2; one has no rank"),
        ({"at_least": 0}, math.inf, "k=inf: out of range; allowed are finite values from 0"),
        ({"at_least": 1}, [3, 0], "k=[3,0]: out of range; allowed are values from 1"),
        ({"nonempty": True}, [], "k=[]: name at least one"),
        ({}, 2**63, f"k={2**63}: out of range; integers are below 2^63"),
        ({"at_least": 1}, [1, 2**63], f"k=[1,{2**63}]: out of range; integers are below 2^63"),
        ({"nonempty": True, "choices": ["a", "b"]}, [], "k=[]: name at least one of a, b"),
        (
            {"choices": ["left", "right"]},
            ["left", "rigt"],
            "k=rigt: unknown, did you mean right?; allowed are left, right",
        ),
    ],
)
def test_a_key_refuses_in_one_line(limits, value, said):
    assert refusal(keys.key("Meaning.", **limits).metadata["key"].check, "k", value) == said


@pytest.mark.parametrize(
    ("limits", "value"),
    [
        ({"at_least": 2}, None),  # null is the type's matter
        ({"at_least": 2}, 2**63 - 1),
        ({"above": 0, "below": 0.5}, 0.25),
        ({"at_least": 1}, []),
        ({"choices": ["a"]}, ["a", "a"]),
        ({}, True),
        ({}, {"a": 1}),
    ],
)
def test_a_key_takes_what_is_allowed(limits, value):
    keys.key("Meaning.", **limits).metadata["key"].check("k", value)


@pytest.mark.parametrize(
    ("type_", "limits", "words"),
    [
        (int, {"between": (1, 8)}, "integer from 1 to 8"),
        (float | None, {"above": 0, "unit": "steps"}, "number above 0 (steps), or null"),
        (bool, {}, "true, false"),
        (str, {"choices": ["a", "b"]}, "a, b"),
        (str | None, {}, "text, or null"),
        (None | int, {}, "integer, or null"),
        (list[int], {"at_least": 2}, "list of integers from 2"),
        (list[list[float]], {}, "list of lists of numbers"),
        (dict[str, list[int]], {}, "keys of its own"),
    ],
)
def test_what_is_allowed_in_words(type_, limits, words):
    assert keys.key("Meaning.", **limits).metadata["key"].allowed(type_) == words


def test_ranges_are_checked_before_a_dataclass_checks_itself():
    @dataclass(frozen=True)
    class Sized:
        width: int = keys.key("Width.")
        heads: int = keys.key("Heads.", at_least=1)

        def __post_init__(self):
            if self.width % self.heads:
                raise ConfigError("not divisible")

    assert refusal(typed, Sized, {"width": 4, "heads": 0}, "task").startswith("task.heads=0: out of range")
    assert refusal(typed, Sized, {"width": 4, "heads": 3}, "task") == "not divisible"


# --- typed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    length: int
    rate: float
    repeats: bool
    label: str
    size: int | None = 3

    def __post_init__(self):
        if self.length < 0:
            raise ConfigError(f"task.length={self.length}: too small")


GOOD = {"length": 3, "rate": 0.5, "repeats": True, "label": "a", "size": None}


def test_typed_values_come_back_as_the_dataclass():
    assert typed(Options, GOOD, "task") == Options(3, 0.5, True, "a", None)
    rate = typed(Options, {**GOOD, "rate": 2}, "task").rate
    assert isinstance(rate, float) and rate == 2.0  # a whole number, where a float is wanted
    without_size = {name: value for name, value in GOOD.items() if name != "size"}
    assert typed(Options, without_size, "task").size == 3  # the default of a key that is not given


@pytest.mark.parametrize(
    ("key", "value", "wants"),
    [
        ("lenght", 3, "unknown key, did you mean length?; allowed are length, rate, repeats, label, size"),
        ("zzz", 3, "unknown key; allowed are length, rate, repeats, label, size"),
        ("length", "three", "wants an integer"),
        ("length", 2.5, "wants an integer"),
        ("length", True, "wants an integer"),
        ("size", "many", "wants an integer"),
        ("rate", "fast", "wants a number"),
        ("repeats", "maybe", "wants true or false"),
        ("repeats", 2.5, "wants true or false"),
        ("label", [1, 2], "wants a text"),
        ("length", None, "null is not allowed"),
        ("label", None, "null is not allowed"),
    ],
)
def test_typed_says_what_is_wanted(key, value, wants):
    message = refusal(typed, Options, {**GOOD, key: value}, "task")
    given = f"task.{key}" if "unknown" in wants else f"task.{key}={as_typed(value)}"
    assert message.startswith(f"{given}: {wants}")


@pytest.mark.parametrize("key", ["length", "rate", "repeats", "label"])
def test_typed_names_a_missing_key(key):
    values = {name: value for name, value in GOOD.items() if name != key}
    assert refusal(typed, Options, values, "analysis.paths") == f"analysis.paths.{key}: missing; give it a value"


@pytest.mark.parametrize(("got", "says"), [("layernrom", ", did you mean layernorm?"), ("zzz", ""), (3, "")])
def test_closest(got, says):
    assert closest(got, ("layernorm", "rmsnorm")) == says


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "steps"), [(None, 3000), ("paper", 3000), ("laptop", 600), ("smoke", 20)])
def test_by_budget_gives_each_budget_its_value(budget, steps):
    register()
    register()  # twice is as good as once
    text = "${by_budget:{paper:3000,laptop:600,smoke:20}}"
    cfg = OmegaConf.create({"budget": budget, "trainer": {"steps": text, "half": "${.steps}"}})
    assert cfg.trainer.steps == cfg.trainer.half == steps


@pytest.mark.parametrize(("budget", "steps", "every"), [("paper", 1000, 50), ("laptop", 300, 50), ("smoke", 20, 10)])
def test_budgets_shrink_the_shipped_default(budget, steps, every):
    trainer = resolve(composed(f"budget={budget}")).trainer
    assert (trainer.steps, trainer.eval_every) == (steps, every)


# --- the shipped files -----------------------------------------------------------------------------------------------


def test_without_hydra_the_values_are_those_of_the_command_line():
    cfg = resolve(composed("budget=paper"))
    assert (cfg.model, cfg.optimizer, cfg.trainer) == (ModelConfig(), OptimizerConfig(), TrainerConfig())
    assert ModelConfig(layers=12) == resolve(composed("model.layers=12")).model
    assert ModelConfig(mlp=False) == resolve(composed("model.mlp=false")).model
    OptimizerConfig().milestones.append(1)
    assert OptimizerConfig().milestones == []


def inherited(group, name, cls):
    """The values that a shipped file changes: those of the files in its defaults list, or the defaults of the keys."""
    values = {"mlp_skip": "${model.mlp}"} | vars(cls())
    for parent in OmegaConf.load(conf_dir() / group / f"{name}.yaml").get("defaults", []):
        if parent != "_self_":
            own = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{parent}.yaml"), resolve=False)
            values |= inherited(group, parent, cls) | own
    return values


@pytest.mark.parametrize(
    ("group", "name", "cls"),
    [("model", name, ModelConfig) for name in shipped("model")]
    + [("optimizer", name, OptimizerConfig) for name in shipped("optimizer")],
)
def test_a_variant_states_only_what_it_changes(group, name, cls):
    own = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"), resolve=False)
    before = inherited(group, name, cls)
    assert [key for key, value in own.items() if key not in ("defaults", "name") and value == before[key]] == []


@pytest.mark.parametrize("command", SCHEMAS)
def test_a_command_sets_every_key_of_its_schema_and_no_other(command):
    cfg = composed(command=command)
    for part in (cfg, *(cfg[name] for name in ("model", "optimizer", "trainer", "report") if cfg.get(name))):
        names = [field.name for field in dataclasses.fields(OmegaConf.get_type(part))]
        assert sorted(part) == sorted(names) and not any(OmegaConf.is_missing(part, name) for name in names)


@pytest.mark.parametrize(
    "cls", [*SCHEMAS.values(), *TASKS.values(), *(analysis.options for analysis in ANALYSES.values())]
)
def test_every_key_has_a_meaning_of_its_own(cls):
    keys = entries(cls)  # raises for a field that is no key
    assert len({entry.name for entry in keys}) == len(keys)
    for entry in keys:
        assert re.match(r"[A-Za-z`].*\.$", entry.key.meaning), entry
        assert entry.key.allowed(entry.type), entry


# (skip, mlp, mlp_skip, norm) of the models whose names say it; the others have all parts
PARTS = {
    "lstm": (False, False, False, "none"),
    "san": (False, False, False, "none"),
    "san_skip": (True, False, False, "none"),
    "san_mlp": (False, True, False, "none"),
    "transformer_no_norm": (True, True, True, "none"),
    "transformer_no_skip": (False, True, False, "post"),
    "transformer_pre_norm": (True, True, True, "pre"),
}


@pytest.mark.parametrize("name", shipped("model"))
def test_every_shipped_model_is_what_its_name_says(name):
    model = resolve(composed(f"model={name}")).model
    assert model.name == name
    assert (model.skip, model.mlp, model.mlp_skip, model.norm) == PARTS.get(name, (True, True, True, "post"))


@pytest.mark.parametrize("word", [f"{group}={name}" for group in ("optimizer", "task") for name in shipped(group)])
def test_every_shipped_optimizer_and_task_is_what_its_name_says(word):
    cfg = resolve(composed(word))
    assert word in (f"optimizer={cfg.optimizer.name}", f"task={build_task(cfg.task).name}")


def test_config_loads_without_torch_and_hydra():
    program = "import sys, rankbench.config.compatibility; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert python("-c", program).returncode == 0


@pytest.mark.parametrize(
    ("words", "skip", "mlp_skip"),
    [
        (["model.skips=false"], False, False),
        (["model.skips=true"], True, True),
        (["model=san", "model.skips=true"], True, False),  # there is no MLP to skip
        (["model.skip=false", "model.skips=true"], True, True),
        (["model.skip=false"], False, True),
    ],
)
def test_one_key_decides_all_skips(words, skip, mlp_skip):
    model = resolve(composed(*words)).model
    assert (model.skip, model.mlp_skip) == (skip, mlp_skip)
    assert dataclasses.replace(model, width=2 * model.width).mlp_skip is mlp_skip
