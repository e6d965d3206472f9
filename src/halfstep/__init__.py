"""halfstep: mixed-precision training for PyTorch, exact, checked and explained."""

from halfstep import devices, distributed, doctor, optim
from halfstep.casting.context import active_policy, autocast
from halfstep.casting.functions import custom_bwd, custom_fwd, frozen_weights, op
from halfstep.compat import device_module as device_module
from halfstep.convert.conversion import Conversion, convert
from halfstep.convert.hooks import to_float
from halfstep.errors import (
    BannedOpError,
    CheckpointError,
    ConfigError,
    DataError,
    HalfstepError,
    HalfstepWarning,
    LossScaleCollapsed,
    MasterRangeError,
    NonFiniteError,
    PlanError,
    RankError,
    ScalerStateError,
    UnsupportedError,
)
from halfstep.formats import FORMATS, Format, format_of, round_to
from halfstep.numerics.lint import Audit, Finding, audit, lint
from halfstep.numerics.replayable import Replayable
from halfstep.numerics.trace import BadOp, Trace, first_bad_op, trace_step
from halfstep.numerics.watch import Watch, watch
from halfstep.optim.masters import MasterWeights
from halfstep.outcome import Outcome
from halfstep.policy.levels import LEVELS, Level
from halfstep.policy.ops import Rule
from halfstep.policy.plan import Plan, PlanRule
from halfstep.policy.policy import Policy
from halfstep.scaling.grad_scaler import GradScaler
from halfstep.scaling.headroom import HeadroomLossScale
from halfstep.scaling.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from halfstep.session.prepare import prepare, tune
from halfstep.session.session import Session
from halfstep.session.setup import revert
from halfstep.trainer.loop import Trainer
from halfstep.trees import all_finite, select_tree
from halfstep.tuning.search import Tuning

__all__ = [
    "FORMATS",
    "LEVELS",
    "Audit",
    "BadOp",
    "BannedOpError",
    "CheckpointError",
    "ConfigError",
    "Conversion",
    "DataError",
    "DynamicLossScale",
    "Finding",
    "Format",
    "GradScaler",
    "HalfstepError",
    "HalfstepWarning",
    "HeadroomLossScale",
    "Level",
    "LossScale",
    "LossScaleCollapsed",
    "MasterRangeError",
    "MasterWeights",
    "NoLossScale",
    "NonFiniteError",
    "Outcome",
    "Plan",
    "PlanError",
    "PlanRule",
    "Policy",
    "RankError",
    "Replayable",
    "Rule",
    "ScalerStateError",
    "Session",
    "StaticLossScale",
    "Trace",
    "Trainer",
    "Tuning",
    "UnsupportedError",
    "Watch",
    "active_policy",
    "all_finite",
    "audit",
    "autocast",
    "convert",
    "custom_bwd",
    "custom_fwd",
    "devices",
    "distributed",
    "doctor",
    "first_bad_op",
    "format_of",
    "frozen_weights",
    "lint",
    "op",
    "optim",
    "prepare",
    "revert",
    "round_to",
    "select_tree",
    "to_float",
    "trace_step",
    "tune",
    "watch",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
