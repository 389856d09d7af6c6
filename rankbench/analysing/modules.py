"""The subjects of `rankbench analyze` that are not networks of ours: a user's module, and a public checkpoint."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rankbench.analyses.analysis import Foreign, Subject
from rankbench.analysing.checkpoint_inputs import beside, inputs_of, name_of, token_ids
from rankbench.analysing.module_runs import check_runs
from rankbench.config.keys import ConfigError
from rankbench.config.schema import AnalyzeConfig
from rankbench.measures.module_reading import Asked
from rankbench.measures.network_table import in_words, table_of_reading
from rankbench.model.kinds import Kinds
from rankbench.model.modules import PRESENT, Example, as_example, build, read_inputs, unpacked
from rankbench.model.pretrained import FAMILIES, Checkpoint, as_network, load_checkpoint, load_tokenizer
from rankbench.model.pretrained.families import padding_of
from rankbench.runs.machine import Machine
from rankbench.runs.tables import with_who
from rankbench.tasks import Batch
from rankbench.tasks.task import ABSENT

MOST_UNKNOWN = 0.1  # share of tokens that the tokenizer does not know; above it there is a warning

log = logging.getLogger(__name__)

# By spec: checked before anything is written, and measured later, so that the user's code runs once.
BUILT: dict[str, tuple[nn.Module, Example | None]] = {}
# The last config's, by that config: what was read of them when they were checked is not read again.
SUBJECTS: dict[str, list[Subject]] = {}
load_once = lru_cache(maxsize=1)(load_checkpoint)


@contextmanager
def building_once() -> Iterator[None]:
    """Forget the modules that are built inside: a process that lives on builds them again."""
    before = set(BUILT)
    try:
        yield
    finally:
        SUBJECTS.clear()
        for spec in set(BUILT) - before:
            del BUILT[spec]


@contextmanager
def offering(module: nn.Module, inputs: Any) -> Iterator[str]:
    """Register a copy of a module, with its inputs, under a name that cfg.module can have."""
    spec = f"{type(module).__name__}:given"
    example = as_example(inputs, "rankbench.analyze")
    BUILT[spec] = unpacked(deepcopy(module), "rankbench.analyze")[0], example
    yield spec


def is_foreign(cfg: Any) -> bool:
    """Whether the config asks for a network that is not ours."""
    return isinstance(cfg, AnalyzeConfig) and (cfg.module is not None or cfg.checkpoint is not None)


def checked_subjects(cfg: AnalyzeConfig) -> Sequence[Subject]:
    """The subjects of the config, each module run on one sequence; ConfigError for keys or modules that do not fit."""
    named = {name: value for name in ("run", "module", "checkpoint") if (value := getattr(cfg, name)) is not None}
    if len(named) > 1:
        given = " ".join(f"{name}={value}" for name, value in named.items())
        raise ConfigError(f"{given}: several networks to measure; leave all but one out")
    (name,) = named.values()
    if cfg.claims and cfg.module is not None:
        raise ConfigError(f"claims=[{','.join(cfg.claims)}]: no claim is about a user's module; use claims=[]")
    if cfg.module is not None and cfg.replicas != 1:
        raise ConfigError(f"replicas={cfg.replicas}: model={name} has one set of weights; use replicas=1")
    if cfg.module is not None and cfg.special_tokens is not None:
        raise ConfigError(f"special_tokens={cfg.special_tokens}: is for texts of a checkpoint; use special_tokens=null")
    if cfg.checkpoint is not None and cfg.tokenizer is not None:
        raise ConfigError(f"tokenizer={cfg.tokenizer}: {cfg.checkpoint} brings its own; use tokenizer=null")
    if cfg.mask is not None and cfg.checkpoint is not None:
        raise ConfigError(f"mask={cfg.mask}: {cfg.checkpoint} brings its own; use mask=null")
    if cfg.module is not None and cfg.masked:
        raise ConfigError(f"masked={cfg.masked}: is for texts of a checkpoint; use masked=0, and targets of your own")
    subjects = foreign_subjects(cfg, Machine.prepare(cfg))
    for subject in subjects:
        check_runs(subject)
    return subjects


def foreign_subjects(cfg: AnalyzeConfig, machine: Machine) -> Sequence[Subject]:
    """The user's module, or the checkpoint of the config along with fresh weights for each seed."""
    if (same := repr(replace(cfg, out=""))) not in SUBJECTS:
        SUBJECTS.clear()
        of = _of_user if cfg.module is not None else _of_checkpoint
        SUBJECTS[same] = [of(cfg, seed, machine) for seed in range(cfg.seed, cfg.seed + cfg.replicas)]
    return SUBJECTS[same]


def _of_user(cfg: AnalyzeConfig, seed: int, machine: Machine) -> Subject:
    """The user's module with the inputs of the config, or else with its own; it is moved in place."""
    spec, given, unknown = cfg.module or "", None, None
    if cfg.tokenizer is not None:
        given, unknown = _texts(cfg, cfg.tokenizer)
    elif cfg.inputs is not None:
        given = read_inputs(cfg.inputs)
    if spec not in BUILT:
        BUILT[spec] = build(spec)
    module, own = BUILT[spec]
    example = own if given is None else given
    if example is None:
        raise ConfigError(f"inputs=null: model={spec} brings none; give inputs=<file>, or return (module, inputs)")
    example = _padded(example)
    inputs = "own" if cfg.inputs is None else Path(cfg.inputs).name
    module = module.to(machine.device, machine.dtype)
    modules, example = {"given": module}, example.to(machine.device, machine.dtype)
    example = replace(example, kinds=_kinds({}, {}, cfg))
    foreign = Foreign(type(module).__name__, inputs, modules, example, asked_of(cfg), unknown=unknown)
    return Subject(spec, seed, foreign=foreign)


def asked_of(cfg: AnalyzeConfig) -> Asked:
    """What the config says of a network that is not ours."""
    return Asked(cfg.mask, cfg.output, None if cfg.layers is None else tuple(cfg.layers), cfg.token_axis)


def _texts(cfg: AnalyzeConfig, name: str) -> tuple[Example, float | None]:
    """Token ids of the texts in a .txt as the module's one argument; if the texts differ in length, also which tokens
    are present, as the keyword attention_mask. And the share of unknown ones."""
    if cfg.inputs is None or not cfg.inputs.endswith(".txt"):
        raise ConfigError(f"tokenizer={name}: reads texts, inputs={cfg.inputs} has none; give a .txt")
    tokenizer = load_tokenizer(name)
    ids_BN = read_inputs(cfg.inputs, partial(token_ids, tokenizer, cfg.tokens)).tensors[0]
    return _padded(Example((ids_BN,)), tokenizer.pad_token_id or 0), _share_unknown(tokenizer, ids_BN)


def _padded(example: Example, token: int = 0) -> Example:
    """The example with `token` in place of negative ones, which are absent, and the keyword attention_mask; unchanged
    if it has none, or more arguments than tokens."""
    ids_BN = example.tensors[0]
    if len(example.tensors) > 1 or ids_BN.is_floating_point() or ids_BN.dim() != 2 or not (ids_BN < 0).any():
        return example
    present_BN = ids_BN >= 0
    if (present_BN[:, 1:] & ~present_BN[:, :-1]).any():
        raise ConfigError("inputs: an absent token, which is negative, comes before others; pad sequences at their end")
    args, kwargs = tree_map_only(Tensor, lambda x: x.masked_fill(x < 0, token), (example.args, dict(example.kwargs)))
    return replace(example, args=args, kwargs=kwargs | {PRESENT: present_BN.long()}, lengths_B=present_BN.sum(1))


def _share_unknown(tokenizer: Any, ids_BN: Tensor) -> float | None:
    """Share of the tokens, special ones aside, that the tokenizer does not know; None if it has no id for these alone,
    as one that falls back to bytes."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = _ids_of(tokenizer, "bos", "eos", "cls", "sep", "pad", "mask")
    if unknown is None or unknown in others or ids_BN.is_floating_point():
        return None
    words = ids_BN[~torch.isin(ids_BN, torch.tensor([ABSENT, *others]))]
    return (words == unknown).double().mean().item() if len(words) else None


def _ids_of(tokenizer: Any, *names: str) -> list[int]:
    """The ids of these special tokens, as bos for `bos_token`, less those that the tokenizer lacks."""
    ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
    return [token for token in ids if token is not None]


def tell_unknown(subject: Subject) -> None:
    """Log the share of unknown tokens, as a warning if it is large."""
    if subject.foreign is not None and (share := subject.foreign.unknown):
        level = logging.WARNING if share > MOST_UNKNOWN else logging.INFO
        told = "%s: %.2g %% of the tokens of %s are unknown to the tokenizer%s"
        hint = "; give texts in the network's own language" if level == logging.WARNING else ""
        log.log(level, told, subject.run, 100 * share, subject.foreign.inputs, hint)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Inputs from a file, in place of a task. length: number of tokens of the longest."""

    name: str
    num_outputs: int
    length: int
    test_size: int
    target_kind: str = "classes"


def _of_checkpoint(cfg: AnalyzeConfig, seed: int, machine: Machine) -> Subject:
    """A checkpoint with its trained weights and fresh ones of this seed; for later seeds with the fresh ones alone.

    A family without an adapter has modules alone.
    """
    path = cfg.checkpoint or ""
    checkpoint = load_once(path, seed)
    cfg = replace(cfg, inputs=cfg.inputs or beside(path))
    models = {"trained": checkpoint.trained, "initialised": checkpoint.initialised}
    models = {name: model.to(machine.device, machine.dtype) for name, model in models.items()}
    if seed != cfg.seed:
        del models["trained"]
    config = checkpoint.trained.config
    inputs, targets = inputs_of(cfg, checkpoint)
    special = _special(cfg, checkpoint, inputs)
    kinds = _kinds_of_checkpoint(cfg, checkpoint, inputs)
    example = _example(inputs, targets, checkpoint.trained, special)
    example = replace(example.to(machine.device, machine.dtype), kinds=kinds)
    name = name_of(cfg, checkpoint)
    modules = {name: model.get_encoder() if config.is_encoder_decoder else model for name, model in models.items()}
    asked, half, unknown = asked_of(cfg), "", _share_unknown(checkpoint.reader, inputs)
    if config.is_encoder_decoder:
        half = "the encoder"
        if asked.output in ("encoder", "decoder"):
            half, asked = f"the {asked.output}", replace(asked, output=None)
        if half == "the decoder":
            modules, example = _decoders(models, example, config)
    if config.model_type not in FAMILIES:
        return Subject(path, seed, foreign=Foreign(checkpoint.name, name, modules, example, asked, half, unknown))
    with_special = replace(kinds, ids={**kinds.ids, "special": special}, left_out=("special", *kinds.left_out))
    networks = {name: as_network(model, with_special if special else kinds) for name, model in models.items()}
    num_tokens = next(iter(networks.values())).num_tokens(inputs)
    if targets is None:
        targets = torch.full((len(inputs), num_tokens), ABSENT)
    batch = Batch(inputs, targets).to(machine.device, machine.dtype)
    task = Texts(name, getattr(config, "vocab_size", None) or config.hidden_size, num_tokens, len(inputs))
    foreign = Foreign(next(iter(networks.values())).name, name, modules, example, asked, half, unknown)
    return Subject(path, seed, task, batch, batch, networks, foreign=foreign)


def _special(cfg: AnalyzeConfig, checkpoint: Checkpoint, inputs: Tensor) -> tuple[int, ...]:
    """The token ids that do not count in measurements of states and sums of paths."""
    if inputs.is_floating_point():
        if cfg.special_tokens:
            raise ConfigError(f"special_tokens={cfg.special_tokens}: {cfg.checkpoint} reads no token ids; use []")
        return ()
    special = cfg.special_tokens
    if special is None:
        special = sorted({*_ids_of(checkpoint.reader, "cls", "sep", "bos", "eos")})
    if not (~torch.isin(inputs, torch.tensor([*special, ABSENT]))).any(1).all():
        raise ConfigError(
            f"inputs={cfg.inputs}: a text has only special tokens; leave it out, or use special_tokens=[]"
        )
    return tuple(special)


def _decoders(models: dict[str, nn.Module], example: Example, config: Any) -> tuple[dict[str, nn.Module], Example]:
    """Whole models in place of their encoders, whose decoder reads the same text, shifted by one token."""
    ids_BN = example.kwargs.get("input_ids")
    if ids_BN is None:
        raise ConfigError("output=decoder: this checkpoint's encoder reads no token ids; use output=encoder")
    start = config.pad_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
    if start not in range(config.vocab_size):
        raise ConfigError(
            f"output=decoder: decoder_start_token_id={start} in this checkpoint's config, which is no token; set it"
        )
    first_B1 = torch.full_like(ids_BN[:, :1], start)
    kwargs = {**example.kwargs, "decoder_input_ids": torch.cat([first_B1, ids_BN[:, :-1]], 1)}
    return models, replace(example, kwargs=kwargs)


def _kinds_of_checkpoint(cfg: AnalyzeConfig, checkpoint: Checkpoint, inputs: Tensor) -> Kinds:
    """Kinds of tokens: of images the class tokens (in DeiT two) and registers, of texts beginnings and ends."""
    if not inputs.is_floating_point():
        reader = checkpoint.reader
        return _kinds({}, {"class": _ids_of(reader, "cls", "bos"), "separators": _ids_of(reader, "sep", "eos")}, cfg)
    embeddings = getattr(checkpoint.trained.base_model, "embeddings", None)
    num_class = sum(getattr(embeddings, f"{name}_token", None) is not None for name in ("cls", "distillation"))
    num_registers = getattr(checkpoint.trained.config, "num_register_tokens", None) or 0
    registers = range(num_class, num_class + num_registers)
    return _kinds({"class": range(num_class), "registers": registers}, {}, cfg)


def _kinds(positions: dict[str, Sequence[int]], ids: dict[str, Sequence[int]], cfg: AnalyzeConfig) -> Kinds:
    kinds = Kinds(positions, ids, tuple(cfg.uncounted or ()))
    kinds.check(kinds.left_out, "uncounted")
    return kinds


def _example(inputs: Tensor, targets: Tensor | None, model: Any, special: tuple[int, ...]) -> Example:
    """The inputs as the library's own arguments, with the targets."""
    if inputs.is_floating_point():
        reads_tokens = model.main_input_name == "input_ids"  # beside images, as CLIP does
        return Example((), {"pixel_values" if reads_tokens else model.main_input_name: inputs})
    present_BN = inputs != ABSENT
    arguments = {"input_ids": inputs.masked_fill(~present_BN, padding_of(model.config) or 0)}
    if not present_BN.all():
        arguments["attention_mask"] = present_BN.long()
    is_special_BN = torch.isin(inputs, torch.tensor(special))
    special_BN = is_special_BN if is_special_BN.any() else None
    return replace(as_example(arguments, "inputs"), targets=targets, special_BN=special_BN)


def described(subject: Subject) -> list[str]:
    """What was read of a network that is not ours, in a line for each kind of weights that differs from the first."""
    assert subject.foreign is not None
    return list(dict.fromkeys(in_words(read, subject.foreign.half) for read in subject.reads.values()))


def network_table(subject: Subject) -> pd.DataFrame:
    """network.csv: what was read of a network that is not ours."""
    assert subject.foreign is not None
    read = next(iter(subject.reads.values()))
    return with_who(table_of_reading(read, subject.foreign.half), **subject.who)
