"""Use a smaller loss or another loss scale: gradients that overflow want less, ones that vanish more."""

import ast
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.numerics.remedies.base import Cure, Evidence, Met, Remedy, always, with_attributes
from halfstep.numerics.remedies.source import Script, append, set_keywords, with_edit
from halfstep.numerics.remedies.terms import terms_of
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import OpLocation
from halfstep.trees import compute_device

#: Where scripts write a loss scale: keywords, and classes by their first argument.
_SCALES = ("init_scale", "loss_scale", "scale_value", "max_loss_scale", "init")
_SCALE_CLASSES = ("DynamicLossScale", "StaticLossScale")
_LARGE_LOSS = 1e3


@dataclass(frozen=True)
class DivideLoss(Remedy):
    """Divide the loss by 2**bits before it is scaled and backward begins."""

    bits: int
    kind = "loss"
    cases = ("range",)
    same_ops = True

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it where a large loss leaves the range in backward."""
        loss = evidence.root / (evidence.parts.scale_now[0] or 1.0)
        if evidence.node.phase != "backward" or loss < _LARGE_LOSS:
            return []
        text = f"divide the loss: it is {loss:.3g} (a mean in place of a sum, say), 2^{{}} less is enough"
        strengths = (evidence.bits + more for more in (0, 4, 8))
        return [Cure.of(*(cls(by, text=text.format(by), code=f"loss = loss / {2**by}") for by in strengths))]

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met:
        """Divide the loss where backward, or what scales it first, takes it."""
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
                return original(loss * 2.0**-self.bits, *args, **kwargs)
            finally:
                inside = False

        stack.enter_context(with_attributes(owner, **{name: backward_of_divided}))
        return lambda: met

    def edit_script(self, script: Script) -> None:
        """Write the division where backward or a loss scale takes the loss."""
        scaled = [
            c for c in script.calls("scale", "scale_loss") if isinstance(c.func, ast.Attribute) and c.args
        ]
        calls = scaled or [c for c in script.calls("backward") if c.args]
        losses = [c.args[0] for c in calls] or [
            c.func.value for c in script.calls("backward") if isinstance(c.func, ast.Attribute)
        ]
        for loss in losses:
            append(script, loss, f" / {2**self.bits})", "(")


@dataclass(frozen=True)
class LossScaleBy(Remedy):
    """Multiply the loss scale by 2**bits."""

    bits: int
    kind = "loss_scale"
    cases = ("range",)
    same_ops = True
    keeps_updates = True

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose a lower one, as far as later ops of backward need, but not below its minimum."""
        parts = evidence.parts
        now, least = parts.scale_now
        text = "lower the loss scale by 2^{} (a dynamic one does: the skip is harmless)"
        if parts.scale_moves:
            text = "begin with a loss scale 2^{} smaller: this one goes down only by skipping steps"
        doses = [
            cls(-by, text=text.format(by), code=_in_words(parts, now * 2.0**-by))
            for by in (evidence.bits, evidence.bits + 4, evidence.bits + 8)
            if evidence.node.phase == "backward" and now * 2.0**-by >= least and parts.has_scale
        ]
        return [Cure.of(*doses)] if doses else []

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Multiply the current scale."""
        return lift_loss_scale(parts, stack, self.bits)

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Write the scale where the script has its number, else as the code says."""
        yield from super().edit(text, location)
        yield with_edit(text, set_keywords, self.code)

    def edit_script(self, script: Script) -> None:
        calls = (call for call in ast.walk(script.tree) if isinstance(call, ast.Call))
        scales = [keyword.value for call in calls for keyword in call.keywords if keyword.arg in _SCALES]
        scales += [call.args[0] for call in script.calls(*_SCALE_CLASSES) if call.args]
        for node in scales:
            if any(isinstance(x, ast.Call) for x in ast.walk(node)):
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                script.swap(node, repr(node.value * 2.0**self.bits))
            elif not isinstance(node, ast.Constant):
                append(script, node, f" * {2.0**self.bits!r}")


@dataclass(frozen=True)
class LowestLossScale(Remedy):
    """Set a dynamic loss scale to its minimum: what it would come to by skipping steps."""

    kind = "lowest scale"

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Lower the current scale."""
        now, least = parts.scale_now
        return lift_loss_scale(parts, stack, math.log2(max(least, 1.0) / now)) if parts.scale_falls else None


def larger_scale(missing_bits: int, parts: StepParticipants) -> Cure:
    """Raise the loss scale for values so many powers of two below the smallest of their format."""
    bits = max(4, missing_bits + 8)
    text = f"raise the loss scale by 2^{bits}, or let it find its own"
    if parts.scale_moves:
        text = f"begin with a loss scale 2^{bits} larger: this one grows too slowly"
    return Cure.of(LossScaleBy(bits, text=text, code=_in_words(parts, parts.scale_now[0] * 2.0**bits)))


def lift_loss_scale(parts: StepParticipants, stack: ExitStack, bits: float) -> Met | None:
    """Multiply the current loss scale by 2**bits until the stack closes."""
    session, scaler = parts.session, parts.scaler
    if not parts.has_scale:
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
    return always


def _in_words(parts: StepParticipants, value: float) -> str:
    """Write another loss scale in the words of the script; a dynamic one only where there is none."""
    terms = terms_of(parts, True)
    return ((parts.scale_moves and terms.begin) or terms.scale).format(f"{value:.17g}")
