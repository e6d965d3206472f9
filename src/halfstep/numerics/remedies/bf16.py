"""Compute in bf16 in place of fp16, wherever a script asks for that."""

import ast
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from halfstep import formats
from halfstep.numerics.remedies.base import Cure, Evidence, Met, Remedy, always, with_attributes
from halfstep.numerics.remedies.source import Script, set_keywords, with_edit
from halfstep.numerics.remedies.terms import terms_of
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import OpLocation
from halfstep.policy import levels

#: What `torch.float16` is outside of a trial in which scripts get bf16 by that name.
FP16 = torch.float16
_NAMES = {"fp16": "bf16", "float16": "bfloat16", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}


@dataclass(frozen=True)
class UseBf16(Remedy):
    """Give bf16 to whatever asks for fp16."""

    kind = "bf16"
    scope = "run"
    cases = ("state", "range", "precision")
    removes = FP16

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it where fp16 is the format that holds too little."""
        if evidence.case == "precision" and evidence.cause.format != "fp16":
            return []
        return [to_bf16(evidence.parts, evidence.case != "state" and evidence.node.location.in_region)]

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Change regions and the session; weights in fp16 would have to be bf16 from the start of a run."""
        session = parts.session
        if any(p.dtype == torch.float16 for p in parts.parameters()):
            return None
        if session is None:
            stack.enter_context(_bf16_regions())
        elif session.policy.compute_dtype == torch.float16:
            policy = replace(session.policy, compute_dtype=torch.bfloat16)
            stack.enter_context(with_attributes(session, policy=policy))
        else:
            return None
        return always

    def replace_names(self, stack: ExitStack) -> bool:
        """Give bf16 to a script that asks for fp16 by name, method, region or level."""
        bf16 = torch.bfloat16
        words = {w: (level, bf16 if dtype == FP16 else dtype) for w, (level, dtype) in levels.WORDS.items()}
        for owner, values in (
            (torch, {"float16": bf16, "half": bf16}),
            (Tensor, {"half": Tensor.bfloat16}),
            (nn.Module, {"half": nn.Module.bfloat16}),
            (levels, {"WORDS": words}),
            (formats, {"FORMATS": {**formats.FORMATS, "fp16": formats.BF16}}),
        ):
            stack.enter_context(with_attributes(owner, **values))
        stack.enter_context(_bf16_regions())
        return True

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Write bf16 wherever the script names fp16, else as the code says."""
        if "amp.initialize" not in self.code:  # Apex's levels know fp16 alone
            yield from super().edit(text, location)
        yield with_edit(text, set_keywords, self.code)

    def edit_script(self, script: Script) -> None:
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Constant) and node.value in _NAMES:
                script.swap(node, f'"{_NAMES[node.value]}"')
            elif isinstance(node, ast.Attribute) and node.attr in ("float16", "half"):
                script.rename(node, "bfloat16")


def to_bf16(parts: StepParticipants, in_region: bool = False) -> Cure:
    """Compute in bf16 instead of fp16; `in_region`: whether autocast is what chose fp16."""
    text = "use bf16 in place of fp16 throughout, .half() too: the range of fp32, no loss scale needed"
    return Cure.of(UseBf16(text=text, code=terms_of(parts, in_region).bf16))


@contextmanager
def _bf16_regions() -> Generator[None]:
    """Give bf16 to regions that ask for fp16, for the block."""
    set_dtype = torch.set_autocast_dtype

    def set_bf16(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, torch.bfloat16 if dtype == FP16 else dtype)

    with with_attributes(torch, set_autocast_dtype=set_bf16):
        yield
