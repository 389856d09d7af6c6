"""Ways to write a network again, so that it computes the same and its tables must be the same.

    python -m rewrites                 try all of them on all networks, print the differences, and write the table in
                                       docs/NETWORKS.md
    python -m rewrites BertModel ...   the same for these networks alone

Most rewrites leave the network's source alone: a TorchFunctionMode replaces one call by others of equal result. The
outputs must agree to 1e-12, so that a wrong rewrite is not taken for a wrong table.

Shapes: B sequence, N query token, M key token, D width, H head, K head width.
"""

import inspect
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from exported import Exported
from networks_of_others import LENGTHS, LETTERS, NETWORKS, B, Inputs, N, Network, SequenceFirst, drawn, within
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from rankbench import analyze
from rankbench.config.keys import ConfigError
from rankbench.measures import rounding

ANALYSES = ("residual", "spectrum", "attention")
SAME_OUTPUT = 1e-12
SAME_VALUE = 1e-9
# The library's casts round to float32, an error of 6e-8, which norms and ratios of small matrices magnify.
SAME_OUTPUT_IN_FLOAT32, SAME_VALUE_IN_FLOAT32 = 1e-5, 1e-4

# Left out of the comparison: names, which a rewrite may change; and what is decided by random rounding or by random
# shuffles, whose draws depend on the number and the order of the calls.
NAMES = ["run", "model", "submodule", "frozen", "measured", "weights_sd"]  # weights_sd: of the weights as written
RANDOM = ["noise_floor", "relative_noise_floor", "below_floor", "attention_relative_noise_floor"]
RANDOM += ["attention_below_floor", "distance_noise_floor", "uniform_below_floor", "identity_below_floor"]
RANDOM += ["error_below_floor", "remainder", "shuffled_over_law"]
MAIN = ["num_paths", "num_sequences", "relative_residual", "mass", "attention_entropy"]  # shown first where they differ
ROWS = ["weights", "variant", "view", "layer", "sublayer", "head", "path_length"]

EQUAL, REFUSED, DIFFERENT = "=", "r", "≠"
TRACEBACK = "traceback"  # is no refusal: not even two of them agree


@dataclass(frozen=True)
class Written:
    """A network in one form: its module and arguments, and how to bring its result to the original form's.

    has_layers: whether it has submodules, which residual.csv needs. alone: the arguments of each sequence by itself;
    their tables are joined. by_position: whether arguments are given without their names. output, value: how closely
    results and tables must agree.
    """

    module: nn.Module
    inputs: Inputs
    back: Callable[[Tensor], Tensor] = lambda x: x
    has_layers: bool = True
    alone: tuple[Inputs, ...] = ()
    by_position: bool = False
    output: float = SAME_OUTPUT
    value: float = SAME_VALUE


Rewrite = Callable[[Network], Written | None]
REWRITES: dict[str, Rewrite] = {}


def rewrite(name: str) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite. It returns None for a network to which it does not apply."""

    def register(function: Rewrite) -> Rewrite:
        REWRITES[name] = function
        return function

    return register


def original(network: Network) -> Written:
    """The network as it is."""
    return Written(network.module(), network.inputs())


@torch.no_grad()
def result(module: nn.Module, inputs: Inputs) -> Tensor:
    """The module's main result, from copies of its inputs, which it may change."""
    return first_of(module(**{name: x.clone() for name, x in inputs.items()}))


def first_of(out: Any) -> Tensor:
    """The first of the tensors that a module returned."""
    return out if isinstance(out, Tensor) else out[0]


# --- calls replaced by equal ones ------------------------------------------------------------------------------------


class Replaced(TorchFunctionMode):
    """Replaces calls of functions, by name. A replacement returns NotImplemented for a call that it leaves alone."""

    def __init__(self, replacements: Mapping[str, Callable]):
        super().__init__()
        self.replacements, self.count = replacements, 0

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        replacement = self.replacements.get(name.strip("_") if name.startswith("__") else name)
        if replacement is not None and (new := replacement(*args, **kwargs)) is not NotImplemented:
            self.count += 1
            return new
        return func(*args, **kwargs)


def with_calls_replaced(network: Network, replacements: Mapping[str, Callable]) -> Written | None:
    """The network with these calls replaced; None if it makes none of them."""
    mode, written = Replaced(replacements), original(network)
    result(within(written.module, mode), written.inputs)
    return written if mode.count else None


def replacing(name: str, replacements_of: Callable[[Callable], Mapping[str, Callable]]) -> Callable:
    """Register the rewrite that calls a function in place of others. replacements_of: the calls that it replaces."""

    def register(function: Callable) -> Callable:
        REWRITES[name] = partial(with_calls_replaced, replacements=replacements_of(function))
        return function

    return register


Product = Callable[[Tensor, Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def of_each_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values for each head of queries, of which groups may share them."""
    is_shared = q.dim() == 4 and q.shape[1] != k.shape[1]
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) if is_shared else x for x in (k, v)]


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, product: Product) -> Any:
    """Attention by this product, which may return NotImplemented."""
    k, v = of_each_head(q, k, v)
    if (scores := product(q, k.mT)) is NotImplemented:
        return NotImplemented
    scores = masked(scores * scale, mask)
    p = scores.softmax(-1)
    if mask is not None:  # the kernel gives 0 to a query that sees no key
        p = p.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0)
    return product(p, v)


def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by torch's kernel."""
    grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)


def of_kernels(attend: Attend) -> dict[str, Callable]:
    """Replacements of torch's two functions of attention; `attend` may return NotImplemented."""

    def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        return attend(query, key, value, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale)

    def multi_head(*args: Any, **kwargs: Any) -> Any:
        """(N, B, D) in and out."""
        given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
        given.apply_defaults()
        at = given.arguments
        if at["need_weights"] or at["use_separate_proj_weight"]:
            return NotImplemented
        maps = zip(at["in_proj_weight"].chunk(3), at["in_proj_bias"].chunk(3), strict=True)
        q, k, v = (
            F.linear(x, *weight_and_bias).unflatten(-1, (at["num_heads"], -1)).permute(1, 2, 0, 3)
            for x, weight_and_bias in zip((at["query"], at["key"], at["value"]), maps, strict=True)
        )
        absent_BM, mask = at["key_padding_mask"], None
        for part in (at["attn_mask"], None if absent_BM is None else absent_BM[:, None, None, :]):
            if part is not None:
                hides = part.dtype == torch.bool
                part = torch.zeros(part.shape, dtype=q.dtype).masked_fill(part, -math.inf) if hides else part
                mask = part if mask is None else mask + part
        mixed = attend(q, k, v, mask, q.shape[-1] ** -0.5)
        if mixed is NotImplemented:
            return NotImplemented
        return F.linear(mixed.permute(2, 0, 1, 3).flatten(-2), at["out_proj_weight"], at["out_proj_bias"]), None

    return {"scaled_dot_product_attention": sdpa, "multi_head_attention_forward": multi_head}


def written_out(module: nn.Module) -> nn.Module:
    """The module, with torch's two functions of attention by their formulas."""
    return within(module, Replaced(of_kernels(partial(attended, product=torch.matmul))))


def of_products(product: Product, einsum: bool = True) -> dict[str, Callable]:
    """Replacements of every product of two batches of matrices, and of torch's functions of attention."""

    def multiplied(a: Tensor, b: Tensor) -> Any:
        return product(a, b) if min(a.dim(), b.dim()) > 2 else NotImplemented

    def added(table: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        new = multiplied(batch1, batch2)
        return NotImplemented if new is NotImplemented else beta * table + alpha * new

    def contracted(equation: str, *operands: Tensor) -> Any:
        """An einsum of two tensors, by a product of matrices."""
        equation = equation.replace(" ", "")
        if len(operands) != 2 or "..." in equation or "->" not in equation:
            return NotImplemented
        a, b = operands
        letters_a, letters_b, out = re.split(",|->", equation)
        size = dict(zip(letters_a + letters_b, (*a.shape, *b.shape), strict=True))
        both = [x for x in out if x in letters_a and x in letters_b]
        left = [x for x in out if x in letters_a and x not in letters_b]
        right = [x for x in out if x in letters_b and x not in letters_a]
        summed = [x for x in letters_a if x in letters_b and x not in out]
        if not summed or not both or len({*left, *both, *summed}) < len(letters_a):
            return NotImplemented

        def brought(x: Tensor, given: str, *groups: list[str]) -> Tensor:
            x = x.permute([given.index(letter) for group in (both, *groups) for letter in group])
            return x.reshape([size[letter] for letter in both] + [math.prod(size[y] for y in g) for g in groups])

        new = product(brought(a, letters_a, left, summed), brought(b, letters_b, summed, right))
        if new is NotImplemented:
            return NotImplemented
        made = [*both, *left, *right]
        return new.reshape([size[letter] for letter in made]).permute([made.index(letter) for letter in out])

    replacements = {"matmul": multiplied, "bmm": multiplied, "baddbmm": added}
    replacements |= of_kernels(partial(attended, product=product))
    return replacements | ({"einsum": contracted} if einsum else {})


# the kernel and einsum
replacing("matmul", lambda by: {name: call for name, call in of_products(by).items() if "mm" not in name})(torch.matmul)


@replacing("einsum", partial(of_products, einsum=False))
def by_einsum(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[:-2] != b.shape[:-2]:
        return torch.einsum("...nm,...mk->...nk", a, b)
    batch = "bhcd"[: a.dim() - 2]
    return torch.einsum(f"{batch}nm,{batch}mk->{batch}nk", a, b)


@replacing("product and sum", of_products)
def product_and_sum(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[..., None, :, :]).sum(-2)


@rewrite("product and sum, not of tokens")
def _(network: Network) -> Written | None:
    """The same of products that neither sum over tokens nor have the shape of scores: of streams, experts, channels."""
    first = next(iter(network.inputs().values()))
    tokens = {N, first.shape[1], first.shape[1] + 1}

    def product(a: Tensor, b: Tensor) -> Any:
        if first.dim() == 4 or a.shape[-1] in tokens or {a.shape[-2], b.shape[-1]} <= tokens:
            return NotImplemented
        return product_and_sum(a, b)

    replacements = of_products(product)
    return with_calls_replaced(network, {name: replacements[name] for name in ("matmul", "bmm", "einsum")})


@replacing("bmm, heads flattened", of_products)
def by_bmm(a: Tensor, b: Tensor) -> Any:
    if a.dim() == b.dim() == 3:
        return NotImplemented  # nothing to flatten
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return torch.bmm(a, b).unflatten(0, batch)


@replacing("transposed", of_products)
def transposed(a: Tensor, b: Tensor) -> Tensor:
    """With its factors changed over: v^T P^T for P v."""
    return (b.mT @ a.mT).mT


@replacing("head by head", of_products)
def head_by_head(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 4 or a.shape[:2] != b.shape[:2]:
        return NotImplemented
    return torch.stack([a[:, head] @ b[:, head] for head in range(a.shape[1])], dim=1)


@replacing("kernel for each head", of_kernels)
def kernel_for_each_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Any:
    if q.dim() != 4:
        return NotImplemented
    (k, v), heads = of_each_head(q, k, v), range(q.shape[1])
    masks = [mask if mask is None or mask.dim() < 4 or mask.shape[1] == 1 else mask[:, [h]] for h in heads]
    return torch.cat([kernel(q[:, [h]], k[:, [h]], v[:, [h]], masks[h], scale) for h in heads], dim=1)


@rewrite("P shared by two calls")
def _(network: Network) -> Written | None:
    """Each half of the values in a call of its own, with the same P."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        return torch.cat([kernel(q, k, half, mask, scale) for half in v.chunk(2, dim=-1)], dim=-1)

    def multiplied(a: Tensor, b: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            rows = min(a.dim(), b.dim()) > 2 and b.shape[-1] > 1 and a.sum(-1)
            are_weights = rows is not False and bool((a >= 0).all() and torch.allclose(rows, torch.ones_like(rows)))
        return torch.cat([a @ half for half in b.chunk(2, dim=-1)], dim=-1) if are_weights else NotImplemented

    return with_calls_replaced(network, {"matmul": multiplied, "bmm": multiplied, **of_kernels(attend)})


@rewrite("softmax written out")
def _(network: Network) -> Written | None:
    """The softmax as exponentials over their sum; the kernel and einsum by torch.matmul."""

    def softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        powers = torch.exp(x - x.amax(dim, keepdim=True))
        return powers / powers.sum(dim, keepdim=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Any:
        k, v = of_each_head(q, k, v)
        scores = q @ k.mT * scale
        if mask is not None and mask.dtype == torch.bool:  # some padded queries see no key
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min / 2)
            powers = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask
            return powers / powers.sum(-1, keepdim=True).clamp(min=1) @ v
        return softmax(masked(scores, mask), -1) @ v

    return with_calls_replaced(network, {"softmax": softmax, **of_kernels(attend)})


@replacing("one key head in einsum", of_kernels)
def one_key_head_in_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Any:
    """Several query heads and the key head that they share."""
    if q.dim() != 4 or q.shape[1] == k.shape[1]:
        return NotImplemented
    scores = torch.einsum("bgrnk,bgmk->bgrnm", q.unflatten(1, (k.shape[1], -1)), k) * scale
    scores = masked(scores, mask if mask is None or mask.dim() < 4 else mask[:, :, None])
    return torch.einsum("bgrnm,bgmk->bgrnk", scores.softmax(-1), v).flatten(1, 2)


@replacing("scores by baddbmm", of_kernels)
def scores_by_baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Any:
    """Scores are added to the mask, with heads flattened into the batch."""
    k, v = of_each_head(q, k, v)
    mask = torch.zeros(1, dtype=q.dtype) if mask is None else mask
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    mask = mask.clamp(min=torch.finfo(q.dtype).min).expand(*q.shape[:-1], k.shape[-2]).flatten(0, 1)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


@replacing("linear maps by addmm", lambda by: {"linear": by})
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Tokens are flattened; a map without a bias is a product."""
    if bias is None:
        return x @ weight.mT
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.mT).unflatten(0, x.shape[:-1])


@replacing("norms written out", lambda by: {"layer_norm": by})
def layer_norm(x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5):
    """Mean, variance and root."""
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    scaled = centred * torch.rsqrt(centred.pow(2).mean(axes, keepdim=True) + eps)
    scaled = scaled if weight is None else weight * scaled
    return scaled if bias is None else scaled + bias


FUNCTIONS = {
    "silu": lambda x, inplace=False: x * torch.sigmoid(x),
    "relu": lambda x, inplace=False: x * (x > 0),
    "gelu": lambda x, approximate="none": (
        0.5 * x * (1 + (torch.erf(x / math.sqrt(2)) if approximate == "none" else torch.tanh(_cubic(x))))
    ),
}
REWRITES["activations written out"] = partial(with_calls_replaced, replacements=FUNCTIONS)


def _cubic(x: Tensor) -> Tensor:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


# --- additions in place and out of place -----------------------------------------------------------------------------


class InPlace(TorchFunctionMode):
    """Makes some additions to states in place, by their number in the pass, which batches of any size share.

    chosen: for each such addition, which of the two terms takes the sum. older: of each addition of two states, which
    of them was made first.
    """

    def __init__(self):
        super().__init__()
        self.chosen: dict[int, int] = {}
        self.older: dict[int, int] = {}
        self.made, self.number = WeakTensorKeyDictionary(), 0

    def __enter__(self):
        self.older, self.made, self.number = {}, WeakTensorKeyDictionary(), 0
        return super().__enter__()

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        taken = None
        if getattr(func, "__name__", "") in ("add", "__add__", "__radd__") and not kwargs and self._adds_states(*args):
            self.number += 1
            taken = self.chosen.get(self.number)
            if args[0].shape == args[1].shape:
                # what no call of the pass made, an argument or a parameter, is older than everything
                times = [self.made.get(x, 0) for x in args]
                self.older[self.number] = int(times[1] < times[0])
        result = func(*args, **(kwargs or {})) if taken is None else args[taken].add_(args[1 - taken])
        if isinstance(result, Tensor) and (taken is not None or result not in self.made):
            self.made[result] = len(self.made) + 1
        return result

    @staticmethod
    def _adds_states(a: Any, b: Any) -> bool:
        with torch._C.DisableTorchFunction():
            both = isinstance(a, Tensor) and isinstance(b, Tensor)
            return both and max(a.dim(), b.dim()) == 3 and a.dtype == b.dtype == torch.float64


@rewrite("additions in place")
def _(network: Network) -> Written | None:
    """x += f(x) for x = x + f(x): every addition of states that may change one of its terms, the older if it can."""
    written, mode = original(network), InPlace()
    held = [*within(written.module, mode).parameters(), *written.module.buffers()]

    def run() -> list[Tensor]:
        """The result, with everything that the pass must leave as it was."""
        inputs = {name: x.clone() for name, x in written.inputs.items()}
        with torch.no_grad():
            return [first_of(written.module(**inputs)), *inputs.values(), *held]

    wanted = [x.clone() for x in run()]
    for number, older in mode.older.items():
        for taken in (older, 1 - older):
            before = mode.chosen
            mode.chosen = {**before, number: taken}
            try:
                if all(map(torch.equal, run(), wanted)):
                    break
            except RuntimeError:  # a term that is a broadcast view takes no sum
                pass
            mode.chosen = before
            for x, kept in zip(held, wanted[-len(held) :], strict=True):
                x.copy_(kept)
    return written if mode.chosen else None


# x = x + f(x) in place of x += f(x)
replacing("additions out of place", lambda by: {"iadd": by, "add_": by})(torch.add)


# --- axes, masks, batches, outputs -----------------------------------------------------------------------------------


class Turned(nn.Module):
    """A module called with tokens first, (N, B) or (N, B, D), whose result has tokens first, too; masks are (B, N)."""

    def __init__(self, inner: nn.Module, mask: str | None):
        super().__init__()
        self.inner, self.mask = inner, mask

    def forward(self, **inputs: Tensor) -> Tensor:
        turned = {name: x if name == self.mask else x.transpose(0, 1) for name, x in inputs.items()}
        return first_of(self.inner(**turned)).transpose(0, 1)


def in_own_form(network: Network, name: str) -> Written | None:
    """The network in another form of its own source."""
    return Written(form(), network.inputs()) if (form := network.forms.get(name)) is not None else None


# the layers read (N, B, D) in place of (B, N, D), or the other way round
REWRITES["sequence first inside"] = partial(in_own_form, name="sequence first inside")


@rewrite("sequence first")
def _(network: Network) -> Written | None:
    """Inputs and result have tokens first; so have the layers, in torch's own modules."""
    inputs, mask = network.inputs(), network.name_of_mask
    if next(iter(inputs.values())).dim() > 3:
        return None  # images
    form = network.forms.get("sequence first inside", network.module)()
    inner = form.inner if isinstance(form, SequenceFirst) else Turned(network.module(), mask)
    inputs = {name: x if name == mask else x.transpose(0, 1).contiguous() for name, x in inputs.items()}
    return Written(inner, inputs, back=lambda x: x.transpose(0, 1))


class Renamed(nn.Module):
    """A module one of whose arguments has another name, and is turned back by a function."""

    def __init__(self, inner: nn.Module, old: str, name: str, back: Callable[[Tensor], Tensor]):
        super().__init__()
        self.inner, self.old, self.name, self.back = inner, old, name, back

    def forward(self, **inputs: Tensor) -> Any:
        return self.inner(**with_another_name(inputs, self.name, self.old, self.back))


def with_another_name(inputs: Inputs, old: str, name: str, turned: Callable[[Tensor], Tensor]) -> Inputs:
    """The arguments, of which one has this name and is turned by a function."""
    return {name if key == old else key: turned(x) if key == old else x for key, x in inputs.items()}


def renamed(network: Network, name: str, tells_present: bool) -> Written | None:
    """The network with another name of its mask, of truth values; None if it has none, or has this one."""
    if network.mask is None or network.mask[0] == name:
        return None
    (old, old_tells_present), inputs = network.mask, network.inputs()
    dtype = inputs[old].dtype

    def turned(mask: Tensor) -> Tensor:
        return mask.bool() if tells_present == old_tells_present else ~mask.bool()

    module = Renamed(network.module(), old, name, lambda mask: turned(mask).to(dtype))
    return Written(module, with_another_name(inputs, old, name, turned))


REWRITES["mask named attention_mask"] = partial(renamed, name="attention_mask", tells_present=True)
REWRITES["mask named padding_mask"] = partial(renamed, name="padding_mask", tells_present=False)
REWRITES["mask named valid"] = partial(renamed, name="valid", tells_present=True)


@rewrite("arguments by position")
def _(network: Network) -> Written | None:
    """Arguments without their names."""
    written = original(network)
    names = list(inspect.signature(type(written.module).forward).parameters)[1:]
    return replace(written, by_position=True) if names[: len(written.inputs)] == [*written.inputs] else None


@rewrite("sequences one by one")
def _(network: Network) -> Written | None:
    """Each sequence in a batch of its own, without padding."""
    written = original(network)

    def of(index: int) -> Inputs:
        length = None if network.mask is None else LENGTHS[index]
        states = {name: x[[index]] for name, x in written.inputs.items() if name != network.name_of_mask}
        return {name: x[:, :length] if x.shape[1] == N else x for name, x in states.items()}

    return replace(written, alone=tuple(map(of, range(B))))


class Tower(nn.Module):
    """Three layers of four heads, of letters, states or images."""

    def __init__(self, example: Tensor, width: int = 8):
        super().__init__()
        if example.dtype == torch.long:
            self.read = nn.Embedding(LETTERS, width)
        else:
            self.read = nn.Linear(example.shape[1 if example.dim() == 4 else 2], width)
        layer = nn.TransformerEncoderLayer(width, 4, 12, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.read(x.flatten(2).transpose(1, 2) if x.dim() == 4 else x))


class TwoTowers(nn.Module):
    """A network and a tower that reads the same input and does not reach the network's result."""

    def __init__(self, inner: nn.Module, tower: nn.Module, returned: bool):
        super().__init__()
        self.inner, self.tower, self.returned = inner, tower, returned

    def forward(self, **inputs: Tensor) -> Any:
        other = self.tower(next(iter(inputs.values())))
        out = self.inner(**inputs)
        return (first_of(out), other) if self.returned else out


def with_tower(network: Network, returned: bool) -> Written:
    """The network with a tower beside it."""
    written = original(network)
    tower = drawn(Tower(next(iter(written.inputs.values()))))
    return replace(written, module=TwoTowers(written.module, tower, returned))


REWRITES["a dead tower"] = partial(with_tower, returned=False)
REWRITES["a tower as second output"] = partial(with_tower, returned=True)


# the other one of two implementations, as fused and eager in the library
REWRITES["the source's other attention"] = partial(in_own_form, name="other implementation")


@rewrite("exported")
def _(network: Network) -> Written | None:
    """The graph that torch.export makes of it. Not of networks whose code counts sequences or tokens in Python."""
    inputs = network.inputs()
    with suppress(RuntimeError, ValueError):
        written = Written(Exported(network.module(), inputs, B), inputs, has_layers=False)
        result(written.module, {name: x[:1] for name, x in inputs.items()})
        return written
    return None


@rewrite("the library's casts")
def _(network: Network) -> Written | None:
    """With the library's own casts to float32, which are left out elsewhere."""
    if (form := network.forms.get("library's casts")) is None:
        return None
    written = Written(form(), network.inputs(), output=SAME_OUTPUT_IN_FLOAT32, value=SAME_VALUE_IN_FLOAT32)
    has_none = torch.equal(*(result(module, written.inputs) for module in (written.module, network.module())))
    return None if has_none else written


# --- what became of a pair -------------------------------------------------------------------------------------------


class Refusal(str):
    """The line with which an analysis refuses a network."""


Tables = dict[str, pd.DataFrame | Refusal]


@contextmanager
def quietly() -> Iterator[None]:
    """Without logs and warnings, and with one pass of random rounding, because no floor is compared."""
    passes, rounding.MOST_PASSES = rounding.MOST_PASSES, 1
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        rounding.MOST_PASSES = passes
        logging.disable(logging.NOTSET)


def tables_of(module: nn.Module, inputs: Inputs, by_position: bool = False) -> Tables:
    """The table of each analysis, or the line that refuses it."""

    def tables(*names: str) -> Tables:
        copies = {name: x.clone() for name, x in inputs.items()}
        return analyze(module, tuple(copies.values()) if by_position else copies, *names)

    try:
        return tables(*ANALYSES)
    except Exception:  # each by itself: some may be refused, and others not
        found: Tables = {}
    for name in ANALYSES:
        try:
            found |= tables(name)
        except ConfigError as error:
            found[name] = Refusal(error)
        except Exception as error:
            found[name] = Refusal(f"{TRACEBACK}: {type(error).__name__}: {error}")
    return found


def joined(parts: Sequence[Tables], like: Tables) -> Tables:
    """The tables of a batch, from those of its sequences one by one. like: the batch's own, for their columns."""
    return {name: _joined([part[name] for part in parts], like[name]) for name in ANALYSES}


def _joined(parts: list[pd.DataFrame | Refusal], like: pd.DataFrame | Refusal) -> pd.DataFrame | Refusal:
    for part in parts:
        if isinstance(part, Refusal):
            return part
        if len(part) != len(parts[0]):
            return Refusal(f"{TRACEBACK}: sequences have {len(parts[0])} and {len(part)} rows")
    first = parts[0].copy()
    for column in set().union(*(part.columns for part in parts)) - {*ROWS, *NAMES}:
        if column in ("num_undefined", "num_sequences"):
            first[column] = sum(part[column] for part in parts)
        elif f"{column}_sd" in like:
            values = np.stack([part[column] if column in part else np.full(len(part), np.nan) for part in parts])
            counts = (~np.isnan(values)).sum(0)
            with np.errstate(invalid="ignore", divide="ignore"):
                first[column] = mean = np.nansum(values, axis=0) / counts
                variance = np.nansum((values - mean) ** 2, axis=0) / (counts - 1)
            first[f"{column}_sd"] = np.where(counts > 1, np.sqrt(np.abs(variance)), np.nan)
        elif not column.endswith("_sd") and pd.api.types.is_float_dtype(first[column]):
            first[column] = np.mean([part[column] for part in parts], axis=0)
    return first


def difference(one: pd.DataFrame | Refusal, other: pd.DataFrame | Refusal, value: float, alone: bool) -> str:
    """How two tables of one analysis differ, in a line; "" if they do not."""
    if isinstance(one, Refusal) and isinstance(other, Refusal):
        return next((line for line in (one, other) if line.startswith(TRACEBACK)), "")
    for second, words in ((other, "rewritten"), (one, "original")):
        if isinstance(second, Refusal):
            return f"only the {words} network is refused: {second}"
    counts = ""
    if "num_paths" in one:
        counts = "; num_paths " + " and ".join(" ".join(f"{n:g}" for n in table.num_paths) for table in (one, other))
    if len(one) != len(other):
        return f"{len(one)} rows and {len(other)}{counts}"
    rows = [name for name in ROWS if name in one]
    for row in rows:
        if row not in other or list(one[row].map(str)) != list(other[row].map(str)):
            return f"rows: {row} is {list(one[row])} and {list(other.get(row, []))}{counts}"
    left_out = {*NAMES, *RANDOM, *(f"{name}_sd" for name in RANDOM)}
    if alone:  # one sequence has no interval; MPT's positions are counted from the batch's width, which shifts logits
        left_out |= {name for name in one.columns if name.endswith(("_low", "_high")) or "largest_logit" in name}
    columns, others = ([name for name in table.columns if name not in left_out] for table in (one, other))
    lines = {}
    if alone_there := {*columns} ^ {*others}:
        lines["columns"] = f"{', '.join(sorted(alone_there)[:4])} in one table alone"
    shared = [name for name in columns if name not in alone_there]
    for name in shared:
        a, b = one[name], other[name]
        if not (pd.api.types.is_numeric_dtype(a) and pd.api.types.is_numeric_dtype(b)):
            if unlike := [pair for pair in zip(a.map(str), b.map(str), strict=True) if pair[0] != pair[1]]:
                lines[name] = f"{name} {' and '.join(unlike[0])}"
            continue
        a, b = a.to_numpy(float), b.to_numpy(float)
        with np.errstate(invalid="ignore"):
            apart = np.abs(a - b) / np.maximum(1, np.abs(a))
        apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        apart[np.isnan(apart)] = np.inf
        if apart.max() > value:
            at = int(apart.argmax())
            where = ", ".join(f"{row} {one[row].iloc[at]}" for row in rows if row not in ("weights", "variant"))
            lines[name] = f"{name} {a[at]:.6g} and {b[at]:.6g} ({where})"
    if not lines:
        return ""
    shown = next((lines[name] for name in MAIN if name in lines), next(iter(lines.values())))
    return f"{len(lines)} of {len(columns)} columns: {shown}"


@lru_cache(maxsize=4)
def original_tables(name: str) -> Tables:
    """The tables of a network as it is."""
    written = original(NETWORKS[name])
    return tables_of(written.module, written.inputs)


def check_output(network: Network, written: Written) -> None:
    """AssertionError if the rewritten network does not compute the same, at the tokens that are present."""
    wanted = result(network.module(), network.inputs())
    scale = wanted.abs().max()
    if written.alone:
        got = [result(written.module, inputs)[0] for inputs in written.alone]
        pairs = [(one, wanted[index, : len(one)]) for index, one in enumerate(got)]
    else:
        got = written.back(result(written.module, written.inputs))
        assert got.shape == wanted.shape
        rows = range(len(wanted))
        lengths = LENGTHS if network.mask is not None and wanted.shape[1] == N else [None] * len(wanted)
        pairs = [(got[row, : lengths[row]], wanted[row, : lengths[row]]) for row in rows]
    assert max((one - other).abs().max() for one, other in pairs) <= written.output * scale


def outcome(name: str, rewrite_name: str) -> tuple[str, list[str]] | None:
    """What became of each analysis of a pair, a letter for each, and a line for each difference; None if the rewrite
    does not apply."""
    network = NETWORKS[name]
    with quietly():
        written = REWRITES[rewrite_name](network)
        if written is None:
            return None
        check_output(network, written)
        one = original_tables(name)
        if written.alone:
            other = joined([tables_of(written.module, inputs) for inputs in written.alone], one)
        else:
            other = tables_of(written.module, written.inputs, written.by_position)
    letters, lines = "", []
    for analysis in ANALYSES:
        if analysis == "residual" and not written.has_layers:
            continue
        line = difference(one[analysis], other[analysis], written.value, bool(written.alone))
        letters += DIFFERENT if line else REFUSED if isinstance(one[analysis], Refusal) else EQUAL
        lines += [f"{analysis}: {line}"] if line else []
    return letters, lines


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parent.parent / "docs" / "NETWORKS.md"
BEGIN, END = "<!-- written by `python -m rewrites` in tests/ -->\n", "<!-- end -->\n"


def cells_of(name: str) -> list[str]:
    """What became of each rewrite of a network; "" where it does not apply. Differences are printed."""
    cells = []
    for rewrite_name in REWRITES:
        found = outcome(name, rewrite_name)
        cells.append("" if found is None else found[0])
        for line in () if found is None else found[1]:
            print(f"{name} | {rewrite_name} | {line}", flush=True)
    return cells


def table_of(cells: Mapping[str, list[str]]) -> str:
    """The table of all networks, with the rewrites by number."""
    lines = [f"{number}. {name}" for number, name in enumerate(REWRITES, 1)]
    header = ["network", *map(str, range(1, len(REWRITES) + 1))]
    rows = [header, ["---"] * len(header), *([name, *cells[name]] for name in NETWORKS if name in cells)]
    return "\n".join([*lines, "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def recorded() -> dict[str, list[str]]:
    """The table of the page, by network."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rows = [line.split("|")[1:-1] for line in rest.partition(END)[0].splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows[2:]}


def write(cells: Mapping[str, list[str]]) -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table_of(cells) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or list(NETWORKS):
        write(recorded() | {name: cells_of(name)})
