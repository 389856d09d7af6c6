"""benchmarks: `make bench` runs and its tables have what they promise. No time is ever judged here."""

import subprocess

import numpy as np
import pandas as pd
import pytest
import torch
from benchmarks import attention, check, depth, lipschitz, metrics, paths, record, startup, timing, training
from benchmarks.__main__ import main
from benchmarks.config import config_of
from command_line import ROOT, python
from refusals import refusal

from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.model import initial_model
from rankbench.model.attention import FUSED_FROM_TOKENS
from rankbench.runs.machine import Machine
from rankbench.runs.tables import read_table
from rankbench.seeds import generator_for
from rankbench.tasks import build_task
from rankbench.training.seeds_side_by_side import Training

TINY = ("device=cpu", "repeats=2", "sequences=8", "replicas=2", "model.layers=2", "trainer.steps=2")
TINY += ("trainer.eval_every=2", "trainer.batch_size=10")


def config(*overrides):
    return config_of([*TINY, *overrides])


def check_ratios(table, columns):
    """Each of these ratios stands in at least one row, positive, between its _min and its _max."""
    for column in columns:
        rows = table.dropna(subset=[column])
        assert len(rows)
        assert (rows[f"{column}_min"] > 0).all()
        assert (rows[f"{column}_min"] <= rows[column]).all()
        assert (rows[column] <= rows[f"{column}_max"]).all()
    seconds = [column for column in table if column.startswith("seconds_")]
    assert seconds
    assert (table[seconds].stack().dropna() > 0).all()


@pytest.mark.further
def test_command_writes_a_table_for_each_benchmark(tmp_path, capsys):
    out = tmp_path / "bench"
    main(["paths", "training", *TINY, f"out={out}"])
    assert {path.name for path in out.iterdir()} == {"environment.json", "bench_paths.csv", "bench_training.csv"}
    sums = read_table(out / "bench_paths.csv")
    ratios = ["ratio_sums_to_forward_narrow", "ratio_sums_to_forward", "ratio_tape_to_sums"]
    ratios += ["ratio_speedup_over_one_head", "ratio_speedup_over_all_heads"]
    check_ratios(sums, ratios)
    frozen, recomputed = sums[sums.paths == "frozen"], sums[sums.paths == "recomputed"]
    assert sorted(zip(frozen.mlp_ratio, frozen.precision, strict=True)) == [
        (ratio, precision) for ratio in (1.0, 4.0) for precision in ("fp32", "fp64")
    ]
    # sums over up to 4 paths of numbers of order 1: rounding of the number type
    limit = recomputed.precision.map({"fp32": 1e-4, "fp64": 1e-12})
    assert (recomputed.largest_difference < limit * recomputed.largest_sum).all()

    steps = read_table(out / "bench_training.csv")
    ratios_of_steps = ["ratio_roofline", "ratio_limit", "ratio_speed_to_torch_encoder", "ratio_speed_to_plain"]
    check_ratios(steps, [*ratios_of_steps, "ratio_side_by_side", "ratio_many_side_by_side"])
    assert list(zip(steps.seeds, steps.batch_size, strict=True)) == [
        (seeds, size) for size in (10, 30) for seeds in (1, 2, 8)
    ]
    assert (steps.sequences_per_second > 0).all()
    printed = capsys.readouterr().out
    for name in (*ratios, "ratio_speed_to_torch_encoder", "ratio_side_by_side"):
        assert name in printed


@pytest.mark.further
def test_the_record_keeps_every_run_and_shows_the_newest_beside_the_one_before(tmp_path, monkeypatch):
    cfg = config()
    machine, moments = Machine.prepare(cfg), iter(("2026-01-01 00:00", "2026-01-02 00:00"))
    monkeypatch.setattr(record.time, "strftime", lambda _: next(moments))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "notes.md").write_text("By hand.\n")
    for median in (3.5, 4.5):
        ratios = [("paths", "ratio_sums_to_forward", "frozen", median, 3.0, 5.0)]
        record.add(ratios, cfg.repeats, machine, tmp_path)
    history = read_table(tmp_path / "benchmarks" / "history.csv")
    assert list(history["median"]) == [3.5, 4.5] and set(history.device) == {"cpu"}
    page = (tmp_path / "BENCHMARKS.md").read_text()
    assert "| frozen | **4.50** [3.00, 5.00] missed | 3.50 | at most 4.0 |" in page and page.endswith("\nBy hand.\n")
    assert (tmp_path / "benchmarks" / "history.png").stat().st_size > 1000


def test_the_page_of_benchmarks_is_written_from_its_record():
    docs = ROOT / "docs"
    notes = (docs / "benchmarks" / "notes.md").read_text()
    page = record.page(read_table(docs / "benchmarks" / "history.csv"))
    assert (docs / "BENCHMARKS.md").read_text() == page + "\n" + notes


def test_startup_times_each_command(monkeypatch):
    ran = []
    monkeypatch.setattr(startup, "run_python", lambda *words: ran.append(words))
    cfg = config()
    table = startup.table(cfg, Machine.prepare(cfg))
    check_ratios(table, ["ratio_to_import_torch"])
    assert list(table.index) == [
        "rankbench --help",
        "rankbench train --help",
        "rankbench train --cfg job",
        "rankbench train trainer.steps=1",
    ]
    # one warm-up and `repeats` measured
    assert ran == [*startup.COMMANDS.values(), ("-c", "import torch")] * (cfg.repeats + 1)


@pytest.mark.further
def test_startup_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rankbench train --cfg job", "rankbench train trainer.steps=1"):
        startup.run_python(*startup.COMMANDS[name])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(subprocess.CalledProcessError):
        startup.run_python("-c", "raise SystemExit(3)")


@pytest.mark.parametrize(
    ("benchmark", "ratios", "num_rows"),
    [(depth, ["ratio_sums_to_forward_of_depth"], 2), (metrics, ["ratio_metrics_to_svd"], 2)],
)
def test_tables_hold_their_ratios(benchmark, ratios, num_rows, monkeypatch):
    monkeypatch.setattr(metrics, "SHAPE", (3, 6, 8))
    cfg = config()
    table = benchmark.table(cfg, Machine.prepare(cfg))
    check_ratios(table, ratios)
    assert len(table) == num_rows


@pytest.mark.further
def test_jacobians_of_every_kind_agree_and_the_closed_form_is_small(monkeypatch):
    monkeypatch.setattr(lipschitz, "SIZES", ((30, 1, 1), (5, 4, 2)))
    cfg = config("sequences=100")
    table = lipschitz.table(cfg, Machine.prepare(cfg))
    check_ratios(table, ["ratio_jacobian_to_row", "ratio_memory_jacobian_to_row", "ratio_jacobian_to_all_rows"])
    assert len(table) == 4
    assert (table.largest_difference < 1e-14).all()  # entries below 1
    # one row of a Jacobian holds a 30th of it
    assert (table.ratio_memory_jacobian_to_row.xs(30, level="num_tokens") > 5).all()


def test_the_peak_counts_what_lives_at_a_time():
    def work():
        for _ in range(3):
            large = torch.ones(1000, dtype=torch.float64)
            small = large[:10] + 1
        return small

    peak, result = lipschitz.peak_bytes(work)
    # a second large tensor is made before the name lets the first one go
    assert peak == 2 * 8000 + 80 and torch.equal(result, torch.full((10,), 2.0).double())


def test_alternatives_take_turns_after_a_warm_up():
    cfg, called = config(), []
    seconds = timing.paired(Machine.prepare(cfg), 3, {"a": lambda: called.append("a"), "b": lambda: called.append("b")})
    assert called == ["a", "b"] * 4
    assert {name: of_name.shape for name, of_name in seconds.items()} == {"a": (3,), "b": (3,)}


def test_spread_is_median_and_range():
    assert timing.spread("ratio_x", np.array([4.0, 1.0, 2.0])) == {
        "ratio_x": 2.0,
        "ratio_x_min": 1.0,
        "ratio_x_max": 4.0,
    }


def test_lines_leave_out_the_ratios_that_a_case_lacks():
    ratios = {1: "ratio_memory_to_dot", 5: "ratio_speed_to_torch_encoder"}
    rows = [{"seeds": seeds, **timing.spread(ratio, np.ones(1))} for seeds, ratio in ratios.items()]
    lines = timing.lines_of(pd.DataFrame(rows).set_index(["seeds"]))
    assert len(lines) == 2
    assert "ratio_memory_to_dot" in lines[0] and "seeds=1" in lines[0] and "goal" not in lines[0]
    assert "ratio_speed_to_torch_encoder" in lines[1] and "seeds=5" in lines[1] and "goal: at least 2.5" in lines[1]


@pytest.mark.parametrize("heads", [1, 2, 3])
@torch.no_grad()
def test_paths_alone_have_the_sums_of_shared_ones(heads):
    cfg = config(f"model.heads={heads}", "precision=fp64")
    task = build_task(cfg.task)
    model = initial_model(cfg.model, task, 0).double().eval()
    # more than one chunk of sequences, the last one short
    inputs = task.sample(paths.ALONE_SEQUENCES + 3, generator_for(0, "test")).inputs
    network = RecomputedNetwork(model, inputs)
    groups = [all_paths(2, heads, length) for length in range(3)]
    shared = sums_of_groups(network, groups)
    for step in (paths.one_head(network), paths.all_heads(model)):
        alone = paths.sums_of_paths_alone(network.embedding_BND, groups, step)
        torch.testing.assert_close(alone, shared, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_torch_encoder_has_our_shape(norm):
    cfg = config(f"model.norm={norm}", "model.mlp_ratio=2")
    task = build_task(cfg.task)
    ours = initial_model(cfg.model, task, 0)
    theirs = training.TorchEncoder(cfg, task)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    inputs = task.sample(5, generator_for(0, "test")).inputs
    assert theirs(inputs).shape == ours(inputs).shape


@pytest.mark.parametrize("train_size", ["1000", "null"])
def test_torch_loop_leaves_the_global_generator_alone(train_size):
    cfg = config(f"task.train_size={train_size}")
    before = torch.get_rng_state()
    block = training.torch_loop(
        Training(cfg, build_task(cfg.task), Machine.prepare(cfg), [0]), steps=2, torch_fused=True
    )
    block()
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_has_a_row_for_each_attention_and_length(monkeypatch):
    monkeypatch.setattr(attention, "NUM_TOKENS", (4, FUSED_FROM_TOKENS + 4))
    monkeypatch.setattr(attention, "CHARACTER_MODEL", {"width": 16, "heads": 2, "mask": "causal"})
    cfg = config()
    table = attention.table(cfg, Machine.prepare(cfg))
    assert list(table.index) == [(kind, n) for n in (4, FUSED_FROM_TOKENS + 4) for kind in attention.ATTENTIONS]
    assert (table.loc["dot", "ratio_step_to_dot"] == 1).all() and (table.loc["dot", "ratio_memory_to_dot"] == 1).all()
    check_ratios(table, ["ratio_step_to_dot", "ratio_explicit_to_step", "ratio_memory_to_dot"])
    # of short rows both are the same step; of long ones only the explicit one keeps the weights, 11 sequences x 2 heads
    short, long = (table.xs(n, level="num_tokens") for n in (4, FUSED_FROM_TOKENS + 4))
    assert (short.megabytes_step == short.megabytes_explicit).all()
    weights = 11 * 2 * (FUSED_FROM_TOKENS + 4) ** 2 * 4 / 1e6
    assert (long.megabytes_explicit - long.megabytes_step > 0.5 * weights).all()
    assert not table.isna().all().any()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["pahts"], ["benchmark=pahts", "did you mean paths?", "paths, training, startup"]),
        (["repeats=0"], ["repeats=0", "out of range", "from 1 to 10,000"]),
        (["sequences=many"], ["sequences=many", "out of range"]),
        (["model=san"], ["model.skip=False", "TransformerEncoder", "leave training out"]),
        (["model=lstm", "task=char_lm", "task.path=text.txt"], ["model.kind=lstm", "time Transformers"]),
        (["optimizer=muon"], ["optimizer.name=muon", "adam, adamw, sgd", "leave training out"]),
        (["analysis=[paths]"], ["analysis: a benchmark analyses nothing"]),
        (["card", "device=cpu"], ["card: it does not cover"]),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(words, parts, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a text of some words\n" * 50)
    monkeypatch.chdir(tmp_path)
    line = refusal(main, [*TINY, *words])
    assert all(part in line for part in parts) and not (tmp_path / "outputs").exists()


def test_the_command_says_its_name_and_no_traceback():
    done = python("-m", "benchmarks", "repeats=0", at=ROOT / "tests")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("rankbench bench: repeats=0: ")


def test_every_model_can_be_measured_without_training():
    check(["paths", "startup"], config("model=san"))
