"""Where a touch arrives: the axes along which two passes differ at few indices count tokens, or sequences.

Shapes: N query token, M key token, H head, R sequence or window of one; `lead` the axes of P in front of N.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.reading import Lead

HIDDEN = -5e3  # logits of hidden keys are lower: masks have -1e4 or less there
LEAK = 0.01  # of the largest change along an axis: smaller ones come through scales of norms
ROUNDING = 100  # roundings of a state's largest number below which two passes count as equal


def changed_numbers(new: Tensor, old: Tensor, leak: float = LEAK) -> Tensor:
    """Which numbers are touched, less leaks; none of those that are infinite in both."""
    change = (new - old).abs().nan_to_num()
    return change > leak * change.max() if change.numel() else change > 0


def touched_at(new: Tensor, old: Tensor, axis: int, leak: float = LEAK) -> list[int]:
    """Indices along an axis at which the tensors differ, less leaks."""
    if not new.numel() or new.shape != old.shape:
        return []
    change = _changes(new, old, axis)
    return (change > leak * change.max()).nonzero()[:, 0].cpu().tolist()


def _changes(new: Tensor, old: Tensor, axis: int) -> Tensor:
    """The largest change at each index along an axis."""
    return (new - old).abs().nan_to_num().movedim(axis, 0).reshape(new.shape[axis], -1).amax(1)


def most_touched(new: Tensor, old: Tensor) -> tuple[int, ...]:
    """The place of the number that differs most."""
    return tuple(int(at) for at in torch.unravel_index((new - old).abs().nan_to_num().argmax(), old.shape))


def touched_keys(new: Tensor, old: Tensor) -> list[int]:
    """The keys that are touched; all of them if the others are zero, as outputs of experts that leave a token out."""
    at, rows = touched_at(new, old, -2), old[changed_numbers(new, old).flatten(-2).any(-1)]
    others = set(rows.ne(0).any(-1).any(0).nonzero()[:, 0].tolist()) - set(at)
    return at if others or not at else [*range(old.shape[-2])]


def touched_in_windows(changed: Tensor) -> list[int]:
    """The keys that are touched in one of several windows that slide over the tokens, in each of which the touch stands
    at another place; none if keys are no such windows."""
    if changed.dim() < 3:
        return []
    windows = changed.any(-1).flatten(0, -2)
    windows = windows[windows.any(-1)]
    slides = len(windows) > 1 and bool((windows != windows[0]).any())
    each = [row.nonzero()[:, 0].tolist() for row in windows]
    return each[0] if slides and all(is_partly(at, windows.shape[-1]) for at in each) else []


def of_one_window(leads: Tensor, p: Tensor, p0: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Of the touched leading indices of P one: that of the touched token's own window, else that at which P changes
    most. tokens: the touched indices along axes of the state that the layer reads."""
    change = (p - p0).abs().flatten(-2).amax(-1).masked_fill(~leads, -torch.inf)
    for axis in range(leads.dim()):
        for (index,) in (at for at in tokens if len(at) == 1):
            if index < leads.shape[axis] and 1 < along(leads, axis).sum() < leads.shape[axis]:
                change.select(axis, index).add_(change.max() + 1)
    one = torch.zeros_like(leads).flatten()
    one[change.argmax()] = True
    return one.view_as(leads)


def in_blocks(leads: Tensor, of_blocks: Mapping[int, Sequence[int]]) -> Tensor:
    """The touched leading indices of P that are among these along each of these axes; if none is, these along each such
    axis, wherever the others are touched."""
    chosen, reached = torch.ones_like(leads), leads
    for axis, at in of_blocks.items():
        others = [index for index in range(leads.shape[axis]) if index not in at]
        chosen.movedim(axis, 0)[others] = False
        reached = reached.any(axis, keepdim=True)
    return leads & chosen if (leads & chosen).any() else reached & chosen


def changed_at(new: Tensor, old: Tensor, axis: int) -> list[int]:
    """Indices along an axis at which the tensors differ by more than rounding."""
    if not new.numel() or new.shape != old.shape:
        return []
    return beyond_rounding(_changes(new, old, axis), old).nonzero()[:, 0].cpu().tolist()


def beyond_rounding(change: Tensor, old: Tensor) -> Tensor:
    """Which changes of a state are more than rounding."""
    return change > ROUNDING * torch.finfo(old.dtype).eps * old.abs().nan_to_num().max()


def is_partly(at: Sequence[int], size: int) -> bool:
    """Whether the touch stands at few indices, as along an axis of tokens or sequences. Of features it may miss some by
    chance; a scan carries it from the last token but one to the last."""
    return 0 < len(at) < size and len(at) <= max(2, size // 2)


def is_spread(new: Tensor, old: Tensor) -> bool:
    """Whether the touch stands at few indices of one axis at most, as where something that is no attention has mixed
    all tokens; what is left is the axis of sequences."""
    touched = [touched_at(new, old, axis) for axis in range(new.dim())]
    return all(touched) and sum(is_partly(at, size) for at, size in zip(touched, new.shape, strict=True)) < 2


def compared_alike(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with the numbers of each leading index in units of their own size: heads of small values show the touch."""
    size = old.nan_to_num().abs().flatten(-2).amax(-1)[..., None, None]
    size = size.where(size > 0, 1)
    return new / size, old / size


def touched_in_part(q: Tensor, q0: Tensor) -> dict[int, list[int]]:
    """The touched indices along each leading axis that is touched in part; not where all others are zero."""
    new, old = compared_alike(q, q0)
    found = {}
    for axis, size in enumerate(q.shape[:-2]):
        at = touched_at(new, old, axis)
        others = [index for index in range(size) if index not in at]
        if is_partly(at, size) and q0.movedim(axis, 0)[others].any():
            found[axis] = at
    return found


def touched_leads(v: Tensor, v0: Tensor, p: Tensor, p0: Tensor) -> Tensor:
    """The leading indices of P where values or weights are touched. Where all values are zero, as of a pruned head,
    the touch is where it is at the other indices of the axis."""
    moved = (p - p0).abs().nan_to_num().flatten(-2).amax(-1)
    leads = leads_of(changed_numbers(*compared_alike(v, v0)), p) | (moved > LEAK * moved.max()) & (moved > 0)
    zeros = is_zero(v, v0, p)
    for axis in range(leads.dim()) if leads.dim() > 1 else ():
        if (along(leads, axis) | ~along(~zeros, axis)).all():
            leads = leads | leads.any(axis, keepdim=True) & zeros
    return leads


def is_zero(v: Tensor, v0: Tensor, p: Tensor) -> Tensor:
    """The leading indices of P whose values are all zero."""
    return ~leads_of((v != 0) | (v0 != 0), p)


def leads_of(changed: Tensor, p: Tensor) -> Tensor:
    """The leading indices of P whose values are touched."""
    leads, wanted = changed.flatten(-2).any(-1), p.shape[:-2]
    if leads.shape != wanted and leads.dim() and len(wanted):
        if wanted[-1] % leads.shape[-1] == 0:  # groups of heads share their values
            leads = leads.repeat_interleave(wanted[-1] // leads.shape[-1], -1)
        for axis, size in enumerate(wanted):  # one P for the values of several heads
            leads = leads.any(axis, keepdim=True) if size == 1 and leads.dim() == len(wanted) else leads
        leads = leads.expand(wanted)
    return leads


def moves_with(p: Tensor, p0: Tensor, leads: Tensor) -> bool:
    """Whether P changes where its values do, as it does if it depends on their tokens: at more than half of the touched
    leading indices, because a softmax that is nearly 1 somewhere hides a change. Weights of each token by itself change
    at one of the windows that hold it, and these are two or more."""
    moved = (p - p0).abs().flatten(-2).amax(-1)
    return (moved > 1e-6 * moved.max())[leads].double().mean().item() > 0.5


def paired_rows(p: Tensor, p0: Tensor, at: Sequence[int], leaky: Container[int] = ()) -> list[int]:
    """The rows of P that change with the touch, if weights depend on the tokens of their query and of their key: in
    these rows and in the columns of the touched keys they change, and nowhere else. Else none. leaky: keys that do not
    tell, as in `leaky_keys`."""
    untouched = [key for key in range(p.shape[-1]) if key not in at]
    others = [key for key in untouched if key not in leaky]
    for leak in (LEAK, LEAK / 1000):  # leaky slopes carry little of a change
        changed = changed_numbers(p, p0, leak)[None].flatten(0, -3).any(0)
        rows = changed[:, others].any(1).nonzero()[:, 0].tolist()
        columns = [query for query in range(p.shape[-2]) if query not in rows]
        is_cross = at and rows and columns and others and changed[columns][:, list(at)].any()
        if is_cross and is_partly(rows, p.shape[-2]):
            return rows
    return []


def leaky_keys(v: Tensor, v0: Tensor, at: Sequence[int]) -> list[int]:
    """Keys beside the touched ones that see a little of the touch, as the tokens around a convolution's do: P of their
    features may see more of it than their values. No key if most do, as behind a norm of all tokens."""
    for leak in (0.0, LEAK / 1000, LEAK / 10):
        keys = touched_at(v, v0, -2, leak)
        if len(set(keys) - set(at)) <= (v.shape[-2] - len(at)) / 2:
            return keys
    return []


def touched_pairs(new: Tensor, old: Tensor) -> list[list[int]]:
    """The touched rows and columns, of numbers of pairs of tokens, as distances are: they change in the row and in the
    column of the touched token, and nowhere else. [] for other numbers."""
    if new.dim() < 2:
        return []
    found = changed_numbers(new, old)[None].flatten(0, -3).any(0)
    rows, columns = ((found.double().mean(axis) > 0.5).nonzero()[:, 0].tolist() for axis in (1, 0))
    found[rows] = found[:, columns] = False
    are_few = all(is_partly(at, size) for at, size in zip((rows, columns), found.shape, strict=True))
    return [rows, columns] if are_few and not found.any() else []


def own_queries(scores: Tensor, scores0: Tensor, v: Tensor, v0: Tensor) -> Tensor | None:
    """Which leading indices of weights of one query are those of a touched query: its scores change at keys that are
    not touched. None if the values, (*lead, M, K), have other axes than the scores, (*lead, 1, M)."""
    keys = changed_numbers(v, v0).any(-1)
    if keys.shape != scores.shape[:-2] + scores.shape[-1:]:
        return None
    return (changed_numbers(scores, scores0).squeeze(-2) & ~keys).any(-1)


def of_all_heads(leads: Tensor, sequence: tuple[int, int]) -> Tensor:
    """The touched leading indices of weights of one query, as if all heads saw the touch, which may choose other keys.
    sequence: which of how many is touched. Of the other axes the longest is that of the queries."""
    sizes = dict(enumerate(leads.shape))
    inner = [
        axis
        for axis, size in sizes.items()
        if size != sequence[1] or along(leads, axis).nonzero()[:, 0].tolist() != [sequence[0]]
    ]
    for axis in sorted(inner, key=sizes.__getitem__)[:-1]:
        leads = leads.any(axis, keepdim=True).expand(leads.shape)
    return leads


def lead_of(
    changed: Tensor,
    zeros: Tensor,
    p: Tensor,
    leads: Tensor,
    at: Sequence[int],
    of_blocks: Container[int] | None,
    num_sequences: int,
) -> Lead:
    """The roles of the axes of P in front of its queries. zeros: where all values are zero. of_blocks: axes along which
    queries are touched in part; None: not known. num_sequences: of the batch."""
    shape, is_told, of_blocks = p.shape[:-2], of_blocks is not None, of_blocks or ()
    if not shape:
        return Lead(1)
    if not at or (len(at) == p.shape[-1] > 1 and len(shape) > 1):
        others = [axis for axis, size in enumerate(shape) if of_blocks and size > 1 and axis not in of_blocks]
        axes = tuple(others) or ((len(shape) - 1,) if len(shape) > 1 else ())
        return Lead(math.prod(shape[axis] for axis in axes), axes)
    whole = [axis for axis, size in enumerate(shape) if size > 1 and along(leads, axis).all() and axis not in of_blocks]
    if changed.dim() == p.dim() and not is_told:  # heads of shifted values are none
        whole = [axis for axis in whole if not _slides(changed, axis)]
    if len(shape) > 1:
        heads = math.prod(shape[axis] for axis in whole)
        if not whole and (flat := _flattened(along(leads, 0))) is not None:  # beside an axis of windows
            return flat
        if not leads[..., None].movedim(whole, [*range(len(whole))]).flatten(len(whole)).any(-1).all():
            raise ConfigError(
                f"P of shape {tuple(p.shape)}: the touch of one token reaches other windows in each head, so that "
                "nothing shows which of its axes counts heads; give fewer tokens, or one window"
            )
        return Lead(heads, tuple(whole))
    if len(at) == 1:
        one = leads
    else:
        one = max((of_groups(changed.any(-1)[..., index], p) for index in at), key=lambda of_key: int(of_key.sum()))
    # pruned heads, as many in every sequence, do not show the touch
    heads, rest = divmod(int((one & ~zeros).sum()) * shape[0], max(1, int((~zeros).sum())))
    is_spread_out = len(at) > 1 and heads * num_sequences != shape[0]  # perhaps over several windows
    if heads in (1, shape[0]) and not rest:
        return Lead(heads, (0,) if heads > 1 else ())
    rows = one.nonzero()[:, 0]
    may_be_heads = heads and not rest and shape[0] % heads == 0 and not is_spread_out
    if may_be_heads and (order := _order_of(rows, heads, shape[0])):
        return Lead(heads, (), order)
    raise ConfigError(
        f"P of shape {tuple(p.shape)}: the touch of one token reaches {len(rows)} of its {shape[0]} rows of heads and "
        "sequences, which are not the heads of one sequence; give the heads an axis of their own"
    )


def are_heads(new: Tensor, old: Tensor, axis: int) -> bool:
    """Whether each index of a leading axis of values holds numbers of its own and sees the touch at the same keys."""
    if old.shape[axis] < 2:
        return False
    keys, own = (x.movedim(axis, 0) for x in (changed_numbers(*compared_alike(new, old)).any(-1), old))
    return bool((keys == keys[:1]).all()) and not bool((own == own[:1]).all())


def _slides(changed: Tensor, axis: int) -> bool:
    """Whether the ends of a leading axis see the touch at keys of their own, as windows that slide over the tokens do
    and heads do not."""
    first, last = (changed.any(-1).movedim(axis, 0)[end] for end in (0, -1))
    in_both = first.any(-1) & last.any(-1)
    return bool(in_both.any()) and not bool((first & last)[in_both].any())


def _flattened(touched: Tensor) -> Lead | None:
    """The heads of one sequence, if these are the touched indices of an axis that holds both; None if they are not."""
    at, size = touched.nonzero()[:, 0], len(touched)
    may_be_heads = 1 < len(at) < size and size % len(at) == 0
    order = _order_of(at, len(at), size) if may_be_heads else ""
    return Lead(len(at), (), order) if order else None


def _order_of(at: Tensor, heads: int, size: int) -> str:
    """How an axis holds heads and sequences, if these indices are of the heads of one sequence; empty if they are not,
    as in `Lead`."""
    of_sequence = {"inside": at // heads, "outside": at % (size // heads)}
    return next((order for order, number in of_sequence.items() if (number == number[0]).all()), "")


def of_groups(leads: Tensor, p: Tensor) -> Tensor:
    """Leading indices of values, as those of P, whose groups of heads share them."""
    return leads.repeat_interleave(p.shape[-3] // leads.shape[-1], -1)


def axes_that_share(v: Tensor, p: Tensor) -> list[int]:
    """The leading axes of P along which all values are the same tensor."""
    missing = p.dim() - v.dim()
    return [
        axis
        for axis in range(p.dim() - 2)
        if p.shape[axis] > 1 and (axis < missing or v.shape[axis - missing] == 1 or v.stride(axis - missing) == 0)
    ]


def along(leads: Tensor, axis: int) -> Tensor:
    """Which indices of one axis are touched anywhere."""
    return leads.movedim(axis, 0).reshape(leads.shape[axis], -1).any(1)


def is_flat(p: Tensor) -> bool:
    """Whether each query gives the same weight to all keys that it sees, as fresh heads may."""
    return bool(((p == 0) | (p == p.amax(-1, keepdim=True))).all())


def are_rearranged(p: Tensor, other: Tensor) -> bool:
    """Whether two P hold the same numbers in another order."""
    return p.numel() == other.numel() and not is_flat(p) and torch.equal(*(x.flatten().sort()[0] for x in (p, other)))


def reads_other_tokens(
    at: Sequence[int], queries: list[int] | None, p: Tensor, inputs: tuple[set[int], set[int]]
) -> bool | None:
    """Whether queries and keys are other tokens; None if the touch does not tell. inputs: of which both are tokens."""
    if not at or queries is None:
        return None if p.shape[-1] == p.shape[-2] or not at else True
    if all(inputs):
        return inputs[0].isdisjoint(inputs[1])
    # queries that are not touched are no tokens of an input
    return not any(set(at) & {index + offset for index in queries} for offset in {0, p.shape[-1] - p.shape[-2]})


def hidden_keys(p_RHNM: Tensor, logits_RHNM: Tensor | None, is_cross: bool | None) -> Tensor:
    """Keys to which no other query of any head gives weight, (R, M); rows of queries that see no key do not count.

    A padded token may see itself. In causal attention no later query may see the last token either, so there its own
    query counts; also of a mask that is causal at its end alone, where each sequence has one such token.
    """
    return hidden_in(*seen_keys(p_RHNM, logits_RHNM, is_cross))


def seen_keys(p_RHNM: Tensor, logits_RHNM: Tensor | None, is_cross: bool | None) -> tuple[Tensor, Tensor]:
    """The keys to which another query than their own gives weight, if some mask hides no later ones, and those to which
    any does; (R, M)."""
    seen = p_RHNM != 0
    if logits_RHNM is not None and logits_RHNM.shape == p_RHNM.shape:
        seen &= logits_RHNM.amax(-1, keepdim=True) > HIDDEN  # other queries see nothing
    seen_RNM = seen.any(1)
    num_queries, num_keys = seen_RNM.shape[1:]
    if is_cross or num_queries != num_keys or not seen_RNM.triu(1).any():
        return seen_RNM.any(1), seen_RNM.any(1)
    own_NM = torch.eye(num_keys, dtype=torch.bool, device=seen.device)
    return (seen_RNM & ~own_NM).any(1), seen_RNM.any(1)


def hidden_in(by_others_RM: Tensor, by_any_RM: Tensor) -> Tensor:
    """`hidden_keys` of what `seen_keys` returned, of all sequences together."""
    are_last = bool(((by_any_RM & ~by_others_RM).sum(1) == 1).all())
    return ~torch.where(by_others_RM.any(1, keepdim=True) & (not are_last), by_others_RM, by_any_RM)


def put_back(
    result: Tensor,
    old: Tensor,
    back: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    leads: Tensor,
    row: int,
    scale: float,
) -> None:
    """Give an attention call the result of the first pass, with a change at this query of the touched sequence. back:
    how P v, of this shape, becomes the result. scale: of the change, in standard deviations."""
    if not leads.any():
        return
    mark = torch.zeros(shape, dtype=result.dtype, device=result.device)
    noise = torch.rand(shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    mark[..., row, :] = leads[..., None].to(mark) * noise.to(mark)
    deviation = old.std().nan_to_num(1.0).item() or 1.0
    result.copy_(old + scale * deviation * back(mark).reshape(result.shape))
