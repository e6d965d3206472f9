"""Examine a step function: `hs.doctor.examine(step, x, y)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.doctor.document import Document
from halfstep.errors import ConfigError, show
from halfstep.numerics.snapshot import StepParticipants, as_list


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
        batches: further arguments, one tuple a step: they are examined until one is bad.
        model, optimizer, session, others: what takes part; what is left out is found among the names that
            `step` uses. `others` are further things with state_dict (schedulers, scalers).
        label: what the document calls it.

    Returns:
        The document: `healthy`, `verdict` (a list of lines), `bad` (the faults), `as_dict()`; a page with
        `halfstep.report.doctor.write_doctor(document, path)`.

    Raises:
        ConfigError: `step` is not a function, or a batch is not a tuple.
        Exception: what `step` raised, where nothing in it was found to be not finite.
    """
    from halfstep.numerics.lint import Audit, LintProbe, audit, findings_at_rest
    from halfstep.numerics.trace import trace_step

    if not callable(step):
        raise ConfigError(f"examine({show(step)}): expected a function that does one training step")
    document = Document(label, 0)
    models, optimizers = as_list(model), as_list(optimizer)
    parts = StepParticipants(step, [*models, *optimizers, *as_list(session), *others])
    at_rest = findings_at_rest(parts, step)
    document.audit = Audit(row for row in audit(parts.models, parts.optimizers) if row not in at_rest)
    todo = [batch] if batch else []
    probe = LintProbe(parts.session, parts.models)
    for number, args in enumerate([*todo, *batches] or [()]):
        if not isinstance(args, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a batch of type {type(args).__name__}: expected a tuple of step's arguments")
        trace = trace_step(
            step, *args, model=models, optimizer=optimizers, session=session, others=others,
            underflow=True, observers=[probe.observe],
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
    document.lint = list(dict.fromkeys([*at_rest, *probe.list_findings()]))
    return document
