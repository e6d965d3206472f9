"""What a model and its optimizer hold in which dtype, and what is wrong with that, before any step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from halfstep.errors import ConfigError
from halfstep.formats import dtype_name
from halfstep.names import named_parameters
from halfstep.numerics.lint import Finding, findings_at_rest, masters_cure, rounded_weights
from halfstep.numerics.snapshot import StepParticipants, listed
from halfstep.policy.levels import LOW_DTYPES


class Audit(list[Finding]):
    """The rows that `audit` found; prints as a table."""

    def __str__(self) -> str:
        """One row a finding, its cure below it."""
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

    Rows: 16-bit weights without masters, and whether updates at this learning rate are lost in them; an
    epsilon that fp16 rounds to zero; running statistics, positions and tables in 16 bits; losses that take
    probabilities; tied weights that have come apart in two dtypes.

    Args:
        model, optimizer: one or several, as for `prepare`; before it or after.
        becomes: a dtype that the model is going to be cast to; buffers are judged by it.

    Returns:
        A list of `Finding`, each with its cure; `print` shows a table.

    Raises:
        ConfigError: a model or optimizer that is none, or an unknown dtype.
    """
    models, optimizers = listed(model), listed(optimizer)
    for kind, things in ((nn.Module, models), (torch.optim.Optimizer, optimizers)):
        for wrong in (x for x in things if not isinstance(x, kind)):
            raise ConfigError(
                f"audit got a {type(wrong).__name__}, expected a {kind.__name__}: audit(model, optimizer)"
            )
    parts = StepParticipants(None, [*models, *optimizers])
    found = findings_at_rest(parts, becomes=becomes)
    coarse = {row.where for row in found if row.rule == "learning rate"}
    low = [row for row in _low_weights(optimizers) if row.where not in coarse]
    return Audit([*low, *found, *_untied(models)])


def _low_weights(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[Finding]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            low = rounded_weights(optimizer, group)
            if low and group.get("master") != "stochastic":
                count, kind = sum(p.numel() for p in low), type(optimizer).__name__
                text = f"{kind} keeps no fp32 copy of {count:,} {dtype_name(low[0].dtype)} weights"
                text += ": small updates are rounded away"
                yield Finding("low weights", f"{kind} group {number}", text, masters_cure(optimizer, group))


def _untied(models: Iterable[nn.Module]) -> Iterable[Finding]:
    """Pairs of matrices in two dtypes, of which one is the other rounded."""
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
