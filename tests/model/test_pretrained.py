"""rankbench.model.pretrained against the library's own hidden states and attention, and against the tape.

All models are tiny and random; nothing is downloaded, but for the last two tests, which say so.

Shapes: K path length, B batch, H head, N query token, M key token, D width.
"""

import copy
import json
import pickle
import random
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from breadth import some
from refusals import Bomb, refusal
from safetensors.torch import load_file, save_file
from torch import nn

import rankbench
from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.lipschitz_of_networks import norm_bound
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.measures.residual_coordinates import tokens
from rankbench.measures.residual_propagation import propagate
from rankbench.model.network import run, without
from rankbench.model.pretrained import as_network, load_checkpoint
from rankbench.model.pretrained.parts import ACTIVATION_NAMES, PretrainedMlp
from rankbench.tape import record, tap

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")

# Float64 with a few hundred operations, each good to 2.2e-16 of states of size 1 to 10.
ROUNDING = {"rtol": 0, "atol": 1e-12}
B, N, LETTERS = 3, 6, 50

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": LETTERS, "max_position_embeddings": 32}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
DISTILBERT = {"dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2, "vocab_size": LETTERS}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": LETTERS, "n_positions": 32}
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 3, "num_heads": 2, "vocab_size": LETTERS}
XLNET = {"d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 24, "vocab_size": LETTERS, "use_mems_eval": False}
FAMILIES = {
    "Bert": ("BertModel", TEXT),
    "Bert, causal": ("BertModel", {**TEXT, "is_decoder": True}),
    "Bert, masked LM": ("BertForMaskedLM", TEXT),
    "Bert, pretraining": ("BertForPreTraining", TEXT),
    "Roberta": ("RobertaModel", TEXT),
    "Roberta, masked LM": ("RobertaForMaskedLM", TEXT),
    "DistilBert": ("DistilBertModel", DISTILBERT),
    "DistilBert, masked LM": ("DistilBertForMaskedLM", DISTILBERT),
    "Albert": ("AlbertModel", {**TEXT, "embedding_size": 12}),
    "Albert, groups": ("AlbertModel", {**TEXT, "embedding_size": 12, "num_hidden_groups": 2, "inner_group_num": 2}),
    "Albert, masked LM": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 12}),
    "GPT2": ("GPT2Model", GPT2),
    "GPT2, scaled by layer": ("GPT2Model", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "GPT2, not scaled": ("GPT2Model", {**GPT2, "scale_attn_weights": False, "activation_function": "relu"}),
    "GPT2, causal LM": ("GPT2LMHeadModel", GPT2),
    "T5": ("T5EncoderModel", T5),
    "T5, gated": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 4}),
    "Llama": ("LlamaModel", {**TEXT, "num_key_value_heads": 1}),
    "Llama, biases": ("LlamaModel", {**TEXT, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "Llama, head width": ("LlamaModel", {**TEXT, "head_dim": 6, "num_key_value_heads": 1}),
    "Llama, causal LM": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 1}),
    "Mistral": ("MistralModel", {**TEXT, "num_key_value_heads": 1, "sliding_window": 8}),
    "Qwen2": ("Qwen2Model", {**TEXT, "num_key_value_heads": 1}),
    "XLNet": ("XLNetModel", XLNET),
    "XLNet, causal": ("XLNetModel", {**XLNET, "attn_type": "uni", "clamp_len": 2}),
    "XLNet, causal LM": ("XLNetLMHeadModel", XLNET),
    "ViT": ("ViTModel", IMAGE),
    "ViT, no biases": ("ViTModel", {**IMAGE, "qkv_bias": False, "hidden_act": "quick_gelu"}),
    "ViT, classes": ("ViTForImageClassification", IMAGE),
    "DeiT": ("DeiTModel", IMAGE),
}
IMAGES = [name for name in FAMILIES if name.startswith(("ViT", "DeiT"))]
RMSNORM = [name for name in FAMILIES if name.startswith(("T5", "Llama", "Mistral", "Qwen2"))]
TEXTS = [name for name in FAMILIES if name not in IMAGES]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test touches the hub. The library reads HF_HUB_OFFLINE when it is imported, which may have been before."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def rms_norm(self, x):
    """The library's own passes through float32, whatever the number type of the model."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


def built(family, implementation="sdpa", patch=True):
    """A model of the library in float64: its own start, and on top of it noise, so that no bias is 0 and no scale 1.

    patch: RMSNorm in float64 too.
    """
    name, sizes = FAMILIES[family]
    model_class = getattr(transformers, name)
    implementation = implementation if model_class._supports_sdpa else "eager"
    config = model_class.config_class(**sizes, attn_implementation=implementation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    model = model.double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    for part in model.modules() if patch else ():
        if hasattr(part, "variance_epsilon"):
            part.forward = types.MethodType(rms_norm, part)
    return model


def inputs_of(family, padding=None):
    """Inputs of the network, and those of the library; the second and third text end in 2 and 3 absent tokens."""
    generator = torch.Generator().manual_seed(2)
    if family in IMAGES:
        pixels = torch.randn(B, 3, 8, 8, generator=generator, dtype=torch.float64)
        return pixels, {"pixel_values": pixels}
    ids = torch.randint(6, LETTERS, (B, N), generator=generator)  # no family's own padding
    if family == "XLNet, causal":  # where the library adds a mask in place to one that is too small
        return ids, {"input_ids": ids}
    if padding is None:
        return ids, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mask = (torch.arange(N) < torch.tensor([[N], [N - 2], [N - 3]])).long()
    fill = padding if padding >= 0 else 0
    return ids.masked_fill(mask == 0, padding), {"input_ids": ids.masked_fill(mask == 0, fill), "attention_mask": mask}


def close(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **(tolerance or ROUNDING))


def layers_of(network, inputs):
    """The states that enter the first layer and those that leave each, and P of each layer."""
    steps = list(run(network, inputs))
    states = [step.input_BND for step in steps if step.sublayer.kind == "attention"] + [steps[-1].output_BND]
    return states, [step.weights_BHNM for step in steps if step.sublayer.kind == "attention"]


def same_as_the_library(model, network, inputs, call):
    """Every state, every P and the last state, at all tokens that are there."""
    present_BN = call.get("attention_mask", torch.ones(len(inputs), network.num_tokens(inputs))).bool()
    own = model.base_model(**call, output_hidden_states=True)
    states, weights = layers_of(network, inputs)
    wanted = list(own.hidden_states)
    if network.last_norm is not None:  # the library's last hidden state stands behind the last norm
        states[-1] = states[-1] if model.config.model_type in ("vit", "deit") else network.finish(states[-1])
    assert len(states) == len(wanted)
    for state, hidden in zip([*states, network.state(inputs)], [*wanted, own.last_hidden_state], strict=True):
        close(state[present_BN], hidden[present_BN])
    close(network.state(inputs, kernel="fused")[present_BN], own.last_hidden_state[present_BN])
    calls = []
    tap(model.base_model, calls.append, **call)
    assert len(calls) == len(weights)
    for p_BHNM, observed in zip(weights, calls, strict=True):
        close(p_BHNM.transpose(1, 2)[present_BN], observed.weights.transpose(1, 2)[present_BN])


PADDED = [name for name in TEXTS if name != "XLNet, causal"]  # states and weights of these: see the padded texts


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in PADDED])
def test_states_and_weights_are_the_librarys(family):
    model = built(family)
    same_as_the_library(model, as_network(model), *inputs_of(family))


@pytest.mark.parametrize("family", ["Bert, causal", "GPT2", "Llama", "Mistral"])
def test_a_decoder_that_is_not_causal_sees_all_tokens(family):
    model = built(family)
    causal = as_network(model).state(inputs_of(family)[0])
    model.config.is_causal = False
    network, (inputs, call) = as_network(model), inputs_of(family)
    same_as_the_library(model, network, inputs, call)
    assert (network.state(inputs) - causal).abs().max() > 0.1


@pytest.mark.parametrize("family", RMSNORM)
def test_states_are_the_librarys_to_the_float32_of_its_norms(family):
    model = built(family, patch=False)
    inputs, call = inputs_of(family)
    close(as_network(model).state(inputs), model.base_model(**call).last_hidden_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_output_attentions(family):
    model = built(family, "eager")
    inputs, call = inputs_of(family)
    attentions = model.base_model(**call, output_attentions=True).attentions
    _, weights = layers_of(as_network(model), inputs)
    # eager attention of these takes its softmax in float32
    coarse = family.startswith(("ViT", "DeiT", "Llama", "Mistral", "Qwen2"))
    tolerance = {"rtol": 0, "atol": 1e-6} if coarse else ROUNDING
    for p_BHNM, wanted in zip(weights, attentions, strict=True):
        close(p_BHNM, wanted, **tolerance)


def marks(name):
    return () if name in ("Bert", "T5") else pytest.mark.slow


WITH_PADDING = [name for name in TEXTS if name.startswith(("Bert", "Roberta", "DistilBert", "Albert", "T5"))]


@pytest.mark.parametrize(
    ("family", "is_own"),
    [
        *some(((name, False) for name in PADDED), 2),
        *(pytest.param(name, True, marks=marks(name)) for name in WITH_PADDING),
    ],
)
def test_padded_texts_are_those_of_the_attention_mask(family, is_own):
    """With -1 for absent tokens, and with the model's own padding."""
    model = built(family)
    padding = model.config.pad_token_id
    inputs, call = inputs_of(family, padding if is_own else -1)
    call["input_ids"] = call["input_ids"].masked_fill(call["attention_mask"] == 0, padding or 0)
    network = as_network(model)
    assert network.lengths(inputs).tolist() == [N, N - 2, N - 3]
    same_as_the_library(model, network, inputs, call)
    alone = inputs[1:2, : N - 2]
    assert network.lengths(alone) is None
    close(network.state(alone), network.state(inputs)[1:2, : N - 2])


@pytest.mark.parametrize("family", [name for name in FAMILIES if "LM" in name])
def test_the_read_out_is_the_librarys(family):
    model = built(family)
    inputs, call = inputs_of(family)
    close(as_network(model)(inputs), model(**call).logits)


# --- weights are the module's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_network_has_the_sizes_of_its_module_and_follows_it(family):
    model = built(family)
    network = as_network(model)
    norm_kind = "rmsnorm" if family in RMSNORM else "layernorm"
    assert (network.width, network.num_heads, network.norm_kind) == (16, 2, norm_kind)
    inputs, call = inputs_of(family)
    before = sums_by_length(network, inputs).state_BND
    for parameter in model.parameters():
        parameter.mul_(0.9)
    close(network.state(inputs), model.base_model(**call).last_hidden_state)
    assert sums_by_length(network, inputs).remainder().max() < 1e-12  # so do the maps of single heads
    assert (network.state(inputs) - before).abs().max() > 0.01
    network.float()
    assert network.state(inputs).dtype == torch.float32
    assert next(model.parameters()).dtype == torch.float32


def test_a_copy_of_the_network_has_a_module_of_its_own():
    network = as_network(built("GPT2"))
    inputs, _ = inputs_of("GPT2")
    other, before = copy.deepcopy(network), network.state(inputs)
    for parameter in other.module.parameters():
        parameter.mul_(0.9)
    assert torch.equal(network.state(inputs), before)
    close(other.state(inputs), other.module(inputs).last_hidden_state)


# --- parts taken out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", [("skip",), ("mlp",), ("norm",), ("skip", "mlp", "norm")])
def test_parts_taken_out_of_a_bert_are_those_of_its_modules(removed):
    model, (inputs, _) = built("Bert"), inputs_of("Bert")
    x_BND = model.embeddings(inputs)

    def after(output, y_BND):
        y_BND = output.dense(y_BND) + (0 if "skip" in removed else x_BND)
        return y_BND if "norm" in removed else output.LayerNorm(y_BND)

    for layer in model.encoder.layer:
        x_BND = after(layer.attention.output, layer.attention.self(x_BND)[0])
        if "mlp" not in removed:
            x_BND = after(layer.output, layer.intermediate(x_BND))
    network = without(as_network(model), **dict.fromkeys(removed, True))
    close(network.state(inputs), x_BND, rtol=0, atol=1e-12 * max(1, x_BND.abs().max().item()))  # without norms it grows


# --- measures --------------------------------------------------------------------------------------------------------


# where the embedding is the result of a submodule, as the tape wants it
BEGIN = dict.fromkeys(("Bert", "Bert, causal", "Roberta", "DistilBert", "ViT", "DeiT"), "embeddings")
BEGIN |= {"Albert": "encoder.embedding_hidden_mapping_in", "GPT2": "drop", "XLNet": "word_embedding"}
BEGIN |= dict.fromkeys(("Llama", "Llama, biases", "Llama, head width"), "embed_tokens")
BEGIN |= dict.fromkeys(("T5", "T5, gated"), "encoder.embed_tokens")


@pytest.mark.parametrize("family", some(BEGIN, 2))
def test_path_sums_are_those_of_the_tape(family):
    model = built(family)
    inputs, call = inputs_of(family, -1)
    present_BN = call.get("attention_mask", torch.ones(B, 1)).bool().expand(B, as_network(model).num_tokens(inputs))
    wanted = record(model, begin=BEGIN[family], **call).sums()
    sums = sums_by_length(as_network(model), inputs)
    atol = 1e-12 * wanted.state_BND.abs().max().item()
    close(sums.by_length_KBND[:, present_BN], wanted.by_length_KBND[:, present_BN], rtol=0, atol=atol)
    close(sums.bias_BND[present_BN], wanted.bias_BND[present_BN], rtol=0, atol=atol)
    assert sums.remainder().max() < 1e-12


FOLLOWED = ["Bert", "Bert, causal", "Roberta", "DistilBert", "Albert", "GPT2", "GPT2, not scaled", "ViT", "DeiT"]


@pytest.mark.parametrize("family", FOLLOWED)
def test_residual_coordinates_are_those_of_the_states(family):
    network = as_network(built(family))
    inputs, _ = inputs_of(family, -1)
    states, _ = layers_of(network, inputs)
    present_BN = torch.ones(B, network.num_tokens(inputs)).bool() if family in IMAGES else inputs >= 0
    for state, wanted in zip(propagate(network, inputs), states, strict=True):
        # tokens of size up to 10 that go through a mean and back
        close(tokens(state)[present_BN], wanted[present_BN], rtol=0, atol=1e-11)


def test_bounds_take_the_epsilon_of_the_norm():
    """BERT's is 1e-12: next to a token of equal numbers its norm is 3000 times as steep as one with torch's 1e-5."""
    norm = as_network(built("Bert")).sublayers[0].norm
    jacobian_DD = torch.func.jacrev(norm)(torch.zeros(16, dtype=torch.float64))
    steepest = torch.linalg.matrix_norm(jacobian_DD, 2).item()
    # the bound multiplies the norms of the centring and of the learned scale, which are not those of their product
    assert steepest <= norm_bound(norm, "2") <= 1.1 * steepest


@pytest.mark.parametrize("name", ACTIVATION_NAMES)
def test_activations_and_their_gates_are_the_librarys(name):
    from transformers.activations import ACT2FN

    z = torch.cat([torch.zeros(1, dtype=torch.float64), torch.linspace(-12, 12, 4000, dtype=torch.float64)])
    z.requires_grad_()
    linear = nn.Linear(1, 1)
    part = PretrainedMlp(linear, linear, name)
    act = ACT2FN[name](z)
    tolerance = 1e-10 if name == "gelu_fast" else 1e-14  # its constant has ten digits
    close(part.activation(z), act, rtol=0, atol=tolerance)
    close(part.gate(z) * z, act, rtol=0, atol=tolerance)
    (slope,) = torch.autograd.grad(act[0], z)
    assert part.gate(z)[0].item() == pytest.approx(slope[0].item(), abs=1e-15)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_other_families_are_refused_with_those_covered_and_the_tape():
    model = transformers.OPTModel(transformers.OPTConfig(**SIZES, ffn_dim=24, vocab_size=LETTERS)).eval()
    covered, text = "bert, roberta, distilbert, albert, gpt2, t5, llama", refusal(as_network, model)
    assert text.startswith(f"opt: no adapter for this family; covered: {covered}") and "rankbench.tape" in text
    assert refusal(as_network, nn.Linear(2, 2)).startswith("Linear: no adapter")


def test_a_module_in_training_mode_is_refused():
    assert "eval()" in refusal(as_network, built("Bert").train())


def test_an_activation_without_a_gate_is_refused():
    config = transformers.BertConfig(**{**TEXT, "hidden_act": "mish"})
    assert refusal(as_network, transformers.BertModel(config).eval()).startswith("activation mish: ")


@pytest.mark.parametrize(
    ("family", "ids", "wanted"),
    [
        ("Bert", [[0, 0, 5, 6]], "padding before a token"),
        ("Bert", [[5, -1, 6, 7]], "padding before a token"),
        ("Bert", [[5, 6], [0, 0]], "a text without tokens"),
        ("Bert", [[5, 50]], "token id 50; its vocabulary ends with 49"),
        ("Bert", [[5] * 33], "texts of 33 tokens; it has positions for 32"),
        ("Roberta", [[5] * 31], "it has positions for 30"),  # its table has two rows more
        ("Mistral", [[5] * 9], "it has positions for 8"),  # of its sliding window
    ],
)
def test_texts_that_do_not_fit_are_refused(family, ids, wanted):
    network = as_network(built(family))
    assert wanted in refusal(lambda: list(run(network, torch.tensor(ids))))


@pytest.mark.parametrize("key", ["bi_data", "same_length"])
def test_xlnet_is_refused_where_it_hides_other_tokens(key):
    model = built("XLNet, causal")
    setattr(model.config, key, True)
    assert f"{key}=true" in refusal(as_network, model)


@pytest.mark.parametrize("family", ["T5", "Llama", "XLNet"])
def test_scores_of_positions_are_refused_where_scores_must_be_products(family):
    network = as_network(built(family))
    inputs, _ = inputs_of(family)
    name = {"T5": "dot with a bias of positions", "Llama": "rotary", "XLNet": "relative"}[family]
    assert name in refusal(propagate, network, inputs)
    assert name in refusal(RecomputedNetwork, network, inputs)


def test_padding_that_also_begins_or_ends_texts_is_absent_only_at_the_end():
    model = built("GPT2")
    model.config.pad_token_id = model.config.eos_token_id = 7
    present = as_network(model).present(torch.tensor([[7, 1, 7, 2], [7, 3, 7, 7]]))
    assert present.tolist() == [[True] * 4, [True, True, False, False]]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def saved(model, folder, suffix="safetensors"):
    """The folder with the model's config and weights in it."""
    if suffix == "safetensors":
        model.save_pretrained(folder)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return str(folder)


LOADED = [*TEXTS[:1], *(name for name in FAMILIES if "LM" in name), "DistilBert", "ViT", "ViT, classes", "DeiT"]


@pytest.mark.parametrize("suffix", some(["safetensors", "bin"], 2))
@pytest.mark.parametrize("family", LOADED)
def test_saved_checkpoints_load_equal(family, suffix, tmp_path):
    model = built(family).float()
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    checkpoint = load_checkpoint(saved(model, tmp_path / "tiny", suffix), initialised_seed=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert (checkpoint.name, checkpoint.reader) == ("tiny", None)
    assert not checkpoint.trained.training
    weights, wanted = dict(checkpoint.trained.base_model.named_parameters()), dict(model.base_model.named_parameters())
    weights = {name: weight for name, weight in weights.items() if not name.startswith("pooler.")}
    assert weights and all(torch.equal(weight, wanted[name]) for name, weight in weights.items())
    assert not any(weight.requires_grad for weight in checkpoint.initialised.parameters())
    inputs, call = inputs_of(family)
    call = {name: x.float() if x.is_floating_point() else x for name, x in call.items()}
    network = as_network(checkpoint.trained)
    assert network.name == "tiny"
    # float32: 6e-8 of states of size 1 to 10, through some hundred operations
    close(network.state(inputs), model.base_model(**call).last_hidden_state, rtol=0, atol=1e-4)
    if "LM" in family:
        close(network(inputs), model(**call).logits, rtol=0, atol=1e-4)


def test_fresh_weights_are_those_of_the_seed(tmp_path):
    path = saved(built("Bert"), tmp_path)
    drawn = [load_checkpoint(path, seed).initialised.encoder.layer[0].output.dense.weight for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert (drawn[0] - drawn[2]).abs().max() > 1e-3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        own = transformers.BertModel(transformers.BertConfig(**TEXT))
    assert torch.equal(drawn[2], own.encoder.layer[0].output.dense.weight)


def test_the_tokenizer_comes_along(tmp_path):
    letters = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    path = saved(transformers.BertModel(transformers.BertConfig(**{**TEXT, "vocab_size": len(letters)})), tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(letters))
    checkpoint = load_checkpoint(path, 0)
    assert checkpoint.no_reader is None
    batch = checkpoint.reader(["a b c", "d"], padding=True, return_tensors="pt")
    assert as_network(checkpoint.trained).lengths(batch["input_ids"]).tolist() == [5, 3]


def test_a_tokenizer_that_reads_none_of_the_files_is_none(tmp_path):
    """ALBERT's wants spiece.model: from vocab.txt the library makes one of the special tokens alone."""
    path = saved(built("Albert"), tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(map(str, range(LETTERS))))
    checkpoint = load_checkpoint(path, 0)
    assert checkpoint.reader is None
    assert checkpoint.no_reader.endswith("tokens from these files, the model has 50")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_holds_more_than_tensors_is_not_run(tmp_path, zipped):
    folder, trace = tmp_path / "bad", tmp_path / "trace"
    path = saved(built("Bert"), folder, "bin")
    weights = {"embeddings.word_embeddings.weight": Bomb(trace)}
    if zipped:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(weights, protocol=2))
    assert "pytorch_model.bin holds more than tensors, and none of it was run" in refusal(load_checkpoint, path, 0)
    assert not trace.exists()


def test_code_beside_the_weights_is_not_run(tmp_path):
    path, trace = saved(built("Bert"), tmp_path / "bad"), tmp_path / "trace"
    code = f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nclass Mine: pass\n"
    (tmp_path / "bad" / "mine.py").write_text(code)
    config = tmp_path / "bad" / "config.json"
    own_code = {"auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"}}
    values = {**json.loads(config.read_text()), **own_code}
    config.write_text(json.dumps(values))
    assert load_checkpoint(path, 0).trained is not None  # the library's own BERT
    config.write_text(json.dumps({**values, "model_type": "mine"}))
    assert "needs code of its own, which is never run" in refusal(load_checkpoint, path, 0)
    assert not trace.exists()


def test_a_kernel_that_the_config_names_is_not_fetched(tmp_path):
    for key in ("attn_implementation", "_attn_implementation"):
        path = saved(built("Bert"), tmp_path)
        rewrite(tmp_path, {key: "kernels-community/flash-attn"})
        checkpoint = load_checkpoint(path, 0)
        kinds = {model.config._attn_implementation for model in (checkpoint.trained, checkpoint.initialised)}
        assert kinds == {"sdpa"}


@pytest.mark.parametrize(
    ("missing", "wanted"),
    [("config.json", "has no config.json"), ("model.safetensors", "has no model.safetensors or pytorch_model.bin")],
)
def test_missing_files_are_named(tmp_path, missing, wanted):
    path = saved(built("Bert"), tmp_path)
    (tmp_path / missing).unlink()
    text = refusal(load_checkpoint, path, 0)
    assert wanted in text and "put them into one folder and give its path" in text


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_tensors_that_are_not_in_the_model_are_said(tmp_path, suffix, caplog):
    """Of more layers than config.json says, and a mask of integers, which is no weight."""
    model = built("Bert")
    path = saved(model, tmp_path, suffix)
    rewrite(tmp_path, {"num_hidden_layers": 2}, lambda weights: weights | {"embeddings.mask": torch.ones(3).long()})
    assert len(load_checkpoint(path, 0).trained.encoder.layer) == 2
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("rankbench")]
    of_layer = [name for name in model.state_dict() if name.startswith("encoder.layer.2.")]
    assert line.startswith(f"{path}: {len(of_layer) + 1} tensors of the file are not in the model: embeddings.mask, ")


def test_tensors_under_another_name_are_said_next_to_the_missing_ones(tmp_path):
    path = saved(built("Bert"), tmp_path)
    rewrite(tmp_path, {}, lambda weights: {name.replace("layer.1.", "layer_1."): x for name, x in weights.items()})
    text = refusal(load_checkpoint, path, 0)
    assert "lacks 16 weights of BertModel: encoder.layer.1." in text
    assert "; 16 tensors of the file are not in the model: encoder.layer_1." in text


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_weights_of_integers_are_one_line(tmp_path, suffix, dtype):
    path = saved(built("Bert"), tmp_path, suffix)
    name = "encoder.layer.1.output.dense.weight"
    rewrite(tmp_path, {}, lambda weights: weights | {name: weights[name].to(dtype)})
    wanted = f"{path}: {name} is of {dtype}, and weights are floating-point numbers; fetch the files again"
    assert refusal(load_checkpoint, path, 0) == wanted


def rewrite(folder, changes, weights=lambda weights: weights):
    """Change a saved model's config and weights."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if (file := folder / "model.safetensors").exists():
        save_file(weights(load_file(file)), file, {"format": "pt"})
    else:
        torch.save(weights(torch.load(folder / "pytorch_model.bin")), folder / "pytorch_model.bin")


@pytest.mark.parametrize("content", [b"", b"{}", b"not json"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_broken_files_are_one_line(tmp_path, name, content):
    path = saved(built("Bert"), tmp_path)
    (tmp_path / name).write_bytes(content)
    assert refusal(load_checkpoint, path, 0).startswith(f"{path}: ")


UNREADABLE = [{"hidden_size": "wide"}, {"num_attention_heads": 0}, {"hidden_act": "unheard"}, {"architectures": 5}]
UNREADABLE += [{"model_type": None}, {"vocab_size": -3}]


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("GPT2", {"n_layer": 0}, "config.json says 0 layers; fetch it again"),
        ("GPT2", {"n_layer": 2**31}, "config.json says 2147483648 layers; fetch it again"),
        ("GPT2", {"quantization_config": {"quant_method": "unheard"}}, "its weights are quantised (unheard), and "),
        ("Bert", {"intermediate_size": 20}, "encoder.layer.0.intermediate.dense.bias has the shape (24,), config.json"),
        *(("Bert", changes, "cannot be read: ") for changes in UNREADABLE),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_one_line(tmp_path, family, changes, says):
    path = saved(built(family), tmp_path)
    rewrite(tmp_path, changes)
    assert refusal(load_checkpoint, path, 0).startswith(f"{path}: {says}")


def test_a_broken_tokenizer_is_none_and_why(tmp_path):
    path = saved(built("Bert"), tmp_path)
    (tmp_path / "tokenizer.json").write_text("junk")
    assert load_checkpoint(path, 0).no_reader.startswith("JSONDecodeError: Expecting value")


@pytest.mark.further
@pytest.mark.parametrize("path", ["google/no-such-model", "no-such-model"])
def test_a_name_on_the_hub_without_a_network_is_one_line_within_seconds(path, monkeypatch):
    slept = []
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://192.0.2.1")  # an address that nobody has
    monkeypatch.setattr("time.sleep", slept.append)  # between the library's tries
    text = refusal(load_checkpoint, path, 0)
    assert slept == []
    assert text.startswith(f"{path}: no folder of this name, and none from the hub: ")
    assert "fetch config.json, model.safetensors or pytorch_model.bin" in text


@pytest.mark.further
def test_a_missing_folder_is_one_line(tmp_path):
    for path in (str(tmp_path / "none"), "~no-such-user/none"):
        assert refusal(load_checkpoint, path, 0).startswith(f"{path}: no such folder; fetch")


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    wanted = "transformers is not installed: pip install 'rankbench[pretrained]'"
    assert refusal(load_checkpoint, str(tmp_path), 0) == wanted


def test_progress_bars_and_reports_are_as_they_were(tmp_path, capfd):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    path = saved(built("Bert"), tmp_path)
    capfd.readouterr()
    load_checkpoint(path, 0)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr().err == ""


# --- real weights ----------------------------------------------------------------------------------------------------

ALBERT = "rxnmapper==0.4.3"  # 3 MB, MIT: an ALBERT of 12 shared layers, 8 heads and width 256, trained on reactions


@pytest.fixture(scope="session")
def real_albert(tmp_path_factory):
    """The folder of a public checkpoint, out of a wheel that is kept in the user's cache and never installed."""
    cache = Path(pooch.os_cache("rankbench-tests"))
    if not list(cache.glob("rxnmapper-0.4.3-*.whl")):
        fetch = [sys.executable, "-m", "pip", "download", ALBERT, "--no-deps", "--only-binary=:all:", "-d", str(cache)]
        try:
            subprocess.run([*fetch, "--retries=0", "--timeout=15"], check=True, capture_output=True, timeout=120)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"cannot fetch {ALBERT} from the package index: {type(error).__name__}")
    (wheel,) = cache.glob("rxnmapper-0.4.3-*.whl")
    folder = tmp_path_factory.mktemp("albert")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "albert_heads_8" in name and name.endswith(("config.json", "pytorch_model.bin", "vocab.txt")):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


@pytest.mark.slow
def test_a_real_albert(real_albert):
    checkpoint = load_checkpoint(str(real_albert), 0)
    assert type(checkpoint.trained).__name__ == "AlbertForMaskedLM"
    vocabulary = (real_albert / "vocab.txt").read_text().split()
    ids = [vocabulary.index(token) for token in ["[CLS]", "C", "C", "O", "[SEP]"]]
    inputs = torch.tensor([ids, [*ids[:3], ids[-1], vocabulary.index("[PAD]")]])
    call = {"input_ids": inputs, "attention_mask": (inputs != 0).long()}
    present_BN = inputs != 0
    for model in (checkpoint.trained.double(), checkpoint.initialised.double()):
        network = as_network(model)
        same_as_the_library(model, network, inputs, call)
        close(network(inputs)[present_BN], model(**call).logits[present_BN], rtol=1e-12, atol=1e-10)
        wanted = record(model.base_model, begin=BEGIN["Albert"], **call).sums()
        sums = sums_by_length(network, inputs)
        atol = 1e-12 * wanted.by_length_KBND.abs().max().item()  # long paths cancel: they are larger than their sum
        close(sums.by_length_KBND[:, present_BN], wanted.by_length_KBND[:, present_BN], rtol=0, atol=atol)
        states, _ = layers_of(network, inputs)
        for state, state_BND in zip(propagate(network, inputs), states, strict=True):
            close(tokens(state)[present_BN], state_BND[present_BN], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_spectrum_of_a_real_albert(real_albert, tmp_path):
    """The preset on two reactions of 17 tokens with hidden ones, by the library's own loss."""
    vocabulary = (real_albert / "vocab.txt").read_text().split()
    reactions = [["[CLS]", *"CCCO", ".", *"CCN", ">>", *f"CC{end}CC", "[SEP]"] for end in "ON"]
    ids = torch.tensor([[vocabulary.index(token) for token in reaction] for reaction in reactions])
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, [2, 7, 12]] = True
    inputs, targets = ids.masked_fill(hidden, vocabulary.index("[MASK]")), ids.masked_fill(~hidden, -1)
    save_file({"inputs": inputs, "targets": targets}, tmp_path / "reactions.safetensors")
    words = ["experiment=spectrum", "budget=smoke", "model=pretrained", f"model.path={real_albert}"]
    table = rankbench.analyze([*words, f"inputs={tmp_path / 'reactions.safetensors'}"])["spectrum"]
    assert set(table.of) == {"states", "logits", "output"}
    table = table[(table.of == "output") & (table.part == "length")]
    assert len(table) == 2 * 13 and (table.groupby("weights").num_paths.sum() == 9**12).all()
    assert table.remainder.max() < 1e-12
    assert table.groupby("weights").share.sum().to_numpy() == pytest.approx(1, rel=1e-12)
    trained = table[table.weights == "trained"]
    library = load_checkpoint(str(real_albert), 0).trained.double()
    loss = nn.functional.cross_entropy(library(inputs).logits[hidden], ids[hidden]).item()
    assert trained.whole_loss.to_numpy() == pytest.approx(loss, rel=1e-12)
    assert trained.loss_upto.iloc[-1] == pytest.approx(loss, rel=1e-9)
