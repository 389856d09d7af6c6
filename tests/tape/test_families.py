"""Families of the transformers library: the attention weights and the states after layers that are found are those that
the library itself gives out.

Shapes: B sequence, H head, N query token, M key token, D width.
"""

import pytest
import torch
from networks_of_others import TEXT, InDouble, Inputs, drawn, image_inputs, letters, within
from refusals import refusal
from torch import nn

from rankbench.measures.module_reading import read_module
from rankbench.measures.module_states import layers_of, states_of
from rankbench.model.modules import Example
from rankbench.tape import tap

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")

TEXTS = """
    afmoe albert apertus arcee aria_text beam bert bert-generation big_bird biogpt bitnet bloom camembert
    clip_text_model cohere cohere2 cohere2_moe ctrl cwm data2vec-text deberta deberta-v2 deepseek_v4 distilbert
    doge dots1 electra ernie ernie4_5 ernie4_5_moe esm eurobert exaone4 exaone_moe flaubert flex_olmo flint gemma gemma2
    gemma3_text gemma3n_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite
    granite_docling_text granitemoe granitemoeshared gte helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4
    hyperclovax ibert imagegpt inkling_text internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1 laguna
    layoutlm lfm2 lfm3 llama llama4_text markuplm megatron-bert mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral mobilebert modernbert modernbert-decoder molmo2_text moshi mpnet mpt
    muse_glimmer_text muse_spark_text nanochat nemotron nomic_bert nystromformer olmo olmo2 olmo3 olmoe openai-gpt
    opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text
    rembert roberta roberta-prelayernorm roformer seed_oss smollm3 solar_open splinter stablelm starcoder2 tapas
    tipsv2_text_model ultrabert vaultgemma visual_bert xlm xlm-roberta xlm-roberta-xl
"""
PAIRS = """
    bart bigbird_pegasus blenderbot blenderbot-small longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus plbart
    switch_transformers t5 umt5
"""
IMAGES = """
    aimv2_vision_model beit clip_vision_model data2vec-vision deit dinov2 dinov2_with_registers dinov3_vit dpt ijepa
    internvl_vision mlcd pixio qianfan_ocr_vision radio sam3_vit_model sapiens2 siglip_vision_model tipsv2_vision_model
    vit vit_msn vitdet
"""
WITHOUT_LAYERS = {"flaubert", "hrm_text", "xlm"}  # whose submodules are branches, or run in another order
WITH_STREAMS = {"deepseek_v4", "gemma3n_text", "hy_v4"}  # whose library gives out one state for several streams
# by every name that a config has for it
SIZES = {
    **TEXT,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size"), 16),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_attention_heads", "head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("v_head_dim", "sliding_window", "attention_window", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_local_experts", "hidden_size_per_layer_input"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "num_buckets"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **{"n_positions": 40, "vocab_size_per_layer_input": 50, "num_kv_shared_layers": 0, "use_cache": False},
    **{"image_size": 8, "patch_size": 4, "layerdrop": 0.0, "use_head": False, "vision_use_head": False},
    "attention_type": "original_full",  # of BigBird, whose blocks are longer than these texts
}


def family(name: str) -> nn.Module:
    """A random model of two layers, of each kind of layer if there are two."""
    kind = transformers.CONFIG_MAPPING[name]
    config = kind()
    sizes = {key: size for key, size in SIZES.items() if hasattr(config, key)}
    if kinds := getattr(config, "layer_types", None):
        sizes["layer_types"] = (2 * list(dict.fromkeys(kinds)))[:2]
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return within(drawn(transformers.AutoModel.from_config(kind(**sizes), **how)), InDouble())


def given_out(module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """The weights that the library gives out, (B, H, N, M), in the order of the calls."""
    output = module(**inputs, output_attentions=True)
    if "decoder_attentions" not in output:
        return list(output.attentions)
    decoder = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for layer in decoder for weights in layer)]


def assert_finds_the_weights(name: str, inputs: Inputs) -> None:
    module, found = family(name), []
    tap(module, lambda call: found.append(call.weights), **inputs)
    wanted = given_out(module, inputs)
    assert len(found) == len(wanted) > 0
    for p_BHNM, wanted_BHNM in zip(found, wanted, strict=True):
        torch.testing.assert_close(p_BHNM.reshape(wanted_BHNM.shape), wanted_BHNM, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TEXTS.split())
def test_texts(name):
    assert_finds_the_weights(name, {"input_ids": letters()})


@pytest.mark.parametrize("name", PAIRS.split())
def test_texts_and_targets(name):
    assert_finds_the_weights(name, {"input_ids": letters(), "decoder_input_ids": letters(6, "target")})


@pytest.mark.parametrize("name", IMAGES.split())
def test_images(name):
    assert_finds_the_weights(name, image_inputs())


@pytest.mark.parametrize("name", [name for name in TEXTS.split() if name not in WITHOUT_LAYERS | WITH_STREAMS])
def test_states_after_layers(name):
    """The library's last states may be those behind the last norm."""
    module, example = family(name), Example((), {"input_ids": letters()})
    read = read_module(module, example)
    found = states_of(read, layers_of(read), example)
    wanted = module(**example.kwargs, output_hidden_states=True).hidden_states
    assert len(found) == len(wanted) == 3
    for x_BND, wanted_BND in zip(found[:-1], wanted[:-1], strict=True):
        torch.testing.assert_close(x_BND, wanted_BND, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(WITHOUT_LAYERS))
def test_submodules_without_layers_are_refused(name):
    assert "so these are branches, not layers" in refusal(
        layers_of, read_module(family(name), Example((), {"input_ids": letters()}))
    )
