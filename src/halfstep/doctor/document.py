"""What the doctor found, as typed values, and its verdict in sentences.

`Document` is what `examine` and the command return, print and draw; `as_dict` is its JSON.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from halfstep.formats import FORMATS
from halfstep.numerics.cause import Cause
from halfstep.numerics.fault import Fault
from halfstep.numerics.lint import Audit, Finding
from halfstep.numerics.remedies.base import Cure
from halfstep.numerics.tape import within
from halfstep.numerics.watch import skips_in_words

if TYPE_CHECKING:
    from halfstep.numerics.watch import Watch

STEPS, INTERRUPT = "steps", "interrupt"

#: The values that a document is made of, by the names that they have beside it.
CauseFound, CureFound = Cause, Cure


@dataclass
class Document:
    """Everything the verdict, the JSON and the report are made of; `bad` holds the faults.

    `audit`: mistakes of precision in weights, buffers and optimizers before the first step, each with its
    cure; the faults say what came of them. `beside`: the largest values at the first fault's step and at the
    last good step before it. `diff`, `plan`: what to change in the script, and a plan as TOML, where asked
    for. `ended_by`: what ended the examination: "script" (it was over), "steps" (as many as were asked for),
    "interrupt"; else empty.
    """

    target: str
    steps: int
    losses: list[float] = field(default_factory=list[float])
    error: str | None = None
    notes: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    bad: list[Fault] = field(default_factory=list[Fault])
    counts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    lint: list[Finding] = field(default_factory=list[Finding])
    audit: Audit = field(default_factory=Audit)
    beside: dict[str, Any] = field(default_factory=dict[str, Any])
    format: str = "fp32"
    series: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    forecasts: list[str] = field(default_factory=list[str])
    lost: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    summary: list[str] = field(default_factory=list[str])
    diff: str = ""
    plan: str = ""
    ended_by: str = ""
    torch: str = field(default_factory=lambda: str(torch.__version__))

    @property
    def faults(self) -> list[Fault]:
        """Return the faults that need a change."""
        return [fault for fault in self.bad if not fault.harmless]

    @property
    def healthy(self) -> bool:
        """Whether no fault needs a change."""
        finite = all(math.isfinite(x) for x in self.losses) or bool(self.bad)
        return not (self.faults or self.lint or self.error) and finite

    @property
    def headline(self) -> str:
        """Return the verdict in one sentence: cause, place, cure with its code."""
        if self.healthy:
            return f"{self.target}: healthy over {self.steps} steps{self._end}"
        if not self.faults:
            why = self.error or (self.lint[0].text if self.lint else "the loss is not finite")
            return f"{self.target}: not healthy: {why}"
        fault = self.faults[0]
        cure = fault.best
        word = "" if cure is None else {"works": "cure", "untried": "try"}.get(cure.status, cure.status)
        do = f"; {word}: {cure.code or cure.text}" if cure is not None else ""
        return f"{self.target}: not healthy: step {fault.step + 1}, {fault.place}: {fault.cause.words}{do}"

    @property
    def _end(self) -> str:
        """Say why the examination ended where it did, if the script may go on."""
        if self.ended_by == INTERRUPT:
            return ", then it was interrupted"
        text = ", as many as were asked for; --steps 0 follows the script to its end"
        return text if self.ended_by == STEPS else ""

    @property
    def verdict(self) -> list[str]:
        """Return what a person reads first: a few lines, the gravest first."""
        lines = [self.headline, *([self.error] if self.error and self.faults else [])]
        distinct_faults: list[Fault] = []
        for fault in self.bad:
            if not any(fault.same_as(other) for other in distinct_faults):
                distinct_faults.append(fault)
                lines.append(_describe(fault))
        if not all(math.isfinite(x) for x in self.losses) and not self.bad:
            lines.append("the loss is not finite")
        lines += self.summary
        lines += [f"lint: {f.rule} ({f.where}): {f.text}; {f.cure}" for f in self.lint]
        return lines + [f"the script warned: {text}" for text in self.warnings]

    def as_dict(self) -> dict[str, Any]:
        """Return the document as plain values, with `healthy` and `verdict`."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return plain | {
            "bad": [fault.as_dict() for fault in self.bad],
            "lint": [dataclasses.asdict(finding) for finding in self.lint],
            "audit": [dataclasses.asdict(row) for row in self.audit],
            "healthy": self.healthy,
            "headline": self.headline,
            "verdict": self.verdict,
        }


def _describe(fault: Fault) -> str:
    number = f"step {fault.step + 1}" + ("" if fault.rank is None else f", rank {fault.rank}")
    if fault.harmless:
        place = within(fault.module, fault.module_class)
        return f"{number} skipped: {fault.op} {place} overflowed in backward; harmless"
    second = "second fault, behind the first: " if fault.masked_by else ""
    return f"{second}{number}: {fault.summary()}"


def add_watched(document: Document, watch: Watch, skips: Sequence[int]) -> None:
    """Add what a watch recorded to the document; `skips`: the steps that were skipped."""
    watch.collect()
    activations = (s for s in watch.series.values() if s.kind == "activation")
    formats = {FORMATS[sample.dtype] for s in activations for sample in s.samples}
    # Where no session decides, the format with the least range among the activations.
    document.format = (watch.format or min(formats, key=lambda f: f.max, default=FORMATS["fp32"])).name
    document.series = [
        {
            "kind": s.kind,
            "path": s.path,
            "class": watch.class_of(s.path),
            "steps": s.steps,
            "amax": s.amax,
            "samples": [dict(sample.__dict__) for sample in s.samples],
        }
        for s in watch.series.values()
    ]
    document.history = [dict(n.__dict__) for n in watch.notes]
    document.forecasts = [str(f) for f in watch.forecasts()]
    document.lost = [dict(n.__dict__) for n in watch.lost]
    document.summary = [*skips_in_words(skips, document.steps), *watch.outlook()]


def keep_latest(document: Document, until: int | None = None) -> None:
    """Keep one sample of each tensor: the latest up to step `until`, else the last."""
    for row in document.series:
        early = [s for s in row["samples"] if until is None or s["step"] <= until]
        row["samples"] = (early or row["samples"])[-1:]
