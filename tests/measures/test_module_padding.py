"""Which tokens of others' padded batches count, against states and weights of the same networks, cut by hand.

Shapes: B sequence, N token, D width.
"""

import pandas as pd
import pytest
import torch
from networks_of_others import MaskedAttention
from refusals import refusal
from torch import nn

import rankbench
from rankbench.measures.norms import composite_norm, residual_matrix

LENGTHS = torch.tensor([9, 7, 8, 5, 9])
IDS = torch.randint(1, 30, (5, 9), generator=torch.Generator().manual_seed(0))
PRESENT = (torch.arange(9) < LENGTHS[:, None]).long()


def of_keys(mask):
    """Keys alone are hidden."""
    return mask.bool()[:, None, None]


def of_both(mask):
    """Rows of absent queries are hidden, too: with a fill that is finite they are uniform."""
    return (mask[:, :, None] & mask[:, None]).bool()[:, None]


class Layers(nn.Module):
    """Two layers, which keep their states. sees: the keys that a mask leaves, (B, 1, N or 1, N)."""

    def __init__(self, sees, number=2):
        super().__init__()
        self.sees, self.layers = sees, nn.ModuleList(MaskedAttention(-1e9) for _ in range(number))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, self.sees(mask))
        self.states = x
        return x


class Texts(Layers):
    """Of embedded tokens, with as many learned ones in front and behind."""

    def __init__(self, sees=of_keys, front=0, behind=0):
        super().__init__(sees)
        self.embedding = nn.Embedding(30, 16)
        self.position, self.front = nn.Parameter(torch.randn(9, 16)), nn.Parameter(torch.randn(front, 16))
        self.behind = nn.Parameter(torch.randn(behind, 16))

    def forward(self, ids, mask):
        front, behind = (x.expand(len(ids), -1, -1) for x in (self.front, self.behind))
        x = torch.cat([front, self.embedding(ids) + self.position, behind], 1)
        mask = nn.functional.pad(mask, (front.shape[1], behind.shape[1]), value=1)
        return super().forward(x, mask)


def made(network):
    torch.manual_seed(0)
    return network().double().eval()


@torch.no_grad()
def measured(module, inputs, tmp_path, **options):
    """What is said of the tokens, the relative residual of the last states, and the table of attention; the module then
    keeps what it computed on these inputs."""
    tables = rankbench.analyze(module, inputs, "residual", "attention", out=str(tmp_path / "out"), **options)
    module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    network, residual = pd.read_csv(tmp_path / "out" / "network.csv"), tables["residual"]
    last = residual[(residual["view"] == "all") & (residual.layer == residual.layer.max())].iloc[0]
    return network[network.part == "tokens"].note.item(), last.relative_residual, tables["attention"]


def residual_of(states, lengths):
    """The mean of those of the first tokens of each sequence."""
    parts = [x[None, :length] for x, length in zip(states, lengths, strict=True)]
    return sum((composite_norm(residual_matrix(x)) / composite_norm(x)).item() for x in parts) / len(parts)


@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor([9, 8, 7, 5, 5])])
@pytest.mark.parametrize("sees", [of_keys, of_both])
def test_rows_of_absent_queries_hide_no_padding(sees, lengths, tmp_path):
    module, mask = made(lambda: Texts(sees)), (torch.arange(9) < lengths[:, None]).long()
    said, residual, _ = measured(module, {"ids": IDS, "mask": mask}, tmp_path)
    assert said == f"{lengths.sum()} of 45 tokens count, by present:mask"
    assert residual == pytest.approx(residual_of(module.states, lengths), rel=1e-12)


def test_a_sequence_whose_tokens_are_all_hidden_enters_no_mean(tmp_path):
    module, mask = made(Texts), PRESENT.clone()
    mask[3] = 0
    kept = torch.tensor([0, 1, 2, 4])
    said, residual, _ = measured(module, {"ids": IDS, "mask": mask}, tmp_path)
    assert said == "33 of 45 tokens count, by present:mask"
    assert residual == pytest.approx(residual_of(module.states[kept], LENGTHS[kept]), rel=1e-12)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [2, 3, 4, 0, 1, 5]])
@pytest.mark.parametrize("kind", ["lengths", "mask of four axes"])
def test_padding_is_found_in_any_order_of_the_sequences(kind, order, tmp_path):
    lengths = torch.tensor([9, 9, 5, 4, 3, 9])[order]
    present = torch.arange(9) < lengths[:, None]
    says = {"lengths": (lambda x: (torch.arange(9) < x[:, None])[:, None, None], lengths)}
    says["mask of four axes"] = (lambda x: x, present[:, None, None])
    sees, given = says[kind]
    module = made(lambda: Layers(sees))
    states = torch.randn(6, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    said, residual, _ = measured(module, (states, given), tmp_path)
    assert said.startswith("39 of 54 tokens count")
    assert residual == pytest.approx(residual_of(module.states, lengths), rel=1e-12)


def test_the_last_token_of_a_mask_that_is_causal_at_its_end_counts(tmp_path):
    """Of a prefix whose tokens see one another, and others that see what is before them."""
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    module = made(lambda: Texts(lambda _: (causal | (torch.arange(9) < 4))[None, None]))
    said, residual, _ = measured(module, {"ids": IDS, "mask": torch.ones(5, 9).long()}, tmp_path)
    assert said == "all 45 tokens count"
    assert residual == pytest.approx(residual_of(module.states, [9] * 5), rel=1e-12)


class Masked(Texts):
    """The same, whose mask has the name that rankbench gives to that of negative ids."""

    def forward(self, ids, attention_mask):
        return super().forward(ids, attention_mask)


def test_padded_ids_behind_a_token_of_the_network(tmp_path):
    module = made(lambda: Masked(front=1))
    _, residual, table = measured(module, {"ids": IDS, "attention_mask": PRESENT}, tmp_path)
    assert residual == pytest.approx(residual_of(module.states, LENGTHS + 1), rel=1e-12)
    ids = IDS.masked_fill(PRESENT == 0, -1)
    by_ids = rankbench.analyze(module, ids, "attention")["attention"]
    assert (by_ids.row_sum - 1).abs().max() < 1e-12
    assert by_ids.attention_entropy.to_numpy() == pytest.approx(table.attention_entropy.to_numpy(), rel=1e-12)


def test_tokens_of_the_network_behind_padding_are_refused():
    module = made(lambda: Texts(behind=2))
    line = refusal(rankbench.analyze, module, {"ids": IDS, "mask": PRESENT}, "residual")
    assert "padding comes before a token; pad sequences at their end, behind tokens that the network adds" in line


class Reader(nn.Module):
    """Latents that read a padded text and then one another; or, without layers, a learned query that pools it."""

    def __init__(self, latents=6, layers=2):
        super().__init__()
        self.embedding, self.latents = nn.Embedding(30, 16), nn.Parameter(torch.randn(1, latents, 16))
        self.before = nn.ModuleList(MaskedAttention(-1e9) for _ in range(2 - layers))
        self.read = nn.MultiheadAttention(16, 4, batch_first=True)
        self.layers = nn.ModuleList(MaskedAttention(-1e9) for _ in range(layers))

    def forward(self, ids, mask=None, attention_mask=None):
        mask = attention_mask if mask is None else mask
        text = self.embedding(ids)
        for layer in self.before:
            text = layer(text, of_keys(mask))
        self.text, latents = text, self.latents.expand(len(ids), -1, -1)
        x, self.weights = self.read(latents, text, text, key_padding_mask=mask == 0, average_attn_weights=False)
        for layer in self.layers:
            x = layer(x, torch.ones(1, 1, 1, 1, dtype=torch.bool))
        self.states = x
        return x


@pytest.mark.parametrize("latents", [6, 9, 12])
@pytest.mark.parametrize("name", ["mask", "attention_mask"])
def test_all_latents_that_read_a_padded_text_count(name, latents, tmp_path):
    module = made(lambda: Reader(latents))
    _, residual, table = measured(module, {"ids": IDS, name: PRESENT}, tmp_path, layers=["layers.*"])
    assert residual == pytest.approx(residual_of(module.states, [latents] * 5), rel=1e-12)
    assert (table.row_sum - 1).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["mask", "attention_mask"])
def test_a_query_that_pools_a_padded_text_counts_for_each_text(name, tmp_path):
    module = made(lambda: Reader(latents=1, layers=0))
    _, residual, table = measured(module, {"ids": IDS, name: PRESENT}, tmp_path, layers=["before.*"])
    assert residual == pytest.approx(residual_of(module.text, LENGTHS), rel=1e-12)
    entropy = torch.special.entr(module.weights[:, :, 0]).sum(-1) / LENGTHS.double().log()[:, None]
    pooled = table[table.submodule == "read"].attention_entropy
    assert pooled.to_numpy() == pytest.approx(entropy.mean(0).numpy(), rel=1e-9)


class Translator(nn.Module):
    """torch's encoder and decoder, each with padding of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 2)

    def forward(self, source, target, source_pad, target_pad):
        read = self.encoder(self.embedding(source), src_key_padding_mask=source_pad)
        causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
        masks = {"tgt_mask": causal, "tgt_key_padding_mask": target_pad, "memory_key_padding_mask": source_pad}
        return self.decoder(self.embedding(target), read, **masks)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_states_of_each_side_have_its_own_padding(side, tmp_path):
    module, targets = made(Translator), torch.tensor([3, 6, 6, 2, 5])
    inputs = {"source": IDS, "target": IDS[:, :6], "source_pad": PRESENT == 0}
    inputs["target_pad"] = torch.arange(6) >= targets[:, None]
    kept = []
    layers = getattr(module, side).layers
    layers[-1].register_forward_hook(lambda *passed: kept.append(passed[-1]))
    _, residual, _ = measured(module, inputs, tmp_path, layers=[f"{side}.layers.*"])
    lengths = {"encoder": LENGTHS, "decoder": targets}[side]
    assert residual == pytest.approx(residual_of(kept[-1], lengths), rel=1e-12)


class Joined(Layers):
    """Two tokens become one in front of the first or of the second layer."""

    def __init__(self, before):
        super().__init__(of_keys, 3)
        self.before, self.embedding = before, nn.Embedding(30, 16)
        self.position = nn.Parameter(torch.randn(12, 16))

    def forward(self, ids, mask):
        x = self.embedding(ids) + self.position
        for number, layer in enumerate(self.layers):
            if number == self.before:
                x, mask = (x[:, ::2] + x[:, 1::2]) / 2, mask[:, ::2]
            x = layer(x, of_keys(mask))
        self.states = x
        return x


def test_padded_tokens_that_are_joined_are_measured_or_refused(tmp_path):
    lengths = torch.tensor([12, 8, 6, 4, 10])
    ids = torch.randint(30, (5, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"ids": ids, "mask": (torch.arange(12) < lengths[:, None]).long()}
    module = made(lambda: Joined(0))
    said, residual, _ = measured(module, inputs, tmp_path, layers=["layers.*"])
    assert said == "20 of 30 tokens count, by keys to which no query gives weight"
    assert residual == pytest.approx(residual_of(module.states, lengths // 2), rel=1e-12)
    line = refusal(rankbench.analyze, made(lambda: Joined(1)), inputs, "residual", layers=["layers.*"])
    assert line.startswith("padding: 12 tokens are joined to 6, and nothing shows which of these are present; give")
