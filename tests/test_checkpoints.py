"""rankbench analyze model=pretrained: tables of public checkpoints against the library's own numbers. No download."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import rankbench
from rankbench.keys import ConfigError

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "a", "cat", "dog", "sat", "on", "the", "mat", "and", "ran", "."]
TEXTS = ["the cat sat on the mat .", "a dog ran and ran and ran .", "the mat ran"]
SIZES = {"vocab_size": len(WORDS), "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of tiny checkpoints with random weights, by name, and a file of texts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    bert = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    models = {
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**bert, max_position_embeddings=16, **SIZES)),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=16, vocab_size=len(WORDS))
        ),
        "gpt_neox": transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(**bert, max_position_embeddings=16, **SIZES)
        ),
    }
    for index, (name, model) in enumerate(models.items()):
        generator = torch.Generator().manual_seed(index)
        for parameter in model.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    return folder


def analyze(folder, name, *analyses, words=(), **options):
    given = ["model=pretrained", f"model.path={folder / name}", f"inputs={folder / 'texts.txt'}", *words]
    return rankbench.analyze(given, *analyses, **options)


def library(folder, name, auto):
    model = auto.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager").eval()
    batch = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    return model, {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def test_losses_are_the_librarys(folder):
    table = analyze(folder, "gpt2", "spectrum")["spectrum"]
    model, batch = library(folder, "gpt2", transformers.AutoModelForCausalLM)
    expected = []
    for ids, present in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        text = ids[: present.sum()][None]
        expected.append(model(text, labels=text).loss.item())
    trained = table[table.weights == "trained"]
    assert trained.whole_loss.to_numpy() == pytest.approx(np.mean(expected), rel=1e-6)
    assert trained.loss_upto.iloc[-1] == pytest.approx(np.mean(expected), rel=1e-6)
    assert trained.num_paths.tolist() == [1, 6, 12, 8] and table.remainder.max() < 1e-12
    fresh = table[table.weights == "initialised"]
    # the library draws weights of size .02, so that nothing is known of the next token
    assert fresh.whole_loss.iloc[0] == pytest.approx(np.log(len(WORDS)), rel=0.02)


def test_residuals_of_every_layer_are_those_of_the_librarys_states(folder):
    table = analyze(folder, "bert", "residual")["residual"]
    assert set(table.variant) == {"full", "no_mlp", "no_skip", "attention_only"}
    assert set(table.weights) == {"trained", "initialised"}
    model, batch = library(folder, "bert", transformers.AutoModelForMaskedLM)
    states = model(**batch, output_hidden_states=True).hidden_states
    full = table[(table.variant == "full") & (table.weights == "trained") & (table.view == "all")]
    for layer, state_BND in enumerate(states):
        expected = []
        for state_ND, present_N in zip(state_BND.detach().numpy(), batch["attention_mask"].numpy(), strict=True):
            x_ND = state_ND[: present_N.sum()]
            norms = [np.sqrt(np.linalg.norm(x, 1) * np.linalg.norm(x, np.inf)) for x in (x_ND - x_ND.mean(0), x_ND)]
            expected.append(norms[0] / norms[1])
        rows = full[(full.layer == layer) & full.sublayer.isin(["input", "mlp"])]
        assert rows.relative_residual.item() == pytest.approx(np.mean(expected), rel=1e-5)


def test_attention_is_the_librarys(folder):
    table = analyze(folder, "bert", "attention")["attention"]
    model, batch = library(folder, "bert", transformers.AutoModelForMaskedLM)
    weights = model(**batch, output_attentions=True).attentions
    for layer, p_BHNM in enumerate(weights, start=1):
        first_BH = torch.stack(
            [p_BHNM[row, :, : present.sum(), 0].mean(-1) for row, present in enumerate(batch["attention_mask"])]
        )
        rows = table[(table.weights == "trained") & (table.layer == layer)]
        assert rows.first_weight.to_numpy() == pytest.approx(first_BH.mean(0).detach().numpy(), rel=1e-5)


def test_a_masked_model_is_scored_on_what_was_hidden(folder):
    table = analyze(folder, "bert", "spectrum", words=["masked=0.5", "seed=3"])["spectrum"]
    again = analyze(folder, "bert", "spectrum", words=["masked=0.5", "seed=3"])["spectrum"]
    pd.testing.assert_frame_equal(table, again)
    assert table.whole_loss.notna().all()
    assert analyze(folder, "bert", "spectrum")["spectrum"].whole_loss.isna().all()


def test_seeds_draw_fresh_weights_beside_one_trained_network(folder):
    table = analyze(folder, "gpt2", "spectrum", words=["replicas=2"])["spectrum"]
    assert table.groupby("weights").seed.unique().map(list).to_dict() == {"trained": [0], "initialised": [0, 1]}
    fresh = table[table.weights == "initialised"].pivot_table("mass", "seed", "path_length")
    assert (fresh.loc[0] != fresh.loc[1]).all()


def test_a_family_without_an_adapter_is_measured_as_a_module(folder):
    tables = analyze(folder, "gpt_neox", "spectrum", "residual", "path_mass")
    model, batch = library(folder, "gpt_neox", transformers.AutoModelForCausalLM)
    state_BND = model(**batch, output_hidden_states=True).hidden_states[1].detach()
    cosines, losses = [], []
    for row, count in enumerate(batch["attention_mask"].sum(1)):
        unit_ND = F.normalize(state_BND[row, :count], dim=-1)
        cosines.append((unit_ND @ unit_ND.T).fill_diagonal_(0).sum().item() / (count * (count - 1)).item())
        text = batch["input_ids"][row : row + 1, :count]
        losses.append(model(text, labels=text).loss.item())
    residual = tables["residual"][tables["residual"].view == "all"]
    first = residual[(residual.layer == 1) & (residual.weights == "trained")]
    assert (first.variant.item(), first.submodule.item()) == ("full", "gpt_neox.layers.0")
    assert first.mean_cosine.item() == pytest.approx(np.mean(cosines), rel=1e-6)
    assert tables["spectrum"].whole_loss.iloc[0] == pytest.approx(np.mean(losses), rel=1e-6)
    assert len(tables["path_mass"]) == 2 * (4 + 6)


@pytest.mark.parametrize(
    "name, words, analysis, message",
    [
        ("gpt_neox", [], "collapse", "takes networks of ours apart"),
        ("gpt2", ["masked=0.2"], "spectrum", "no masked language model"),
        ("none", [], "residual", "no such folder"),
        ("bert", ["claims=[dong_claim31]"], "residual", "claims"),
    ],
)
def test_refused_and_nothing_written(folder, tmp_path, name, words, analysis, message):
    with pytest.raises(ConfigError, match=message):
        analyze(folder, name, analysis, words=words, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_keys_of_networks_of_ours(folder, tmp_path):
    words = ["model=pretrained", f"model.path={folder / 'bert'}", "model.layers=3", "analysis=[residual]", "out=out"]
    command = [sys.executable, "-m", "rankbench", "analyze", *words, f"inputs={folder / 'texts.txt'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "model.layers" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "inputs, message",
    [
        (np.array([[1, 99]]), "token id 99; the vocabulary"),
        (np.array([1, 2, 3]), "give (sequences, tokens)"),
    ],
)
def test_token_ids_refused(folder, tmp_path, inputs, message):
    np.save(tmp_path / "ids.npy", inputs)
    with pytest.raises(ConfigError) as refused:
        words = ["model=pretrained", f"model.path={folder / 'bert'}", f"inputs={tmp_path / 'ids.npy'}"]
        rankbench.analyze(words, "spectrum")
    assert message in str(refused.value)
