"""Why an op gave inf or NaN: its re-run in a wider format on the same inputs, and on inputs computed wider.

Finite when re-run wider: the range (by how many times) or the precision of the format. Finite only when the
ops before it are re-run wider too: something earlier was flushed to zero or rounded away. Not finite even so:
the mathematics, or the data. `UnderflowProbe` looks for results that are zero only because the format ends
there: suspected when most of a 16-bit result is zero, convicted when its re-run in fp32 is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.distributed import local_of
from halfstep.formats import Format, dtype_name, format_of
from halfstep.numerics.histogram import amax
from halfstep.numerics.tape import Node, is_finite, key_of, tensors_written
from halfstep.torch_private import pytree
from halfstep.trees import first_device, tensors_in

_DEPTH = 48


@dataclass(frozen=True)
class Cause:
    """Why: `kind` is range, precision, mathematics, data, weights, learning rate, rounding, divergence,
    accumulation, update (of what, by what, how often), loss scale, machine, rank (another rank's step) or
    unknown; `text` says it in words, `more` what else
    was found.

    `times`: by how many times the largest value leaves the range. `format`: what could not hold it. `weight`:
    the parameter that holds what is too large, if one does. `scalar`: a constant that the format rounds to
    zero, as it does an epsilon. `advice`: text and code of what to do, where the cause alone says that.
    """

    kind: str
    text: str
    times: float | None = None
    format: str = ""
    weight: str = ""
    scalar: float | None = None
    more: tuple[str, ...] = ()
    advice: tuple[str, str] | None = None

    @property
    def words(self) -> str:
        """Return the whole cause in a line."""
        return "; ".join([self.text, *self.more])

    def and_also(self, text: str) -> Cause:
        """Return the cause with one more finding."""
        return replace(self, more=(*self.more, text))


def _sources(node: Node, depth: int = 24) -> list[Tensor]:
    """Return the tensors from before the step that the op's inputs were computed from."""
    sources: list[Tensor] = []
    todo, visited = [(node, 0)], {node.index}
    while todo:
        maker, far = todo.pop()
        if maker.dropped:
            continue
        for t, parent in zip(tensors_in((maker.args, maker.kwargs)), maker.parents):
            if parent is None:
                sources.append(t)
            elif far < depth and parent[0].index not in visited:
                visited.add(parent[0].index)
                todo.append((parent[0], far + 1))
    return sources


def outlying_weight(
    node: Node, parameters: list[tuple[str, Tensor]], originals: Mapping[Any, Tensor]
) -> tuple[str, str] | None:
    """Return the parameter behind the op's inputs that has one far larger row, and a description."""
    read = {t.untyped_storage().data_ptr() for t in _sources(node) if t.layout == torch.strided and t.numel()}
    worst: tuple[float, tuple[str, str]] | None = None
    for name, p in ((name, local_of(p)) for name, p in parameters):
        if p.layout != torch.strided or not p.numel() or p.untyped_storage().data_ptr() not in read:
            continue
        p = originals.get(key_of(p), p).detach()  # as it was before the update
        rows = p.float().reshape(p.shape[0], -1).abs().amax(1) if p.dim() else p.abs().view(1)
        usual, top = float(rows.median()), float(rows.max())
        if rows.numel() < 4 or not (top >= 100 * usual and top >= 100):
            continue
        text = f"row {int(rows.argmax())} of {name} holds {top:.3g}, the others about {usual:.2g}"
        if worst is None or top > worst[0]:
            worst = top, (name, text)
    return None if worst is None else worst[1]


def _wider(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return copies in which every floating tensor, and every floating dtype argument, is `dtype`."""
    leaves, spec = pytree.tree_flatten(tree)

    def widen(x: Any) -> Any:
        if isinstance(x, Tensor):
            low = dtype is not None and x.is_floating_point()
            return x.detach().to(dtype, copy=True) if low else x.detach().clone()
        if isinstance(x, torch.dtype) and x.is_floating_point and dtype is not None:
            return dtype
        return x

    return pytree.tree_unflatten([widen(x) for x in leaves], spec)


def _call(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    device = first_device((args, kwargs))
    with torch.no_grad(), torch.autocast(device, enabled=False):  # Apex leaves a region open
        out = func(*args, **kwargs)
    return [*tensors_in(out), *tensors_written(func, args, kwargs)]


def rerun(node: Node, dtype: torch.dtype | None) -> list[Tensor] | None:
    """Return the op's results in another dtype (None: unchanged), or None if it cannot run."""
    try:
        args, kwargs = _wider((node.args, node.kwargs or {}), dtype)
        return _call(node.func, args, kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


class _WiderResults:
    """Results of past ops recomputed in fp32, as deep as the tape remembers."""

    def __init__(self, originals: Mapping[Any, Tensor]) -> None:
        self._originals = originals
        self._done: dict[int, tuple[Node, list[Tensor] | None]] = {}

    def of(self, node: Node, depth: int = 0) -> list[Tensor] | None:
        """Return the results of an op in fp32; None where it cannot be rerun."""
        if node.index not in self._done:
            self._done[node.index] = node, None
            self._done[node.index] = node, self._compute(node, depth)
        return self._done[node.index][1]

    def _compute(self, node: Node, depth: int) -> list[Tensor] | None:
        random = torch.Tag.nondeterministic_seeded in node.func.tags
        if node.dropped or random or depth > _DEPTH:
            return None
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs or {}))
        parents = iter(node.parents)
        wide = [
            self._value(x, next(parents, None), depth) if isinstance(x, Tensor) else _wider(x, torch.float32)
            for x in leaves
        ]
        args, kwargs = pytree.tree_unflatten(wide, spec)
        try:
            return _call(node.func, args, kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None

    def _value(self, leaf: Tensor, parent: tuple[Node, int] | None, depth: int) -> Tensor:
        if parent is None:
            return _wider(self._originals.get(key_of(leaf), leaf), torch.float32)
        results = self.of(parent[0], depth + 1) if leaf.is_floating_point() else None
        if results is not None and results[parent[1]].shape == leaf.shape:
            return results[parent[1]].clone()
        return _wider(leaf, torch.float32)

    def at_fault(self) -> Node | None:
        """Return an op whose epsilon its format rounds to zero, else the earliest op with lost values.

        Values are lost where the stored result is zero and the wider one is not."""
        on_the_way = [self._done[index] for index in sorted(self._done)]
        for node, _ in on_the_way:
            if not node.dropped and _find_lost_scalar(node):
                return node
        for node, results in on_the_way:
            for low, wide in zip(node.outs, results or () if not node.func.is_view else ()):
                if low.is_floating_point() and low.shape == wide.shape and ((low == 0) & (wide != 0)).any():
                    return node
        return None


def rerun_wider(node: Node, originals: Mapping[Any, Tensor]) -> list[Tensor] | None:
    """Return the op's results in fp32 from inputs that are computed in fp32 too; None where it cannot run."""
    return _WiderResults(originals).of(node)


def _all_finite(tensors: list[Tensor] | None) -> bool:
    return tensors is not None and all(is_finite(t) for t in tensors)


def explain(node: Node, originals: Mapping[Any, Tensor]) -> tuple[Cause, Node]:
    """Find out why `node`, whose inputs were finite, gave a result that is not; and which op is at fault.

    `originals`: values that the step later overwrote, as the tape kept them.
    """
    dtypes = [t.dtype for t in node.outs if t.is_floating_point() and not is_finite(t)]
    fmt = format_of(dtypes[0] if dtypes else torch.float32)
    same = rerun(node, None)
    if same is None:
        return Cause("unknown", f"{node.op} could not be run again on its own"), node
    if _all_finite(same):
        text = f"{node.op} on the same inputs is finite when run again: nondeterminism, memory written by "
        return Cause("machine", f"{text}another kernel, or faulty hardware"), node
    for wide in (torch.float32, torch.float64):
        results = rerun(node, wide) if format_of(wide).bits > fmt.bits else None
        if results is not None and _all_finite(results):
            reached = max((float(amax(t)) for t in results if t.is_floating_point()), default=0.0)
            return _range_or_precision(node, fmt, wide, reached), node
    return _earlier(node, fmt, originals)


def _range_or_precision(node: Node, fmt: Format, wide: torch.dtype, reached: float) -> Cause:
    times = reached / fmt.max
    if times > 1:
        beyond = f"{times:.3g} times too large" if times >= 1.005 else "just beyond"
        text = f"range: the result reaches {reached:.3g} and {fmt} ends at {fmt.max:.5g} ({beyond})"
        return Cause("range", f"{text}; finite in {dtype_name(wide)}", times, fmt.name)
    lost = _find_lost_scalar(node)
    if lost is not None:
        return Cause("precision", f"precision: {_describe_lost(*lost)}", None, fmt.name, scalar=lost[0])
    text = f"range inside the op: in {dtype_name(wide)} the result is only {reached:.3g}"
    return Cause("range", f"{text}, but an intermediate value leaves {fmt}", None, fmt.name)


def _find_lost_scalar(node: Node) -> tuple[float, torch.dtype] | None:
    """Return a scalar argument that the tensors' format rounds to zero (an epsilon), and that format."""
    low = next((t for t in node.tensors() if t.is_floating_point()), None)
    if low is None:
        return None
    smallest = format_of(low.dtype).smallest_subnormal
    scalars = [x for x in pytree.tree_flatten((node.args, node.kwargs))[0] if isinstance(x, float)]
    return next(((x, low.dtype) for x in scalars if 0 < abs(x) <= smallest / 2), None)


def _describe_lost(scalar: float, dtype: torch.dtype) -> str:
    smallest = format_of(dtype).smallest_subnormal
    return f"{scalar:g} is zero in {dtype_name(dtype)}, whose smallest value is {smallest:.3g}"


def _earlier(node: Node, fmt: Format, originals: Mapping[Any, Tensor]) -> tuple[Cause, Node]:
    """Explain a result that is not finite in fp64 either: were its inputs rounded below fp32 before?"""
    wider_results = _WiderResults(originals)
    if not _all_finite(wider_results.of(node)):
        words, advice = _mistake(node)
        return Cause("mathematics", f"mathematics: {words}", None, fmt.name, advice=advice), node
    culprit = wider_results.at_fault()
    if culprit is None:
        low = next((dtype_name(t.dtype) for t in node.tensors() if t.is_floating_point()), "fp32")
        text = f"precision: rounding to {low} before it; finite when computed in fp32"
        return Cause("precision", text, None, low), node
    lost = _find_lost_scalar(culprit)
    name = next((dtype_name(t.dtype) for t in culprit.outs if t.is_floating_point()), "")
    why = _describe_lost(*lost) if lost else f"{culprit.op} flushed values to zero in {name}"
    text = f"precision: {why} ({culprit.location.where}); finite when computed in fp32 from there on"
    return Cause("precision", text, None, name or fmt.name, scalar=lost and lost[0]), culprit


def _some(what: str, mask: Tensor) -> str:
    count = int(mask.sum())
    return f"{count} of {mask.numel()} {what}" if mask.numel() > 1 else what


def count_in_words(t: Tensor) -> str:
    """Say how many NaN and infinities a tensor holds."""
    nans, infs = int(torch.isnan(t).sum()), int(torch.isinf(t).sum())
    return " and ".join(f"{n} {what}" for n, what in ((nans, "NaN"), (infs, "inf")) if n)


def count_nonfinite(t: Tensor) -> str:
    """Say how many values are not finite, and in which row, if it is one."""
    return f"{count_in_words(t.detach())} of {t.numel()} values{nonfinite_row(t) if t.dim() > 1 else ''}"


def nonfinite_row(t: Tensor) -> str:
    """Name the one row (sample of a batch) that holds all values that are not finite; else nothing."""
    if t.dim() == 0 or t.shape[0] < 2 or not t.numel():
        return ""
    rows = torch.nonzero(~torch.isfinite(t.detach()).reshape(t.shape[0], -1).all(1)).flatten()
    return f", all in row {int(rows[0])}" if rows.numel() == 1 else ""


def out_of_domain(node: Node) -> str:
    """Say what a power was taken of outside its domain; empty where it is only too large."""
    base, exponent = (torch.as_tensor(x) for x in node.args[:2])
    for mask, what, power in (
        ((base == 0) & (exponent < 0), "0", "a negative power"),
        ((base < 0) & (exponent != exponent.trunc()), "negative", "a power that is no whole number"),
    ):
        if mask.any():
            bad = f"values are {what}" if mask.numel() > 1 else f"the value is {what}"
            return f"{power} of a value out of its domain ({_some(bad, mask)})"
    return ""


#: Ops with an edge of their domain: what is beyond it, and the words for that.
_EDGES: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "log": (lambda x: x <= 0, "logarithm", "values that are not positive"),
    "log2": (lambda x: x <= 0, "logarithm", "values that are not positive"),
    "log10": (lambda x: x <= 0, "logarithm", "values that are not positive"),
    "log1p": (lambda x: x <= -1, "log1p", "values at or below -1"),
    "sqrt": (lambda x: x < 0, "square root", "negative values"),
    "rsqrt": (lambda x: x == 0, "rsqrt", "values that are zero"),
    "reciprocal": (lambda x: x == 0, "reciprocal", "values that are zero"),
}


def _mistake(node: Node) -> tuple[str, tuple[str, str] | None]:
    """Return the operation that has no value, what to do about it, and the code for that.

    The last two are empty where the cure is to keep an argument from the edge of its domain."""
    base, name = node.base.removesuffix("_").removeprefix("_foreach_"), node.location.node
    backward = f" in the gradient of {node.op}" if name[-1:].isdigit() else f" in {name}" if name else ""
    floats = [t for t in node.tensors() if t.is_floating_point()]
    first = floats[0] if floats else torch.zeros((), device="cpu")
    if any(t.numel() == 0 for t in floats):
        text, code = "leave this term out where there is nothing to take it of", "x.sum() / max(x.numel(), 1)"
        return f"{node.op} of an empty tensor{backward}", (text, code)
    if base in ("div", "true_divide", "addcdiv"):
        if len(floats) < 2:
            advice = "keep the number that is divided by from becoming 0", "max(d, 1e-4)"
            return f"division by zero{backward}", None if node.phase == "backward" else advice
        zeros = _some("divisors are 0", floats[-1] == 0) if floats[-1].numel() > 1 else "the divisor is 0"
        return f"division by zero{backward} ({zeros})", None
    if base in _EDGES:
        beyond, what, of = _EDGES[base]
        return f"{what} of {_some(of, beyond(first))}{backward}", None
    if base == "exp":
        return f"exp of values up to {float(first.max()):.3g} is infinite in every format", None
    if base == "pow":
        of, exponent = node.args[:2]
        what, largest = ("pow", of) if isinstance(of, Tensor) else (f"{of:.3g} to the power", exponent)
        words = f"{what} of values up to {float(amax(largest)):.3g} is infinite in every format"
        return f"{out_of_domain(node) or words}{backward}", None
    words, advice = _of_rows(node, base, first)
    return words or f"{node.op}{backward} is not finite in fp64 either on the same inputs", advice


def _of_rows(node: Node, base: str, first: Tensor) -> tuple[str, tuple[str, str] | None]:
    """Return the same for ops over rows, which may have too few terms or no spread."""
    words = ""
    if "softmax" in base:
        text = "a row in which everything is masked has no softmax: keep one term, or zero such rows"
        return "softmax over a row in which every term is -inf", (text, "")
    if base in ("std", "var", "std_mean", "var_mean"):
        terms = first.numel() // max(1, node.outs[0].numel())
        if terms < 2:
            words = f"{node.op} of {terms} value{'s' * (terms != 1)}, which have no spread"
        text = "leave the spread out where there is one value, or divide by their number"
        return words, (text, f"x.{base}(dim, correction=0)")
    if base.startswith("nll_loss") and node.phase != "backward":
        labels = next(t for t in node.tensors() if not t.is_floating_point())
        if bool((labels == node.args[4]).all()):
            words = f"{node.op} is a mean over no label: all {labels.numel()} are ignored ({node.args[4]})"
        text = "leave out batches without a label, or divide a sum by their number"
        return words, (text, 'cross_entropy(..., reduction="sum") / max(n, 1)')
    if "ctc_loss" in base:
        words = (
            "ctc_loss finds no way to fit a target into its input: the target is too long for it, or empty"
        )
        text = "leave out pairs whose target does not fit into the input"
        return words, (text, "nn.CTCLoss(zero_infinity=True)")
    if "batch_norm" in base and not base.endswith("_backward"):
        if len(node.args) > 4 and isinstance(node.args[4], Tensor):
            eps = next((x for x in node.args[5:] if isinstance(x, float) and x < 0.01), 0.0)
            low = node.args[4] + eps <= 0
            if low.any():
                words = f"{node.op} by running_var, of which {_some('variances are not positive', low)}"
        text = "look at how running_var, a variance, was made, loaded or averaged"
        return words, (text, "running_var.clamp_(min=0)")
    if base.endswith(("layer_norm", "group_norm", "rms_norm")):
        text = "give the normalisation a variance to divide by"
        return f"{node.op} of a row without spread, with an epsilon of 0", (text, "eps=1e-5")
    return words, None


_MOSTLY = 0.5


class UnderflowProbe:
    """Looks at each op's results while the tape runs.

    `worst`: the first op that flushed most of its nonzero results to zero; their share, their format, and by
    how many powers of two the largest of them lies below that format's smallest value.
    """

    def __init__(self) -> None:
        self.worst: tuple[Node, float, str, int] | None = None

    def observe(self, node: Node, finite: bool) -> None:
        """Rerun the op in fp32 if most of its 16-bit results are zero."""
        if self.worst is not None or node.phase == "optimizer" or not finite or node.func.is_view:
            return
        for place, low in enumerate(node.outs):
            if low.dtype not in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2) or low.numel() == 0:
                continue
            zero = low == 0
            if zero.double().mean() < _MOSTLY:
                continue
            wide = rerun(node, torch.float32)
            if wide is None or wide[place].shape != low.shape:
                continue
            nonzero = wide[place] != 0
            lost = nonzero & zero
            share = float(lost.sum()) / max(1, int(nonzero.sum()))
            if share >= _MOSTLY:
                top = float(wide[place].abs()[lost].max())
                bits = math.ceil(math.log2(format_of(low.dtype).smallest_subnormal) - math.log2(top))
                self.worst = node, share, dtype_name(low.dtype), bits
                return
