"""The keys of a config; rankbench.compatibility says which of their values go together. The values are in conf/*.yaml.

This module imports neither torch nor OmegaConf: a wrong config is refused, and a key completed, before anything heavy
is loaded.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rankbench.keys import Key, entries, key

BUDGETS = ("smoke", "laptop", "paper")
PLUGINS = "Your modules with tasks, analyses, attentions or presets. Installed plug-ins need not be named."
# Kinds of attention, and update rules. Importing a plug-in adds its own.
ATTENTIONS = ["dot", "l2", "contractive_l2", "cosine", "sigmoid", "relu", "differential", "kernel", "sparse"]
OPTIMIZERS = ["adam", "adamw", "sgd", "muon"]
SIZE, STEPS, POSITIVE, FACTOR = (1, 65536), (1, 10**12), (1e-6, 1e6), (-1e6, 1e6)  # ranges of several keys

# Objectives of a search, with their direction
OBJECTIVES = {
    "test_accuracy": "maximize",
    "test_loss": "minimize",
    "valid_loss": "minimize",
    "train_seconds": "minimize",
}


# The keys of a model, in five groups. ModelConfig joins them: a dataclass lists the fields of its last base first.


@dataclass
class ModelSize:
    """Size of the model: the architecture, and the number and width of its layers and heads."""

    name: str = key("Name of this variant in tables and figures.")
    kind: str = key("Architecture. lstm: `layers` layers of `width` cells.", choices=("transformer", "lstm"))
    layers: int = key("Number of layers.", between=(1, 1024))
    heads: int = key("Number of attention heads in each layer.", between=SIZE)
    width: int = key("Width of a token's state.", between=SIZE)
    head_width: int | None = key("Width of a head's queries and keys. null: width / heads.", between=SIZE)
    value_width: int | None = key("Width of a head's values. null: head_width.", between=SIZE)
    kv_groups: int | None = key("Number of groups of heads that share keys and values. null: heads.", between=SIZE)
    latent_width: int | None = key("Width of the latent that keys and values come from. null: no latent.", between=SIZE)


@dataclass
class ModelAttention:
    """Attention of the model: what a query sees, how it scores keys, and what is done with the values."""

    attention: str = key(
        "Kind of attention: the scores, or how weights are made from them. l2: -||q - k||^2, with values through A_h; "
        "contractive_l2: l2 scaled to a Lipschitz constant; cosine: queries, keys and values divided by their norms; "
        "sigmoid, relu: no softmax; differential: the difference of two softmaxes; kernel: of a rank of at most "
        "head_width, without a softmax; sparse: softmax over a random quarter of the keys, the same in every sequence.",
        choices=ATTENTIONS,
    )
    contraction: float | None = key("Lipschitz constant (p = inf) to which contractive_l2 scales l2.", between=POSITIVE)
    contraction_when: str = key(
        "When contractive_l2 rescales. above: only where l2's bound exceeds contraction.", choices=("always", "above")
    )
    contraction_keys: int | None = key(
        "Number of keys that the bound assumes. null: the sequence's length; language models need a number.",
        between=(1, 10**6),
    )
    tied_qk: bool = key("Whether W_Q = W_K.")
    temperature: float = key("Attention scores are divided by it before the softmax.", between=POSITIVE)
    mix_attention: float = key(
        "a in a P + b I + c U, the matrix that multiplies the values: P is attention, U averages the tokens seen.",
        between=FACTOR,
    )
    mix_identity: float = key("b in the same sum, the share of the identity.", between=FACTOR)
    mix_uniform: float = key("c in the same sum, the share of the average. -1 removes the mean.", between=FACTOR)
    exclusive: bool = key("Whether to remove from each head's output its part along the token's own value.")
    head_reduction: str = key(
        "How heads are combined. mean: their sum divided by heads * head_width / width, if that is above 1.",
        choices=("sum", "mean"),
    )
    mask: str = key("Tokens a query sees. others: all except its own.", choices=("none", "causal", "window", "others"))
    window: int | None = key("Number of tokens that mask=window shows on either side.", between=(0, 10**6))


@dataclass
class ModelSublayers:
    """Skips, norms, MLP.

    A sub-layer f of the input x gives norm(a x + b f(x)) or a x + b f(norm(x)).
    """

    skips: bool | None = key("Sets skip and mlp_skip together. null: leave them.")
    skip: bool = key("Whether attention has a skip. Without one, a = 0.")
    skip_scale: float = key("Factor a of the skip in a x + b f(x).", between=FACTOR)
    branch_scale: float = key("Factor b of the sub-layer in a x + b f(x). 1 / sqrt(layers) is common.", between=FACTOR)
    mlp: bool = key("Whether each layer has an MLP.")
    mlp_ratio: float = key("Hidden width of the MLP over the model's width.", between=(1e-3, 1e3))
    mlp_skip: bool = key("Whether the MLP has a skip.")
    activation: str = key("Activation of the MLP.", choices=("relu", "gelu"))
    norm: str = key(
        "Place of the norm. pre: before a sub-layer; post: after its sum with the skip; peri: before and after its "
        "branch; ngpt: after its branch and after the sum.",
        choices=("none", "pre", "post", "peri", "ngpt"),
    )
    norm_kind: str = key("Kind of norm. l2norm: x / ||x|| times a number.", choices=("layernorm", "rmsnorm", "l2norm"))
    norm_affine: bool = key("Whether norms have a learned scale and shift.")
    norm_scale: str = key(
        "Factor of the norms around the sub-layers. depth: 1/sqrt(l) in layer l (LayerNorm scaling).",
        choices=("none", "depth"),
    )
    bias: bool = key("Whether the linear maps of the layers have biases.")
    value_residual: float = key("Weight of layer 1's values in every later layer's values.", between=(0.0, 1.0))
    embedding_skip: float = key("Factor of the embedding that is added to the input of each layer.", between=FACTOR)
    hyper_connections: str = key(
        "Kind of the learned matrices that mix the streams of hyper-connections. none: no such streams.",
        choices=("none", "free", "doubly_stochastic"),
    )
    streams: int = key("Number of states that hyper-connections keep for each token.", between=(2, 64))
    stream_deviation: float = key(
        "Standard deviation of the noise on the initial hyper-connections. 0: they begin as plain skips.",
        between=(0.0, 1e3),
    )
    dropout: float = key("Share of entries that dropout sets to zero.", between=(0.0, 0.99))


@dataclass
class ModelEnds:
    """Ends of the model: from the task's inputs to the first state, and from the last state to the outputs."""

    positions: str = key(
        "Position embeddings. concatenated: learned, in the part of the width that coordinates leave free.",
        choices=("none", "learned", "sinusoidal", "concatenated"),
    )
    embedding_norm: bool = key("Whether a norm of norm_kind follows the read-in and its positions, as in BERT.")
    read_in: str = key(
        "How inputs become states. mlp: two linear maps and the activation; identity: inputs are states.",
        choices=("linear", "mlp", "identity"),
    )
    read_out: str = key(
        "How states become outputs. identity: the first coordinates are the output.", choices=("linear", "identity")
    )


@dataclass
class ModelWeights:
    """Weights of the model: how they are initialised and parametrised."""

    init: str = key("Scheme of initialisation.", choices=("pytorch", "glorot", "bert", "scaled"))
    attention_init: float | None = key(
        "s: attention's matrices are drawn from U(-s/sqrt(width), s/sqrt(width)). null: as init says.", between=POSITIVE
    )
    init_gain: float = key("Multiplies every matrix of the layers at initialisation.", between=(0.0, 1e6))
    mlp_gain: float = key(
        "Multiplies the MLPs' matrices again at initialisation, and so their Lipschitz constant by its square.",
        between=(0.0, 1e6),
    )
    values: str = key(
        "W_V and W_O at the start. free: as init says; uniform: as init=pytorch does.",
        choices=("free", "orthogonal", "uniform", "zero"),
    )
    weight_norm: str = key("sigma: matrices are gamma W / ||W||_2, with gamma learned.", choices=("none", "sigma"))


@dataclass
class ModelConfig(ModelWeights, ModelEnds, ModelSublayers, ModelAttention, ModelSize):
    """One network."""

    def __post_init__(self) -> None:
        if self.skips is not None:
            self.skip, self.mlp_skip = self.skips, self.skips and self.mlp


@dataclass
class OptimizerConfig:
    """Optimizer: the update rule and the schedule of its learning rate."""

    name: str = key("Update rule.", choices=OPTIMIZERS)
    lr: float = key("Learning rate at its peak.", between=(0.0, 1e3))
    weight_decay: float = key("Weight decay. adamw, muon: decoupled from the gradient.", between=(0.0, 1e3))
    momentum: float = key("Momentum of sgd, and of muon for the matrices of the layers.", between=(0.0, 1.0))
    beta1: float = key("Decay rate of the first moment in adam, adamw and muon.", between=(0.0, 0.999999))
    beta2: float = key("Decay rate of the second moment in adam, adamw and muon.", between=(0.0, 0.999999))
    schedule: str = key(
        "Learning rate after the warm-up.", choices=("constant", "linear", "cosine", "multistep", "inverse_sqrt")
    )
    warmup: int = key("Length of the linear warm-up.", unit="steps", between=(0, 10**12))
    milestones: list[int] = key("When schedule=multistep multiplies the rate by optimizer.decay.", unit="steps")
    decay: float = key("Factor of schedule=multistep.", between=(0.0, 1e3))
    cap: float | None = key(
        "Largest singular value of the layers' matrices: after each step, larger ones are set to it. null: no limit.",
        between=POSITIVE,
    )


@dataclass
class TrainerConfig:
    """Trainer: how long training lasts, how much it reads at a time, and how often it is evaluated."""

    steps: int | None = key("Length of training, unless epochs is given.", unit="steps", between=(0, 10**12))
    epochs: float | None = key("Length of training, unless steps is given.", unit="epochs", between=(0.0, 1e9))
    batch_size: int = key("Number of sequences in a batch.", between=(1, 10**9))
    accumulate: int = key("Number of parts into which a batch is split to save memory.", between=(1, 10**9))
    eval_every: int = key("Interval between rows of metrics.csv.", unit="steps", between=STEPS)
    checkpoint_every: int = key(
        "Interval between checkpoints. A killed run loses at most this many steps.", unit="steps", between=STEPS
    )
    keep_state: bool = key(
        "Whether a finished run keeps its training state, up to three times its weights, so that more steps can follow."
    )
    clip: float | None = key("Largest gradient norm of each seed. null: no clipping.", between=(1e-12, 1e12))
    compile: str = key(
        "How a training step is compiled. auto: on a CPU with a C++ compiler, trainings of 600 steps or more of small "
        "networks take one fused step, whose few seconds of compiling they repay; all others are not compiled. true: "
        "torch.compile compiles the forward pass.",
        choices=("true", "false", "auto"),
    )
    target_accuracy: float | None = key("Test accuracy at which a seed stops. null: none stops.", between=(0.0, 1.0))
    writers: list[str] = key(
        "Trackers that also get the rows of metrics.csv. Each needs the extra of its name.",
        choices=("tensorboard", "wandb", "mlflow"),
    )
    dynamics_every: int | None = key(
        "Interval between rows of layers.csv. null: no such rows.", unit="steps", between=STEPS
    )
    dynamics_sequences: int = key("Number of test sequences that layers.csv is measured on.", between=(1, 10**6))

    def __post_init__(self) -> None:
        self.compile = self.compile.lower()  # true and false come from YAML as the text True and False


@dataclass(kw_only=True)
class BaseConfig:
    """Commands with a model."""

    seed: int = key("First seed.", between=(0, 2**32 - 1))
    replicas: int = key("Number of seeds, which train side by side in one run.", between=(1, 4096))
    device: str = key("Device to compute on.", choices=("auto", "cpu", "cuda"))
    precision: str = key("Floating-point format.", choices=("fp32", "bf16", "fp64"))
    threads: int = key(
        "Threads of each process, at most one for each processor of the machine. More than one rarely pays for models "
        "of this size.",
        between=(1, 1024),
    )
    budget: str | None = key(
        "Size of a preset. null: the paper's size. A time, as in 2h or 30min: as many seeds and steps as fit.",
        choices=BUDGETS,
        why="or, with a preset, a time such as 30min or 2h",
    )
    out: str = key("Folder that the command writes.")
    plugins: list[str] = key(PLUGINS)
    beyond_memory: bool = key("Whether to continue when the sizes need more memory than the machine has.")
    model: ModelConfig
    task: dict[str, Any] = key("Keys of the task. Choose one with task=<name>.")
    analysis: dict[str, Any] = key("Options of each analysis. Choose analyses with analysis=[<name>,...].")
    claims: list[str] = key("Claims to judge on the analyses' tables.")
    published: str | None = key("Figure whose published numbers are drawn next to ours. null: none.")
    figures: list[str] = key(
        "File types in which each figure is saved. `rankbench plot` draws a table in all of them.",
        choices=("png", "pdf", "svg"),
    )


@dataclass(kw_only=True)
class TrainConfig(BaseConfig):
    """Commands that train."""

    optimizer: OptimizerConfig
    trainer: TrainerConfig
    objective: str | None = key("Quantity that search= optimises (train returns it).", choices=OBJECTIVES)


KINDS_OF_TOKENS = ("class", "registers", "first", "separators", "unscored")


@dataclass(kw_only=True)
class AnalyzeConfig(BaseConfig):
    """rankbench analyze."""

    run: str | None = key("Run to analyse: a folder, or `latest`. null: a fresh model.")
    seeds: list[int] | None = key(
        "Seeds of the run that are analysed, as [3,4]. null: all.", between=(0, 2**32 + 4094), nonempty=True
    )
    module: str | None = key(
        "Your torch module: `<file>.py:<function>`, where the function returns it. Typed as model=<file>.py:<function>."
    )
    checkpoint: str | None = key(
        "Public network: hub id or local folder. Typed as model=pretrained model.path=<hub id or folder>."
    )
    inputs: str | None = key(
        "Inputs for the module or checkpoint: a .npy, .safetensors or .txt file, or a folder of images."
    )
    tokenizer: str | None = key(
        "Hub id or local folder of the tokenizer that reads a .txt for your module; a checkpoint brings its own."
    )
    tokens: int = key("Number of tokens kept of each text in a .txt.", between=(2, 10**6))
    special_tokens: list[int] | None = key(
        "Ids of tokens left out of residuals, Jacobians and the sizes of sums of paths, and out of the queries of "
        "attention matrices. null: the tokenizer's ids for the beginning and the end of a text. []: none.",
        between=(0, 10**9),
    )
    uncounted: list[str] | None = key(
        "Kinds of tokens that are left out just as special_tokens are: the class token, registers, the first token, "
        "separators, tokens without a target. null: none.",
        choices=KINDS_OF_TOKENS,
    )
    masked: float = key(
        "Share of tokens that a masked language model has to fill in, and is scored on.", between=(0, 1)
    )
    mask: str | None = key(
        "Input of a module that says which tokens are present, as present:<name> or absent:<name>, where true means "
        "present, or absent. null: read from the weights of attention, or from a known name."
    )
    output: str | None = key(
        "Tensor of a module or checkpoint that is measured, by its name in network.csv or that of a submodule; of a "
        "checkpoint with two halves, encoder or decoder. null: the first that is returned, or the encoder."
    )
    layers: list[str] | None = key(
        "Submodules of a module or checkpoint whose results are its states, as [encoder.layers.*]. null: read.",
        nonempty=True,
    )
    token_axis: int | None = key(
        "Axis of a module's tokens, in the tensor that is measured and in the layers' states. null: read.",
        between=(0, 7),
    )
    optimizer: dict[str, Any] = key("Accepted and ignored, so that presets written for train also run here.")
    trainer: dict[str, Any] = key("Accepted and ignored, so that presets written for train also run here.")


BENCHMARKS = ("paths", "training", "startup", "attention", "depth", "lipschitz", "metrics", "compiling")


@dataclass
class BenchConfig(TrainConfig):
    """rankbench bench, where trainer.steps is the length of one timed block of training."""

    bench: list[str] = key("Benchmarks.", choices=BENCHMARKS, nonempty=True)
    repeats: int = key("Number of paired repetitions: A B A B ...", between=(1, 10_000))
    sequences: int = key("Number of sequences whose paths are summed.", between=(1, 10**9))
    record: str | None = key(
        "Folder, such as docs, in whose BENCHMARKS.md and benchmarks/ the ratios are recorded. null: nowhere."
    )


@dataclass
class FigureKeys:
    """Figure of a report. null: chosen among the keys that vary between the runs."""

    x: str | None = key("Key along the x axis. null: the numeric key with the most values.")
    series: str | None = key("Key with a line for each of its values.")
    facet: str | None = key("Key with a panel for each of its values.")

    @property
    def places(self) -> dict[str, str | None]:
        """The keys by their place in the figure."""
        return {"x": self.x, "series": self.series, "facet": self.facet}


@dataclass
class StudyKeys(FigureKeys):
    """Study of a report: columns of the analyses' tables, by the keys that vary between the runs."""

    value: list[str] = key(
        "Columns to draw, as in [residual.effective_rank,test_accuracy]: each by the keys or, as with report.x=layer, "
        "by a column of its table. Of several, also the last against each of the others, with their rank correlation."
    )
    where: str | None = key("Rows of the tables that count, as in weights=initialised,layer=last; or layer=first.")


NOTHING_CHOSEN = StudyKeys(None, None, None, [], None)


@dataclass
class PageKeys(StudyKeys):
    """Page of a report."""

    open: bool = key("Whether to open the page in a browser.")
    watch: bool = key("Whether to keep rewriting the page until none of the jobs is running.")


@dataclass
class PlotKeys:
    """Figures for print."""

    column: str | None = key(
        "Width of the figures: a column of a page, or two. null: 3.25 inches for each panel of a row.",
        choices=("single", "double"),
    )
    style: str | None = key(
        "Matplotlib style file with fonts, sizes, lines and colours; its figure.figsize is the size of a panel. null: "
        "the user's matplotlibrc, and rankbench's own style where that says nothing."
    )


@dataclass(kw_only=True)
class DrawingConfig:
    """Commands that draw what other commands have measured."""

    out: str = key("Folder that the command writes.")
    plugins: list[str] = key(PLUGINS)
    statistic: str = key("What the figure shows of seeds: mean with 95 % interval, or best.", choices=("mean", "best"))
    plot: PlotKeys


@dataclass(kw_only=True)
class ReportConfig(DrawingConfig):
    """rankbench report, which takes the models from the runs."""

    runs: str = key(
        "Runs to gather: folder of a run or a sweep, a folder of such folders, a glob, a list as [a,b], or `latest`."
    )
    scoreboard: str | None = key("Scoreboard of a preset, or of all. Typed as experiment=<preset> or experiment=all.")
    pages: str | None = key(
        "With experiment=all: folder for the presets' results as Markdown pages, such as docs/results. null: in out."
    )
    report: PageKeys


@dataclass(kw_only=True)
class PlotConfig(DrawingConfig):
    """rankbench plot."""

    table: str = key("CSV file of a run or a report, whose figure is drawn. Typed alone: rankbench plot paths.csv.")
    published: str | None = key("Figure whose published numbers are drawn next to ours. null: none.")
    report: StudyKeys


@dataclass(kw_only=True)
class DataConfig:
    """rankbench data."""

    corpus: str = key("Corpus to fetch. ptb: the Penn Treebank, one sentence a line.", choices=("ptb",))
    folder: str | None = key("Where its files go. null: a cache folder, where task.path=<corpus> finds them.")


Config = TrainConfig | AnalyzeConfig | BenchConfig | ReportConfig | PlotConfig | DataConfig
SCHEMAS: dict[str, type] = {
    "train": TrainConfig,
    "analyze": AnalyzeConfig,
    "report": ReportConfig,
    "plot": PlotConfig,
    "bench": BenchConfig,
    "data": DataConfig,
}

# Every key of every command, except those of tasks and analyses
KEYS: dict[str, Key] = {entry.name: entry.key for schema in SCHEMAS.values() for entry in entries(schema)}


@cache
def conf_dir() -> Path:
    """The folder of the shipped configs: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
