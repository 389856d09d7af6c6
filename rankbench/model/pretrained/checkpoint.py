"""Public checkpoints: weights, and the reader of inputs, from a folder or from the Hugging Face hub, as data alone.

Weights come from safetensors, or from a pickle that may hold nothing but tensors. No code that comes with them is run.
"""

import contextlib
import copy
import logging
import os
import pickle
import re
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from rankbench.config.keys import ConfigError

log = logging.getLogger(__name__)

SECONDS_TO_ANSWER = 2
MOST_LAYERS = 10_000
OFFLINE = {"local_files_only": True}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
BESIDE = ("inputs.txt", "inputs.npy")  # in a checkpoint's folder: what it reads unless the user says otherwise
FETCH = (
    f"fetch config.json, {' or '.join(WEIGHTS)}, and tokenizer.json or the tokenizer's other files, "
    "put them into one folder and give its path"
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Checkpoint(NamedTuple):
    """A model as it was trained, the same architecture with fresh weights, and its reader; both models in eval mode.

    Weights are float32. reader: the tokenizer of a model that reads tokens, else the image processor. no_reader: why
    there is none, else None.
    """

    name: str
    trained: Any  # of the library
    initialised: Any
    reader: Any  # None without one
    no_reader: str | None

    @property
    def mask_token(self) -> int | None:
        """Id of the token that hides others: the tokenizer's, that of a usual name in its vocabulary, the config's."""
        known = getattr(self.reader, "mask_token_id", None)
        if known is None and hasattr(self.reader, "get_vocab"):
            vocabulary = self.reader.get_vocab()
            known = next((vocabulary[name] for name in ("[MASK]", "<mask>") if name in vocabulary), None)
        return getattr(self.trained.config, "mask_token_id", None) if known is None else known


def load_checkpoint(path: str, initialised_seed: int) -> Checkpoint:
    """Load a causal language model, a masked one, or a model without a head, whichever config.json names.

    path: a folder, or a name on the hub. initialised_seed: seed of the fresh weights, which the library draws. torch's
    global generator is left as it was. ConfigError if transformers, a file or a weight is missing, if a file holds more
    than tensors, or if the model needs code of its own.
    """
    transformers, source = import_transformers(), _source(path)
    folder = Path(os.path.expanduser(path))
    if is_local := folder.is_dir():
        _check_files(folder)
    elif not HUB_ID.fullmatch(path):
        raise ConfigError(f"{path}: no such folder; {FETCH}")
    with quiet(transformers), torch.random.fork_rng(devices=[]):
        try:
            config = transformers.AutoConfig.from_pretrained(**source)
            _check_config(path, config)
            auto = _auto_class(transformers, config)
            with torch.device("meta"):
                model_class = type(auto.from_config(copy.deepcopy(config), attn_implementation="eager"))
            # set explicitly, because a config.json may name a kernel to fetch and run; the tape covers both choices
            kind = {"attn_implementation": "sdpa" if model_class._supports_sdpa else "eager", "dtype": torch.float32}
            checks = {"weights_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
            torch.default_generator.manual_seed(initialised_seed)
            initialised = auto.from_config(copy.deepcopy(config), **kind)
            trained, report = auto.from_pretrained(**source, **kind, **checks, config=config)
        except ConfigError:
            raise
        except Exception as error:  # foreign files can make the library fail in any way
            raise ConfigError(_refused(path, is_local, error)) from error
        _check_weights(path, trained, report)
        in_folder = transformers.utils.cached_file(source["pretrained_model_name_or_path"], "config.json", **OFFLINE)
        _check_types(path, Path(in_folder).parent, trained)
        read = _tokenizer if hasattr(config, "vocab_size") else _image_processor
        reader, no_reader = read(transformers, source, config)
    for model in (trained, initialised):
        model.eval().requires_grad_(False)
    name = folder.resolve().name if is_local else path.rpartition("/")[2]
    return Checkpoint(name, trained, initialised, reader, no_reader)


def import_transformers() -> ModuleType:
    """The library; ConfigError, with what to install, where it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("transformers is not installed: pip install 'rankbench[pretrained]'") from error
    return transformers


def _source(path: str) -> dict[str, Any]:
    """Where the library reads a checkpoint: from a folder, which needs no network, or from the hub; no code is run.
    Where the hub does not answer, only what is in its cache is read: the library would retry for most of a minute."""
    folder = Path(os.path.expanduser(path))
    name, is_offline = (str(folder), True) if folder.is_dir() else (path, not _hub_answers())
    return {"pretrained_model_name_or_path": name, "local_files_only": is_offline, "trust_remote_code": False}


def _hub_answers() -> bool:
    from huggingface_hub.constants import ENDPOINT

    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(ENDPOINT, method="HEAD")
        with contextlib.suppress(OSError):
            with contextlib.suppress(urllib.error.HTTPError):  # an answer, too
                urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER)
            answered.set()

    threading.Thread(target=ask, daemon=True).start()  # because looking up the name has no time limit of its own
    return answered.wait(SECONDS_TO_ANSWER)


def _check_files(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder}: has no config.json; {FETCH}")
    if not any((folder / f"{name}{part}").exists() for name in WEIGHTS for part in ("", ".index.json")):
        raise ConfigError(f"{folder}: has no {' or '.join(WEIGHTS)}; {FETCH}")


def _check_config(path: str, config: Any) -> None:
    """ConfigError for a model without layers, or with more than any has, and for quantised weights, whose numbers the
    library may not know."""
    if not 1 <= (layers := getattr(config, "num_hidden_layers", 1)) <= MOST_LAYERS:  # the library would make them all
        raise ConfigError(f"{path}: config.json says {layers} layers; fetch it again")
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(
            f"{path}: its weights are quantised ({method or 'quantization_config'}), and the measurements need them in "
            "floating point; fetch the checkpoint that it was made from"
        )


def _check_weights(path: str, model: nn.Module, report: dict[str, Any]) -> None:
    """ConfigError if a weight is missing: the library would draw it at random. The pooler may be missing: nothing here
    measures it. Warns of tensors that the model does not have, such as those of more layers, or of another head."""
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    surplus = sorted(report["unexpected_keys"])
    unused = f"{len(surplus)} tensors of the file are not in the model: {_some(surplus)}" if surplus else ""
    if missing:
        lacks = f"lacks {len(missing)} weights of {type(model).__name__}: {_some(missing)}"
        raise ConfigError(f"{path}: {lacks}; {unused + '; ' if unused else ''}{FETCH}")
    if unused:
        log.warning("%s: %s; they are not measured", path, unused)
    for key, got, wanted in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"{path}: {key} has the shape {tuple(got)}, config.json says {tuple(wanted)}; fetch both from one place"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _check_types(path: str, folder: Path, model: nn.Module) -> None:
    """ConfigError if a file has integers for a weight, which the library converts."""
    types: dict[str, torch.dtype] = {}
    if files := sorted(folder.glob("model*.safetensors")):
        for file in files:
            with safe_open(file, "pt") as opened:
                empty = {name: opened.get_slice(name)[..., :0] for name in opened.keys()}  # noqa: SIM118
            types |= {name: tensor.dtype for name, tensor in empty.items()}
    for file in [] if files else folder.glob("pytorch_model*.bin"):
        tensors = torch.load(file, map_location="meta", weights_only=True)
        types |= {name: tensor.dtype for name, tensor in tensors.items()}
    for name in (name for name, dtype in types.items() if not dtype.is_floating_point):
        # one of the two may lack the name of the whole; other tensors, such as masks, may be of integers
        if any(f".{own}".endswith(f".{name}") or f".{name}".endswith(f".{own}") for own in model.state_dict()):
            raise ConfigError(
                f"{path}: {name} is of {types[name]}, and weights are floating-point numbers; fetch the files again"
            )


def _auto_class(transformers: ModuleType, config: Any) -> Any:
    """The library's class that reads the weights of this architecture."""
    architecture = (config.architectures or [""])[0]
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return transformers.AutoModelForCausalLM
    if architecture.endswith("ForMaskedLM"):
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModel


def _refused(path: str, is_local: bool, error: Exception) -> str:
    """One-line message for this error, with what to do about it."""
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return f"{path}: needs code of its own, which is never run; models of the library itself can be read"
    if isinstance(error, pickle.UnpicklingError):
        return f"{path}: pytorch_model.bin holds more than tensors, and none of it was run; use model.safetensors"
    reason = _in_one_line(error)
    if is_local:
        return f"{path}: cannot be read: {reason}; fetch its config.json and weights again"
    return f"{path}: no folder of this name, and none from the hub: {reason}; {FETCH}"


def _in_one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" [...]")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint, without its weights. path: a folder, or a name on the hub."""
    transformers, source = import_transformers(), _source(path)
    try:
        with quiet(transformers):
            return transformers.AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # as above
        raise ConfigError(f"tokenizer={path}: {_in_one_line(error)}; give a folder with tokenizer.json") from error


def _tokenizer(transformers: ModuleType, source: dict[str, Any], config: Any) -> tuple[Any | None, str | None]:
    """The tokenizer, or None and why there is none."""
    folder, letters = Path(source["pretrained_model_name_or_path"]), config.vocab_size
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER):
        return None, f"the folder has none of the files {', '.join(TOKENIZER)}"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # as above; the model can be measured without it
        return None, _in_one_line(error)
    # if a file is not one that its class reads, the library makes a tokenizer of the special tokens alone
    if len(tokenizer) < letters / 2:
        kind = type(tokenizer).__name__
        return None, f"{kind} reads {len(tokenizer)} tokens from these files, the model has {letters}"
    return tokenizer, None


def _image_processor(transformers: ModuleType, source: dict[str, Any], _: Any) -> tuple[Any | None, str | None]:
    """The processor that turns images into pixels as in the model's training, or None and why there is none."""
    try:
        return transformers.AutoImageProcessor.from_pretrained(**source), None
    except Exception as error:  # as above
        return None, _in_one_line(error)


@contextlib.contextmanager
def quiet(transformers: ModuleType) -> Iterator[None]:
    """Silence the library's progress bars and reports, and restore them afterwards."""
    logging = transformers.utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
