"""What `level="auto"` chooses among, and how it decides: data in, a choice and its reason out.

Nothing here measures. A `Trial` is what was measured of one `LevelChoice`; `decide` takes the fastest that
stays near fp32, and fp32 itself where nothing beats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch

from halfstep.formats import parse_dtype
from halfstep.policy.plan import Plan
from halfstep.ratios import speed_in_words

#: Below this share of fp32's time a 16-bit choice is worth its rounding.
WORTH = 0.98

#: Gradients: distance to fp32's over fp32's norm, in roundings of the dtype (2^-8 in bf16, 2^-11 in fp16),
#: that one step from the same weights may have: an angle of 30 degrees in bf16. Healthy networks at their
#: first step were seen at 0.004 (an LSTM) to 0.30 (20 layers with batch norm), `torch.autocast` at the same;
#: a wrong or overflowing gradient is at 1 or more.
ULPS = 128

#: The level of what is timed beside the choices: torch's own region around fp32 weights.
TORCHS = "torch.autocast"

#: Why a choice was not measured where the seconds were spent before.
NO_TIME = "no time was left to measure it"

#: What a choice that did not fit into memory failed by.
TOO_LARGE = ("GB beside what is held", "out of memory", "allocate memory")

#: The loss: distance to fp32's over fp32's, in the same units.
LOSS_ULPS = 4


@dataclass(frozen=True)
class LevelChoice:
    """A level in a dtype (None in fp32), the memory layout, the rules of a plan, and whether compiled."""

    level: str
    dtype: str | None = None
    layout: str = "keep"
    rules: Plan = field(default_factory=Plan.empty)
    compiled: bool = False

    @property
    def label(self) -> str:
        """`O2 bf16`, with layout and plan where they are not the plain ones."""
        words = [self.level, self.dtype or ""]
        words += [self.layout if self.layout != "keep" else ""]
        words += [f"plan of {len(self.rules)}" if self.rules.rules else ""]
        words += ["compiled" if self.compiled else ""]
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Trial:
    """What was seen of a choice: seconds of its steps, and how far one step was from fp32's.

    loss_error, gradient_error: |x - x32| / |x32| over the first step from the same weights; None where there
    was nothing to compare. farthest: the parameter whose gradient has the largest part in the distance, where
    names are known. compiling: seconds of its first step, where that compiled. failed: why it is out of the
    question, or None. Of a script that does not use halfstep also the losses of its steps, the peak
    bytes of tensors in one, how many were skipped, and what it `uses` of torch that halfstep's lines take the
    place of.
    """

    choice: LevelChoice
    seconds: tuple[float, ...] = ()
    loss_error: float | None = None
    gradient_error: float | None = None
    compiling: float | None = None
    failed: str | None = None
    losses: tuple[float, ...] = ()
    peak_bytes: int | None = None
    skipped: int = 0
    uses: frozenset[str] = frozenset()
    farthest: str = ""

    @property
    def time(self) -> float:
        """The lower quartile of a step's seconds, since what else runs here only adds; inf where none was
        timed."""
        return sorted(self.seconds)[(len(self.seconds) - 1) // 4] if self.seconds else float("inf")

    @property
    def too_large(self) -> bool:
        """Whether it failed for want of memory, in the words of torch's allocators or of the count before."""
        return self.failed is not None and any(words in self.failed for words in TOO_LARGE)

    @property
    def usable(self) -> bool:
        """Whether it was measured and is near fp32's numbers."""
        return self.failed is None and self.too_far is None

    @property
    def is_choice(self) -> bool:
        """Whether it may be taken: torch.autocast is usable, and only timed."""
        return self.usable and self.choice.level != TORCHS

    @property
    def too_far(self) -> str | None:
        """Which bound the step breaks, or None."""
        if self.choice.dtype is None:
            return None
        for what, error, limit in (
            ("loss", self.loss_error, loss_bound(self.choice.dtype)),
            ("gradient", self.gradient_error, gradient_bound(self.choice.dtype)),
        ):
            if error is not None and not isfinite(error):
                return f"its {what} or fp32's is inf or NaN"
            if error is not None and error > limit:
                where = f", most in {self.farthest}" if self.farthest and what == "gradient" else ""
                return f"its {what} is {error:.2g} of fp32's away from fp32's, more than {limit:.2g}{where}"
        return None


def gradient_bound(dtype: str) -> float:
    """Return how far gradients may be from fp32's, relative to them: 0.5 in bf16, 0.0625 in fp16."""
    return ULPS * _ulp(dtype)


def loss_bound(dtype: str) -> float:
    """Return how far the loss may be from fp32's, relative to it: 0.016 in bf16, 0.002 in fp16."""
    return LOSS_ULPS * _ulp(dtype)


def _ulp(dtype: str) -> float:
    return torch.finfo(parse_dtype(dtype)).eps / 2


def decide(trials: Sequence[Trial]) -> tuple[LevelChoice, str]:
    """Return the fastest that is near the first one's numbers, or the first where none is worth it; and why.

    The first is what there is without a choice (fp32, as a rule); earlier ones are plainer than later ones.
    Compiling must be worth it beside the fastest that is not compiled. torch.autocast is never taken.
    """
    choice, reason = _decide([t for t in trials if t.choice.level != TORCHS])
    return choice, "; ".join([reason, *_remarks({t.choice: t for t in trials}, choice)])


def _remarks(trials: Mapping[LevelChoice, Trial], taken: LevelChoice) -> list[str]:
    """What compiling cost and bought, and torch.autocast where it is faster than what is taken."""
    remarks: list[str] = []
    for choice, trial in ((c, t) for c, t in trials.items() if t.usable):
        plain, label, ms = replace(choice, compiled=False), choice.label, trial.time * 1e3
        if trial.compiling is not None:
            speed = speed_in_words(trial.time / trials[plain].time)
            speed += " as" if speed == "as fast" else " than"
            remarks.append(f"{label} is {speed} {plain.label}, after {trial.compiling:.2g} s of compiling")
        if choice.level == TORCHS and (share := trial.time / trials[taken].time) <= WORTH:
            remarks.append(
                f"{label} without halfstep is {speed_in_words(share)} than that ({ms:.4g} ms a step)"
            )
    return remarks


def _decide(trials: Sequence[Trial]) -> tuple[LevelChoice, str]:
    base, others = trials[0], trials[1:]
    usable = [t for t in others if t.usable]
    refused = [f"{t.choice.label}: {t.failed or t.too_far}" for t in others if not t.usable]
    if others and all((t.failed or "").startswith(NO_TIME) for t in others):
        why = "nothing else was measured in the time there was; give more by seconds= (--seconds)"
        return base.choice, f"{base.choice.label}: {why}"
    if not usable:
        return base.choice, "; ".join([f"{base.choice.label}: nothing else can be used", *refused])
    base_name = "fp32" if base.choice.dtype is None else base.choice.label
    plain = min(t.time for t in (base, *usable) if not t.choice.compiled)
    worth = [t for t in usable if not t.choice.compiled or t.time <= WORTH * plain]
    best = min(worth or usable, key=lambda t: t.time)
    share = best.time / base.time
    speed = speed_in_words(share)
    times = f"({best.time * 1e3:.4g} ms a step against {base.time * 1e3:.4g} ms)"
    if share > WORTH:
        why = f"nothing here is faster than {base_name}; the best other setting, {best.choice.label}, is"
        return base.choice, "; ".join([f"{base.choice.label}: {why} {speed} {times}", *refused])
    reasons, dtype = [f"{best.choice.label}: {speed} than {base_name} {times}"], best.choice.dtype
    if best.gradient_error is not None and dtype is not None:
        allowed = f"allowed {gradient_bound(dtype):.2g} in {dtype}"
        reasons.append(f"relative gradient error {best.gradient_error:.2g} ({allowed})")
    return best.choice, "; ".join([*reasons, *refused])
