"""What to change so that a bad op stops being one: cheapest first, each applicable around a step.

A cure is put in place from outside (around the functions the user calls, in the session or the optimizer), so
that a run can try it before a person edits anything; `code` says what to write once it is known to work, in
the words of the interface through which the script trains (`Terms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.formats import FORMATS
from halfstep.numerics.cause import out_of_domain
from halfstep.numerics.fault import Cause, Cure, Spec
from halfstep.numerics.snapshot import StepParticipants, scale_of
from halfstep.numerics.tape import CallMode, Node, OpLocation, call_site, is_finite, op_label
from halfstep.scaling.loss_scale import NoLossScale
from halfstep.torch_private import pytree
from halfstep.trees import compute_device, first_device

_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


_TORCH_WIDE = 'with torch.autocast("cpu", enabled=False): ...  # inputs .float()'
_MASTERS = 'hs.prepare(model, optimizer, level="O2")'


@dataclass(frozen=True)
class Terms:
    """What to write in a script, by the interface it trains through; defaults are those of a plain loop.

    `clip`: clips gradients. `bf16`: computes in bf16. `wide`: runs one op in fp32. `scale`: asks for another
    loss scale, `{}` where its value stands; `begin`: has a dynamic one begin there, where that is written in
    another way. `masters`: keeps fp32 master weights. `rule`: runs the op `{}` in fp32 by a rule, where that
    can be.
    """

    clip: str = f"{_CLIP}  # before optimizer.step()"
    bf16: str = ".bfloat16() in place of .half(), torch.bfloat16 in place of torch.float16"
    wide: str = "inputs .float()"
    scale: str = 'torch.amp.GradScaler("cpu", init_scale={})'
    begin: str = ""
    masters: str = f'{_MASTERS}  # or weights in fp32, and torch.autocast("cpu", dtype=torch.bfloat16)'
    rule: str = ""


PLAIN = Terms()
AUTOCAST = Terms(bf16='torch.autocast("cpu", dtype=torch.bfloat16)', wide=_TORCH_WIDE)
SCALER = replace(
    AUTOCAST,
    clip=f"scaler.unscale_(optimizer); {_CLIP}",
    bf16='torch.autocast("cpu", dtype=torch.bfloat16)  # and no GradScaler',
)
SESSION = Terms(
    clip="amp.step(clip_norm=1.0)",
    bf16='hs.prepare(..., dtype="bf16")',
    wide="with hs.autocast(enabled=False): ...  # inputs .float()",
    scale='hs.prepare(..., loss_scale="dynamic")',
    begin="hs.prepare(..., loss_scale=hs.DynamicLossScale({}))",
    masters=_MASTERS,
    rule='hs.prepare(..., policy="full={}")',
)
TRAINER = replace(
    SESSION,
    clip="hs.Trainer(..., clip_norm=1.0)",
    bf16='hs.Trainer(..., dtype="bf16")',
    scale='hs.Trainer(..., loss_scale="dynamic")',
    begin="hs.Trainer(..., loss_scale=hs.DynamicLossScale({}))",
    masters='hs.Trainer(..., level="O2")',
    rule='hs.Trainer(..., policy="full={}")',
)
APEX = Terms(
    clip="torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)",
    bf16='hs.prepare(model, optimizer, dtype="bf16")  # in place of amp.initialize, which knows fp16 alone',
    wide="with amp.disable_casts(): ...  # inputs .float()",
    scale='amp.initialize(..., loss_scale="dynamic")',
    begin="amp.initialize(..., max_loss_scale={})",
    masters='amp.initialize(..., opt_level="O2")',
)
MINDSPORE = Terms(
    clip="grads = [g * min(1.0, 1.0 / float(g.norm())) for g in grads]",
    bf16='amp.auto_mixed_precision(net, "O2", dtype=ms.bfloat16)',
    wide="x.astype(ms.float32)",
    scale="amp.DynamicLossScaler(scale_value={}, scale_factor=2, scale_window=1000)",
    masters='amp.auto_mixed_precision(net, "O2")',
)
LIGHTNING = replace(
    AUTOCAST,
    clip="Trainer(gradient_clip_val=1.0)",
    bf16='Trainer(precision="bf16-mixed")',
    scale='Trainer(precision="16-mixed")',
    begin='Trainer(plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale={})))',
    masters='Trainer(precision="bf16-mixed")',
)
TRANSFORMERS = replace(
    AUTOCAST,
    clip="TrainingArguments(max_grad_norm=1.0)",
    bf16="TrainingArguments(bf16=True, fp16=False)",
    scale="TrainingArguments(fp16=True)",
    begin="Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale={})])",
    masters="TrainingArguments(bf16=True)  # weights in fp32",
)

#: Loops that call a script's step, by the end of the path of their source.
LOOPS = {
    "/halfstep/trainer/loop.py": TRAINER,
    "/lightning/pytorch/trainer/trainer.py": LIGHTNING,
    "/pytorch_lightning/trainer/trainer.py": LIGHTNING,
    "/transformers/trainer.py": TRANSFORMERS,
}


def terms_of(parts: StepParticipants, in_region: bool = False) -> Terms:
    """Return the words for a script of these parts; `in_region`: whether the op ran under autocast."""
    kinds = {kind.__module__ for model in parts.models for kind in type(model).__mro__}
    if parts.loop in LOOPS:
        terms = LOOPS[parts.loop]
    elif parts.session is not None:
        terms = SESSION
    elif getattr(parts.scaler, "frontend", "") == "apex":
        terms = APEX
    elif any(kind.startswith("halfstep.compat.mindspore") for kind in kinds):
        terms = MINDSPORE
    else:
        terms = SCALER if parts.scaler is not None and parts.scaler.is_enabled() else AUTOCAST
        terms = terms if in_region else replace(terms, bf16=PLAIN.bf16)
    if terms.wide == _TORCH_WIDE and not in_region:
        terms = replace(terms, wide=PLAIN.wide)
    device = compute_device(parts.parameters()).type
    return replace(
        terms, **{name: text.replace('"cpu"', f'"{device}"') for name, text in vars(terms).items()}
    )


Met = Callable[[], bool]
"""Says, later, whether a cure that was put in place has met what it is to change."""


def _always() -> bool:
    return True


class AtLocation(CallMode):
    """Runs one call (by its source line and op name) through `change`; everything else as it is.

    `met`: whether that call was made. Without a file it is every call in a region.
    """

    def __init__(self, op: str, file: str, line: int, change: Callable[..., Any]) -> None:
        super().__init__()
        self._op, self._where, self._change = op, (file, line), change
        self.met = not file

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; the one at the location through `change`."""
        name = getattr(func, "__name__", "")
        if not name.startswith("__get") and op_label(func, name) == self._op:
            in_region = torch.is_autocast_enabled(first_device((args, kwargs)))
            site = call_site()[1:] if self._where[0] else ("", 0 if in_region else -1)
            if site == self._where:
                self.met = True
                return self._change(func, args, kwargs)
        return func(*args, **kwargs)


def _in_fp32(func: Any, args: Any, kwargs: Any) -> Any:
    def wide(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    with torch.autocast(first_device((args, kwargs)), enabled=False):
        args, kwargs = pytree.tree_map(wide, (args, kwargs))
        return func(*args, **kwargs)


def _call_scaled(bits: float, has_bias: float, func: Any, args: Any, kwargs: Any) -> Any:
    place = next(i for i, x in enumerate(args) if isinstance(x, Tensor))
    out = func(*args[:place], args[place] * 2.0**-bits, *args[place + 1 :], **kwargs).float()
    bias = kwargs.get("bias", [*args, None, None][2]) if func is torch.nn.functional.linear else None
    return out * 2.0**bits if bias is None else (out - bias.float()) * 2.0**bits + bias.float()


def _exponent(func: Any, args: Any) -> int | None:
    """Return the position of the argument that is an exponent; None where none is."""
    name = getattr(func, "__name__", "")
    if op_label(func, name) == "exp" or name == "__rpow__":
        return 0
    return 1 if op_label(func, name) == "pow" and not isinstance(args[0], Tensor) else None


def _call_shifted(*arguments: Any) -> Any:
    *dims, func, args, kwargs = arguments
    place, args = _exponent(func, args) or 0, list(args)
    args[place] = args[place] - args[place].detach().amax(dims, keepdim=True)
    return func(*args, **kwargs)


def _with_epsilon(value: float, func: Any, args: Any, kwargs: Any) -> Any:
    def lift(x: Any) -> Any:
        return value if isinstance(x, float) and 0 < abs(x) < value else x

    args, kwargs = pytree.tree_map(lift, (args, kwargs))
    return func(*args, **kwargs)


def _call_clamped(value: float, *arguments: Any) -> Any:
    *either_sign, func, args, kwargs = arguments
    args, op = list(args), op_label(func, getattr(func, "__name__", ""))
    if (place := _exponent(func, args)) is not None:
        args[place] = args[place].clamp_max(value)
    elif op == "div":
        last = max(i for i, x in enumerate(args) if isinstance(x, Tensor))
        small = args[last].abs() < value
        args[last] = torch.where(small, value, args[last]) if either_sign else args[last].clamp_min(value)
    elif op != "pow" or not all(isinstance(x, int) and x > 0 for x in args[1:]):
        args[0] = args[0].clamp_min(value)
    return func(*args, **kwargs)


def over(dims: Sequence[int]) -> str:
    """Write dimensions as a script does; nothing for all."""
    return ", ".join(map(str, dims)) if len(dims) < 2 else f"({', '.join(map(str, dims))})"


@contextmanager
def with_attributes(thing: Any, **values: Any) -> Generator[None]:
    """Set attributes of `thing` for the block."""
    before = {name: getattr(thing, name) for name in values}
    instance_names = {name for name in values if name in vars(thing)}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if name in instance_names or name not in vars(thing):  # else it was a class's, and is again
                setattr(thing, name, value)
            else:
                delattr(thing, name)


def _reads_rules(parts: StepParticipants) -> bool:
    """Whether a session casts ops, so that a rule of its policy can run one in fp32."""
    return parts.session is not None and getattr(parts.session.policy, "compute_dtype", None) != torch.float32


#: What `torch.float16` is outside of a trial in which scripts get bf16 by that name.
FP16 = torch.float16


@contextmanager
def bf16_regions() -> Generator[None]:
    """Give bf16 to regions that ask for fp16, for the block."""
    set_dtype = torch.set_autocast_dtype

    def set_bf16(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, torch.bfloat16 if dtype == FP16 else dtype)

    with with_attributes(torch, set_autocast_dtype=set_bf16):
        yield


def _bf16(parts: StepParticipants, stack: ExitStack) -> Met | None:
    session = parts.session
    if any(p.dtype == torch.float16 for p in parts.parameters()):
        return None  # weights in fp16 would have to be converted too: from the start of a run, that is
    if session is None:
        stack.enter_context(bf16_regions())
    elif session.policy.compute_dtype == torch.float16:
        policy = replace(session.policy, compute_dtype=torch.bfloat16)
        stack.enter_context(with_attributes(session, policy=policy))
    else:
        return None
    return _always


def has_scale(parts: StepParticipants) -> bool:
    """Whether the loss is scaled by something whose scale can be set."""
    if parts.session is not None:
        return not isinstance(parts.session.loss_scale, NoLossScale)
    return parts.scaler is not None and parts.scaler.is_enabled()


def lift_loss_scale(parts: StepParticipants, stack: ExitStack, bits: float) -> Met | None:
    """Multiply the current loss scale by 2**bits until the stack closes."""
    session, scaler = parts.session, parts.scaler
    if not has_scale(parts):
        return None
    if session is not None:
        scale = session.loss_scale
        bounds = getattr(scale, "limit", scale)
        value = max(float(scale.value) * 2.0**bits, getattr(bounds, "min", 0.0))
        lifted = scale.with_value(min(value, getattr(bounds, "max", math.inf)))
        stack.enter_context(with_attributes(session, loss_scale=lifted))
    elif isinstance(scaler, torch.amp.GradScaler):
        # Not by `update`: a script may call that itself before the next step, and it wants a step between.
        home = compute_device(parts.parameters())
        scaler.scale(torch.ones((), device=home))  # makes the tensor of the scale
        stack.enter_context(with_attributes(scaler, _scale=scaler._scale * 2.0**bits))
    else:
        before = scaler.get_scale()
        stack.callback(scaler.update, before)
        scaler.update(before * 2.0**bits)
    return _always


def scale_falls(parts: StepParticipants) -> bool:
    """Whether the loss scale is dynamic and still above its minimum."""
    now, least = scale_now(parts)
    return has_scale(parts) and parts.scale_moves and now > max(least, 1.0)


def _lowest_scale(parts: StepParticipants, stack: ExitStack) -> Met | None:
    now, least = scale_now(parts)
    lower = math.log2(max(least, 1.0) / now)
    return lift_loss_scale(parts, stack, lower) if scale_falls(parts) else None


def _divide_loss(parts: StepParticipants, stack: ExitStack, bits: int) -> Met:
    """Divide the loss by 2**bits before it is scaled and backward begins."""
    owner, name = Tensor, "backward"
    if parts.session is not None:
        owner = parts.session
    elif parts.scaler is not None and not getattr(parts.scaler, "frontend", ""):
        owner, name = parts.scaler, "scale"
    original, met, inside = getattr(owner, name), False, False

    def backward_of_divided(loss: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal met, inside
        if inside or not isinstance(loss, Tensor):  # torch's own handlers call it once more
            return original(loss, *args, **kwargs)
        met = inside = True
        try:
            return original(loss * 2.0**-bits, *args, **kwargs)
        finally:
            inside = False

    stack.enter_context(with_attributes(owner, **{name: backward_of_divided}))
    return lambda: met


def _no_faster(parts: StepParticipants, stack: ExitStack, *most: float) -> Met:
    """Limit learning rates far above `most`, one for each group, to `most`."""
    met = False

    def limit_rates(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal met
        groups = optimizer.param_groups
        for group, rate in zip(groups, most if len(groups) == len(most) else ()):
            if float(group["lr"]) > 30 * rate:
                group["lr"] = rate
                met = True

    stack.callback(register_optimizer_step_pre_hook(limit_rates).remove)
    return lambda: met


def _logsumexp(
    parts: StepParticipants, stack: ExitStack, op: str, file: str, line: int, last: int, *dims: int
) -> Met:
    """Replace the logarithm of a sum of exponentials, taken on line `last`, by torch's logsumexp."""
    operands: list[Tensor] = []

    def remember(func: Any, args: Any, kwargs: Any) -> Any:
        operands[:] = args[:1]
        return func(*args, **kwargs)

    def take(func: Any, args: Any, kwargs: Any) -> Any:
        (x,) = operands
        return torch.logsumexp(x, dims or tuple(range(x.dim())), keepdim=args[0].dim() == x.dim())

    power = stack.enter_context(AtLocation(op, file, line, remember))
    log = stack.enter_context(AtLocation("log", file, last, take))
    return lambda: power.met and log.met


def put_in_place(spec: Spec, parts: StepParticipants, stack: ExitStack) -> Met | None:
    """Apply a dose of a cure to steps of these parts until the stack closes; None where that cannot be.

    ("both", first, second) applies two; ("lowest scale",) sets the loss scale to its minimum.
    """
    kind, *rest = spec
    if kind == "both":
        both = [put_in_place(dose, parts, stack) for dose in rest]
        return None if None in both else lambda: all(met is not None and met() for met in both)
    if kind in _ANYWHERE:
        return _ANYWHERE[kind](parts, stack, *rest)
    if kind not in _AT_SITE:
        return None
    op, file, line, *amount = rest
    if kind == "full" and _reads_rules(parts):
        policy = parts.session.policy.with_rules(full=[op])
        stack.enter_context(with_attributes(parts.session, policy=policy))
        file, line = "", 0  # a region that was opened before has read the policy as it was
    mode = stack.enter_context(AtLocation(op, file, line, partial(_AT_SITE[kind], *amount)))
    return lambda: mode.met


_ANYWHERE: dict[str, Callable[..., Met | None]] = {
    "bf16": _bf16,
    "loss_scale": lift_loss_scale,
    "lowest scale": _lowest_scale,
    "loss": _divide_loss,
    "rate": _no_faster,
    "logsumexp": _logsumexp,
}
_AT_SITE: dict[str, Callable[..., Any]] = {
    "full": _in_fp32, "full_here": _in_fp32, "scale": _call_scaled, "epsilon": _with_epsilon,
    "clamp": _call_clamped, "shift": _call_shifted,
}  # fmt: skip


def _spec(kind: str, node: Node, *amount: float) -> Spec:
    return (kind, node.op, node.location.file, node.location.line, *amount)


def _cure(*doses: tuple[Spec, str, str]) -> Cure:
    """Make a cure of doses (spec, text, code), each stronger than the one before."""
    (spec, text, code), *_ = doses
    kind = "full" if spec[0] == "full_here" else spec[0]
    return Cure(kind, text, code, specs=[d[0] for d in doses], doses=[d[1:] for d in doses])


def _here(location: OpLocation) -> str:
    return f" at {location.where}" if location.where else ""


def _full(node: Node, parts: StepParticipants) -> Cure:
    terms = terms_of(parts, node.location.in_region)
    by_rule = terms.rule and node.location.in_region and _reads_rules(parts)
    code = terms.rule.format(node.op) if by_rule else terms.wide
    text = f"run {node.op} in fp32{_here(node.location)}"
    return _cure((_spec("full" if by_rule else "full_here", node), text, code))


def to_bf16(parts: StepParticipants, in_region: bool = False) -> Cure:
    """Compute in bf16 instead of fp16; `in_region`: whether autocast is what chose fp16."""
    text = "use bf16 in place of fp16 throughout, .half() too: the range of fp32, no loss scale needed"
    return _cure((("bf16",), text, terms_of(parts, in_region).bf16))


def _for_range(
    node: Node, cause: Cause, parts: StepParticipants, root: float, later: Sequence[Node]
) -> list[Cure]:
    if cause.format not in ("fp16", "e4m3fn", "e5m2"):
        return _for_wide_range(node, cause, parts, later)
    bits = max(1, math.ceil(math.log2(cause.times or 2)) + 1)
    cures: list[Cure] = []
    if cause.weight:
        text = f"bring the row of {cause.weight} back; look at what wrote it (learning rate, sparse updates)"
        cures.append(Cure("advice", text, f"{cause.weight}.data.clamp_(-k, k)"))
    if node.phase == "backward":
        cures += _smaller_loss(parts, bits, root)
        cures += _lower_scale(parts, bits)
    adds_gradients = node.phase == "backward" and node.base == "add_" and not node.location.node
    if node.op != "cast" and not adds_gradients:  # the sum of gradients is autograd's own
        cures.append(_full(node, parts))
    if node.op in ("matmul", "linear", "bmm", "mm", "mul", "einsum") and node.phase != "backward":
        cures.append(_scale_around(node, bits, later))
    if _base_of(node) and node.phase != "backward":
        cures.append(_smaller_exponent(node, cause, later))
    return [*cures, to_bf16(parts, node.location.in_region)]


def _scale_around(node: Node, bits: int, later: Sequence[Node]) -> Cure:
    """Scale an op's input down by a power of two and its result up; the bias stays as it is."""
    of_the_call = (n for n in (node, *later) if n.location.call == node.location.call)
    added = node.op == "linear" and any(n.base.startswith("add") for n in of_the_call)
    text = f"scale by 2^-{bits} before {node.op} and undo it in fp32 after{_here(node.location)}"
    code = f"torch.{node.op}(x * 2**-{bits}, y).float() * 2**{bits}"
    if added:
        text += ", but for its bias"
        code = f"(linear(x * 2**-{bits}).float() - linear.bias) * 2**{bits} + linear.bias"
    return _cure((_spec("scale", node, bits, added), text, code))


_LARGE_LOSS = 1e3


def scale_now(parts: StepParticipants) -> tuple[float, float]:
    """Return the loss scale and its minimum."""
    rule = getattr(parts.session or parts.scaler, "loss_scale", None)
    return float(scale_of(parts.session, parts.scaler)), float(getattr(rule, "min", 0.0))


def _smaller_loss(parts: StepParticipants, bits: int, root: float) -> list[Cure]:
    """Divide a loss that is large by itself: a sum instead of a mean, targets without a scale."""
    loss = root / (scale_now(parts)[0] or 1.0)
    if loss < _LARGE_LOSS:
        return []
    template = f"divide the loss: it is {loss:.3g} (a mean in place of a sum, say), 2^{{}} less is enough"
    strengths = (bits, bits + 4, bits + 8)
    return [_cure(*((("loss", by), template.format(by), f"loss = loss / {2**by}") for by in strengths))]


def _lower_scale(parts: StepParticipants, bits: int) -> list[Cure]:
    """Lower the loss scale, as far as later ops of backward need, but not below its minimum."""
    now, least = scale_now(parts)
    template = "lower the loss scale by 2^{} (a dynamic one does: the skip is harmless)"
    if parts.scale_moves:
        template = "begin with a loss scale 2^{} smaller: this one goes down only by skipping steps"
    doses = [
        (("loss_scale", -further), template.format(further), _scale_written(parts, now * 2.0**-further))
        for further in (bits, bits + 4, bits + 8)
        if now * 2.0**-further >= least and has_scale(parts)
    ]
    return [_cure(*doses)] if doses else []


def larger_scale(missing_bits: int, parts: StepParticipants) -> Cure:
    """Raise the loss scale for values so many powers of two below the smallest of their format."""
    bits = max(4, missing_bits + 8)
    text = f"raise the loss scale by 2^{bits}, or let it find its own"
    if parts.scale_moves:
        text = f"begin with a loss scale 2^{bits} larger: this one grows too slowly"
    return _cure((("loss_scale", bits), text, _scale_written(parts, scale_now(parts)[0] * 2.0**bits)))


def _scale_written(parts: StepParticipants, value: float) -> str:
    """Write another loss scale in the words of the script; a dynamic one only where there is none."""
    terms = terms_of(parts, True)
    return ((parts.scale_moves and terms.begin) or terms.scale).format(f"{value:.17g}")


def _for_wide_range(node: Node, cause: Cause, parts: StepParticipants, later: Sequence[Node]) -> list[Cure]:
    clip = terms_of(parts, node.location.in_region).clip
    if _base_of(node) and node.phase != "backward":
        return [_smaller_exponent(node, cause, later)]
    if node.phase == "optimizer":
        text = "the values in the optimizer's state left the range: clip gradients before they get there"
        return [Cure("advice", text, clip)]
    text = f"values have left the range of {cause.format} itself: look for divergence (learning rate, "
    return [Cure("advice", text + "missing normalisation) or unscaled data", clip)]


def _for_precision(node: Node, culprit: Node, cause: Cause, parts: StepParticipants) -> list[Cure]:
    cures: list[Cure] = []
    if cause.scalar is not None:
        value = FORMATS[cause.format].smallest_normal
        text = f"use an epsilon that {cause.format} can hold ({value:.2g}){_here(culprit.location)}"
        cures.append(_cure((_spec("epsilon", culprit, value), text, f"eps = {value:.2g}")))
    cures.append(_full(culprit, parts))
    if culprit is not node:
        cures.append(_full(node, parts))
    if cause.format == "fp16":
        cures.append(to_bf16(parts, node.location.in_region))
    if node.op in ("log", "div", "sqrt", "rsqrt", "reciprocal") and node.phase == "forward":
        cures += [*_instead_of_log(node), *_away_from_the_edge(node, cause)]
    return cures


def _name_of(t: Tensor, node: Node) -> str:
    """Return the user's name for a tensor that the op read; empty where it has none, or two match."""
    names = [
        n for n, v in node.names.items() if v.shape == t.shape and v.dtype == t.dtype and torch.equal(v, t)
    ]
    return names[0] if len(names) == 1 else ""


def _instead_of_log(node: Node) -> list[Cure]:
    """Replace the logarithm of a softmax or a sigmoid by the one function of the logits that stays finite."""
    todo = [(p[0], 0) for p in node.parents if p is not None and node.op == "log"]
    while todo:
        maker, far = todo.pop()
        if "softmax" in maker.base:
            text = f"take log_softmax of the logits in place of the log of a softmax{_here(maker.location)}"
            return [Cure("advice", text, "torch.log_softmax(logits, dim=-1)")]
        if maker.base.startswith("sigmoid"):
            text = f"take logsigmoid of the logits in place of the log of a sigmoid{_here(maker.location)}"
            return [Cure("advice", text, "nn.functional.logsigmoid(logits)  # of -logits for 1 - p")]
        if far < 4 and maker.base not in ("mm", "addmm", "bmm"):
            todo += [(p[0], far + 1) for p in maker.parents if p is not None]
    return []


#: What exp may be taken of, by what its result has to fit into, with what is computed of it after.
_EXPONENTS = {"fp16": (10.0, 4.0)}


#: Ops that leave a ratio to a sum, or the logarithm of that but for a constant, as it is.
_IN_PROPORTION = ("mul", "where", "masked_fill", "_to_copy", "bmm", "mm", "add")


def _by_hand(node: Node, later: Sequence[Node]) -> tuple[Node | None, tuple[int, ...]]:
    """Find a softmax or logsumexp that the script writes by hand after an op, and its dimensions."""
    powers, sums, dims = {node.index}, set[int](), ()
    for other in later if node.phase == "forward" else ():
        repeat = other.func == node.func and other.location.line == node.location.line
        if repeat and other.parents == node.parents and None not in node.parents:
            powers.add(other.index)  # `x.exp() / x.exp().sum()`
        of = [-1 if parent is None else parent[0].index for parent in other.parents] or [-1]
        if other.base == "sum" and of[0] in powers and other.tensors()[0].shape == node.outs[0].shape:
            dims = tuple(other.args[1] or ()) if len(other.args) > 1 else ()
            sums.add(other.index)
        elif (other.base == "div" and of[0] in powers and of[-1] in sums) or (
            other.base == "log" and of[0] in sums
        ):
            return other, dims
        elif other.func.is_view or other.base in _IN_PROPORTION:
            for kind in (powers, sums):
                kind |= {other.index} if kind.intersection(of) else set()
    return None, ()


def _base_of(node: Node) -> float:
    """Return the base of a power that becomes too large; 0 for other ops."""
    base = node.args[0] if node.op == "pow" else math.e if node.op == "exp" else 0.0
    return float(base) if isinstance(base, int | float) and base > 1 else 0.0


def _smaller_exponent(node: Node, cause: Cause, later: Sequence[Node] = ()) -> Cure:
    base, exp = _base_of(node), node.op == "exp"
    name = next((_name_of(t, node) for t in node.tensors()), "") if node.phase == "forward" else ""
    last, dims = _by_hand(node, later)
    if last is not None and last.base == "log" and exp:
        text = f"take logsumexp in place of the log of a sum of exponentials{_here(last.location)}"
        spec = ("logsumexp", *_spec("", node)[1:], last.location.line, *dims)
        return _cure((spec, text, f"torch.logsumexp({name or 'x'}, dim={over(dims) or '...'})"))
    what = "what exp is taken of" if exp else "the exponent"
    template = f"keep {what} below {{:g}}, before {node.op} and not after it{_here(node.location)}"
    x, powers = name or "x", _EXPONENTS.get(cause.format, (80.0, 20.0))
    limits = [float(f"{k / math.log(base):.3g}") for k in powers]
    doses = [(_spec("clamp", node, k), template.format(k), f"{x}.clamp(max={k:g})") for k in limits]
    if last is not None and last.base != "log":
        text = (
            f"subtract the largest before {node.op}, as softmax does{_here(node.location)}: the ratio stays"
        )
        dim = f"{over(dims)}, " if dims else ""
        power = "torch.exp" if exp else f"{base:g} ** "
        doses.insert(0, (_spec("shift", node, *dims), text, f"{power}({x} - {x}.amax({dim}keepdim=True))"))
    return _cure(*doses)


def _away_from_the_edge(node: Node, cause: Cause, later: Sequence[Node] = ()) -> list[Cure]:
    floats = [t for t in node.tensors() if t.is_floating_point()]
    text = f"keep the argument of {node.op} away from the edge of its domain{_here(node.location)}"
    if node.op == "exp":
        return [_smaller_exponent(node, cause, later)]
    edged = ("div", "log", "sqrt", "rsqrt", "reciprocal", "pow", "log2", "log10", "log1p")
    if node.op not in edged or (node.op == "pow" and not isinstance(node.args[0], Tensor)):
        return [Cure("advice", text)]
    least = 1e-4 - (node.op == "log1p")
    name = _name_of(floats[-1 if node.op == "div" else 0], node) if floats and node.phase == "forward" else ""
    spec, code = _spec("clamp", node, least), f"{name or 'x'}.clamp_min({least:.4g})"
    last_parent = node.parents[-1] if node.parents else None  # what a weight is at one step tells nothing
    if node.op == "div" and (last_parent is None or bool((node.tensors()[-1] < 0).any())):
        d = name or "d"
        code = f"torch.where({d}.abs() < 1e-4, 1e-4, {d})" + ("" if name else "  # d: what is divided by")
        spec = (*spec, True)
    return [_cure((spec, text, code))]


def unmask(node: Node, mask: Node) -> list[Cure]:
    """Return the cure where an op reads the -inf that a mask wrote."""
    text = f"leave the masked terms out of {node.op}{_here(node.location)}, or fill them with a finite number"
    return [Cure("advice", f"{text}{_here(mask.location)}", "x.masked_fill(mask, -1e4)")]


def propose(
    node: Node,
    cause: Cause,
    parts: StepParticipants,
    root: float = 0.0,
    culprit: Node | None = None,
    later: Sequence[Node] = (),
) -> list[Cure]:
    """Return the cures worth trying for this op and cause, cheapest first.

    `root`: the loss, scaled; `culprit`: the earlier op at fault, where it is not this one; `later`: the ops
    that ran after it.
    """
    if cause.kind == "learning rate":
        return [Cure("advice", "check the schedule: what it divides by, and its range", "math.isfinite(lr)")]
    if node.phase == "optimizer" and cause.format in ("fp16", "e4m3fn", "e5m2"):
        text = "keep optimizer state in fp32: fp32 master weights"
        return [_cure((("masters",), text, terms_of(parts).masters)), to_bf16(parts)]
    if cause.kind == "range":
        return _for_range(node, cause, parts, root, later)
    if cause.kind == "precision":
        return _for_precision(node, culprit or node, cause, parts)
    if cause.kind == "mathematics":
        if node.base == "pow" and not out_of_domain(node):
            return _for_wide_range(node, cause, parts, later)
        if cause.advice is not None:
            return [Cure("advice", cause.advice[0] + _here(node.location), cause.advice[1])]
        return [*_instead_of_log(node), *_away_from_the_edge(node, cause, later)]
    if cause.kind == "data":
        name = next((n for n, t in node.names.items() if not is_finite(t)), "x")
        text = "drop such batches, or clean them where they are loaded"
        return [Cure("data", text, f"torch.isfinite({name}).all()")]
    if cause.kind == "weights":
        text = "look at how it was made, loaded or updated, or go back to a checkpoint before that"
        return [Cure("advice", text)]
    text = "run the step again; if it stays finite, check the hardware and kernels that write without order"
    return [Cure("advice", text, "torch.use_deterministic_algorithms(True)")]
