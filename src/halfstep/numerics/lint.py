"""Mistakes of precision that show without training long: in the model, the optimizer, one taped step.

A finding from the tape is certain: that op ran with that argument in that dtype. Findings from source code
are made only where a step cannot be run (scripts, before they start).
"""

from __future__ import annotations

import ast
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import optim
from halfstep.convert.buffers import is_recomputed
from halfstep.errors import BannedOpError, ConfigError
from halfstep.formats import FP16, Format, dtype_name, format_of
from halfstep.names import is_normalisation, named_parameters
from halfstep.numerics.cause import rerun, rerun_wider
from halfstep.numerics.remedies.source import called
from halfstep.numerics.snapshot import StepParticipants, as_list, closure_of
from halfstep.numerics.tape import Node, is_users, key_of
from halfstep.numerics.trace import trace_step
from halfstep.numerics.uncast import casts_weights, low_ops, no_region, weights_fault, zero_epsilons
from halfstep.optim.loading import find_zero_moments
from halfstep.optim.masters import holder_of
from halfstep.optim.resolution import expected_step, find_idle_steps, too_coarse
from halfstep.policy.levels import LOW_DTYPES
from halfstep.scaling.loss_scale import NoLossScale
from halfstep.torch_private import pytree

_MASKING = frozenset(
    ["masked_fill", "where", "full", "fill", "add", "sub", "mul", "full_like", "new_full", "scalar_tensor"]
)


@dataclass(frozen=True)
class Finding:
    """`rule` names the mistake; `where` is a source line, module path or parameter; `cure` what to write."""

    rule: str
    where: str
    text: str
    cure: str

    def __str__(self) -> str:
        return f"{self.rule} ({self.where}): {self.text}; {self.cure}"


def lint(
    step: Callable[..., Any] | None = None,
    *batch: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    session: Any = None,
    becomes: str | torch.dtype | None = None,
) -> list[Finding]:
    """Find mistakes of precision; `step(*batch)`, if given, runs once under the tape and is undone.

    Args:
        step, batch: one training step, as for `trace_step`.
        model, optimizer, session: what takes part; found through `step` where left out.
        becomes: a dtype that the model's buffers are going to be cast to.

    Returns:
        Findings, each place once, in the order found.

    Raises:
        ConfigError: `step` is no function.
    """
    if isinstance(step, nn.Module) or not (step is None or callable(step)):
        hint = "lint(model=...)" if isinstance(step, nn.Module) else "lint(step, *batch) or lint(model=...)"
        raise ConfigError(f"lint got a {type(step).__name__} as the step, expected a function: {hint}")
    participants = [x for x in (model, optimizer, session) if x is not None]
    parts = StepParticipants(step, participants)
    findings = findings_at_rest(parts, step, becomes)
    if step is not None:
        probe = LintProbe(parts.session, parts.models)
        versions = [
            (where, buffer, buffer._version)
            for where, module, name, buffer in _floating_buffers(parts)
            if (becomes is not None or buffer.dtype in LOW_DTYPES) and not is_normalisation(module)
            if not buffer.is_inference() and not is_recomputed(module, name)
        ]
        try:
            trace_step(step, *batch, session=parts.session, model=parts.models, optimizer=parts.optimizers,
                       try_cures=False, observers=[probe.observe])  # fmt: skip
        except BannedOpError as error:
            findings.append(Finding("banned op", "loss", str(error), "see the remedy in the message"))
        except RuntimeError as error:
            findings += _from_error(error)
        findings += probe.list_findings()
        findings += probe.uses.find_repeated_casts()
        text = "the model changes it in training, and 16 bits round small changes away"
        cure = "keep it in fp32 by a plan rule, PlanRule({!r}, dtype='fp32'), or make a count an integer"
        changed = (name for name, buffer, version in versions if buffer._version != version)
        findings += [Finding("low buffer", name, text, cure.format(name)) for name in changed]
    return list(dict.fromkeys(findings))


def findings_at_rest(
    parts: StepParticipants, step: Callable[..., Any] | None = None, becomes: str | torch.dtype | None = None
) -> list[Finding]:
    """Yield findings that need no step: in buffers, optimizers, criteria and the session."""
    if becomes is not None:
        format_of(becomes)
    return [
        *_buffers(parts, becomes),
        *(Finding("epsilon", *row) for row in zero_epsilons(parts.optimizers)),
        *(Finding("fused step", *row) for row in find_idle_steps(parts.optimizers)),
        *coarse_weights(parts.optimizers),
        *_zero_moments(parts.optimizers),
        *_losses(parts, step),
        *_missing_scale(parts),
        *_unfit_weights(parts.session),
    ]


def _where(node: Node) -> str:
    return node.location.where or node.location.module or "root"


class LintProbe:
    """An observer for the tape of a session's step, or of any; `list_findings()` after it."""

    def __init__(self, session: Any = None, models: Iterable[nn.Module] = ()) -> None:
        self.findings: list[Finding] = []
        self._session = session
        self.uses = _WeightUses(models)
        self.low = False
        """Whether an op gave values in 16 bits."""
        self._uncast: str | None = None
        """Where the first op ran in fp32 that a session runs in 16 bits; None where one ran in these."""
        self._low = set[str]()
        if session is not None and casts_weights(session.level, session.policy):
            self._uncast, self._low = "", low_ops(session.policy)

    def list_findings(self) -> list[Finding]:
        """Return the findings of the step."""
        weights = [*_unfit_weights(self._session)]
        if self._uncast and not weights:
            fault = no_region(self._session.policy, self._session.conversions)
            return [*self.findings, Finding("no region", self._uncast, *fault)]
        return [*self.findings, *weights, *self.uses.find_long_sums()]

    def observe(self, node: Node, finite: bool) -> None:
        """Check one op as it ran."""
        self.uses.observe(node)
        self.low = self.low or any(t.dtype in LOW_DTYPES for t in node.outs)
        if node.func.is_view or node.phase not in ("forward", "recompute"):
            return
        if self._uncast is not None and any(t.dtype in LOW_DTYPES for t in node.outs):
            self._uncast = None
        elif self._uncast == "" and node.base in self._low:
            self._uncast = _where(node)
        tensors = [t for t in node.tensors() if t.is_floating_point()]
        if any(t.dtype == torch.float16 for t in (*node.outs, *tensors)):
            for check in (_scalars, _mask_cast, _long):
                rows = check(node, tensors, any(t.dtype == torch.float16 for t in node.outs[:1]))
                self.findings += [Finding(rule, _where(node), text, cure) for rule, text, cure in rows]
        if node.outs and node.outs[0].dtype in LOW_DTYPES:
            rows = (*(_find_stuck(node) or _find_still(node, self.uses.weights)), *_equal_neighbours(node))
            self.findings += [Finding(rule, _where(node), text, cure) for rule, text, cure in rows]


class _WeightUses:
    """An observer for the tape: uses of each weight in the forward passes between two backward passes.

    A use of an fp32 weight is a cast of it to 16 bits. Weights are known by where they lie, since an op may
    be given a view of one.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.weights: Mapping[int, tuple[str, Tensor]] = {
            p.data_ptr(): (name, p)
            for model in models
            for name, p in model.named_parameters()
            if type(p) is nn.Parameter and p.requires_grad and not p.is_meta and p.numel()
        }
        self._uses, self._most = Counter[int](), Counter[int]()
        """Since the last backward, and the most before one."""

    def observe(self, node: Node) -> None:
        """Count the weights that one op was given."""
        if node.phase == "backward":
            self._most |= self._uses
            self._uses.clear()
        elif node.phase == "forward" and not node.func.is_view:
            casts = node.base == "_to_copy" and any(t.dtype in LOW_DTYPES for t in node.outs)
            used = {t.data_ptr() for t in node.tensors() if (t.dtype is torch.float32) is casts}
            self._uses.update(used & self.weights.keys())

    def find_repeated_casts(self) -> Iterable[Finding]:
        """Yield where copies of fp32 weights take more memory than all of these and their gradients."""
        casts = self._most_uses(torch.float32)
        copies = _bytes_of(casts)
        if copies <= sum(8 * w.numel() for _, w in self.weights.values() if w.dtype is torch.float32):
            return
        (name, _), count = max(casts.items(), key=lambda row: row[1] * row[0][1].numel())
        once = _bytes_of(dict.fromkeys(casts, 1))
        text = f"cast to 16 bits {count} times before backward: copies of this model's weights take "
        text += f"{copies / 1e6:.3g} MB until then, {once / 1e6:.2g} MB where each is cast once"
        cure = "run the model in `with hs.frozen_weights(model):` inside of the region"
        yield Finding("repeated casts", name, text, cure)

    def find_long_sums(self) -> Iterable[Finding]:
        """Yield the weight whose gradients autograd adds in 16 bits, one by one, past what these can hold."""
        uses = self._most_uses(*LOW_DTYPES)
        long = {
            (name, weight): n
            for (name, weight), n in uses.items()
            if n * torch.finfo(weight.dtype).eps > 0.5 and weight.grad_dtype is not torch.float32
        }
        if not long:
            return
        (name, weight), count = max(long.items(), key=lambda row: row[1])
        dtype, others = dtype_name(weight.dtype), f" (and {len(long) - 1} others)" if len(long) > 1 else ""
        text = f"used {count} times before backward{others}: autograd adds the gradients of these uses in "
        text += f"{dtype}, one by one, which rounds the later ones away"
        cure = "give hs.optim accumulate='fp32', keep this module in fp32 by a plan rule, or use level O1"
        yield Finding("long gradient sum", name, text, cure)

    def _most_uses(self, *dtypes: torch.dtype) -> dict[tuple[str, Tensor], int]:
        counts = self._most | self._uses
        return {row: n for at, n in counts.items() if (row := self.weights[at])[1].dtype in dtypes}


def _bytes_of(casts: Mapping[tuple[str, Tensor], int]) -> int:
    return sum(2 * count * weight.numel() for (_, weight), count in casts.items())


_Problem = Iterable[tuple[str, str, str]]
"""Rule, text and cure."""
_MASK_CURE = "use torch.finfo(x.dtype).min, or float('-inf') before a softmax"


def _scalars(node: Node, tensors: list[Tensor], half: bool) -> _Problem:
    if not any(t.dtype == torch.float16 for t in (tensors or node.outs)):
        return
    base = node.base.rstrip("_")
    for value in pytree.tree_flatten((node.args, node.kwargs))[0]:
        if type(value) not in (int, float):
            continue
        size = abs(value)
        if base in ("add", "clamp_min", "clamp", "maximum") and 0 < size <= FP16.smallest_subnormal / 2:
            text = f"{value:g} is zero in fp16, whose smallest value is 6e-08"
            yield "epsilon", text, "use at least 6.1e-05 (the smallest normal fp16), or run this op in fp32"
        elif base in _MASKING and 1e6 <= size < math.inf and (value < 0) != (base == "sub"):
            yield "mask", f"{value:g} does not fit fp16, which ends at 65504", _MASK_CURE


def _mask_cast(node: Node, tensors: list[Tensor], half: bool) -> _Problem:
    if not half or node.base != "_to_copy" or not tensors or not tensors[0].numel():
        return
    low, high = torch.aminmax(tensors[0])
    if tensors[0].dtype != torch.float16 and -math.inf < low.item() <= -1e6 and high.item() <= FP16.max:
        text = f"a mask of {low.item():g} becomes -inf when it is cast to fp16"
        yield "mask", text, "build the mask with torch.finfo(torch.float16).min"


def _long(node: Node, tensors: list[Tensor], half: bool) -> _Problem:
    if not half or not tensors:
        return
    if node.base in ("_softmax", "_log_softmax", "logsumexp"):
        terms = tensors[0].shape[node.args[1] if isinstance(node.args[1], int) else node.args[1][0]]
        text = f"{terms} terms in fp16: their sum does not fit"
        row = "softmax", text, "run softmax in fp32: policy.with_rules(full=['softmax', 'log_softmax'])"
    elif node.base in ("sum", "mean"):
        terms = tensors[0].numel() // max(1, node.outs[0].numel())
        why = "the sum leaves fp16" if node.base == "sum" else "1/n in its gradient underflows fp16"
        text = f"{node.base} over {terms} elements in fp16: {why}"
        row = "long reduction", text, f"x.{node.base}(dtype=torch.float32)"
    else:
        return
    if terms > FP16.max:
        yield row


#: Share of the changes to an average that rounding swallows, beyond which it does not move.
_STUCK = 0.9


def _find_stuck(node: Node) -> list[tuple[str, str, str]]:
    """Find a 16-bit running average or count that a change below its spacing leaves as it is."""
    base = node.base.removeprefix("_foreach_")
    learning = torch.is_grad_enabled() and any(t.requires_grad for t in node.tensors())
    if learning or base not in ("add_", "sub_", "mul_", "lerp_", "addcmul_"):
        return []
    wide = rerun(node, torch.float32) or []
    outs = node.outs if base != node.base else node.outs[:1]
    lost = meant = 0
    for old, new, exact in zip(node.tensors(), outs, wide):
        moved = exact != old
        lost, meant = lost + int((moved & (new == old)).sum()), meant + int(moved.sum())
    if meant and lost >= _STUCK * meant:
        return [_still(base, lost / meant, outs[0])]
    return []


def _still(base: str, share: float, out: Tensor) -> tuple[str, str, str]:
    text = f"{base} leaves {share:.0%} of it as it is: {dtype_name(out.dtype)} rounds the change away"
    return "average", text, "keep this average in fp32"


#: Ops that blend values element by element, or only move them.
_BLENDS = frozenset(
    ["add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "_to_copy", "copy", "clone", "detach", "alias"]
)
#: A sum so many spacings of its format above what is added rounds that by more than 6 %.
_COARSE = 8


def _is_blend(node: Node) -> bool:
    return node.phase == "forward" and not node.dropped and node.base.rstrip("_") in _BLENDS


def _list_blended(node: Node, depth: int = 8) -> list[tuple[Tensor, Node | None]]:
    """Return what a value was blended of: tensors from before the step (None), and results of other ops."""
    found: list[tuple[Tensor, Node | None]] = []
    given = [(t, None if parent is None else parent[0]) for t, parent in zip(node.tensors(), node.parents)]
    for t, maker in given[node.base == "copy_" :]:  # which does not look at what it writes over
        follow = maker is not None and depth > 0 and _is_blend(maker)
        found += _list_blended(maker, depth - 1) if follow and maker is not None else [(t, maker)]
    return [(t, maker) for t, maker in found if t.is_floating_point()]


def _find_still(node: Node, weights: Mapping[int, Any]) -> _Problem:
    """Find a 16-bit value from before the step that is blended with others and stays, or is a coarse sum."""
    inside = node.location.module or node.location.module_class
    if inside or not _is_blend(node) or any(t.requires_grad for t in node.tensors()):
        return
    out, first, sources = node.outs[0], node.tensors()[0], _list_blended(node)
    writes = node.base.endswith("_")
    outside = [t for t, maker in sources if maker is None and (t.dtype, t.shape) == (out.dtype, out.shape)]
    old = [t for t in outside if not writes or t is first or key_of(t) == key_of(out)]
    old = [first if writes else t for t in old if t.data_ptr() not in weights]
    given = [id(t) for t, parent in zip(node.tensors(), node.parents) if parent is None]
    plain = node.base in ("add", "add_") and any(id(t) in given for t in old)
    sums = plain and out.numel() == 1 and len(sources) > 1
    follows = any(maker is not None or t.data_ptr() in weights for t, maker in sources)
    blend = old and (sums or follows)
    wide = rerun_wider(node, {key_of(out): old[0]} if writes else {}) if blend else None
    if not wide or wide[0].shape != out.shape:
        return
    change = wide[0] - old[0].float()
    spacing = torch.finfo(out.dtype).eps * float(old[0].abs()) if sums else 0.0
    moved = change != 0
    lost, meant = int((moved & (out == old[0])).sum()), int(moved.sum())
    if sums and 0 < float(change.abs()) < _COARSE * spacing:
        name = dtype_name(out.dtype)
        text = f"a sum of {float(old[0]):.4g} in {name} is given {float(change):.3g} more, and the steps of "
        text += f"{name} are {spacing:.2g} there: it rounds what it is given, and stands still in the end"
        yield "sum", text, "keep this sum in fp32"
    elif follows and meant and lost >= _STUCK * meant:
        yield _still(node.base, lost / meant, out)


def _equal_neighbours(node: Node) -> _Problem:
    """Find positions or cumulative sums whose neighbours become equal in 16 bits."""
    out, inputs = node.outs[0], node.tensors()
    if out.numel() < 16:
        return
    if node.base == "cumsum":
        dim, exact = node.args[1], rerun(node, torch.float32) or []
        row = [x.movedim(dim, -1).reshape(-1, x.shape[dim])[0] for x in (out, *exact[:1])]
    elif node.base in ("arange", "linspace") and out.dim() == 1:
        row = [out, torch.arange(len(out), device=out.device)]
    elif node.base == "_to_copy" and out.numel() == max(out.shape, default=0) and inputs:
        whole = inputs[0].detach().flatten().float()
        row = [out.flatten(), whole] if bool((whole == whole.round()).all()) else []
    else:
        return
    if len(row) < 2 or not bool((row[1].diff() > 0).all()):
        return
    lost = int((row[0].diff() == 0).sum())
    if lost:
        text = f"{lost} of {len(row[0])} rising values equal the one before in {dtype_name(out.dtype)}"
        yield "positions", text, "compute them in fp32, or as whole numbers"


def _from_error(error: RuntimeError) -> Iterable[Finding]:
    if "without overflow" in str(error):
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        text = "a fill value does not fit the tensor's dtype (fp16 ends at 65504)"
        yield Finding("mask", line, text, _MASK_CURE)
        return
    raise error


def _buffers(parts: StepParticipants, becomes: str | torch.dtype | None) -> Iterable[Finding]:
    for where, module, _, buffer in _floating_buffers(parts):
        if buffer.numel() < 2:
            continue
        if is_normalisation(module):
            if buffer.dtype in LOW_DTYPES:
                text = f"running statistics in {dtype_name(buffer.dtype)} stop moving and lose range"
                yield Finding("low buffer", where, text, "keep normalisation statistics in fp32")
        elif becomes is not None or buffer.dtype in LOW_DTYPES:
            yield from _find_merged(where, buffer, format_of(becomes or buffer.dtype))


def _floating_buffers(parts: StepParticipants) -> Iterable[tuple[str, nn.Module, str, Tensor]]:
    for model in parts.models:
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    yield f"{path}.{name}".strip("."), module, name, buffer


def _find_merged(where: str, buffer: Tensor, fmt: Format) -> Iterable[Finding]:
    """Find a buffer whose values leave the format, or become equal in it (positions, frequencies)."""
    wide = buffer.detach().float().flatten()
    low = wide if buffer.dtype == fmt.torch_dtype else wide.to(fmt.torch_dtype).float()
    cure = "keep this buffer in fp32 (a plan rule for it), or compute it where it is used"
    if not low.isfinite().all() and wide.isfinite().all():
        yield Finding("low buffer", where, f"values up to {wide.abs().max():.3g} leave {fmt}", cure)
        return
    steps = wide.diff()
    rising = bool((steps >= 0).all()) and wide.numel() >= 16 and float(wide[-1]) > float(wide[0])
    if rising and bool((low.diff() == 0).any()):
        lost = int((low.diff() == 0).sum())
        yield Finding("low buffer", where, f"{lost} of {wide.numel()} rising values are equal in {fmt}", cure)


def coarse_weights(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[Finding]:
    """Yield 16-bit weights without masters of which an update at the group's rate changes few elements."""
    return (row for row in _low_weights(optimizers) if row.rule == "learning rate")


def _low_weights(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[Finding]:
    """Yield 16-bit weights without masters, and whether updates at the group's rate are lost in them."""
    for optimizer in optimizers:
        kind, keeps = type(optimizer).__name__, holder_of(optimizer) is not None
        for number, group in enumerate(optimizer.param_groups):
            has_masters = keeps and group.get("master", "") is not None
            low = [
                p for p in group["params"] if p.dtype in LOW_DTYPES and p.requires_grad and not has_masters
            ]
            rate = group.get("initial_lr", group.get("lr"))  # a warm-up begins at 0
            steps = ((p, expected_step(p, group, float(rate))) for p in low if rate is not None)
            pairs = ((p, step) for p, step in steps if step is not None)
            lost = [(p, float(too_coarse(p, step)[1].float().mean())) for p, step in pairs]
            still = [p for p, share in lost if share > 0.5]
            name, where = dtype_name(low[0].dtype) if low else "", f"{kind} group {number}"
            if still:  # each tensor by itself: a norm that stands still is a small share of its group
                shapes = ", ".join(dict.fromkeys(str(list(p.shape)) for p in still[:4]))
                text = f"{len(still)} of {len(lost)} {name} tensors (shape {shapes}) are too coarse for a "
                text += f"step of {rate:g}: most of their weights will not move"
                yield Finding("learning rate", where, text, masters_cure(optimizer, group))
            elif low and group.get("master") != "stochastic":
                text = f"{kind} keeps no fp32 copy of {sum(p.numel() for p in low):,} {name} weights"
                text += ": small updates are rounded away"
                yield Finding("low weights", where, text, masters_cure(optimizer, group))


def _zero_moments(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[Finding]:
    """Yield optimizers whose second moments fp16 rounded to zero, by the first such parameter of each."""
    for optimizer in optimizers:
        first = next(find_zero_moments(optimizer), None)
        if first is not None:
            p, words = first
            where = f"{type(optimizer).__name__} state of shape {list(p.shape)}"
            yield Finding("zero moments", where, words, "load a state that was saved in fp32, or clear it")


def masters_cure(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """Return the line that gives an optimizer masters."""
    kind = type(optimizer).__name__
    if holder_of(optimizer) is not None:
        return f"leave master=None out: hs.optim.{kind} then keeps the exact fp32 weights"
    if kind not in optim.__all__:
        return "write hs.MasterWeights(optimizer, model), or prepare at level O2"
    rate = float(group.get("initial_lr", group["lr"]))
    return f"write hs.optim.{kind}(model.parameters(), lr={rate:g}) for torch's, or prepare at level O2"


class Audit(list[Finding]):
    """The rows that `audit` found; prints as a table."""

    def __str__(self) -> str:
        """Return one row a finding, its cure below it."""
        if not self:
            return "no mistakes of precision found in weights, buffers and optimizer"
        rule = max(len(row.rule) for row in self)
        where = max(len(row.where) for row in self)
        lines = [
            f"{row.rule:{rule}}  {row.where:{where}}  {row.text}\n{'':{rule}}  {'':{where}}  -> {row.cure}"
            for row in self
        ]
        return "\n".join(lines)


def audit(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    becomes: str | torch.dtype | None = None,
) -> Audit:
    """Look at the dtypes of weights, buffers and optimizers; runs no step, reads values, changes nothing.

    Rows: 16-bit weights without masters, and whether updates at this learning rate are lost in them; a fused
    step of torch's that does not update them, tried on 64 weights of its own; an epsilon that fp16 rounds to
    zero; running statistics, positions and tables in 16 bits; losses that take probabilities; tied weights
    that have come apart in two dtypes; PEFT's adapters in fp32 on 16-bit layers, which copy each input.

    Args:
        model, optimizer: one or several, as for `prepare`; before it or after.
        becomes: a dtype that the model is going to be cast to; buffers are judged by it.

    Returns:
        A list of `Finding`, each with its cure; `print` shows a table.

    Raises:
        ConfigError: a model or optimizer that is none, or an unknown dtype.
    """
    models, optimizers = as_list(model), as_list(optimizer)
    for kind, things in ((nn.Module, models), (torch.optim.Optimizer, optimizers)):
        for thing in (x for x in things if not isinstance(x, kind)):
            raise ConfigError(
                f"audit got a {type(thing).__name__}, expected a {kind.__name__}: audit(model, optimizer)"
            )
    parts = StepParticipants(None, [*models, *optimizers])
    findings = findings_at_rest(parts, becomes=becomes)
    low = [row for row in _low_weights(optimizers) if row.rule == "low weights"]
    return Audit([*low, *findings, *_find_untied(models), *_find_wide_adapters(models)])


def _find_untied(models: Iterable[nn.Module]) -> Iterable[Finding]:
    """Find pairs of matrices in two dtypes of which one is the other, rounded."""
    for model in models:
        weights = {n: p.detach() for n, p in named_parameters(model).items() if p.dim() > 1 and not p.is_meta}
        for low_name, low in weights.items():
            for name, wide in weights.items() if low.dtype in LOW_DTYPES else ():
                alike = wide.dtype not in LOW_DTYPES and wide.shape == low.shape
                if alike and bool((wide.to(low) == low).all()) and bool((low != low.flatten()[0]).any()):
                    text = f"the same values as {name}, but {dtype_name(low.dtype)} beside "
                    text += f"{dtype_name(wide.dtype)}: a cast of one of them has untied them"
                    cure = "cast the whole model at once, or tie them again after the cast"
                    yield Finding("tied weights", low_name, text, cure)


def _find_wide_adapters(models: Iterable[nn.Module]) -> Iterable[Finding]:
    """Find PEFT's layers whose adapters are fp32 on 16-bit weights: these cast the layer's input for them."""
    for model in models:
        layers = [name for name, module in model.named_modules() if _widens_inputs(module)]
        if layers:
            text = f"its adapter is fp32 on a 16-bit layer: {len(layers)} such layers copy each input to "
            text += "fp32, which is kept for backward"
            cure = "prepare at level O2 (16-bit adapters with fp32 masters); or, in a 16-bit region, set "
            cure += (
                "cast_input_dtype_enabled = False on the layers (peft.helpers.disable_input_dtype_casting)"
            )
            yield Finding("adapters", layers[0], text, cure)


def _widens_inputs(module: nn.Module) -> bool:
    if getattr(module, "cast_input_dtype_enabled", None) is not True:
        return False
    dtypes = {(n.startswith("base_layer."), p.dtype) for n, p in module.named_parameters()}
    return (False, torch.float32) in dtypes and any((True, dtype) in dtypes for dtype in LOW_DTYPES)


_PROBABILITIES = (
    "binary cross-entropy on probabilities: log of a rounded 0 or 1",
    "give logits to BCEWithLogitsLoss and drop the sigmoid",
)


def _losses(parts: StepParticipants, step: Callable[..., Any] | None) -> Iterable[Finding]:
    modules = {m: n for model in parts.models for n, m in model.named_modules()}
    modules = {v: "loss" for v in closure_of(step) if isinstance(v, nn.Module)} | modules
    for module, path in modules.items():
        if isinstance(module, nn.BCELoss):
            yield Finding("probabilities", path or "BCELoss", *_PROBABILITIES)


def _missing_scale(parts: StepParticipants) -> Iterable[Finding]:
    session = parts.session
    if session is None or session.policy.compute_dtype != torch.float16 or not session.optimizers:
        return
    if isinstance(session.loss_scale, NoLossScale):
        text = "fp16 without a loss scale: gradients below 6e-08 become zero"
        yield Finding("loss scale", "prepare", text, 'loss_scale="dynamic"')


def _unfit_weights(session: Any) -> Iterable[Finding]:
    if session is not None:
        weights = (p for model in session.models for p in model.parameters())
        fault = weights_fault(session.level, session.policy, session.optimizers, weights)
        if fault is not None:
            yield Finding("weights", "prepare", *fault)


_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


def lint_source(source: str, name: str = "script") -> list[Finding]:
    """Find mistakes in a script's text: clipping of scaled gradients, losses that take probabilities.

    Raises:
        SyntaxError: the source is not Python.
    """
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    calls.sort(key=lambda n: (n.lineno, n.col_offset))
    losses = (call for call in calls if called(call) in ("BCELoss", "binary_cross_entropy"))
    findings = (Finding("probabilities", f"{name}:{call.lineno}", *_PROBABILITIES) for call in losses)
    return [*_clipping(calls, name), *findings]


def _clipping(calls: list[ast.Call], script: str) -> Iterable[Finding]:
    """Find a clip after `scaler.scale(loss).backward()` without `unscale_` between them."""
    cure = ""
    for call in calls:
        name = called(call)
        if name == "backward":
            cure = _before_a_clip(call.func)
        elif name in ("unscale_", "zero_grad"):
            cure = ""
        elif name in _CLIPS and cure:
            text = "the gradients still carry the loss scale, so the clip is by another norm than it says"
            yield Finding("clipping", f"{script}:{call.lineno}", text, cure)


def _before_a_clip(function: ast.expr) -> str:
    """Return the call that a clip needs after this `x.backward`; nothing, if the loss is not scaled."""
    owner = function.value if isinstance(function, ast.Attribute) else None
    if isinstance(owner, ast.Call):
        return "scaler.unscale_(optimizer) before the clip" if called(owner) == "scale" else ""
    of_a_session = isinstance(owner, ast.Name) and owner.id in ("amp", "session")
    return "amp.step(clip_norm=...) in place of the clip" if of_a_session else ""
