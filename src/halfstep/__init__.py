"""halfstep: mixed-precision training for PyTorch, exact, checked and explained."""

from halfstep import devices
from halfstep.errors import (
    BannedOpError,
    CheckpointError,
    ConfigError,
    DataError,
    HalfstepError,
    HalfstepWarning,
    LossScaleCollapsed,
    MasterRangeError,
    PlanError,
    ScalerStateError,
    UnsupportedError,
)
from halfstep.formats import FORMATS, Format, format_of, round_to
from halfstep.levels import LEVELS, Level
from halfstep.ops import Rule
from halfstep.optim.masters import MasterWeights
from halfstep.outcome import Outcome
from halfstep.plan import Plan, PlanRule
from halfstep.policy import Policy, op
from halfstep.scaling import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    all_finite,
    select_tree,
)

__version__ = "0.1.0"
