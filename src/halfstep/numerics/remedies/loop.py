"""Change what the training loop does around a step: limit learning rates that jump, clear gradients."""

import ast
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.numerics.remedies.base import Met, Remedy
from halfstep.numerics.remedies.source import Script, is_on
from halfstep.numerics.snapshot import StepParticipants


@dataclass(frozen=True)
class LimitRates(Remedy):
    """Limit learning rates far above `most`, one for each group, to `most`."""

    most: tuple[float, ...]
    kind = "rate"
    scope = "run"

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Limit them before each step."""
        met = False

        def limit_rates(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal met
            groups = optimizer.param_groups
            for group, rate in zip(groups, self.most if len(groups) == len(self.most) else ()):
                if float(group["lr"]) > 30 * rate:
                    group["lr"] = rate
                    met = True

        stack.callback(register_optimizer_step_pre_hook(limit_rates).remove)
        return lambda: met

    def edit_script(self, script: Script) -> None:
        """Write a loop that limits them above each step."""
        optimizers = [
            script.of(n.targets[0])
            for n in ast.walk(script.tree)
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)
            if n.value.args and "parameters" in ast.dump(n.value.args[0])
        ]
        for call in script.calls("step"):
            owner = script.of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            name = owner if owner in optimizers or not optimizers else optimizers[0]
            statement = script.statement(call.lineno)
            steps = owner in optimizers or call.args or owner in ("amp", "session", "trainer")
            if statement is not None and steps:
                script.above(
                    statement,
                    f"for group, most in zip({name}.param_groups, {self.most!r}):",
                    '    group["lr"] = most if group["lr"] > 30 * most else group["lr"]',
                )


@dataclass(frozen=True)
class ClearGradients(Remedy):
    """Clear gradients before the backward passes of the step on this line, else after it."""

    line: int
    kind = "clear"

    def edit_script(self, script: Script) -> None:
        """Write the call; nobody but the script knows where its gradients are wanted no more."""
        step = script.statement(self.line)
        call = next((c for c in script.calls("step") if is_on(c, self.line)), None)
        if step is None or call is None or not isinstance(call.func, ast.Attribute):
            return
        clear = f"{script.of(call.args[0] if call.args else call.func.value)}.zero_grad()"
        bodies = (getattr(node, name, None) for node in ast.walk(script.tree) for name in ("body", "orelse"))
        block = next(body for body in bodies if isinstance(body, list) and step in body)
        backward = script.calls("backward")
        before = [s for s in block[: block.index(step)] if any(node in backward for node in ast.walk(s))]
        if before:
            script.above(before[-1], clear)
        else:
            script.around(step, "", f"{script.newline}{' ' * step.col_offset}{clear}")
