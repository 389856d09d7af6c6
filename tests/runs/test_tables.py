"""rankbench.runs.tables and rankbench.runs.files: what is written comes back bit for bit, and is whole or absent."""

import json
import math
import os
import statistics
import struct
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from rankbench.config.keys import ConfigError
from rankbench.runs.files import replacing, write_json, write_text
from rankbench.runs.intervals import interval95
from rankbench.runs.tables import RUN_COLUMNS, by_layer, mean_and_spread, read_table, thinned, with_who, write_table

every = settings(max_examples=10, deadline=None)


# --- files -----------------------------------------------------------------------------------------------------------


def test_by_layer_keeps_one_row_for_each_run_seed_and_layer():
    """Trained weights, the whole network, the state after the last sub-layer, and means over heads."""
    rows = [
        {"weights": weights, "variant": variant, "layer": layer, "sublayer": sublayer, "head": head, "x": x, "p": p}
        for weights, more in (("initialised", 0), ("trained", 100))
        for variant, factor in (("full", 1), ("no_mlp", 1000))
        for layer, sublayer, head, x, p in (
            (0, "input", None, 1 + more, None),
            (1, "weights", 1, None, factor * (2 + more)),
            (1, "weights", 2, None, factor * (4 + more)),
            (1, "attention", None, 3 + more, None),
            (1, "mlp", None, 5 + more, None),
        )
    ]
    table = pd.concat([with_who(pd.DataFrame(rows), run="r", task="t", model="m", seed=seed) for seed in (3, 1)])
    table = table.reset_index(drop=True)
    table.attrs = {"analysis": "residual"}
    kept = by_layer(table)
    assert kept.attrs == table.attrs and kept.columns.to_list() == [name for name in table if name != "head"]
    assert kept[["seed", "layer", "sublayer", "x"]].to_numpy().tolist() == [
        [seed, layer, sublayer, x] for seed in (1, 3) for layer, sublayer, x in ((0, "input", 101), (1, "mlp", 105))
    ]
    assert kept.p.dropna().to_list() == [103, 103] and set(kept.weights) == {"trained"}
    heads = by_layer(table[table["head"].notna()].drop(columns="sublayer").reset_index(drop=True))
    assert heads.p.to_list() == [103, 103] and "x" not in heads
    headless = by_layer(table.drop(columns=["head", "p"]))
    assert headless.x.to_list() == [101, 105, 101, 105]
    fresh = by_layer(table[table.weights == "initialised"].reset_index(drop=True))
    assert fresh.x.to_list() == [1, 5, 1, 5]
    with pytest.raises(ConfigError, match=r"^by_layer: a table without a column layer; it has run, task"):
        by_layer(table.drop(columns="layer"))


def test_what_a_kill_left_of_a_file_goes_with_the_next_write_and_what_is_being_written_stays(tmp_path):
    path = tmp_path / "a.txt"
    left = tmp_path / ".a.txt.killed.part"
    left.write_text("half")
    with replacing(path) as first:
        assert not left.exists()
        write_text(path, "second")
        first.write_text("first")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_replacing_puts_the_new_file_in_place_of_the_old(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("new: α")
        assert path.read_text() == "old"  # until the end
        assert part.parent == path.parent  # a move between file systems would not be atomic
    assert path.read_bytes() == "new: α".encode() and path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_is_moved_and_its_name_when_the_call_returns(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: calls.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("moved") or replace(*paths))
    write_text(path := tmp_path / "a.txt", "new")
    assert calls == [path.stat().st_ino, "moved", tmp_path.stat().st_ino]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError, match="halfway"), replacing(path) as part:
        part.write_text("half of it")
        raise KeyError("halfway")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_json_turns_nan_to_null_however_deep(tmp_path):
    content = {"loss": math.nan, "list": [1, math.nan, {"x": (math.nan, 0.1)}], "number": np.float64("nan"), 3: "nan"}
    content["diverged"] = -math.inf
    write_json(tmp_path / "a.json", content)
    text = (tmp_path / "a.json").read_text()
    nothing = dict.fromkeys(("loss", "diverged", "number"))
    read = json.loads(text, parse_constant=pytest.fail)
    assert read == nothing | {"list": [1, None, {"x": [None, 0.1]}], "3": "nan"}
    assert text.endswith("}\n")


def test_write_json_of_what_json_cannot_hold_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- tables ----------------------------------------------------------------------------------------------------------


def round_trip(table):
    with tempfile.TemporaryDirectory() as folder:
        write_table(table, Path(folder) / "t.csv")
        return read_table(Path(folder) / "t.csv")


@every
@given(st.lists(st.floats(allow_nan=False), min_size=1))
@example([5e-324, 2.2250738585072011e-308, 1.7976931348623157e308, 0.1 + 0.2, -0.0, math.inf, math.nan])
def test_floats_come_back_bit_for_bit(values):
    back = round_trip(pd.DataFrame({"value": np.array(values)}))["value"]
    assert back.dtype == np.float64
    assert [struct.pack("d", x) for x in back] == [struct.pack("d", x) for x in values]


@every
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_integers_come_back(values):
    back = round_trip(pd.DataFrame({"seed": np.array(values)}))["seed"]
    assert back.dtype == np.int64 and back.tolist() == values


def test_integers_beyond_64_bits_come_back_as_floats():
    table = pd.DataFrame({"num_paths": [27, None, 9**20, 9**400]}, dtype=object)
    assert round_trip(table)["num_paths"].tolist() == pytest.approx([27, math.nan, 9.0**20, math.inf], nan_ok=True)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        *(("model", [name]) for name in ("007", "1" + "0" * 30, "1e400", "true")),  # names that look like numbers
        *(("mask", [word, "a"]) for word in ("none", "None", "NA", "null", "N/A", "n/a", "a,b", 'say "b"', "α")),
    ],
)
def test_words_stay_words(column, words):
    assert round_trip(pd.DataFrame({column: words}))[column].tolist() == words


def test_columns_keep_their_order_and_the_index_is_not_written(tmp_path):
    table = pd.DataFrame({"z": [1], "a": [2], "m": [3]}, index=[7])
    write_table(table, tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_bytes() == b"z,a,m\n1,2,3\n"
    assert list(read_table(tmp_path / "t.csv").columns) == ["z", "a", "m"]


def test_who_stands_in_front_in_the_order_of_WHO():
    table = pd.DataFrame({"layer": [0, 1], "value": [0.5, 0.25]}, index=[4, 9])
    got = with_who(table, model="san", seed=3, run="r", task="sorting")
    assert list(got.columns) == ["run", "task", "model", "seed", "layer", "value"] == [*RUN_COLUMNS, "layer", "value"]
    assert got.to_numpy().tolist() == [["r", "sorting", "san", 3, 0, 0.5], ["r", "sorting", "san", 3, 1, 0.25]]
    assert list(table.columns) == ["layer", "value"]  # the caller's table is as it was


@every
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2), st.integers(0, 3), st.floats(-1e3, 1e3)),
        min_size=1,
        max_size=40,
    )
)
@example([("a", 1, seed, value) for seed, value in ((0, 1.0), (0, 1.0), (0, 1.0), (1, 3.0))])  # seeds weigh alike
def test_mean_and_spread_is_that_of_a_loop(rows):
    table = pd.DataFrame(rows, columns=["model", "layer", "seed", "value"])
    got = mean_and_spread(table, ["model", "layer"], "value")
    assert list(got.columns) == ["model", "layer", "mean", "low", "high", "num_seeds", "of_seed"]
    keys = sorted({(model, layer) for model, layer, _, _ in rows})
    assert list(zip(got["model"], got["layer"], strict=True)) == keys
    assert list(got["high"] - got["mean"]) == pytest.approx(list(got["mean"] - got["low"]), abs=1e-8, nan_ok=True)
    spreads = got["high"] - got["mean"]
    for (model, layer), mean, half, num_seeds in zip(keys, got["mean"], spreads, got["num_seeds"], strict=True):
        values = {}
        for m, n, seed, value in rows:
            if (m, n) == (model, layer):
                values.setdefault(seed, []).append(value)
        means = [statistics.fmean(each) for each in values.values()]
        assert num_seeds == len(means)
        (of_seed,) = got.of_seed[(got.model == model) & (got.layer == layer)]
        assert of_seed == pytest.approx({seed: statistics.fmean(each) for seed, each in values.items()}, abs=1e-10)
        # sums of at most 40 numbers below 1e3: rounding stays under 40 * 1e3 * eps = 1e-11; a square root in the sd
        # of nearly equal numbers loses half the digits of 1e3 * eps, which t of two seeds magnifies by 9, hence 1e-8
        assert mean == pytest.approx(np.mean(means), abs=1e-10)
        if num_seeds == 1:
            assert math.isnan(half)
        else:
            t = stats.t.ppf(0.975, num_seeds - 1)
            assert half == pytest.approx(t * np.std(means, ddof=1) / math.sqrt(num_seeds), abs=1e-8)


def test_an_axis_that_holds_nan_keeps_its_rows():
    table = pd.DataFrame({"layer": [0.0, math.nan], "seed": [0, 0], "value": [1.0, 2.0]})
    assert mean_and_spread(table, ["layer"], "value")["mean"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("columns", [1, 5, 13, 14, 97])
def test_a_wide_table_is_thinned_to_its_ends_and_some_between(columns):
    wide = pd.DataFrame([range(columns)])
    columns_kept = thinned(wide).iloc[0].tolist()
    assert len(columns_kept) == min(columns, 13) and columns_kept[0] == 0 and columns_kept[-1] == columns - 1
    steps = set(np.diff(columns_kept))
    assert not steps or max(steps) - min(steps) <= 1  # evenly


# --- intervals -------------------------------------------------------------------------------------------------------


@every
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
@example([0.05, 0.7, 0.99])  # Student's would have both ends outside
def test_the_interval_of_a_share_stays_a_share_and_holds_the_mean(values):
    mean, low, high, _ = interval95(values, "share")
    rounding = 1e-12  # of the logit and back
    assert 0 <= low <= mean + rounding and mean - rounding <= high <= 1
    assert mean == pytest.approx(statistics.fmean(values), abs=1e-15)


def test_far_from_its_ends_the_interval_of_a_share_is_students():
    values = [0.50, 0.51, 0.49, 0.505]
    mean, low, high, method = interval95(values, "share")
    wanted = stats.t.interval(0.95, 3, mean, stats.sem(values))
    # the logit is straight there: its curvature changes the ends by (half-width)^3, 2e-6
    assert [low, high] == pytest.approx(wanted, abs=5e-6) and method == "t of logits"


@pytest.mark.parametrize("column", ["test_accuracy", "whole_loss", "effective_rank", "log10_residual", "loss_fall"])
def test_a_line_has_the_intervals_of_its_columns_scale(column):
    of_x = {0: [0.2, 0.9, 0.6], 1: [1.0, 1.0, 1.0], 2: [0.0, 0.0, 0.9], 3: [0.0, 0.0, 0.0]}
    rows = [{"x": x, "seed": seed, column: value} for x, values in of_x.items() for seed, value in enumerate(values)]
    scale = {"accuracy": "share", "loss": "positive", "rank": "positive"}.get(column.rpartition("_")[2], "real")
    ends = mean_and_spread(pd.DataFrame(rows), ["x"], column)[["low", "high"]].to_numpy()
    # absolute 1e-12: rounding of the scale and back
    np.testing.assert_allclose(ends, [interval95(values, scale)[1:3] for values in of_x.values()], atol=1e-12)
    assert (ends.min() < 0) == (scale == "real") and (ends.max() > 1) == (scale != "share")


def test_one_seed_has_no_interval():
    for scale in ("real", "share"):
        mean, low, high, method = interval95([0.25], scale)
        assert (mean, method) == (0.25, "none") and math.isnan(low) and math.isnan(high)


@pytest.mark.filterwarnings("error")
def test_a_geometric_interval_of_two_seeds_may_end_beyond_all_numbers():
    table = pd.DataFrame({"x": 0, "seed": [0, 1], "value": [1e-300, 1e-10]})
    got = mean_and_spread(table, ["x"], "value", geometric=True).iloc[0]
    assert got["mean"] == pytest.approx(1e-155)
    assert (got.low, got.high) == (0.0, math.inf)
