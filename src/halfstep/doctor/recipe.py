"""Examines a recipe: some steps watched, traced and linted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep.doctor.document import Document, add_watched, counts_of, keep_latest


class ExaminedRecipe(Protocol):
    """What is asked of a recipe: a fresh model with its optimizer, batches by seed, the loss of an output."""

    @property
    def name(self) -> str:
        """What the document calls it."""
        ...

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of (output, target)."""
        ...

    def build(self, seed: int, level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer for a level."""
        ...

    def batches(self, seed: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Inputs and targets of one pass over the data."""
        ...


def examine_recipe(
    recipe: ExaminedRecipe,
    level: str,
    dtype: str | None,
    scale: str | None,
    steps: int,
    seed: int,
    where: torch.device,
) -> Document:
    """Train the recipe for `steps` under watch on device `where`; the document of what was found."""
    from halfstep.numerics.lint import LintProbe, lint
    from halfstep.numerics.replayable import Replayable
    from halfstep.numerics.trace import trace_step
    from halfstep.numerics.watch import watch
    from halfstep.policy.levels import level_of
    from halfstep.session.prepare import prepare

    torch.manual_seed(seed)
    model, optimizer = recipe.build(seed, level)
    model.to(where)
    amp = prepare(model, optimizer, level=level, dtype=dtype, loss_scale=scale)
    batches = itertools.chain.from_iterable(itertools.repeat(recipe.batches(seed)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = recipe.loss(model(x), y)
        amp.backward(loss)
        amp.step()
        return loss.detach()

    first = [t.to(where) for t in next(batches)]
    probe = LintProbe(amp)
    trace = trace_step(step, *first, session=amp, underflow=True, observers=[probe.look])
    findings = [*lint(session=amp), *dict.fromkeys(probe.found())]
    seen = watch(model, amp, every=max(1, steps // 12))
    ready = Replayable(amp, warn=False)
    losses, error = [], None
    for number in range(steps):
        batch = first if number == 0 else [t.to(where) for t in next(batches)]
        try:
            losses.append(float(ready.run(step, *batch)))
        except Exception as caught:  # the verdict says it; the report shows what led there
            said = (str(caught).splitlines() or ["no message"])[0]
            error = f"{type(caught).__name__} at step {number + 1}: {said}"
            break
    ready.settle()
    seen.close()
    row = level_of(level)[0]
    label = f"{recipe.name} {row.name}" + ("" if row.name == "O0" else f" {_dtype_of(amp)}")
    traces = [(0, trace), *((number - 1, found) for number, found in ready.traces)]
    document = Document(label, len(losses), losses, error, lint=list(dict.fromkeys(findings)))
    document.counts = counts_of(trace.counts)
    add_watched(document, seen)
    keep_latest(document)
    skipped = [note for note in seen.notes if not note.taken]
    few = bool(skipped) and len(skipped) <= max(3, len(seen.notes) // 4)
    for number, one in traces:
        if one.bad is not None:
            one.bad.step, one.bad.harmless = number, one.bad.harmless and few
            document.bad.append(one.bad)
    return document


def _dtype_of(amp: Any) -> str:
    from halfstep.formats import dtype_name

    return dtype_name(amp.policy.compute_dtype)
