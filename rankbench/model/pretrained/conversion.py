"""Folders of the Hugging Face library, from the formats that packages keep their networks in.

Everything is read as data: torch checkpoints with weights_only=True, tokenizers as lists of words.
"""

import argparse
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

import torch
from safetensors.torch import save_file
from torch import Tensor

from rankbench.model.pretrained.checkpoint import import_transformers, quiet

# The words of SMILES in the vocabularies of the reaction models (Schwaller et al. 2018, sec. 2.2), and single letters
SMILES = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"
LETTERS = "."
BACKBONE = "backbone."  # of the names in an ONNX graph
# Weights that no measured part of a class of the library has
NOT_MEASURED = re.compile(r"(.*\.)?pooler\.|classifier\.|cls\.(seq_relationship|species|chain|graft)\.")
FROM_FAIRSEQ = {
    r"^decoder\.lm_head\.weight": "lm_head.decoder.weight",
    r"^decoder\.lm_head": "lm_head",
    r"^decoder\.sentence_encoder\.embed_tokens": "roberta.embeddings.word_embeddings",
    r"^decoder\.sentence_encoder\.embed_positions": "roberta.embeddings.position_embeddings",
    r"^decoder\.sentence_encoder\.emb_layer_norm": "roberta.embeddings.LayerNorm",
    r"^decoder\.sentence_encoder\.layers": "roberta.encoder.layer",
    r"self_attn\.q_proj": "attention.self.query",
    r"self_attn\.k_proj": "attention.self.key",
    r"self_attn\.v_proj": "attention.self.value",
    r"self_attn\.out_proj": "attention.output.dense",
    r"self_attn_layer_norm": "attention.output.LayerNorm",
    r"fc1": "intermediate.dense",
    r"fc2": "output.dense",
    r"final_layer_norm": "output.LayerNorm",
}


@dataclass(frozen=True)
class Network:
    """A network of a package.

    weights: the file of the package that holds them. convert: writes the folder. vocabulary: the file with its words,
    one in a line. words: a pattern of the words of a text. config: what its config.json lacks or says otherwise.
    inputs: a file of texts beside this module that it can read, if it cannot read our sentences.
    """

    name: str
    weights: str
    convert: "Callable[[ZipFile, Network, Path], None]"
    vocabulary: str = ""
    words: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""


def _pickled(opened: ZipFile, file: str) -> dict[str, Any]:
    """What a torch checkpoint holds: tensors and plain data, and a namespace, which only holds values."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded: dict[str, Any] = torch.load(io.BytesIO(opened.read(file)), map_location="cpu", weights_only=True)
    return loaded


def _save(weights: dict[str, Tensor], network: Network, config: dict[str, Any], folder: Path) -> None:
    """Write the weights, without indices and NOT_MEASURED, and config.json."""
    kept = {
        name: weight.contiguous().clone()
        for name, weight in weights.items()
        if weight.is_floating_point() and not NOT_MEASURED.match(name)
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | network.config, indent=2))


def as_is(opened: ZipFile, network: Network, folder: Path) -> None:
    """Copy a folder of the library as it is."""
    inside = PurePosixPath(network.weights).parent
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(opened.read(str(inside / name)))


def from_bin(opened: ZipFile, network: Network, folder: Path) -> None:
    """Convert pytorch_model.bin, with the config.json beside it, of BERT and ALBERT."""
    config = json.loads(opened.read(str(PurePosixPath(network.weights).parent / "config.json")))
    _save(_pickled(opened, network.weights), network, config, folder)
    vocabulary = opened.read(network.vocabulary).decode().splitlines()
    _write_tokenizer(vocabulary, network, ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"), folder)


def from_fairseq(opened: ZipFile, network: Network, folder: Path) -> None:
    """Convert a RoBERTa of fairseq, whose layers are those of the library under other names."""
    loaded = _pickled(opened, network.weights)
    args = loaded["args"]
    weights = {_renamed(name): weight for name, weight in loaded["model"].items()}
    words, read_out = weights["roberta.embeddings.word_embeddings.weight"], weights["lm_head.decoder.weight"]
    weights["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, args.encoder_embed_dim)
    weights["lm_head.decoder.bias"] = weights["lm_head.bias"]  # one parameter under two names
    config = {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "vocab_size": len(words),
        "hidden_size": args.encoder_embed_dim,
        "num_hidden_layers": args.encoder_layers,
        "num_attention_heads": args.encoder_attention_heads,
        "intermediate_size": args.encoder_ffn_embed_dim,
        "max_position_embeddings": len(weights["roberta.embeddings.position_embeddings.weight"]),
        "hidden_act": args.activation_fn,
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 1,
        "tie_word_embeddings": torch.equal(words, read_out),
    }
    _save(weights, network, config, folder)
    letters = [line.split()[0] for line in opened.read(network.vocabulary).decode().splitlines()]
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"]  # the order of fairseq
    _write_tokenizer(vocabulary, network, ("<unk>", "<s>", "</s>", "<pad>", "<mask>"), folder)


def _renamed(name: str) -> str:
    """A weight's name in the library, from that in fairseq."""
    for old, new in FROM_FAIRSEQ.items():
        name = re.sub(old, new, name)
    return name


def from_gguf(opened: ZipFile, network: Network, folder: Path) -> None:
    """Convert quantised weights to floating point, as the library reads them."""
    transformers = import_transformers()
    file = folder / "model.gguf"
    file.write_bytes(opened.read(network.weights))
    how = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name}
    with quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(**how, dtype=torch.float32)
        model.hf_quantizer = None  # else transformers refuses to save what was quantised
        del model.config.quantization_config
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(**how).save_pretrained(folder)
    file.unlink()


def from_onnx(opened: ZipFile, network: Network, folder: Path) -> None:
    """Convert a DINOv2 of the library from an ONNX graph that begins with it. The graph keeps the names of biases, and
    of a map's weights only which bias is added to their product. Positions are two arrays without a name of theirs,
    the class token's and the patches'."""
    import onnx

    graph = onnx.load_from_string(opened.read(network.weights)).graph
    arrays = {array.name: torch.from_numpy(onnx.numpy_helper.to_array(array).copy()) for array in graph.initializer}
    weights = {name.removeprefix(BACKBONE): array for name, array in arrays.items() if name.startswith(BACKBONE)}
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:
        bias, product = sorted(node.input, key=products.__contains__) if node.op_type == "Add" else ("", "")
        if bias.startswith(BACKBONE) and products.get(product) in arrays:
            name = bias.removeprefix(BACKBONE).removesuffix("bias")
            weights[f"{name}weight"] = arrays[products[product]].T
    positions = [array for name, array in arrays.items() if array.ndim == 3 and not name.startswith(BACKBONE)]
    positions_1ND = torch.cat(sorted(positions, key=lambda array: array.shape[1]), 1)
    patch = weights["embeddings.patch_embeddings.projection.weight"].shape[-1]
    width = positions_1ND.shape[-1]
    weights |= {"embeddings.position_embeddings": positions_1ND, "embeddings.mask_token": torch.zeros(1, width)}
    config = {
        "model_type": "dinov2",
        "architectures": ["Dinov2Model"],
        "hidden_size": width,
        "num_hidden_layers": sum(name.endswith("norm1.weight") for name in weights),
        "mlp_ratio": len(weights["encoder.layer.0.mlp.fc1.bias"]) // width,
        "patch_size": patch,
        "image_size": patch * math.isqrt(positions_1ND.shape[1] - 1),
    }
    _save(weights, network, config, folder)


def _write_tokenizer(vocabulary: list[str], network: Network, special: tuple[str, ...], folder: Path) -> None:
    """Write a tokenizer whose words are the matches of the network's pattern. special: unknown, begin, end, padding
    and mask."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    unknown, begin, end, *_ = special
    numbers = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(network.words), "isolated")
    ends = [(word, numbers[word]) for word in (begin, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, special, strict=True))}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
