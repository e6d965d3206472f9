"""The kinds of remedy, one a file: to add one, write its file and put its class into this list."""

from halfstep.numerics.remedies.advice import ByHand, RowOfWeight
from halfstep.numerics.remedies.base import Cure, Evidence, Remedy
from halfstep.numerics.remedies.bf16 import UseBf16
from halfstep.numerics.remedies.chain import CastBack
from halfstep.numerics.remedies.edge import FunctionOfLogits, KeepFromEdge, LargerEpsilon
from halfstep.numerics.remedies.exponent import ClampExponent
from halfstep.numerics.remedies.full import RunInFp32
from halfstep.numerics.remedies.loss import DivideLoss, LossScaleBy
from halfstep.numerics.remedies.masters import KeepMasters
from halfstep.numerics.remedies.scale import ScaleAround

#: In the order in which cures of an op are proposed and tried: the cheapest first.
REMEDIES: tuple[type[Remedy], ...] = (
    RowOfWeight, DivideLoss, LossScaleBy, LargerEpsilon, KeepMasters, RunInFp32, CastBack, ScaleAround,
    ClampExponent, UseBf16, FunctionOfLogits, KeepFromEdge, ByHand,
)  # fmt: skip


def propose(evidence: Evidence) -> list[Cure]:
    """Return the cures worth trying for a bad op, the cheapest first."""
    case = evidence.case
    return [cure for remedy in REMEDIES if case in remedy.cases for cure in remedy.propose(evidence)]
