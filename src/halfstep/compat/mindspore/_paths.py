"""Module paths under which scripts import what lies elsewhere here: one row a path."""

from __future__ import annotations

import sys
from types import ModuleType

from halfstep.compat.mindspore import _functions, _tensor, amp, dataset, dtype, nn, ops, train
from halfstep.compat.mindspore._absent import AbsentImports

_HERE = "halfstep.compat.mindspore"
_ROWS: tuple[tuple[str, ModuleType, str], ...] = (
    ("common.dtype", dtype, " ".join(dtype.__all__)),
    ("common.parameter", _tensor, "Parameter ParameterTuple"),
    ("common.tensor", _tensor, "Tensor"),
    ("dataset.transforms", dataset, "TypeCast"),
    ("dataset.vision", dataset, "HWC2CHW Normalize Rescale"),
    (
        "nn.dynamic_lr",
        nn,
        "cosine_decay_lr exponential_decay_lr inverse_decay_lr natural_exp_decay_lr piecewise_constant_lr "
        "polynomial_decay_lr warmup_lr",
    ),
    (
        "nn.learning_rate_schedule",
        nn,
        "CosineDecayLR ExponentialDecayLR InverseDecayLR LearningRateSchedule NaturalExpDecayLR "
        "PolynomialDecayLR WarmUpLR",
    ),
    ("nn.wrap", nn, ""),
    ("nn.wrap.cell_wrapper", nn, "TrainOneStepCell WithEvalCell WithLossCell"),
    (
        "nn.wrap.loss_scale",
        nn,
        "DynamicLossScaleUpdateCell FixedLossScaleUpdateCell TrainOneStepWithLossScaleCell",
    ),
    ("train.amp", amp, "auto_mixed_precision build_train_network"),
    (
        "train.callback",
        train,
        "Callback CheckpointConfig EarlyStopping History LearningRateScheduler LossMonitor ModelCheckpoint "
        "ReduceLROnPlateau RunContext TimeMonitor",
    ),
    ("train.loss_scale_manager", train, "DynamicLossScaleManager FixedLossScaleManager LossScaleManager"),
    ("train.model", train, "Model"),
    ("train.serialization", _functions, "load_checkpoint load_param_into_net save_checkpoint"),
)


def register() -> None:
    """Make every path importable, and an attribute of the module that it lies in; say what is absent."""
    for name in ("composite", "functional", "operations"):
        sys.modules[f"{_HERE}.ops.{name}"] = ops
    for module in (amp, dataset, ops):
        vars(module)["__path__"] = []  # so that `from ... import Name` asks AbsentImports as well
    for path, home, names in _ROWS:
        module = ModuleType(f"{_HERE}.{path}", f"mindspore.{path}: a path that scripts import from.")
        vars(module).update({name: getattr(home, name) for name in names.split()}, __path__=[])
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)
    sys.meta_path.append(AbsentImports())
