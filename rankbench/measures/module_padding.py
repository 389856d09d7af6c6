"""Which tokens of a padded batch are present, as the network itself shows: a key that no query sees is absent.

Shapes: B sequence, N token, M key token.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.model.modules import Example
from rankbench.tape import AttentionCall
from rankbench.tape.reading import ReadCall, Reading
from rankbench.tape.sums import tapped
from rankbench.tape.tags import Site
from rankbench.tape.touch import hidden_in, seen_keys

log = logging.getLogger(__name__)

SEQUENCES_AT_A_TIME = 8
# Names in wide use, and what true means; weights of attention, where they hide tokens, decide first.
KNOWN_MASKS = dict.fromkeys(("src_key_padding_mask", "key_padding_mask", "padding_mask"), "absent")
KNOWN_MASKS |= {"attention_mask": "present"}


def with_lengths(
    module: nn.Module, example: Example, few: Example, reading: Reading, heads: tuple[ReadCall, ...], asked: str | None
) -> tuple[Example, str]:
    """The example with the lengths of its padded sequences, and in words what says so.

    A key is absent if no query of any head gives it weight. All self-attention over the tokens of an input must agree,
    and absent keys must be the last: top-k attention and underflow can hide others. asked: present:<name> or
    absent:<name>, a mask that the user names.
    """
    main = heads[-1].queries_of
    example = replace(example, main_input=main)
    if example.lengths_B is not None:
        return example, "lengths given with the inputs"
    names = [x.name for x in reading.inputs if len(x.shape) == 2 and not x.is_touched]
    if asked is not None:
        kind, _, name = asked.partition(":")
        if kind not in ("present", "absent") or name not in names:
            raise ConfigError(
                f"mask={asked}: give present:<name> or absent:<name>, which says what true means; inputs of shape "
                f"(sequences, tokens) are {', '.join(names) or 'none'}"
            )
        masked = heads[-1].keys_of if main is None else main
        return _by_mask(example, reading, asked, masked), asked
    # the keys of others are those of a window
    heads = tuple(call for call in heads if call.hidden_RM is not None and len(call.hidden_RM) == few.num_sequences)
    numbers = {call.keys_of for call in heads}
    hidden = {number: hidden_BM for number in numbers if (hidden_BM := _hidden(heads, number, few)) is not None}
    said = []
    for number, hidden_BM in hidden.items():
        if (mask := _explaining(hidden_BM, few, reading)) is not None:
            example = _by_mask(example, reading, mask, number, hidden_BM.shape[1])
            said.append(mask)
    unexplained = {number for number in hidden if number not in example.padding}
    if unexplained:
        example = _by_weights(module, example, reading, heads, unexplained)
        said.append("keys to which no query gives weight")
    if main not in hidden:
        known = [f"{KNOWN_MASKS[name]}:{name}" for name in names if name in KNOWN_MASKS]
        if len(known) == 1 and sum(x.is_touched for x in reading.inputs) <= 1 and main is not None:
            example = _by_mask(example, reading, known[0], main)
            said += known
        elif not example.padding:
            _warn_of_padding(module, example)
    return example, ", ".join(dict.fromkeys(said))


def _hidden(heads: tuple[ReadCall, ...], number: int | None, few: Example) -> Tensor | None:
    """The keys of an input's tokens that are absent, (B, M) bool; None if all are present, or the calls disagree."""
    calls = [call for call in heads if call.keys_of == number and call.kind in ("softmax", "signed")]
    calls = [call for call in calls if not call.is_cross] or calls
    each = [call.hidden_RM for call in calls if call.hidden_RM is not None]
    if not each or not all(torch.equal(x, each[0]) for x in each) or not each[0].any():
        return None
    hidden_BM = each[0]
    if (hidden_BM[:, :-1] & ~hidden_BM[:, 1:]).any():
        if not (hidden_BM[:, 1:] & ~hidden_BM[:, :-1]).any() or _is_in_a_mask(hidden_BM, few):
            raise ConfigError(
                f"{calls[0].call}: padding comes before a token; pad sequences at their end, behind tokens that the "
                "network adds"
            )
        return None
    return hidden_BM


def _is_in_a_mask(hidden_BM: Tensor, few: Example) -> bool:
    """Whether an input says of each key whether it is hidden, behind or in front of those that a network adds."""
    for x in few.tensors:
        if x.dim() == 2 and len(x) == len(hidden_BM) and not x.is_floating_point():
            for hides in (x == 0, x != 0):
                for before in range(hidden_BM.shape[1] - x.shape[1] + 1):
                    added = before, hidden_BM.shape[1] - x.shape[1] - before
                    if torch.equal(nn.functional.pad(hides, added), hidden_BM):
                        return True
    return False


def _explaining(hidden_BM: Tensor, few: Example, reading: Reading) -> str | None:
    """The input that says of each key whether it is hidden, as present:<name> or absent:<name>."""
    for read_input, x in zip(reading.inputs, few.tensors, strict=True):
        if read_input.is_touched or x.dim() != 2 or len(x) != len(hidden_BM) or x.shape[1] > hidden_BM.shape[1]:
            continue
        tail_BM = hidden_BM[:, hidden_BM.shape[1] - x.shape[1] :]
        for kind, hides in (("present", x == 0), ("absent", x != 0)):
            if torch.equal(tail_BM, hides):
                return f"{kind}:{read_input.name}"
    return None


def _by_mask(example: Example, reading: Reading, mask: str, number: int | None, width: int | None = None) -> Example:
    """The example with lengths of an input's tokens from a mask; out of `width`, if tokens come before them."""
    kind, _, name = mask.partition(":")
    x = example.tensors[[x.name for x in reading.inputs].index(name)]
    present_BN = (x != 0) if kind == "present" else (x == 0)
    more = 0 if width is None else width - x.shape[1]
    return _padded(example, number, torch.nn.functional.pad(present_BN, (more, 0), value=True), name)


def _padded(example: Example, number: int | None, present_BN: Tensor, name: str) -> Example:
    if (present_BN[:, 1:] & ~present_BN[:, :-1]).any():
        raise ConfigError(f"{name}: padding comes before a token; pad sequences at their end")
    if present_BN.all():
        return example
    if len(present_BN) != example.num_sequences:
        raise ConfigError(
            f"{name}: shows the padding of {len(present_BN)} sequences out of {example.num_sequences}, so that nothing "
            "shows which axis of the inputs counts them; give sequences of one length, without padding"
        )
    padding = dict(example.padding) | {number: (present_BN.sum(-1), present_BN.shape[1])}
    return replace(example, padding=padding)


def _by_weights(
    module: nn.Module, example: Example, reading: Reading, heads: tuple[ReadCall, ...], numbers: set[int | None]
) -> Example:
    """The example with lengths of these inputs' tokens from the weights of attention on every sequence."""
    seen: dict[int | None, list[tuple[Tensor, Tensor]]] = {number: [] for number in numbers}
    wanted = []
    for number in numbers:
        calls = [call for call in heads if call.keys_of == number]
        wanted.append(next((call for call in calls if not call.is_cross), calls[0]))
    for chunk in example.split(SEQUENCES_AT_A_TIME):

        def watch(call: AttentionCall) -> None:
            logits = None if call.logits is None else call.logits()
            of = reading.by_key[call.key]
            seen[of.keys_of].append(seen_keys(call.weights, logits, of.is_cross))

        tap_calls(module, reading, tuple(wanted), chunk, watch)
    for number, parts in seen.items():
        hidden_BM = hidden_in(*map(torch.cat, zip(*parts, strict=True)))
        example = _padded(example, number, ~hidden_BM, "attention")
    return example


def _warn_of_padding(module: nn.Module, example: Example) -> None:
    """Warn if sequences of tokens end in different numbers of one token, which nothing says to be padding."""
    ids_BN = example.tensors[0]
    if ids_BN.is_floating_point() or ids_BN.dim() != 2 or example.axis(0) != 0 or ids_BN.dtype == torch.bool:
        return
    runs_B, last_B = run_at_the_end(ids_BN), ids_BN[:, -1]
    for token in last_B.unique():
        runs = runs_B[last_B == token]
        at_ends_alone = int(runs.sum()) == int((ids_BN == token).sum())
        if at_ends_alone and runs.sum() > 2 and (len(runs) < len(runs_B) or runs.unique().numel() > 1):
            log.warning(
                "%s: some sequences end in several tokens %d, which count like all others; if they are padding, give a "
                "mask with the inputs, and mask=present:<its name> or mask=absent:<its name>",
                type(module).__name__,
                token.item(),
            )
            return


def run_at_the_end(ids_BN: Tensor) -> Tensor:
    """How many tokens at the end of each sequence are alike, (B,)."""
    return (ids_BN == ids_BN[:, -1:]).flip(1).long().cumprod(1).sum(1)


def _for_each_head(call: AttentionCall) -> Tensor:
    """The values, where an axis of heads shares them once for each."""
    lead, values = call.weights.shape[:-2], call.values
    if values.dim() == len(lead) + 2 and all(
        size in (1, wanted) for size, wanted in zip(values.shape, lead, strict=False)
    ):
        return values.expand(*lead, -1, -1)
    return values


def tap_calls(
    module: nn.Module,
    reading: Reading,
    heads: tuple[ReadCall, ...],
    chunk: Example,
    watch: Callable[[AttentionCall], None],
) -> None:
    """`ReadModule.tap`."""
    wanted = {call.key: call for call in heads}
    parts = {key: [key] for key in wanted}
    for call in reading.calls:
        if call.twin in parts:
            parts[call.twin].append(call.key)
    waiting: dict[Site, AttentionCall] = {}

    def see(call: AttentionCall) -> None:
        read_call = reading.by_key[call.key]
        key = read_call.twin or call.key
        if key not in wanted:
            return
        split, weights, first = wanted[key].lead.split, wanted[key].lead.split(call.weights), waiting.pop(key, None)
        values = split(_for_each_head(call), len(weights))
        if first is None:
            logits = None if (of_call := call.logits) is None else lambda: split(of_call())
            whole = call._replace(key=key, weights=weights, values=values, logits=logits)
        else:
            whole = first._replace(values=torch.cat([first.values, values], -1))
        if call.key == parts[key][-1]:
            watch(whole)
        else:
            waiting[key] = whole

    tapped(module, see, chunk.args, chunk.kwargs, reading)
