"""Run one op in fp32: by a rule of the policy where a session casts ops, else where it stands."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.numerics.remedies.base import Cure, Evidence, Met, where, with_attributes
from halfstep.numerics.remedies.op import AtLocation, Operands, OpRemedy
from halfstep.numerics.remedies.source import Script, append, set_keyword, with_edit
from halfstep.numerics.remedies.terms import terms_of
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import Node, OpLocation
from halfstep.numerics.uncast import low_ops
from halfstep.policy.policy import Policy
from halfstep.torch_private import pytree
from halfstep.trees import first_device


@dataclass(frozen=True)
class RunInFp32(OpRemedy):
    """Run the op in fp32; `by_rule`: wherever it runs, by a rule of the session's policy."""

    by_rule: bool = False
    kind = "full"
    cases = ("range", "precision")

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it of an op that leaves its range; where bits are lost, of its culprit too."""
        node, parts = evidence.node, evidence.parts
        if evidence.case == "precision":
            return [cls._cure(one, parts) for one in dict.fromkeys((evidence.culprit or node, node))]
        adds_gradients = node.phase == "backward" and node.base == "add_" and not node.location.node
        # The sum of gradients is autograd's own.
        return [] if node.op == "cast" or adds_gradients else [cls._cure(node, parts)]

    @classmethod
    def _cure(cls, node: Node, parts: StepParticipants) -> Cure:
        terms, in_region = terms_of(parts, node.location.in_region), node.location.in_region
        by_rule = bool(terms.rule) and in_region and _reads_rules(parts)
        code = terms.rule.format(node.op) if by_rule else terms.wide
        return Cure.of(cls.of(node, f"run {node.op} in fp32{where(node.location)}", code, by_rule))

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Add the rule, and run the op in fp32 in regions that are open: they have read the rules before."""
        if not (self.by_rule and _reads_rules(parts)):
            return super().apply(parts, stack)
        policy = parts.session.policy.with_rules(full=[self.op])
        stack.enter_context(with_attributes(parts.session, policy=policy))
        mode = stack.enter_context(AtLocation(self.op, "", 0, self.call))
        return lambda: mode.met

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        def wide(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

        with torch.autocast(first_device((args, kwargs)), enabled=False):
            args, kwargs = pytree.tree_map(wide, (args, kwargs))
            return func(*args, **kwargs)

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Write the rule where the session or the trainer is made, else the op."""
        if self.by_rule:
            yield with_edit(text, self._edit_policy)
        yield from super().edit(text, location)

    def _edit_policy(self, script: Script) -> None:
        for call in script.calls("prepare", "Trainer"):
            policy_node = next((k.value for k in call.keywords if k.arg == "policy"), None)
            if policy_node is None:
                set_keyword(script, call, "policy", f'"full={self.op}"')
            else:
                script.around(policy_node, "hs.Policy.parse(", f').with_rules(full=["{self.op}"])')

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        for operand in operands:
            append(script, operand, ".float()")

    def edit_around(self, script: Script, location: OpLocation) -> None:
        """Leave a region that would cast the op again."""
        statement = script.statement(self.line)
        if location.in_region and self.op in low_ops(Policy()) and statement is not None:
            device = re.search(r'autocast\("(\w+)"', self.code)
            name = f'torch.autocast("{device[1] if device else "cpu"}", enabled=False)'
            script.above(statement, f"with {name}:", indent=True)


def _reads_rules(parts: StepParticipants) -> bool:
    """Whether a session casts ops, so that a rule of its policy can run one in fp32."""
    return parts.session is not None and getattr(parts.session.policy, "compute_dtype", None) != torch.float32
