"""rankbench analyze model=pretrained: tables of public checkpoints against the library's own numbers. No download."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from breadth import some
from by_hand import composite, relative_residual
from command_line import refused, succeeds
from PIL import Image
from refusals import refusal
from safetensors.torch import save_file

import rankbench
from rankbench.analyses import pruning
from rankbench.analysing.checkpoint_inputs import inputs_of
from rankbench.analysing.modules import foreign_subjects
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.measures.attention_matrices import attention_metrics
from rankbench.measures.frozen_network import FrozenNetwork
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.model.pretrained import load_checkpoint
from rankbench.runs.machine import Machine
from rankbench.runs.tables import last_of_layer

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")

pytestmark = pytest.mark.usefixtures("rounded_once")

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
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of tiny checkpoints with random weights, by name, and a file of texts."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    bert = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    models = {
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**bert, max_position_embeddings=16, **SIZES)),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=len(WORDS))
        ),
        "gpt_neox": transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(**bert, max_position_embeddings=16, **SIZES)
        ),
        "xlnet": transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=24, **SIZES)
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
    given += ["analysis.spectrum.resamples=100"] if "spectrum" in analyses else []
    return rankbench.analyze(given, *analyses, **options)


def library(folder, name, auto):
    model = auto.from_pretrained(folder / name, dtype=torch.float64, attn_implementation="eager").eval()
    batch = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    return model, {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


@pytest.mark.further
def test_losses_are_the_librarys(folder):
    table = analyze(folder, "gpt2", "spectrum")["spectrum"]
    model, batch = library(folder, "gpt2", transformers.AutoModelForCausalLM)
    expected = []
    for ids, present in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        text = ids[: present.sum()][None]
        expected.append(model(text, labels=text).loss.item())
    table = table[(table.of == "output") & (table.part == "length")]
    trained = table[table.weights == "trained"]
    assert trained.whole_loss.to_numpy() == pytest.approx(np.mean(expected), rel=1e-6)
    assert trained.loss_upto.iloc[-1] == pytest.approx(np.mean(expected), rel=1e-6)
    assert trained.num_paths.tolist() == [1, 4, 4] and table.remainder.max() < 1e-12
    fresh = table[table.weights == "initialised"]
    # the library draws weights of size .02, so that nothing is known of the next token
    assert fresh.whole_loss.iloc[0] == pytest.approx(np.log(len(WORDS)), rel=0.02)
    assert 0.015 < fresh.weights_sd.iloc[0] < 0.02  # some matrices of GPT-2 begin smaller
    entries = np.concatenate([weight.detach().numpy().ravel() for weight in model.parameters() if weight.ndim > 1])
    assert trained.weights_sd.to_numpy() == pytest.approx(entries.std(), rel=1e-9)


@pytest.fixture(scope="module", params=some([["null", [1, 2]], ["[]", []], ["[6]", [6]]], 3))
def of_bert(request, folder):
    """Tables of one checkpoint, and the ids of the special tokens that they leave out."""
    special, left_out = request.param
    return analyze(folder, "bert", "attention", "residual", "path_mass", words=[f"special_tokens={special}"]), left_out


@pytest.mark.further
def test_residuals_of_every_layer_are_those_of_the_librarys_states(folder, of_bert):
    tables, left_out = of_bert
    table = tables["residual"]
    assert set(table.variant) == {"full", "no_mlp", "no_skip", "attention_only"}
    assert set(table.weights) == {"trained", "initialised"}
    model, batch = library(folder, "bert", transformers.AutoModelForMaskedLM)
    states = model(**batch, output_hidden_states=True).hidden_states
    full = table[(table.variant == "full") & (table.weights == "trained") & (table.view == "all")]
    for layer, state_BND in enumerate(states):
        expected = []
        for state_ND, ids_N in zip(state_BND.detach().numpy(), batch["input_ids"].numpy(), strict=True):
            expected.append(relative_residual(state_ND[~np.isin(ids_N, [0, *left_out])]))
        rows = full[(full.layer == layer) & full.sublayer.isin(["input", "mlp"])]
        assert rows.relative_residual.item() == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize(("special", "left_out"), some([("null", [1, 2]), ("[]", [])], 2))
def test_collapse_and_bounds_measure_the_residual_of_the_tokens_that_count(folder, special, left_out):
    """Of the library's states; the bounds are of all tokens, so they begin at the residual of all."""
    words = [f"special_tokens={special}", "analysis.collapse.variants=[full]", "analysis.bounds.variants=[full]"]
    tables = analyze(folder, "bert", "collapse", "bounds", words=words)
    model, batch = library(folder, "bert", transformers.AutoModelForMaskedLM)
    states = model(**batch, output_hidden_states=True).hidden_states
    for name, columns in {"collapse": ["log10_residual", "log10_measured"], "bounds": ["log10_measured"]}.items():
        table = tables[name][tables[name].weights == "trained"]
        assert set(table.special_tokens) == {"out" if left_out else "in"}
        for layer, state_BND in enumerate(states):
            residuals, relative, of_all = [], [], []
            for state_ND, ids_N in zip(state_BND.detach().numpy(), batch["input_ids"].numpy(), strict=True):
                x_ND, all_ND = (state_ND[~np.isin(ids_N, ids)] for ids in ([0, *left_out], [0]))
                residuals.append(np.log10(composite(x_ND - x_ND.mean(0))))
                relative.append(residuals[-1] - np.log10(composite(x_ND)))
                of_all.append(np.log10(composite(all_ND - all_ND.mean(0))))
            rows = table[table.layer == layer]
            assert rows[columns].to_numpy() == pytest.approx(np.mean(residuals), rel=1e-5)
            if name == "collapse":
                assert rows.log10_relative_residual.item() == pytest.approx(np.mean(relative), rel=1e-5)
            elif layer == 0:
                assert rows[rows.bound == "recursion"].log10_bound.item() == pytest.approx(np.mean(of_all), rel=1e-5)


@pytest.mark.further
def test_attention_is_the_librarys_of_the_queries_that_count(folder, of_bert):
    tables, left_out = of_bert
    heads = tables["attention"]
    assert set(heads.special_tokens) == {"out" if left_out else "in"} and len(heads) == 2 * 2 * 2
    states, parts = tables["residual"], tables["path_mass"]
    of_weights = states[(states.variant == "full") & (states.sublayer == "weights") & (states["view"] == "all")]
    model, batch = library(folder, "bert", transformers.AutoModelForMaskedLM)
    weights = model(**batch, output_attentions=True).attentions
    for layer, p_BHNM in enumerate(weights, start=1):
        of_texts = []
        for p_HNM, ids_N in zip(p_BHNM.detach(), batch["input_ids"], strict=True):
            present = ids_N.nonzero()[:, 0]
            counted = present[~torch.isin(ids_N[present], torch.tensor(left_out))]
            rows_HNM = p_HNM[:, counted][..., present]
            of_all, of_counted = (attention_metrics(p[None]) for p in (p_HNM[:, present][..., present], rows_HNM))
            of_counted["attention_gap_eigenvalue"] = of_all["attention_gap_eigenvalue"]
            own = {"first_weight": rows_HNM[..., 0].mean(-1), "own_weight": p_HNM[:, counted, counted].mean(-1)}
            of_texts.append(own | {name: value_BH[0] for name, value_BH in of_counted.items()})
        expected = {name: torch.stack([of_text[name] for of_text in of_texts]).mean(0) for name in of_texts[0]}
        of_trained = (table[table.weights == "trained"] for table in (heads, of_weights))
        for table in (*of_trained, parts):
            rows = table[table.layer == layer]
            assert len(rows) == 2
            for name in expected.keys() & set(table):
                assert rows[name].to_numpy() == pytest.approx(expected[name].numpy(), rel=1e-5), name


@pytest.mark.further
def test_a_module_of_ones_own_reads_texts_with_a_tokenizer(folder, tmp_path):
    """A module that holds the checkpoint gives the checkpoint's numbers; the texts differ in length."""
    (tmp_path / "mine.py").write_text(
        "import torch, transformers\n"
        "class Held(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.model = transformers.GPT2LMHeadModel.from_pretrained({str(folder / 'gpt2')!r})\n"
        "    def forward(self, ids, attention_mask):\n"
        "        return self.model(input_ids=ids, attention_mask=attention_mask)\n"
        "def build():\n"
        "    return Held()\n"
    )
    words = [f"model={tmp_path / 'mine.py'}:build", f"inputs={folder / 'texts.txt'}"]
    table = rankbench.analyze([*words, f"tokenizer={folder / 'gpt2'}"], "spectrum")["spectrum"]
    wanted = analyze(folder, "gpt2", "spectrum", words=["special_tokens=[]"])["spectrum"]
    wanted = wanted[wanted.weights == "trained"]
    for name in ("path_length", "num_paths", "mass", "share"):
        assert table[name].to_numpy() == pytest.approx(wanted[name].to_numpy(), rel=1e-9, nan_ok=True)
    for wrong, said in (
        ([f"tokenizer={folder / 'none'}"], f"tokenizer={folder / 'none'}: "),
        ([f"tokenizer={folder / 'gpt2'}", "inputs=x.npy"], "reads texts, inputs=x.npy has none"),
        ([], "a text needs a tokenizer; give tokenizer=<hub id or folder>"),
    ):
        assert said in refused("analyze", *words, *wrong, at=tmp_path)


def test_a_masked_model_is_scored_on_what_was_hidden(folder):
    words = [f"model.path={folder / 'bert'}", f"inputs={folder / 'texts.txt'}", "seed=3"]
    checkpoint = load_checkpoint(str(folder / "bert"), 0)
    (plain_BN, nothing), (ids_BN, targets_BN), again = (
        inputs_of(compose("analyze", "model=pretrained", *words, word), checkpoint)
        for word in ("masked=0", "masked=0.5", "masked=0.5")
    )
    hidden_BN = targets_BN >= 0
    assert nothing is None and torch.equal(ids_BN, again[0]) and torch.equal(targets_BN, again[1])
    assert torch.equal(ids_BN, plain_BN.masked_fill(hidden_BN, WORDS.index("[MASK]")))
    assert torch.equal(targets_BN, plain_BN.where(hidden_BN, -1))
    is_word_BN = plain_BN >= WORDS.index("a")
    assert not (hidden_BN & ~is_word_BN).any() and 0.2 < hidden_BN.sum() / is_word_BN.sum() < 0.8


@pytest.mark.further
def test_the_mask_may_be_known_from_the_vocabulary_or_the_config(folder, tmp_path):
    reader = tokenizer()
    np.save(tmp_path / "ids.npy", reader(TEXTS[0], return_tensors="np")["input_ids"])
    words = ["masked=0.5", "seed=3", f"inputs={tmp_path / 'ids.npy'}", f"special_tokens={reader.all_special_ids}"]
    words = [word.replace(" ", "") for word in words]
    said = analyze(folder, "bert", "spectrum", words=words)["spectrum"]

    unnamed, without = tmp_path / "unnamed", tmp_path / "without"
    for copy in (unnamed, without):
        shutil.copytree(folder / "bert", copy)
    mask, reader.mask_token = reader.mask_token_id, None
    reader.save_pretrained(unnamed)
    for path in without.glob("*token*"):
        path.unlink()
    assert "neither a tokenizer nor mask_token_id" in refusal(analyze, tmp_path, "without", "spectrum", words=words)
    config = json.loads((without / "config.json").read_text())
    (without / "config.json").write_text(json.dumps(config | {"mask_token_id": mask}))
    for name in ("unnamed", "without"):
        table = analyze(tmp_path, name, "spectrum", words=words)["spectrum"]
        assert table.whole_loss.tolist() == said.whole_loss.tolist() and table.whole_loss.notna().all()


@pytest.mark.slow
def test_seeds_draw_fresh_weights_beside_one_trained_network(folder):
    table = analyze(folder, "gpt2", "spectrum", words=["replicas=2"])["spectrum"]
    assert table.groupby("weights").seed.unique().map(list).to_dict() == {"trained": [0], "initialised": [0, 1]}
    fresh = table[table.weights == "initialised"].pivot_table("mass", "seed", "path_length")
    assert (fresh.loc[0] != fresh.loc[1]).all()


@pytest.mark.further
def test_a_family_without_an_adapter_is_measured_as_a_module(folder):
    tables = analyze(folder, "gpt_neox", "spectrum", "residual", "path_mass")
    model, batch = library(folder, "gpt_neox", transformers.AutoModelForCausalLM)
    state_BND = model(**batch, output_hidden_states=True).hidden_states[1].detach()
    cosines, losses = [], []
    for row, count in enumerate(batch["attention_mask"].sum(1)):
        unit_ND = F.normalize(state_BND[row, 1 : count - 1], dim=-1)  # without the text's begin and end
        cosines.append((unit_ND @ unit_ND.T).fill_diagonal_(0).sum().item() / ((count - 2) * (count - 3)).item())
        text = batch["input_ids"][row : row + 1, :count]
        losses.append(model(text, labels=text).loss.item())
    residual = tables["residual"][tables["residual"].view == "all"]
    first = residual[(residual.layer == 1) & (residual.weights == "trained")]
    assert (first.variant.item(), first.submodule.item()) == ("full", "gpt_neox.layers.0")
    assert first.mean_cosine.item() == pytest.approx(np.mean(cosines), rel=1e-6)
    assert tables["spectrum"].whole_loss.iloc[0] == pytest.approx(np.mean(losses), rel=1e-6)
    assert len(tables["path_mass"]) == 2 * (3 + 4)


@pytest.mark.slow
def test_sizes_of_sums_leave_special_tokens_out(folder):
    """Of the output's squared norm the tokens that count and those that do not add up to all."""
    names = ("spectrum", "paths", "path_mass")
    few = ["analysis.paths.subset_sizes=[]", "analysis.paths.schemes=[frozen]"]
    tables = [analyze(folder, "gpt2", *names, words=[*few, f"special_tokens={ids}"]) for ids in ("[]", "null", "[0]")]
    for all_count, without_ends, none_there in ([table[name] for table in tables] for name in names):
        pd.testing.assert_frame_equal(all_count, none_there)  # token 0 is in no text
        size, loss = (name for name in ("mass", "norm_share", "whole_loss") if name in all_count)
        assert (all_count[size] != without_ends[size]).any()
        pd.testing.assert_series_equal(all_count[loss], without_ends[loss])


def test_heads_and_counts_are_those_of_the_weights(folder):
    few = ["tokens=4", "sequences=2", "ranges=[[0,1]]"]
    words = [f"analysis.histograms.{word}" for word in few] + ["analysis.invertibility.tokens=[4]"]
    words += [f"analysis.invertibility.{word}" for word in [*few[1:], "iterations=2", "coefficients=[0.5]"]]
    tables = analyze(folder, "bert", "head_rank", "path_counts", "histograms", "invertibility", words=words)
    model, _ = library(folder, "bert", transformers.AutoModelForMaskedLM)
    weights = model.bert.encoder.layer[1].attention.self
    q_HDK, k_HDK = (linear.weight.T.unflatten(1, (2, 8)).transpose(0, 1) for linear in (weights.query, weights.key))
    expected = torch.linalg.matrix_norm(q_HDK @ k_HDK.mT / 8**0.5, 2)
    heads = tables["head_rank"]
    rows = heads[(heads.weights == "trained") & (heads.layer == 2) & (heads.matrix == "qk")]
    assert rows.spectral_norm.to_numpy() == pytest.approx(expected.detach().numpy(), rel=1e-6)
    counts = tables["path_counts"]
    assert (10**counts.log10_count).to_numpy() == pytest.approx([1, 4, 4])
    assert set(tables["histograms"].layer) == set(tables["invertibility"].layer) == {1, 2}


@pytest.mark.parametrize(
    "name, words, level",
    [
        ("bert", [], None),
        ("bert", ["nobody"], "INFO"),
        ("bert", ["nobody", "knows"], "WARNING"),
        ("mine", ["x"] * 9, "WARNING"),
    ],
)
def test_the_share_of_unknown_tokens_is_told(folder, tmp_path, caplog, name, words, level):
    """In a text of twelve known words, which is printed with the words that the tokenizer does not know."""
    known = [word for word in WORDS if word.isalpha()]
    text = ([*known] * 12)[:12]
    (tmp_path / "texts.txt").write_text(" ".join([*text, *words]))
    given = ["model=pretrained", f"model.path={folder / 'bert'}"]
    if name == "mine":
        code = "import torch\nbody = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)\n"
        code += "def build(): return torch.nn.Sequential(torch.nn.Embedding(99, 8), body)"
        (tmp_path / "mine.py").write_text(code)
        given = [f"model={tmp_path / 'mine.py'}:build", f"tokenizer={folder / 'gpt2'}"]
    with caplog.at_level("INFO"):
        rankbench.analyze([*given, f"inputs={tmp_path / 'texts.txt'}", "tokens=40"], "attention")
    told = [(entry.levelname, entry.getMessage()) for entry in caplog.records if "unknown" in entry.getMessage()]
    share = f"{100 * len(words) / (12 + len(words)):.2g} % of the tokens of texts.txt are unknown"
    assert [at for at, _ in told] == ([] if level is None else [level]) and all(share in line for _, line in told)


@pytest.mark.parametrize("name, masked", [("bert", 0.5), ("gpt2", 0)])
def test_pruning_by_the_librarys_head(folder, tmp_path, name, masked, monkeypatch):
    """The halves of the texts, the orders of all paths, and the losses of what is kept."""
    monkeypatch.setattr(pruning, "NUMBERS_AT_A_TIME", 1500)  # several chunks of texts
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 2))
    words = [f"masked={masked}", f"inputs={tmp_path / 'texts.txt'}"]
    given = ["model=pretrained", f"model.path={folder / name}", *words]
    table = rankbench.analyze(given, "pruning", orders=["greedy", "norm"])["pruning"]

    cfg = compose("analyze", *given, "analysis=[pruning]")
    (subject,) = foreign_subjects(cfg, Machine.prepare(cfg))
    chosen, test = subject.test[:3], subject.test[3:]
    network = subject.networks["trained"]
    library, head = subject.modules["trained"], getattr(subject.modules["trained"], "cls", None)

    def loss(state_BND, batch):
        logits_BNC = library.lm_head(state_BND) if head is None else head(state_BND)
        return F.cross_entropy(logits_BNC.flatten(0, 1), batch.targets.flatten(), ignore_index=-1).item()

    def outputs_and_bias(batch):
        frozen = FrozenNetwork(network, batch.inputs)
        paths_PL = np.concatenate([all_paths(2, 2, length) for length in range(3)])
        return sums_of_groups(frozen, list(paths_PL[:, None])), frozen.by_length().bias_BND

    outputs_PBND, bias_BND = outputs_and_bias(chosen)
    left, greedy, state_BND = list(range(9)), [], bias_BND
    while left:
        greedy.append(min(left, key=lambda path: loss(state_BND + outputs_PBND[path], chosen)))
        left.remove(greedy[-1])
        state_BND = state_BND + outputs_PBND[greedy[-1]]
    counted_BN1 = network.counted(chosen.inputs)[..., None]
    norm = (outputs_PBND * counted_BN1).flatten(1).norm(dim=1).argsort(descending=True).tolist()
    outputs_PBND, bias_BND = outputs_and_bias(test)
    for order, indices in {"greedy": greedy, "norm": norm}.items():
        rows = table[table.order == order]
        assert rows.kept.iloc[-1] == 9
        for row in rows.itertuples():
            kept = indices[: row.kept]
            assert row.loss == pytest.approx(loss(bias_BND + outputs_PBND[kept].sum(0), test), rel=1e-9)
        assert rows.loss.iloc[-1] == pytest.approx(rows.whole_loss.iloc[-1], rel=1e-9)


@pytest.mark.further
def test_what_measures_one_network_takes_the_trained_one_alone(folder):
    words = ["replicas=2", "analysis.paths.subset_sizes=[]", "analysis.pruning.orders=[norm]"]
    tables = analyze(folder, "gpt2", "path_mass", "paths", "pruning", words=words)
    assert all(set(table.seed) == {0} and table.whole_loss.nunique() == 1 for table in tables.values())


@pytest.mark.further
@pytest.mark.parametrize(("special", "left_out"), some([("null", [1, 2]), ("[]", [])], 2))
def test_jacobians_and_bounds_at_texts_are_the_librarys(folder, special, left_out):
    words = ["analysis.lipschitz.sequences=1", "analysis.bounds.sequences=1", "analysis.bounds.variants=[full]"]
    tables = analyze(folder, "bert", "lipschitz", "bounds", words=[*words, f"special_tokens={special}"])
    model, batch = library(folder, "bert", transformers.AutoModelForMaskedLM)
    ids = batch["input_ids"][:1, : batch["attention_mask"][0].sum()]
    state_1ND, encoder = model.bert.embeddings(ids).detach(), model.bert.encoder
    kept = torch.isin(ids[0], torch.tensor(left_out), invert=True)
    rows = tables["lipschitz"]
    rows = rows[rows.weights == "trained"]
    for part, layer, of_part in (
        ("network", 0, lambda x: encoder(x).last_hidden_state),
        ("block", 1, lambda x: encoder.layer[0](x)[0].view(x.shape)),
    ):
        j_NDND = torch.autograd.functional.jacobian(of_part, state_1ND)[0, :, :, 0]
        matrix = j_NDND[kept][:, :, kept].flatten(2).flatten(0, 1).numpy()
        of_part = rows[(rows.part == part) & (rows.layer == layer)]
        for p in (2, np.inf):
            value = of_part[(of_part.p == p) & (of_part.quantity == "jacobian")].value
            assert value.item() == pytest.approx(np.linalg.norm(matrix, p), rel=1e-6)
        if part == "network":
            certified = of_part[of_part.quantity == "certificate"].value.item()
            assert np.linalg.norm(j_NDND.flatten(2).flatten(0, 1), 2) < certified < np.inf
    bounds = tables["bounds"]
    assert (bounds[bounds.compared > 0].holds == 1).all() and (bounds.compared > 0).any()


def test_dependence_of_paths_needs_no_weights_of_ours(folder, tmp_path):
    ids = torch.randint(5, len(WORDS), (40, 6), generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "ids.npy", ids.numpy())
    words = [f"inputs={tmp_path / 'ids.npy'}", "analysis.independence.tokens=1"]
    table = analyze(folder, "gpt2", "independence", words=words, schemes=["frozen"])["independence"]
    assert set(table.of) == {"lengths", "paths", "network"}
    whole = table[table.of == "network"]
    assert whole.interaction.max() < 1e-12 and whole.whole_accuracy.notna().all()


@pytest.mark.slow
def test_kinds_of_texts_are_those_of_the_tokenizers_ids(folder):
    choices = ["special_tokens=[]", "special_tokens=[1]", "uncounted=[class]", "special_tokens=[1,2]"]
    plain, a, b, c, d = (
        analyze(folder, "bert", "residual", words=["special_tokens=[]", word], variants=["full"])["residual"]
        for word in [*choices, "uncounted=[class,separators]"]
    )
    columns = plain.select_dtypes("number").columns
    pd.testing.assert_frame_equal(a[columns], b[columns])
    pd.testing.assert_frame_equal(c[columns], d[columns])
    assert not a[columns].equals(c[columns]) and not a[columns].equals(plain[columns])


def seeing(folder, kind, **sizes):
    """A tiny network of the library that reads images, saved in the folder; and the words that name it."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, **sizes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind}Model")(config).eval()
    model.save_pretrained(folder)
    return model, ["model=pretrained", f"model.path={folder}"]


def test_class_tokens_and_registers_of_images_can_be_left_out(tmp_path):
    """Of the library's states: the class token, then two registers, then the four patches."""
    sizes = {"image_size": 8, "patch_size": 4, "num_register_tokens": 2, "mlp_ratio": 2}
    model, words = seeing(tmp_path / "dino", "Dinov2WithRegisters", **sizes)
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    words += [f"inputs={tmp_path / 'pixels.npy'}", "replicas=1"]
    with torch.no_grad():
        states = model.double()(pixels.double(), output_hidden_states=True).hidden_states
    views = "analysis.residual.views=[all,without_registers]"
    table = rankbench.analyze([*words, "uncounted=[class]", views], "residual")["residual"]
    assert set(table.special_tokens) == {"in+class"}
    for view, begin in (("all", 1), ("without_registers", 3)):
        rows = table[(table["view"] == view) & (table.weights == "trained")].relative_residual.tolist()
        for value, state_BND in zip(rows, states, strict=True):
            expected = [relative_residual(x_ND) for x_ND in state_BND[:, begin:].numpy()]
            assert value == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.further
def test_without_pictures_those_of_a_photographs_spectrum_are_read(tmp_path):
    _, words = seeing(tmp_path / "vit", "ViT", image_size=64, patch_size=16)
    checkpoint, cfg = load_checkpoint(str(tmp_path / "vit"), 0), compose("analyze", *words)
    pictures, targets = inputs_of(cfg, checkpoint)
    assert pictures.shape == (8, 3, 64, 64) and targets is None
    assert torch.equal(pictures, inputs_of(cfg, checkpoint)[0])
    assert pictures.std((-2, -1)).numpy() == pytest.approx(np.ones((8, 3)), abs=1e-5)
    amplitudes = torch.fft.fft2(pictures.double()).abs().square().mean((0, 1)).sqrt()[0, 1:20]
    slope, _ = np.polyfit(np.log(np.arange(1, 20)), amplitudes.log().numpy(), 1)
    assert slope == pytest.approx(-1, abs=0.2)  # eight pictures: 1/sqrt(8) of each power, .055 of the slope
    table = rankbench.analyze(words, "residual")["residual"]
    assert set(table.task) == {"rankbench's own pictures"}


@pytest.mark.parametrize(("kind", "size"), [("Dinov2", 224), ("ViT", 448)])
def test_our_pictures_are_no_larger_than_they_must_be(tmp_path, kind, size):
    _, words = seeing(tmp_path / "seen", kind, image_size=448, patch_size=112)
    pictures, _ = inputs_of(compose("analyze", *words), load_checkpoint(str(tmp_path / "seen"), 0))
    assert pictures.shape == (8, 3, size, size)  # a ViT takes its own size alone


def test_of_a_file_of_pixels_nothing_is_ignored(tmp_path):
    _, words = seeing(tmp_path / "vit", "ViT", image_size=8, patch_size=4)
    checkpoint, pixels = load_checkpoint(str(tmp_path / "vit"), 0), torch.zeros(2, 3, 8, 8)
    save_file({"pixel_values": pixels, "targets": torch.zeros(2)}, tmp_path / "pixels.safetensors")
    np.save(tmp_path / "whole.npy", np.zeros((2, 3), dtype=np.int64))
    for name, more, message in (
        ("pixels.safetensors", [], "pixels.safetensors: targets are for token ids alone; leave them out"),
        ("whole.npy", [], "vit reads images; give pixels as floats"),
        ("whole.npy", ["masked=0.5"], "is not a masked language model; use masked=0"),
    ):
        cfg = compose("analyze", *words, f"inputs={tmp_path / name}", *more)
        assert refusal(inputs_of, cfg, checkpoint).endswith(message)
    message = f"special_tokens=[3]: {tmp_path / 'vit'} reads no token ids; use []"
    assert message in refusal(rankbench.analyze, [*words, "special_tokens=[3]"], "residual")


@pytest.mark.further
@pytest.mark.parametrize("suffix", ["txt", "npy"])
def test_inputs_in_its_folder_are_what_a_checkpoint_reads(folder, tmp_path, suffix):
    shutil.copytree(folder / "gpt2", tmp_path / "gpt2")
    shutil.copy(folder / "texts.txt", tmp_path / "mine.txt")
    if suffix == "npy":
        np.save(tmp_path / "mine.npy", tokenizer()(TEXTS[0], return_tensors="np")["input_ids"])
    shutil.copy(tmp_path / f"mine.{suffix}", tmp_path / "gpt2" / f"inputs.{suffix}")
    words = ["model=pretrained", f"model.path={tmp_path / 'gpt2'}", "analysis.residual.variants=[full]"]
    beside, given = (
        rankbench.analyze([*words, *more], "residual")["residual"]
        for more in ([], [f"inputs={tmp_path / 'mine'}.{suffix}"])
    )
    assert set(beside.task) == {f"inputs.{suffix}"} and set(given.task) == {f"mine.{suffix}"}
    pd.testing.assert_frame_equal(beside.drop(columns="task"), given.drop(columns="task"))


@pytest.mark.further
def test_a_folder_of_images_is_read_by_the_checkpoints_processor(tmp_path):
    _, words = seeing(tmp_path / "vit", "ViT", image_size=8, patch_size=4)
    reads = {"size": {"height": 8, "width": 8}, "image_mean": [0.4] * 3, "image_std": [0.2] * 3}
    settings = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "do_normalize": True, **reads}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    np.save(tmp_path / "pixels.npy", ((pixels / 255 - 0.4) / 0.2).transpose(0, 3, 1, 2).astype(np.float32))
    by_folder, by_file = (
        rankbench.analyze([*words, f"inputs={tmp_path / name}"], "residual")["residual"].drop(columns="task")
        for name in ("images", "pixels.npy")
    )
    # pixels are float32 in both, scaled in another order: what has collapsed without skips enlarges that
    by_folder, by_file = (rows[rows.variant == "full"] for rows in (by_folder, by_file))
    # absolute, too: standard deviations are of numbers of order 1, whose float32 pixels err by 6e-8 each
    pd.testing.assert_frame_equal(by_folder, by_file, rtol=1e-5, atol=1e-6, check_exact=False)
    (tmp_path / "images" / "3.jpg").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"3\.jpg: not readable as an image"):
        rankbench.analyze([*words, f"inputs={tmp_path / 'images'}"], "residual")
    (tmp_path / "none").mkdir()
    assert "has no image" in refusal(rankbench.analyze, [*words, f"inputs={tmp_path / 'none'}"], "residual")


@pytest.mark.parametrize(
    "name, words, analysis, message",
    [
        (
            "gpt_neox",
            [],
            "collapse",
            "needs the sub-layers of a network of ours or of bert, roberta, .*gpt_neox does not fit; use residual, ",
        ),
        ("gpt2", ["masked=0.2"], "spectrum", "is not a masked language model"),
        ("none", [], "residual", "no such folder"),
        ("bert", [], "curves", "needs a training of ours; model.path=.*bert does not fit; use residual, "),
        ("xlnet", [], "pruning", "needs predicted tokens in two texts"),  # its tokens see the next ones
        ("bert", [], "pruning", "needs predicted tokens in two texts"),
        ("gpt2", ["analysis.pruning.max_paths=8"], "pruning", "has 9 paths; raise it, .*parts=last_head or length"),
        ("bert", ["special_tokens=[1,2,5,6,7,8,9,10,11,12,13,14]"], "residual", "only special tokens"),
    ],
)
def test_refused_and_nothing_written(folder, tmp_path, name, words, analysis, message):
    with pytest.raises(ConfigError, match=message):
        analyze(folder, name, analysis, words=words, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


IDS = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 0]])


@pytest.mark.parametrize(
    ("tensors", "words", "message"),
    [
        ({"input_ids": 33 * IDS[:, :1].clone()}, [], "token id 99; the vocabulary"),
        ({"input_ids": IDS[0].clone()}, [], "give (sequences, tokens)"),
        ({"attention_mask": (IDS > 0).long()}, [], "holds 2 tensors besides targets; a checkpoint reads one; instead"),
        ({"targets": IDS.clone()}, ["masked=0.5"], "holds targets of its own; use masked=0"),
        ({"targets": IDS[0].clone()}, [], "of torch.int64 and shape (4,) do not fit an output of shape (2, 4, 15)"),
    ],
    ids=["vocabulary", "one axis", "mask", "masked", "targets of sequences"],
)
def test_token_ids_and_what_a_file_holds_besides_are_read_or_refused(folder, tmp_path, tensors, words, message):
    save_file({"input_ids": IDS, **tensors}, tmp_path / "ids.safetensors")
    words = [f"inputs={tmp_path / 'ids.safetensors'}", *words]
    assert message in refusal(analyze, folder, "bert", "residual", words=words)


@pytest.mark.parametrize("absent", [-100, 0])
def test_tokens_below_zero_and_of_padding_are_absent_in_all_tables(folder, tmp_path, absent):
    """Of padding after the last other token: BERT's is 0."""
    tables = []
    for token in (-1, absent):
        np.save(tmp_path / "ids.npy", np.array([[3, 4, 5, 6], [5, 4, token, token]]))
        words = [f"inputs={tmp_path / 'ids.npy'}"]
        tables.append(analyze(folder, "bert", "residual", "attention", "spectrum", words=words))
    for name, table in tables[0].items():
        pd.testing.assert_frame_equal(table, tables[1][name])


def test_random_ids_are_no_padding(folder, tmp_path):
    shutil.copytree(folder / "bert", tmp_path / "bert", ignore=shutil.ignore_patterns("*token*"))
    checkpoint = load_checkpoint(str(tmp_path / "bert"), 0)
    ids_BN, _ = inputs_of(compose("analyze", "model=pretrained", f"model.path={tmp_path / 'bert'}"), checkpoint)
    assert ids_BN.shape == (8, 16) and set(ids_BN.flatten().tolist()) == set(range(1, len(WORDS)))


@pytest.mark.parametrize("padding", [-1, 2**63])
def test_a_padding_token_that_is_none_is_as_good_as_another(folder, tmp_path, padding):
    """As in configs with pad_token_id: -1. Absent tokens are masked, whatever their id."""
    np.save(tmp_path / "ids.npy", np.array([[3, 4, 5, 6], [5, 4, 3, -1]]))
    shutil.copytree(folder / "gpt2", tmp_path / "gpt2")
    tables = []
    config = json.loads((folder / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"pad_token_id": padding}))
    for models in (folder, tmp_path):
        words = [f"inputs={tmp_path / 'ids.npy'}", "precision=fp64"]
        tables.append(analyze(models, "gpt2", "residual", words=words)["residual"].relative_residual)
    np.testing.assert_array_equal(*tables)


HALVES = {f"{half}_{key}": value for half in ("encoder", "decoder") for key, value in (("layers", 2), ("ffn_dim", 24))}
HALVES |= {f"{half}_attention_heads": 2 for half in ("encoder", "decoder")} | {"d_model": 16, "pad_token_id": 0}
HALVES |= {"vocab_size": 20, "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.further
@pytest.mark.parametrize("family", some(["whisper", "marian"], 2))
def test_a_checkpoint_of_two_halves_says_which_is_measured(family, tmp_path):
    torch.manual_seed(0)
    sounds = {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 6} if family == "whisper" else {}
    config = transformers.AutoConfig.for_model(family, **HALVES | sounds)
    model = transformers.AutoModel.from_config(config).double().eval()
    model.save_pretrained(tmp_path / family)
    inputs = torch.randn(3, 4, 12).double() if sounds else torch.randint(3, 20, (3, 6))
    np.save(tmp_path / "inputs.npy", inputs.numpy())
    words = ["analyze", "model=pretrained", f"model.path={family}", "inputs=inputs.npy", "precision=fp64"]
    said = succeeds(*words, "analysis=[residual]", "out=out", at=tmp_path)
    assert "measured: last_hidden_state of the encoder (3, 6, 16)" in said.out + said.err
    rows = pd.read_csv(tmp_path / "out" / "residual.csv")
    state_BND = model.get_encoder()(inputs, output_hidden_states=True).hidden_states[1].detach()
    by_hand = (state_BND - state_BND.mean(1, keepdim=True)).norm(dim=(1, 2)) / state_BND.norm(dim=(1, 2))
    row = rows[(rows.layer == 1) & (rows["view"] == "all") & (rows.weights == "trained")].iloc[0]
    assert row.relative_residual_frobenius == pytest.approx(by_hand.mean().item(), rel=1e-12)
    if family == "marian":
        said = succeeds(*words, "output=decoder", "analysis=[path_mass]", "out=decoder", at=tmp_path)
        assert "of the decoder" in said.out + said.err


@pytest.mark.further
def test_a_checkpoint_answers_in_one_figure_and_a_table_of_80_columns(folder, tmp_path):
    """Without inputs, analyses and options: name, layers, heads, tokens; the same numbers as in the tables."""
    said = succeeds("analyze", "model=pretrained", f"model.path={folder / 'bert'}", "out=o", at=tmp_path).out
    text = said[said.index("bert (BertForMaskedLM): 2 layers of 2 heads; 8 sequences of 16 tokens") :]
    table = text[: text.index("look at: o/network.png")]
    assert max(map(len, table.splitlines())) <= 80 and "was read as" in table
    last = last_of_layer(pd.read_csv(tmp_path / "o" / "residual.csv"))
    assert set(last.variant) == {"full"}
    trained = last[(last.view == "all") & (last.weights == "trained")].set_index("layer")
    paths = pd.read_csv(tmp_path / "o" / "paths.csv").set_index("path_length")
    for k in range(3):
        (row,) = (line.split()[1:] for line in table.splitlines() if re.match(rf"{k} +\d", line))
        wanted = trained.relative_residual[k], trained.effective_rank[k], paths.norm_share[k], paths.path_share[k]
        assert [float(row[number]) for number in (0, 2, 4, 5)] == pytest.approx(wanted, rel=6e-3)
    assert (tmp_path / "o" / "network.png").stat().st_size > 0
    assert pd.read_csv(tmp_path / "o" / "network.csv").task[0] == "rankbench's own texts"


@pytest.mark.further
def test_ones_own_analyses_stand(folder, tmp_path):
    words = ["model=pretrained", f"model.path={folder / 'gpt2'}", "analysis=[residual]", "figures=[]", "out=o"]
    said = succeeds("analyze", *words, at=tmp_path).out
    assert set(pd.read_csv(tmp_path / "o" / "residual.csv").variant) > {"full"}
    assert "relative residual by layer" in said and "network.png" not in said


@pytest.mark.further
def test_checkpoints_side_by_side_have_names(folder, tmp_path):
    paths = ",".join(str(folder / name) for name in ("bert", "gpt2"))
    words = ["model=pretrained", f"model.path={paths}", "analysis=[residual]", "analysis.residual.variants=[full]"]
    succeeds("analyze", "-m", *words, "out=both", at=tmp_path)
    assert set(pd.read_csv(tmp_path / "both" / "residual.csv").checkpoint) == {"bert", "gpt2"}
