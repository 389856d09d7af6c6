"""The same network written in two ways has the same tables: every network of tests/networks_of_others.py in every way
of tests/rewrites.py."""

import pytest
import torch
from networks_of_others import NETWORKS, states
from path_checks import TWO, assert_same_paths
from rewrites import (
    DIFFERENT,
    EQUAL,
    REWRITES,
    Refusal,
    cells_of,
    check_output,
    difference,
    original,
    original_tables,
    outcome,
    quietly,
    recorded,
    with_calls_replaced,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library and of torch, about what is deprecated in them

WAYS = ["matmul", "einsum", "product and sum", "bmm, heads flattened", "transposed", "head by head"]
WAYS += ["kernel for each head", "P shared by two calls", "softmax written out", "scores by baddbmm"]
WAYS += ["linear maps by addmm", "norms written out", "additions in place"]


@pytest.mark.parametrize("way", WAYS)
def test_a_small_network_has_the_same_paths_in_every_way(way):
    network = NETWORKS["post-norm, kernel, causal"]
    assert_same_paths(REWRITES[way](network).module, network.module(), states(), TWO)


QUICK = [
    ("shared keys and values", "one key head in einsum"),
    ("linear attention", "head by head"),
    ("nn.TransformerEncoder, pre-norm, padded", "a dead tower"),
    ("differential attention", "the source's other attention"),
    ("talking heads", "exported"),
]


@pytest.mark.further
@pytest.mark.parametrize(("network", "rewrite"), QUICK)
def test_two_ways_to_write_a_network_give_the_same_tables(network, rewrite):
    letters, lines = outcome(network, rewrite)
    assert (set(letters), lines) == ({EQUAL}, [])


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network_in_every_way(network, capsys):
    cells = cells_of(network)
    assert not any(DIFFERENT in cell for cell in cells), capsys.readouterr().out
    if network in recorded():
        assert cells == recorded()[network], "run `python -m rewrites` in tests/"


def test_the_page_has_networks_and_ways_that_there_are():
    rows = recorded()
    assert rows and set(rows) <= set(NETWORKS)
    assert {len(cells) for cells in rows.values()} == {len(REWRITES)}


def test_a_rewrite_that_computes_something_else_is_not_taken_for_one():
    network = NETWORKS["post-norm, kernel, causal"]
    slightly_wrong = {"gelu": lambda x: torch.nn.functional.gelu(x) * (1 + 1e-9)}
    with pytest.raises(AssertionError):
        check_output(network, with_calls_replaced(network, slightly_wrong))
    check_output(network, original(network))


def test_tables_differ_by_a_value_a_count_a_row_or_a_refusal():
    with quietly():
        table = original_tables("post-norm, kernel, causal")["spectrum"]
    assert difference(table, table.copy(), 1e-9, alone=False) == ""
    assert "mass" in difference(table, table.assign(mass=table["mass"] + 2e-9), 1e-9, alone=False)
    assert difference(table, table.assign(mass=table["mass"] + 1e-10), 1e-9, alone=False) == ""
    assert "num_paths 4 and 8" in difference(
        table, table.assign(num_paths=[1.0, 8.0, 4.0, float("nan")]), 1e-9, alone=False
    )
    assert "4 rows and 2; num_paths 1 4 4 nan and 1 4" in difference(table, table[:2], 1e-9, alone=False)
    assert "share in one table alone" in difference(table, table.drop(columns="share"), 1e-9, alone=False)
    assert "only the rewritten network is refused: no" in difference(table, Refusal("no"), 1e-9, alone=False)
    assert difference(Refusal("no"), Refusal("never"), 1e-9, alone=False) == ""
    assert "traceback" in difference(Refusal("no"), Refusal("traceback: KeyError"), 1e-9, alone=False)
