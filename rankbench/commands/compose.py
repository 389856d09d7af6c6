"""Compose the words of a command line into a checked config, with Hydra."""

import dataclasses
import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from rankbench.commands.budgets import fitted
from rankbench.commands.composition import composed, name_folder, parsed
from rankbench.commands.messages import UNKNOWN_TO_HYDRA, explaining, groups, wanted
from rankbench.config import model, plugins, schema
from rankbench.config.compatibility import check
from rankbench.config.keys import ConfigError, typed_config
from rankbench.config.schema import KEYS, Config
from rankbench.runs.sweep import Sweep

# What a checkpoint's table and figure need: the whole network, and sums of paths that every family has
FIRST_SCREEN = ["analysis=[residual,paths]", "analysis.residual.variants=[full]"]
FIRST_SCREEN += ["analysis.paths.schemes=[frozen]", "analysis.paths.subset_sizes=[]"]

# Its braces may hold another interpolation, or a mapping
INTERPOLATION = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")

SPELLINGS = (  # words that Hydra would misread: the commands that take them, the word, and Hydra's word for it
    ((), r"\+experiment=(.*)", r"experiment=\1"),  # Hydra's documentation has this +, but `experiment` has a default
    ((), r"plugins=null", "plugins=[]"),
    ((), r"(plugins|figures|trainer\.writers)=([\w.]+)", r"\1=[\2]"),
    (("data",), r"checkpoints", "checkpoints=all"),
    (("plot",), r"(?!-|(?:table|out|published|(?:plot|report)\.\w+)=)([^=]+\.\w+|.*\.csv)", r"table=\1"),
    (("report",), r"experiment=(.*)", r"scoreboard=\1"),
    (("report", "plot"), r"report\.value=([^\[].*)", r"report.value=[\1]"),
    (("analyze",), r"model=([^\[{]*[^\s:]:[^\s:]+)", r"module=\1"),  # model=mine.py:build
)


def as_keys(command: str, words: Iterable[str]) -> list[str]:
    """The words of a command line, with those that Hydra would misread replaced.

    Also replaced are a budget that is a time (see rankbench.commands.budgets), the folder of a sweep by its runs,
    several tables by a sweep over them, and model=pretrained model.path= of analyze.
    """
    words = list(words)
    plugins.find(plugins.named(words))
    words, spelled = fitted(command, words), []
    is_sweep = bool({"-m", "--multirun"} & set(words))
    for word in words:
        if re.match(rf"\+*({'|'.join(groups())})=\[[^]'\"]*[\[{{]", word):
            raise ConfigError(f"{word}: a list of a group's choices holds names alone, as in analysis=[paths,residual]")
        if re.match(rf"\+*({'|'.join({*groups()} - {'analysis'})})=\[.*,", word):
            raise ConfigError(f"{word}: several choices; give one, or with -m a job for each, as in -m model=san,lstm")
        if command == "analyze" and re.fullmatch(r"model=[^:]*\.py", word):
            raise ConfigError(f"{word}: which function? give {word}:<function>")
        for commands, wrong, right in SPELLINGS:
            if not commands or command in commands:
                word = re.sub(rf"\A{wrong}\Z", right, word, flags=re.DOTALL)
        spelled.append(_quoted(word, is_sweep))
    if len(tables := [word for word in spelled if command == "plot" and word.startswith("table=")]) > 1:
        values = ",".join(word.removeprefix("table=") for word in tables)
        spelled = ["-m", *(word for word in spelled if word not in tables), f"table={values}"]
    if command == "analyze" and not is_sweep:
        spelled = [part for word in spelled for part in _each_run(word)]
    if command == "analyze" and "model=pretrained" in spelled:
        if not any(word.startswith("model.path=") for word in spelled):
            raise ConfigError("model=pretrained: which one? give model.path=<hub id or local folder>")
        spelled = [word.replace("model.path=", "checkpoint=", 1) for word in spelled if word != "model=pretrained"]
        if not any(re.match(r"[+~]*(analysis|experiment)\b", word) for word in spelled):
            spelled += FIRST_SCREEN
    return spelled


def _each_run(word: str) -> list[str]:
    """Replace run=<folder of a sweep> by words that start a job for each run in it that has weights."""
    key, _, path = word.partition("=")
    folder = Path(path.strip("'").replace(r"\'", "'"))
    if key != "run" or (folder / "config.yaml").exists() or not folder.is_dir():
        return [word]
    jobs = [folder / job.folder for job in Sweep(folder).jobs()]
    runs = [str(job).replace("'", r"\'") for job in jobs if (job / "checkpoint.safetensors").exists()]
    return ["-m", "run={}".format(",".join(f"'{run}'" for run in runs))] if runs else [word]


def _quoted(word: str, is_sweep: bool) -> str:
    """The word with its value quoted for Hydra where that would misread it: letters other than ASCII's and some signs,
    and in a path = and brackets, and commas as in the folders of a sweep's jobs or any out=. What is inside an
    interpolation is Hydra's to read. ~/ is the user's home."""
    key, _, value = word.partition("=")
    is_path, is_list = key in ("run", "runs", "out", "inputs", "table"), key == "runs" and value[:1] == "["
    if is_list or (key in ("report.where", "report.baseline") and value[:1] not in ("'", '"') and value != "null"):
        return f"{key}={_in_quotes(value)}"
    is_sweep, plain = is_sweep and key != "out", INTERPOLATION.sub("", value)
    if value[:1] in ("'", '"', "[", "{") or "${" in plain or (is_sweep and re.search("['\"()]", value)):
        return word
    has_commas = is_path and "," in plain and (key == "out" or Path(value).exists())
    misread = UNKNOWN_TO_HYDRA.search(plain) or (is_path and not is_sweep and re.search(r"[=()[\]{]", plain))
    if not (has_commas or misread):
        return word
    parts = value.split(",") if is_sweep and not has_commas else [value]
    return f"{key}={','.join(_in_quotes(os.path.expanduser(part) if part[:2] == '~/' else part) for part in parts)}"


def _in_quotes(text: str) -> str:
    return "'{}'".format(text.replace("'", r"\'"))


def load_plugins(names: Iterable[str] = ()) -> None:
    """Find the plug-ins of these names and the installed ones, and import those that are not imported yet."""
    plugins.find(names)
    if plugins.FOUND.keys() - plugins.LOADED:  # not imported yet
        from rankbench.analyses import ANALYSES, Analysis
        from rankbench.judging import CLAIMS, PAPERS, Claim
        from rankbench.measures.law import LAWS, Law
        from rankbench.measures.states import STATE_METRICS
        from rankbench.model import KINDS
        from rankbench.model.transformer import Transformer
        from rankbench.model.weightings import ATTENTIONS, Weighting
        from rankbench.runs.tables import MEANINGS
        from rankbench.tasks import TASKS
        from rankbench.training.optimizers import OPTIMIZERS

        registries: dict[str, tuple[MutableMapping[str, Any], Any]]  # Callable is no type
        registries = {"TASKS": (TASKS, type), "ANALYSES": (ANALYSES, Analysis), "ATTENTIONS": (ATTENTIONS, Weighting)}
        registries |= {"MODELS": (KINDS, Transformer), "METRICS": (STATE_METRICS, Callable)}
        registries |= {"OPTIMIZERS": (OPTIMIZERS, Callable)}
        registries |= {"CLAIMS": (CLAIMS, Claim), "LAWS": (LAWS, Law), "PAPERS": (PAPERS, str)}
        plugins.load(registries, _check_metric)
        model.ATTENTIONS[:], schema.OPTIMIZERS[:], model.KINDS[:] = ATTENTIONS, OPTIMIZERS, KINDS
        for name in plugins.brought("METRICS"):
            _describe_metric(name)
        MEANINGS.update({name: analysis.columns for name, analysis in ANALYSES.items()})


def _check_metric(name: str, formula: Callable[..., Any]) -> None:
    """Raise ConfigError for a metric of a plug-in that does not say what it measures, or does not give one number for
    each matrix of a batch."""
    import torch

    from rankbench.measures.states import States

    x_BND = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, got = formula(States.of(x_BND)), ""
    if not inspect.getdoc(formula):
        got = "has no docstring; say what it measures"
    elif not isinstance(values, torch.Tensor) or values.shape != (3,):
        got = f"gives {values} for 3 matrices; give 3 numbers"
    elif not torch.allclose(
        torch.cat([formula(States.of(x_BND[i : i + 1])) for i in range(3)]), values, equal_nan=True
    ):
        got = "gives a matrix another number alone than beside others; take means over its own tokens alone"
    if got:
        raise ConfigError(f"METRICS: {name} {got}")


def _describe_metric(name: str) -> None:
    """Give the metric of a plug-in its column in the tables of metrics."""
    from rankbench.analyses import dynamics, residual
    from rankbench.measures.states import STATE_METRICS
    from rankbench.training.layers import DYNAMICS

    meaning = inspect.getdoc(STATE_METRICS[name]) or ""
    for columns in (residual.COLUMNS, dynamics.COLUMNS):
        columns[name] = meaning.partition("\n\n")[0].replace("\n", " ")
    for names in (dynamics.METRICS, DYNAMICS):
        if name not in names:
            names.append(name)


def compose(command: str, *words: str) -> Config:
    """The checked config of a command line for one job: compose("train", "model.layers=12", "replicas=5").

    ConfigError, with the line that the command would print, for invalid words and for words that ask for a sweep.
    """
    for word in words:
        if not isinstance(word, str):
            raise ConfigError(f"{word!r}: not an override; give texts, as in 'model=san', 'model.layers=12'")
        if word in ("-m", "--multirun"):
            raise ConfigError(_sweep_refused(word, command, words))
        if word.startswith(("hydra.", "hydra/", "cluster=", "search=")):
            raise ConfigError(f"{word}: applies to jobs that Hydra starts, and here it starts none; leave it out")
    given = as_keys(command, words)
    with explaining(command, given):
        overrides = parsed(given)
        for override in overrides:
            if override.is_sweep_override():
                raise ConfigError(_sweep_refused(override.input_line or "", command, given))
        config = composed(command, *given, return_hydra_config=True)
    typed_keys = {override.get_key_element() for override in overrides}
    varied = [key for key in config.hydra.sweeper.params or () if key not in typed_keys]
    if config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN" and varied:
        preset = next(word for word in reversed(given) if word.startswith("experiment="))
        raise ConfigError(f"{_sweep_refused(preset, command, given)}; or give one value for {', '.join(varied)}")
    name_folder(config)
    return resolve(config, given)


def _sweep_refused(word: str, command: str, words: Iterable[str]) -> str:
    line = shlex.join(["rankbench", command, "-m", *(word for word in words if word not in ("-m", "--multirun"))])
    return f"{word}: a sweep; run `{line}` in a terminal and read its folder with rankbench.load_sweep"


def resolve(cfg: DictConfig, words: Iterable[str] = ()) -> Config:
    """Convert the composed config to a checked dataclass, with every interpolation resolved and without Hydra's part.

    words: those of the command line. If they name analyses, a preset's keys for other analyses are dropped.
    """
    cfg, words = cfg.copy(), list(words)
    with read_write(cfg), open_dict(cfg):
        cfg.pop("hydra", None)
    try:
        _keep_named_analyses(cfg, words)
        load_plugins(cfg.plugins if "plugins" in cfg else ())
        if "budget" in cfg:  # the resolvers use it
            KEYS["budget"].check("budget", cfg.budget)
        plain: Any = OmegaConf.to_container(cfg, resolve=True)  # what a reference leads to may have another type
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'config'}: {wanted(str(error))}") from None
    kind: Any = OmegaConf.get_type(cfg)
    for field in dataclasses.fields(kind):
        if plain.get(field.name, MISSING) == MISSING:
            taken = (word for word in words if word.partition("=")[0] == f"~{field.name}")
            word = next(taken, f"{field.name}=???")
            raise ConfigError(f"{field.name}: has no value; give it one, or leave {word} out")
    resolved = typed_config(kind, plain)
    check(resolved)
    return resolved


def _keep_named_analyses(cfg: DictConfig, words: Iterable[str]) -> None:
    """If the words have an analysis=[...], remove the analyses that are there only because a preset sets their keys."""
    values = {override.get_key_element(): override.value() for override in parsed(words) if not override.is_delete()}
    if isinstance(named := values.get("analysis"), str | list):
        for name in [named] if isinstance(named, str) else named:
            if name not in cfg.analysis:
                raise ConfigError(
                    f"analysis={name}: its YAML file has no keys under analysis.{name}; let it begin with the line "
                    f"`# @package analysis.{name}`"
                )
        kept = {named} if isinstance(named, str) else set(named)
        kept |= {key.split(".")[1] for key in values if key.startswith("analysis.")}
        with read_write(cfg), open_dict(cfg):
            for name in set(cfg.analysis) - kept:
                del cfg.analysis[name]
