"""The doctor for a step function, what `hs.doctor.examine(step, x, y)` does, and for a recipe."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from halfstep.doctor.document import Document, add_watched, keep_latest
from halfstep.errors import ConfigError, show
from halfstep.numerics.snapshot import StepParticipants, is_session, listed


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
    document.counts = trace.rows()
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


def examine(
    step: Callable[..., Any],
    *batch: Any,
    batches: Iterable[tuple[Any, ...]] = (),
    model: nn.Module | Iterable[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    session: Any = None,
    others: Iterable[Any] = (),
    label: str = "step",
) -> Document:
    """Run a training step under the tape, and say what the numbers do; everything is as before afterwards.

    Args:
        step: does forward, backward and the optimizer's step, and returns the loss.
        batch: its arguments; with none, `batches` gives them.
        batches: further arguments, one tuple a step: each is examined in turn until one is bad.
        model, optimizer, session, others: what takes part; what is left out is found among the names that
            `step` uses. `others` are further things with state_dict (schedulers, scalers).
        label: what the document calls it.

    Returns:
        The document: `healthy`, `verdict` (a list of lines), `bad` (the faults), `as_dict()`; a page with
        `halfstep.report.doctor.write_doctor(document, path)`.

    Raises:
        ConfigError: `step` is not a function, a batch is not a tuple, or what takes part is of another kind.
        Exception: what `step` raised, where nothing in it was found to be not finite.
    """
    from halfstep.numerics.lint import LintProbe, findings_at_rest
    from halfstep.numerics.trace import trace_step

    _check(step, batches, model, optimizer, session)
    document = Document(label, 0)
    models, optimizers = listed(model), listed(optimizer)
    parts = StepParticipants(step, [*models, *optimizers, *listed(session), *others])
    at_rest = findings_at_rest(parts, step)
    todo = [batch] if batch else []
    probe = LintProbe(parts.session)
    for number, one in enumerate([*todo, *batches] or [()]):
        if not isinstance(one, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a batch of type {type(one).__name__}: expected a tuple of step's arguments")
        trace = trace_step(
            step, *one, model=models, optimizer=optimizers, session=session, others=others,
            underflow=True, observers=[probe.look],
        )  # fmt: skip
        document.steps = number + 1
        document.counts = document.counts or trace.rows()
        loss = trace.result
        if isinstance(loss, Tensor) and loss.numel() == 1:
            document.losses.append(float(loss.detach()))
        if trace.bad is not None:
            trace.bad.step = number
            trace.bad.harmless = trace.bad.harmless and parts.scale_moves
            document.bad.append(trace.bad)
            break
    document.lint = list(dict.fromkeys([*at_rest, *probe.found()]))
    return document


def _check(step: object, batches: object, model: object, optimizer: object, session: object) -> None:
    if not callable(step):
        raise ConfigError(f"examine({show(step)}): expected a function that does one training step")
    if not isinstance(batches, Iterable):
        raise ConfigError(f"batches={show(batches)}: expected tuples of step's arguments")
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        listed: list[object] = (
            [given] if isinstance(given, kind) or not isinstance(given, Iterable) else [*given]
        )
        if given is not None and not all(isinstance(x, kind) for x in listed):
            raise ConfigError(f"{name}={show(given)}: expected a {kind.__name__}, or several")
    if session is not None and not is_session(session):
        raise ConfigError(f"session={show(session)}: expected what hs.prepare returns")
