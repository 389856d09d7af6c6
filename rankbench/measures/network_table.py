"""What was read of a network, in words and as a table: network.csv."""

from collections.abc import Iterator
from itertools import groupby

import pandas as pd

from rankbench.measures.module_reading import ReadModule
from rankbench.tape.reading import Axes, ReadCall

COLUMNS = ["part", "name", "number", "shape", "token_axis", "sequence_axis", "heads", "kind", "counts", "note"]


def table_of_reading(read: ReadModule, half: str) -> pd.DataFrame:
    """Rows, by `part` (docs/NETWORKS.md has more): inputs; calls of attention, with the shape of P, whose last two
    axes are queries and keys, and the heads of one sequence; factors, products that look like attention and are none;
    mixing, submodules that mix tokens by something else; outputs; tokens, the last row, that are measured.
    """
    mixing = [_row("mixing", name, (), counts="no head: paths pass it") for name in read.reading.mixing]
    rows = [*_inputs(read), *_attention(read), *_factors(read), *mixing, *_outputs(read, half), _tokens(read)]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype(dict.fromkeys(["number", "sequence_axis", "heads"], "Int64"))  # whole, and empty in some rows


def in_words(read: ReadModule, half: str) -> str:
    """One line: layers and heads, what does not count, and which tensor is measured."""
    calls = read.heads
    groups = [
        f"{_times(len(list(group)), 'attention call')} of {_times(heads, 'head')} ({kind}) in {place}"
        for (heads, kind, place), group in groupby(calls, lambda call: (call.lead.heads, _kind(call), _place(call)))
    ]
    dead = len(read.reading.calls) - len(read.reading.leading_to(read.target))
    parts = [", ".join(groups)]
    if dead:
        parts.append(f"{_times(dead, 'attention call')} not on the way to what is measured")
    if factors := len(read.reading.factors):
        how = "is no attention and counts as a factor" if factors == 1 else "are no attention and count as factors"
        parts.append(f"{_times(factors, 'product')} that {how}")
    if read.reading.mixing:
        places = list(dict.fromkeys(map(_numbered, read.reading.mixing)))
        named = f"{', '.join(places[:3])}{' ...' if len(places) > 3 else ''}"
        parts.append(f"tokens are also mixed by something that is no attention, in {named}")
    axes = f", tokens are axis {' and '.join(map(str, read.axes.tokens))}" if read.axes.tokens else ""
    of = f" of {half}" if half else ""
    measured, *others = (
        f"output {name}" if name.isdigit() else name
        for name in [read.target.name, *(x.name for x in read.reading.outputs if x.name != read.target.name)]
    )
    left = f" ({', '.join(others[:4])}{' ...' if len(others) > 4 else ''} left out)" if others else ""
    parts.append(f"measured: {measured}{of} {read.target.shape}{axes}{left}")
    parts.append(_tokens(read)["note"])
    return f"{type(read.module).__name__} was read as: {'; '.join(parts)}"


def _times(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _kind(call: ReadCall) -> str:
    return f"{call.kind}{'' if call.is_sure else '?'}, {'cross' if call.is_cross else 'self'}"


def _place(call: ReadCall) -> str:
    """The submodule, with N for the numbers of layers."""
    return _numbered(call.call.module) or "the module itself"


def _numbered(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _row(part: str, name: str, shape: tuple[int, ...], axes: Axes | None = None, /, **columns: object) -> dict:
    row = dict.fromkeys(COLUMNS) | {"part": part, "name": name, "shape": " ".join(map(str, shape))}
    if axes is not None:
        row |= {"token_axis": " ".join(map(str, axes.tokens)) or None, "sequence_axis": axes.batch}
    return row | columns


def _inputs(read: ReadModule) -> Iterator[dict]:
    masks = {part.partition(":")[2]: part for part in read.mask.split(", ")}
    for number, x in enumerate(read.reading.inputs):
        axes = Axes(read.example.axis(number), x.axes.tokens)
        mask = masks.get(x.name)
        counts = f"mask: true means {mask.partition(':')[0]}" if mask else "data" if x.is_touched else "not read"
        note = "" if x.is_touched or mask else "neither tokens nor numbers that reach attention, nor a mask of padding"
        yield _row("input", x.name, x.shape, axes, counts=counts, note=note)


def _attention(read: ReadModule) -> Iterator[dict]:
    live = read.reading.leading_to(read.target)
    for call in read.reading.calls:
        counts, note = "head", f"{call.call.function}; {_evidence(call)}"
        if call not in live:
            counts = "left out: not on the way to what is measured"
        elif call.twin is not None:
            counts = f"one with call {read.reading.by_key[call.twin].call.index}, which has the same P"
        columns = {"number": call.call.index, "heads": call.lead.heads, "kind": _kind(call), "counts": counts}
        yield _row("attention", call.call.module or "the module itself", call.shape, note=note, **columns)


def _evidence(call: ReadCall) -> str:
    size = f"rows sum to {call.row_sum:.3g}"
    if call.is_sure:
        return f"a change of one token was seen at {len(call.touched)} of {call.num_keys} keys; {size}"
    return f"no change of a token showed which axis it mixes; taken for attention by its softmax; {size}"


def _factors(read: ReadModule) -> Iterator[dict]:
    keyed = groupby(read.reading.factors, lambda factor: (factor.call.module, factor.call.function, factor.why))
    for (module, function, why), group in keyed:
        factors = list(group)
        columns = {"number": factors[0].call.index, "counts": f"frozen factor ({_times(len(factors), 'product')})"}
        yield _row("factor", module or "the module itself", factors[0].shape, note=f"{function}; {why}", **columns)


def _outputs(read: ReadModule, half: str) -> Iterator[dict]:
    for output in read.reading.outputs:
        is_target = output == read.target
        counts = f"measured{f' ({half})' if half else ''}" if is_target else "not measured"
        yield _row("output", output.name, output.shape, read.axes if is_target else output.axes, counts=counts)


def _tokens(read: ReadModule) -> dict:
    example = read.example
    num_tokens = [read.target.shape[axis] for axis in read.axes.tokens]
    whole = example.num_sequences * (num_tokens[0] if len(num_tokens) == 1 else 1)
    counted_BN, count = read.counted(example), None
    note = "one vector for each sequence" if not num_tokens else f"all {whole} tokens count"
    if counted_BN is not None:
        count, by = int(counted_BN.sum()), f", by {read.mask}" if read.mask else ""
        note = f"{count} of {whole} tokens count{by}"
    return _row("tokens", read.target.name, (example.num_sequences, *num_tokens), counts=count, note=note)
