"""Keep fp32 master weights, with the optimizer's state in fp32 too."""

import ast
import re
from contextlib import ExitStack
from dataclasses import dataclass

from halfstep.numerics.remedies.base import Cure, Evidence, Met, Remedy, always
from halfstep.numerics.remedies.source import Script, set_keywords
from halfstep.numerics.remedies.terms import terms_of
from halfstep.numerics.snapshot import StepParticipants
from halfstep.policy.levels import LOW_DTYPES


@dataclass(frozen=True)
class KeepMasters(Remedy):
    """Prepare the model at O2."""

    kind = "masters"
    scope = "run"
    cases = ("state",)

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it where the optimizer's state leaves its range."""
        text = "keep optimizer state in fp32: fp32 master weights"
        return [Cure.of(cls(text=text, code=terms_of(evidence.parts).masters))]

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Prepare a model that is in 16 bits already; its weights become the 16-bit halves of masters."""
        dtype = next((p.dtype for p in parts.parameters() if p.dtype in LOW_DTYPES), None)
        if (
            dtype is None
            or parts.session is not None
            or not (parts.prepare and parts.models and parts.optimizers)
        ):
            return None
        parts.prepare(parts.models, parts.optimizers, level="O2", dtype=dtype, loss_scale="none")
        return always

    def edit_script(self, script: Script) -> None:
        """Write the level where the session is made or, without one, a session below the optimizer."""
        if script.calls("prepare", "Trainer"):
            set_keywords(script, self.code)
            return
        dtype = "bf16" if "bfloat16" in ast.dump(script.tree) else "fp16"
        for node in ast.walk(script.tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            argument = script.of(node.value.args[0]) if node.value.args else ""
            model = re.match(r"(\w+(?:\.\w+)*)\.parameters\(\)", argument)
            if model and isinstance(node.targets[0], ast.Name):
                names = f"{model[1]}, {node.targets[0].id}"
                call = f'hs.prepare({names}, level="O2", dtype="{dtype}", loss_scale="none")'
                margin = script.newline + " " * node.col_offset
                script.around(node, "", f"{margin}import halfstep as hs{margin}{call}")
