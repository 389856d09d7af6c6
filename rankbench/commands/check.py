"""`rankbench check plugins=[mine]`: whether what a plug-in brings keeps its promises, before any run."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rankbench.commands.checks import check_everything, check_job, doubting_plugins
from rankbench.commands.compose import compose, load_plugins
from rankbench.commands.composition import composed, parsed
from rankbench.commands.messages import explaining
from rankbench.config import plugins
from rankbench.config.keys import ConfigError
from rankbench.config.presets import described
from rankbench.config.schema import BUDGETS, TrainConfig, conf_dir
from rankbench.judging.published import figures_published, read_published

HELP = """Usage: rankbench check plugins=[a]

Tries what the plug-in brings: the shapes of a task's sequences; an attention's shapes, hidden keys, sums of rows and
gradients; a training step with each task, model, attention and update rule; an analysis' table against its columns;
each preset, composed at each budget; the published numbers. Runs try their attention and their analyses in the same way
before they begin."""
SMALL = ["model.layers=2", "model.width=16", "model.heads=2", "trainer.steps=1", "trainer.batch_size=4"]
SMALL += ["trainer.eval_every=1", "device=cpu"]
TRIED = {  # besides a training step
    "TASKS": "sequences have their shapes; ",
    "ATTENTIONS": "shapes, hidden keys, sums of rows and gradients are right; ",
}
CHOSEN_BY = {
    "TASKS": "task",
    "MODELS": "model.kind",
    "ATTENTIONS": "model.attention",
    "OPTIMIZERS": "optimizer.name",
    "ANALYSES": "analysis",
}


def checked(words: Sequence[str]) -> str:
    """The text of the command; ConfigError for the first promise that is not kept."""
    named = plugins.named(words)
    if odd := [word for word in words if not word.startswith("plugins=")]:
        raise ConfigError(f"check {odd[0]}: takes plugins=[<module>]; leave it out")
    load_plugins(named)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, key in CHOSEN_BY.items():
            for name in plugins.brought(kind):
                with doubting_plugins():
                    lines.append(f"{key}={name}: {_tried(kind, name, named, Path(folder) / kind / name)}")
    rest = {kind: len(plugins.brought(kind)) for kind in ("METRICS", "PAPERS", "CLAIMS", "LAWS")}
    lines += [f"{number} of {kind} read" for kind, number in rest.items() if number]
    with doubting_plugins():
        lines += [f"experiment={name}: {_tried_preset(name, named)}" for name in _presets()]
    figures_published()
    tables = [path for path in plugins.published_files() if not path.is_relative_to(plugins.OURS[0])]
    lines += [f"{len(read_published(path))} published numbers read" for path in tables]
    return "\n".join(lines or ["nothing to try: no preset among the YAML files"])


def _tried(kind: str, name: str, named: Sequence[str], folder: Path) -> str:
    """Train one step with what a plug-in brings, then measure; returns what was tried, in words."""
    from rankbench.analyses import ANALYSES
    from rankbench.analysing.runner import analyze_trained
    from rankbench.runs.run import Run
    from rankbench.runs.tables import RUN_COLUMNS
    from rankbench.training.loop import train

    tasks = plugins.brought("TASKS")
    task = name if kind == "TASKS" else tasks[0] if tasks else "sorting"
    words = [f"plugins=[{','.join(named)}]", f"task={task}", f"out={folder}", *SMALL]
    words += [f"analysis=[{name}]" if kind == "ANALYSES" else f"{CHOSEN_BY[kind]}={name}"] if kind != "TASKS" else []
    cfg = compose("train", *words)
    assert isinstance(cfg, TrainConfig)
    check_job(cfg, words)
    run = Run(folder)
    train(cfg, run)
    if kind == "ANALYSES":
        analyze_trained(cfg, run)
        table = run.table(name)
        lacking = [column for column in ANALYSES[name].columns if column not in table and "<" not in column]
        return f"{len(table)} rows, {table.shape[1] - len(RUN_COLUMNS)} columns, all described" + (
            f"; not in this table: {', '.join(lacking)}" if lacking else ""
        )
    losses = run.metrics.query("split == 'test'").loss
    return f"{TRIED.get(kind, '')}a training step takes the loss from {losses.iloc[0]:.3g} to {losses.iloc[-1]:.3g}"


def _presets() -> list[str]:
    """The names of the presets that plug-ins bring."""
    return [name for name, file in plugins.choices("experiment").items() if not file.is_relative_to(conf_dir())]


def _tried_preset(name: str, named: Sequence[str]) -> str:
    """Compose and check the preset at each budget, of a sweep with each value of a key beside the first of the others;
    returns what was tried, in words."""
    preset = described()[name]
    if preset.of_given_network:
        return "not tried; it measures a network that its user gives"
    command, words = preset.verb or "train", [f"plugins=[{','.join(named)}]", f"experiment={name}"]
    with explaining(command, words):
        params = composed(command, *words, return_hydra_config=True).hydra.sweeper.params or {}
    swept = parsed(f"{key}={values}" for key, values in params.items())
    values = {
        key.key_or_group: [*key.sweep_string_iterator()] if key.is_sweep_override() else [key.value()] for key in swept
    }
    first = {key: choices[0] for key, choices in values.items()}
    jobs = [first, *({**first, key: value} for key, choices in values.items() for value in choices[1:])]
    for job in jobs:
        all_words = words + [f"{key}={value}" for key, value in job.items()]
        for budget in BUDGETS:
            check_everything(compose(command, *all_words, f"budget={budget}"), all_words)
    return f"composes{' with each value of its sweep' if swept else ''}, and is allowed, at budget={', '.join(BUDGETS)}"
