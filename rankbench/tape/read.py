"""Reading a network by touch: which of its products are attention, and which axes hold tokens.

The module runs on one small batch, and again after one number of each input was changed a little. At a product of two
activations the change stands at few indices of the axes that count tokens and sequences, and everywhere along all
others. A product whose summed axis is such an axis of tokens is attention; any other is a frozen factor. The result of
attention is then put back to that of the first pass, with a new change at the token of the query, so that the change
stays at one token at any depth. Names, sizes and libraries play no part.

Another pass, without a change, must give the same numbers as the first: a module that differs from call to call cannot
be measured. In one more the change spreads as the network spreads it, which tells the axis of sequences.

Shapes: N query token, M key token, K head width; `lead` the axes of P in front of N.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import name_of_module, named_tensors, tensors_in
from rankbench.tape.crossing import told_apart
from rankbench.tape.grouping import check_groups
from rankbench.tape.holding import changed_though_held
from rankbench.tape.joining import joined
from rankbench.tape.marks import Way, cached, without_tokens
from rankbench.tape.mixing import axes_of, mixing
from rankbench.tape.plain import Changed, Plain, Size
from rankbench.tape.probe import Touched
from rankbench.tape.reading import NO_TOKENS, OF_ITSELF, UNREACHED, Input, Output, ReadCall, Reading, State
from rankbench.tape.recording import OUTSIDE
from rankbench.tape.tags import Role, Site, Visit
from rankbench.tape.touch import changed_at
from rankbench.tape.touching import Touching

Result = tuple[str, Tensor]  # by its name

TOUCH = 0.03  # standard deviations by which a number is changed
REPEATED = 8  # roundings of a call's numbers by which two equal passes may differ


@torch.no_grad()
def read(
    module: Callable, args: tuple = (), kwargs: Mapping[str, Any] = MappingProxyType({}), submodule: str | None = None
) -> Reading:
    """Read a module on these arguments, of two or more sequences if possible.

    Four passes show heads and tokens. More of them touch whole tokens, or others where the touch does not arrive, and
    show what joins tokens where these get fewer, which of several inputs keys are made of, and what mixes tokens that
    the touch misses. submodule: one whose result is wanted as an output, too. ConfigError if the module differs from
    call to call.
    """
    kwargs = dict(kwargs)
    plain, again = Plain(module, submodule), Plain(module, submodule)
    plain.passed(args, kwargs)
    again.passed(args, kwargs)
    if (
        _differ(plain.output, again.output)
        or [*plain.states] != [*again.states]
        or any(_differ(state.left, again.states[run].left) for run, state in plain.states.items())
    ):
        _refuse_change(module, plain.sizes, again.sizes)
    del again
    touched, spreading = _touch(plain)
    touched.calls = told_apart(touched)
    _check_outside(touched)
    _check_alike(module, touched)
    _check_heads(module, touched)
    _check_blocks(touched)
    _check_loops(touched)
    _check_folded_heads(touched)
    _check_parts_of_keys(touched)
    names = [_name(path) for path, x in tree_flatten_with_path((args, kwargs))[0] if isinstance(x, Tensor)]
    inputs = tuple(
        Input(name, tuple(x.shape), touched.axes_of_input(number), number in touched.data)
        for number, (name, x) in enumerate(zip(names, tensors_in([args, kwargs]), strict=True))
    )
    states = _states(touched)
    results = zip(_results(plain), _results(touched), _results(spreading), strict=False)
    num_returned = len(named_tensors(plain.output))
    outputs = [_output(*of_passes, touched, number >= num_returned) for number, of_passes in enumerate(results)]
    return Reading(
        touched.roles, _named_alike(module, touched.calls), tuple(touched.factors), inputs, tuple(outputs), states,
        tuple(plain.uncovered), mixing(touched, joined(touched) + changed_though_held(touched)),
    )  # fmt: skip


def _touch(plain: Plain) -> tuple[Touched, Plain]:
    """The touched pass, and a pass in which the touch spreads as the network spreads it. Where it does not arrive at an
    attention call, the touched token may be padding that the module leaves out: then one at the other end is touched.
    At last all numbers of a token are."""
    ways = [Way(TOUCH), Way(TOUCH / 100), Way(0.0)]  # 0: what the tags say
    inputs = tensors_in([*plain.arguments])
    best, most = _beside_cached(plain, inputs), -1
    if best is not None:
        most = sum(bool(call.touched) for call in best[0].calls)
        ways = ways if most < len(best[0].calls) else []
    elif left_out := without_tokens(inputs):
        ways.insert(0, Way(TOUCH, left_out=left_out))
    while ways:
        way = ways.pop(0)
        try:
            passes = _passes(plain, way)
        except Changed:
            if best is not None:
                break
            continue
        touched = passes[0]
        if touched.unseen and not way.exchanged:
            ways[:0] = [way._replace(exchanged=touched.unseen), way._replace(exchanged=frozenset({-1}))]  # as before
            continue
        arrived = sum(bool(call.touched) for call in touched.calls)
        if arrived > most:
            best, most = passes, arrived
        is_clear = arrived == len(touched.calls) and all(factor.why != OF_ITSELF for factor in touched.factors)
        if is_clear or (way.early and (most or way.exchanged)) or not way.scale:
            break
        if not (way.early or way.left_out):
            ways.insert(0, way._replace(early=True))
            if not arrived and not way.exchanged and inputs:  # pixels, one-hot floats, numbers that are rounded
                ways.insert(1, Way(way.scale, frozenset(range(len(inputs)))))
    assert best is not None  # without a touch nothing changes
    touched = best[0]
    check_groups(touched)
    if not touched.way.scale or not any(mark.has_features and len(mark.shape) == 3 for mark in touched.marks.values()):
        return best
    try:  # the touch of one number misses what other numbers do, and may stand at one feature as at one token
        passes = _passes(plain, touched.way._replace(rows=True))
    except (Changed, ConfigError) as error:
        if isinstance(error, ConfigError) and any(map(touched.may_be_of_features, touched.calls)):
            raise
        return best
    keys, of_rows = ({call.key for call in each.calls} for each in (touched, passes[0]))
    of_tokens = {call.key for call in touched.calls if not touched.may_be_of_features(call)}
    has_features = of_rows and of_tokens <= of_rows <= keys  # along the last axis
    return passes if has_features and not _counts_tokens_last(touched, passes[0]) else best


def _passes(plain: Plain, way: Way) -> tuple[Touched, Plain]:
    """A touched pass, and one in which the touch spreads."""
    spreading = Touching(plain, way)
    if way.scale:
        spreading.passed(*plain.arguments)
    touched = Touched(plain, way, _sequences(spreading) if way.scale else {})
    touched.passed(*plain.arguments)
    return touched, spreading if way.scale else plain


def _beside_cached(plain: Plain, inputs: Sequence[Tensor]) -> tuple[Touched, Plain] | None:
    """Both with keys and values of earlier tokens left alone; None if attention reads no such inputs."""
    if not (held := cached(inputs)):
        return None
    try:
        passes = _passes(plain, Way(TOUCH, left_out=without_tokens(inputs, held)))
    except (Changed, ConfigError):
        return None
    return passes if passes[0].reads_cached() else None


def _counts_tokens_last(of_number: Touched, of_row: Touched) -> bool:
    """Whether the last of three axes counts tokens, behind their channels: the touch of a row along it enters a
    submodule at all tokens, and attention sees that of one number where it stands along this axis."""
    is_mixed = bool(of_row.begun_anew.keys() - of_number.begun_anew.keys())
    return is_mixed and all(map(of_number.may_be_of_features, of_number.calls))


def _check_outside(touched: Touched) -> None:
    """ConfigError for a tensor that no recorded call made and that differs with the inputs."""
    for (call, x), (_, y) in zip(touched.base.outside, touched.outside, strict=False):
        if x.shape == y.shape and x.dtype == y.dtype and not torch.equal(x, y):
            raise ConfigError(
                f"{call}: reads {OUTSIDE}, and it differs with the inputs, so what mixes tokens there is unseen; use "
                "torch's functions"
            )


def _check_alike(module: Callable, touched: Touched) -> None:
    """ConfigError if a product is attention in one submodule and not in another of its class that makes as many: as
    their code is the same, one of the two is misread."""
    code_of, attention = _codes(module), dict[tuple, str]()
    made = Counter((name, function) for name, function, _ in touched.roles)  # fewer where queries are weights
    roles = sorted(touched.roles.items(), key=lambda item: item[1].role)  # attention first
    for key, (role, _) in roles:
        name, function, _ = key
        product = *code_of(key), made[name, function]
        if role == Role.ATTENTION:
            attention.setdefault(product, name)
        elif product in attention:
            raise ConfigError(
                f"{function} in {attention[product]} and in {name}: the same code, and by the touch attention in the "
                "first alone, so that one of the two is misread; give more tokens, and report this network if that "
                "does not help"
            )


def _check_heads(module: Callable, touched: Touched) -> None:
    """ConfigError if calls of the same code and the same shape of P have other numbers of heads: a touch that rounding
    swallows in some heads shows too few."""
    code_of, first = _codes(module), dict[tuple, ReadCall]()
    for call in touched.calls:
        other = first.setdefault((code_of(call.key), call.shape, call.touched_queries is None), call)
        if other.lead.heads != call.lead.heads:
            raise ConfigError(
                f"{other.call} and {call.call}: the same code, and by the touch {other.lead.heads} and "
                f"{call.lead.heads} heads in P of shape {call.shape}, so that one of the two is misread; measure in "
                "float32, or in float64 if it is that already, and report this network if that does not help"
            )


def _codes(module: Callable) -> Callable[[Site], tuple]:
    """A function that names the code of a product: the same in every layer."""
    submodules = dict(module.named_modules()) if isinstance(module, nn.Module) else {}
    return lambda key: (type(submodules.get(key.module)), re.sub(r"\d+", "#", key.module), key.function, key.time)


def _named_alike(module: Callable, calls: Sequence[ReadCall]) -> tuple[ReadCall, ...]:
    """The calls. Where no input reaches the queries, as those that are learned for a first layer, they are not seen
    among the keys: such a call is named as that of the same code which reads the same keys and its own queries."""
    code_of = _codes(module)
    selves = [(code_of(call.key), call.shape, {*call.touched}) for call in calls if call.is_cross is False]

    def reads_itself(call: ReadCall) -> bool:
        code = code_of(call.key), call.shape
        return call.touched_queries == () and any(x[:2] == code and {*call.touched} < x[2] for x in selves)

    return tuple(replace(call, is_cross=False) if reads_itself(call) else call for call in calls)


def _check_blocks(touched: Touched) -> None:
    """ConfigError for attention whose scores no product made in blocks of tokens, or sequence by sequence, written as a
    loop: one of them shows the touch; and for two equal sums in one submodule, of which one is none over tokens."""
    for factor, call in itertools.product(touched.factors, touched.calls):
        if factor.call[1:] != call.call[1:] or factor.shape[:-2] != call.shape[:-2]:
            continue
        if factor.why == UNREACHED:
            raise ConfigError(
                f"{factor.call} and {call.call}: attention in blocks of tokens, or sequence by sequence, of which the "
                "touch reaches one and the others would be frozen factors; give no more tokens than a block holds, or "
                "all sequences to one call"
            )
        if factor.why == NO_TOKENS and factor.shape == call.shape:
            raise ConfigError(
                f"{factor.call} and {call.call}: sums of the same shape in one submodule, and by the touch attention "
                "in the second alone, so that one of the two may be misread; put each layer into a submodule"
            )


def _check_loops(touched: Touched) -> None:
    """ConfigError for attention of one part of the queries or sequences after another, written as a loop: the touch
    reaches one of the calls, and heads would count once for each."""
    for one, other in itertools.permutations(touched.calls, 2):
        where = {(call.call.function, call.call.module, call.depth, len(call.shape)) for call in (one, other)}
        reached, left_out = (
            touched.own_query.get(call.key, call.touched) if call.touched_queries is None else call.touched_queries
            for call in (one, other)
        )
        are_own = one.num_queries == one.num_keys and other.num_queries == other.num_keys
        # the same keys, or those of other sequences or segments
        reads_alike = other.touched or one.shape[-2:] == other.shape[-2:] or are_own
        # values of another state beside it, with the same weights, as those of a text's layout
        are_twins = one.key == other.twin or other.key == one.twin
        if reached and not left_out and reads_alike and len(where) == 1 and not are_twins:
            raise ConfigError(
                f"{one.call} and {other.call}: attention of some queries or sequences after others, written as a loop, "
                "whose heads would count once for each; give all of them to one call"
            )


def _check_folded_heads(touched: Touched) -> None:
    """ConfigError for heads that stand among the queries of a call, or among sequences if nothing shows how many."""
    for call in touched.calls:
        number, queries = call.num_queries // call.num_keys, call.touched_queries or ()
        if number > 1 == len(call.touched) and len(queries) == number and call.num_queries % call.num_keys == 0:
            steps = {after - before for before, after in itertools.pairwise(queries)}
            if steps in ({1}, {call.num_keys}):
                raise ConfigError(
                    f"{call.call}: P of shape {call.shape} has {number} queries for each token, as where heads that "
                    "share keys are folded into the queries; give heads an axis of their own"
                )
    for where, why in touched.unsplit.items():
        raise ConfigError(f"{where}: one axis of P holds sequences and heads: {why}; give heads an axis of their own")


def _check_parts_of_keys(touched: Touched) -> None:
    """ConfigError for rows of P that are cut into blocks of keys, each with a call of its own."""
    parts: dict[tuple, list[ReadCall]] = {}
    for call in touched.calls:
        if call.kind == "softmax" and call.row_sum < 0.99:
            place = call.call.module, call.call.function, call.depth, call.shape[:-1]
            parts.setdefault(place, []).append(call)
    for calls in parts.values():
        if len(calls) > 1 and abs(sum(call.row_sum for call in calls) - 1) < 0.01:
            raise ConfigError(
                f"{calls[0].call} and {calls[1].call}: one softmax in blocks of keys, written as a loop, whose heads "
                "would count once for each; give all of them to one call"
            )


def _sequences(spreading: Touching) -> dict[int, int]:
    """The axis of each input that counts sequences, where all results in which its touch is found agree; else where all
    states do. These may be in front of attention, where a token stands alone as its sequence does."""
    spread_states = spreading.states
    states = [
        (state.left, spread_states[run].left) for run, state in spreading.base.states.items() if run in spread_states
    ]
    known: dict[int, int] = {}
    results = zip(_results(spreading.base), _results(spreading), strict=False)
    for pairs in (states, [(old, new) for (_, old), (_, new) in results]):
        alike = [(new, old) for old, new in pairs if new.shape == old.shape]
        for number, mark in spreading.marks.items():
            found = {mark.sequences_in(*each) for each in alike} - {None}
            if len(found) == 1 and (axis := found.pop()) is not None:
                known[number] = axis
    return known


def _differ(x: Any, y: Any) -> bool:
    """Whether what two passes returned differs by more than rounding."""
    pairs = [(first, second) for (_, first), (_, second) in zip(named_tensors(x), named_tensors(y), strict=False)]
    return any(
        a.shape != b.shape
        or bool(((a - b).abs() > REPEATED * torch.finfo(a.dtype).eps * a.abs().nan_to_num().max()).any())
        for a, b in pairs
        if a.numel()
    )


def _refuse_change(module: Callable, sizes: list[Size], again: list[Size]) -> None:
    """ConfigError that names the first call that differs between two passes."""
    shorter, longer = sorted((sizes, again), key=len)
    first = longer[len(shorter)].call if len(longer) > len(shorter) else None
    for one, other in zip(sizes, again, strict=False):
        rounding = REPEATED * one.eps * one.sum_of_magnitudes
        changes = one.sum - other.sum, one.sum_of_magnitudes - other.sum_of_magnitudes
        if one.call[1:] != other.call[1:] or any(bool(change.abs() > rounding) for change in changes):
            first = one.call
            break
    raise ConfigError(
        f"{name_of_module(module)}: {first or 'it'} gives other numbers when the module runs again on the same inputs, "
        "so no two passes measure one network; take out what differs from call to call (random numbers, a counter, a "
        "cache)"
    )


def _name(path: Sequence[Any]) -> str:
    """An argument by its keyword, or by its place: `inputs` for the first, `inputs[1]` for the second."""
    kind, *rest = path
    number = getattr(kind, "idx", 0)
    if number == 1:
        first, *rest = rest
        return f"{first.key}{keystr(tuple(rest))}"
    return "inputs" if len(rest) == 1 and rest[0].idx == 0 else f"inputs{keystr(tuple(rest))}"


def _states(touched: Touched) -> dict[Visit, State]:
    """What is known of the submodules that keep the shape of their input."""
    states, touched_states = {}, touched.states
    for run, ((entered, *_), left, _) in touched.base.states.items():
        other = touched_states.get(run)
        axes = None
        if other is not None and other.left.shape == left.shape:
            axes = axes_of(touched, other.left, left, run)
        states[run] = State(tuple(left.shape), axes, _digest(entered), _digest(left), other.passed if other else 0)
    return states


def _digest(x: Tensor) -> tuple:
    """Equal for equal tensors."""
    numbers = x.double().nan_to_num()
    return tuple(x.shape), numbers.sum().item(), numbers.square().sum().item(), numbers.flatten()[-1:].tolist()[0]


def _results(of_pass: Plain) -> list[Result]:
    """What a pass returned, and last the result of the submodule that is wanted, if one is."""
    of_submodule = [] if of_pass.wanted_result is None else [(str(of_pass.submodule), of_pass.wanted_result)]
    return named_tensors(of_pass.output) + of_submodule


def _output(old: Result, new: Result, spread: Result, touched: Touched, is_submodule: bool) -> Output:
    (name, before), (_, after), (_, reached) = old, new, spread
    axes = axes_of(touched, after, before) if after.shape == before.shape else None
    is_apart = axes is None or axes.batch is None or _is_apart(before, reached, axes.batch, touched)
    return Output(name, tuple(before.shape), axes, touched.tag(after).passed, is_submodule, is_apart)


def _is_apart(before: Tensor, reached: Tensor, batch: int, touched: Touched) -> bool:
    """Whether the touch of one sequence reaches no other, where all inputs have an axis of them."""
    number, size = touched.sequence
    marks = touched.marks
    axes = {index: touched.axes_of_input(index).batch for index in marks}
    if before.shape[batch] != size or any(axis is None or marks[at].shape[axis] != size for at, axis in axes.items()):
        return True  # an input that all sequences share, say
    return not set(changed_at(reached, before, batch)) - {number}
