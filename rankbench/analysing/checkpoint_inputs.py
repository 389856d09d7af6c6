"""What a public checkpoint reads: the inputs that the user gives, or that lie beside it, or ours.

Shapes: B sequence or image, N token, C colour.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.config.schema import AnalyzeConfig
from rankbench.model.modules import read_images, read_inputs
from rankbench.model.pretrained import BESIDE, Checkpoint
from rankbench.model.pretrained.families import padding_of, tokens_of
from rankbench.seeds import generator_for
from rankbench.tasks.task import ABSENT

LARGEST = 224  # pixels of a side of our own pictures, if a network takes any size: DINOv2's 518 are 1,370 tokens
OWN_TEXTS = (  # what a checkpoint reads if the user gives nothing
    "The river rose in the night, and by morning the lower fields were under water.",
    "She opened the letter, read it twice, and put it back into the drawer without a word.",
    "Copper conducts heat well, which is why the pans in the old kitchen were made of it.",
    "If the train is late again, we shall take the bus and walk the last mile.",
    "Two ships left the harbour at noon; only one of them was seen again.",
    "The committee will meet on Tuesday to discuss the budget for the new library.",
    "A square has four equal sides, and its diagonals cross at right angles.",
    "He had forgotten the name of the village, but not the colour of its church door.",
)


def beside(folder: str) -> str | None:
    """The file of inputs in a checkpoint's folder, if there is one."""
    return next((str(file) for name in BESIDE if (file := Path(folder) / name).is_file()), None)


def name_of(cfg: AnalyzeConfig, checkpoint: Checkpoint) -> str:
    """What tables and figures call the inputs."""
    if cfg.inputs is not None:
        return Path(cfg.inputs).name
    if not hasattr(checkpoint.trained.config, "vocab_size"):
        return "rankbench's own pictures"
    return "rankbench's own texts" if checkpoint.reader is not None else "random token ids"


def inputs_of(cfg: AnalyzeConfig, checkpoint: Checkpoint) -> tuple[Tensor, Tensor | None]:
    """Token ids (B, N), ABSENT after a text's end, or pixels (B, C, height, width); and targets, or None."""
    reads_tokens = hasattr(checkpoint.trained.config, "vocab_size")
    if cfg.masked and not type(checkpoint.trained).__name__.endswith("ForMaskedLM"):
        raise ConfigError(f"masked={cfg.masked}: {cfg.checkpoint} is not a masked language model; use masked=0")
    if cfg.inputs is None:
        if not reads_tokens:
            return _pictures_of_ours(cfg, checkpoint), None
        return _with_targets(_ids_of_ours(cfg, checkpoint), cfg, checkpoint)
    is_folder = Path(cfg.inputs).is_dir()
    if is_folder == reads_tokens and (is_folder or cfg.inputs.endswith(".txt")):
        raise ConfigError(f"inputs={cfg.inputs}: {cfg.checkpoint} reads {'texts' if reads_tokens else 'images'}")
    if checkpoint.reader is None and (is_folder or cfg.inputs.endswith(".txt")):
        reader, instead = ("tokenizer", "token ids") if reads_tokens else ("image processor", "pixels")
        raise ConfigError(
            f"inputs={cfg.inputs}: {cfg.checkpoint} has no {reader} ({checkpoint.no_reader}); give {instead} in a .npy"
        )
    if is_folder:
        return checkpoint.reader(read_images(cfg.inputs), return_tensors="pt")["pixel_values"], None

    example = read_inputs(cfg.inputs, partial(token_ids, checkpoint.reader, cfg.tokens))
    (inputs, *others), targets = example.tensors, example.targets
    if others:
        raise ConfigError(
            f"inputs={cfg.inputs}: holds {1 + len(others)} tensors besides targets; a checkpoint reads one; instead of "
            f"a mask give {ABSENT} for absent tokens"
        )
    if targets is not None and cfg.masked:
        raise ConfigError(f"masked={cfg.masked}: inputs={cfg.inputs} holds targets of its own; use masked=0")
    if targets is not None and inputs.is_floating_point():
        raise ConfigError(f"inputs={cfg.inputs}: targets are for token ids alone; leave them out")
    if inputs.is_floating_point():
        return inputs, None
    if not reads_tokens:
        raise ConfigError(f"inputs={cfg.inputs}: whole numbers; {cfg.checkpoint} reads images; give pixels as floats")
    if inputs.dim() != 2:
        raise ConfigError(f"inputs={cfg.inputs}: token ids of shape {tuple(inputs.shape)}; give (sequences, tokens)")
    inputs = inputs.long()[:, : cfg.tokens].clamp(min=ABSENT)
    letters = checkpoint.trained.config.vocab_size
    if (largest := int(inputs.max())) >= letters:
        raise ConfigError(
            f"inputs={cfg.inputs}: token id {largest}; the vocabulary of {cfg.checkpoint} ends with {letters - 1}"
        )
    inputs = inputs.where(tokens_of(inputs, checkpoint.trained.config)[1], ABSENT)  # no padding behind a text
    if targets is None:
        return _with_targets(inputs, cfg, checkpoint)
    return inputs, targets[:, : cfg.tokens] if targets.dim() > 1 else targets


def _ids_of_ours(cfg: AnalyzeConfig, checkpoint: Checkpoint) -> Tensor:
    """Token ids of our own texts for a checkpoint that comes without inputs; random ones if it has no tokenizer."""
    config = checkpoint.trained.config
    tokens = min(cfg.tokens, getattr(config, "max_position_embeddings", None) or 32, 32)
    if checkpoint.reader is not None:
        return token_ids(checkpoint.reader, tokens, list(OWN_TEXTS))["inputs"]
    generator, padding = generator_for(cfg.seed, "own tokens"), padding_of(config)
    ids_BN = torch.randint(config.vocab_size, (len(OWN_TEXTS), tokens), generator=generator)
    return ids_BN if padding is None else ids_BN.where(ids_BN != padding, (padding + 1) % config.vocab_size)


def _pictures_of_ours(cfg: AnalyzeConfig, checkpoint: Checkpoint) -> Tensor:
    """Random pictures, (B, C, height, width), standardised: amplitudes fall as 1 / frequency, as in photographs (Field
    1987), and the colours share most of them. They are as large as the config says, or LARGEST where that will do."""
    config = checkpoint.trained.config
    size, colours = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if not isinstance(size, int) or not isinstance(colours, int):
        raise ConfigError("inputs=null: give inputs=<file>: pixels in a .npy, or a folder of images")
    if size > LARGEST and _runs_on(checkpoint.trained, torch.zeros(1, colours, LARGEST, LARGEST)):
        size = LARGEST
    generator = generator_for(cfg.seed, "own pictures")
    grey, own = (torch.randn(len(OWN_TEXTS), number, size, size, generator=generator) for number in (1, colours))
    frequency = torch.hypot(torch.fft.fftfreq(size)[:, None], torch.fft.fftfreq(size))
    frequency[0, 0] = torch.inf  # no mean
    pictures = torch.fft.ifft2(torch.fft.fft2(grey + 0.3 * own) / frequency).real
    return pictures / pictures.std(dim=(-2, -1), keepdim=True)


@torch.no_grad()
def _runs_on(model: nn.Module, pictures: Tensor) -> bool:
    weight = next(model.parameters())
    try:
        model(pictures.to(weight.device, weight.dtype))
    except (ValueError, RuntimeError):
        return False
    return True


def _with_targets(ids_BN: Tensor, cfg: AnalyzeConfig, checkpoint: Checkpoint) -> tuple[Tensor, Tensor | None]:
    """Inputs and targets: the next token for a causal language model; for a masked one the tokens that `masked` hides,
    which are masked in the inputs; None for others."""
    if not cfg.masked:
        # in XLNet's LMHeadModel each token sees the next one, unless attn_type=uni
        sees_next = getattr(checkpoint.trained.config, "attn_type", "uni") == "bi"
        is_causal = type(checkpoint.trained).__name__.endswith(("ForCausalLM", "LMHeadModel")) and not sees_next
        next_BN = torch.cat([ids_BN[:, 1:], torch.full_like(ids_BN[:, :1], ABSENT)], dim=1)
        return ids_BN, next_BN if is_causal else None
    if (mask_token := checkpoint.mask_token) is None:
        raise ConfigError(
            f"masked={cfg.masked}: neither a tokenizer nor mask_token_id in the config.json of {cfg.checkpoint} tells "
            "which token hides others; add one of them, or use masked=0"
        )
    reader = checkpoint.reader
    special = torch.tensor(reader.all_special_ids if reader is not None else cfg.special_tokens or [])
    drawn_BN = torch.rand(ids_BN.shape, generator=generator_for(cfg.seed, "masked tokens")) < cfg.masked
    hidden_BN = drawn_BN & (ids_BN != ABSENT) & ~torch.isin(ids_BN, special)
    return ids_BN.masked_fill(hidden_BN, mask_token), ids_BN.masked_fill(~hidden_BN, ABSENT)


def token_ids(tokenizer: Any, tokens: int, lines: list[str]) -> dict[str, Tensor]:
    """The first token ids of each line, (B, N), ABSENT after a text's end."""
    texts = [tokenizer.encode(line)[:tokens] for line in lines]
    longest = max(map(len, texts))
    return {"inputs": torch.tensor([text + [ABSENT] * (longest - len(text)) for text in texts])}
