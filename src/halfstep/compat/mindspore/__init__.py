"""MindSpore's mixed precision under its own names: change the import lines and go on.

    import halfstep.compat.mindspore as ms
    from halfstep.compat.mindspore import nn, value_and_grad
    from halfstep.compat.mindspore.amp import auto_mixed_precision, DynamicLossScaler, all_finite

Here is what its mixed-precision tutorial names, and what goes with that, as thin classes over torch:

- `mindspore`: Tensor (astype, asnumpy, from_numpy), Parameter, ParameterTuple (clone), dtypes from
  float16 to bool_ (also as `dtype`), value_and_grad, grad, jit, mutable, set_seed, save_checkpoint,
  load_checkpoint, load_param_into_net; set_context, set_device, GRAPH_MODE, PYNATIVE_MODE (also as
  `context`); `common.initializer`.
- `amp`: auto_mixed_precision, custom_mixed_precision, get_white_list, get_black_list, build_train_network,
  LossScaler, StaticLossScaler, DynamicLossScaler, all_finite, LossScaleManager, FixedLossScaleManager,
  DynamicLossScaleManager, GroupLossScaleManager.
- `nn`: Cell (construct, to_float, set_train, trainable_params ...), SequentialCell, CellList, Dense, the
  convolutions and their transposes, the norms, LSTM, GRU, RNN and their cells, activations, pooling, Dropout,
  Embedding, MultiheadAttention, Identity; LossBase and the common losses; SGD, Momentum, Adam,
  AdamWeightDecay, called with gradients; learning rates as lists (cosine_decay_lr ...) and as schedules
  (LearningRateSchedule, CosineDecayLR, ExponentialDecayLR, InverseDecayLR, NaturalExpDecayLR,
  PolynomialDecayLR, WarmUpLR); WithLossCell, WithEvalCell,
  TrainOneStepCell, TrainOneStepWithLossScaleCell with the parts that a `construct` of one's own takes,
  FixedLossScaleUpdateCell, DynamicLossScaleUpdateCell.
- `ops`: MatMul, BatchMatMul, ReLU, PReLU, Ger and more as objects; GradOperation, HyperMap,
  MultitypeFuncGraph, depend, ones, zeros, full, arange, add, sub, mul, div, pow, maximum, minimum, fill,
  select, clip_by_global_norm and more; `functional`, `composite` and
  `operations` name `ops` itself.
- `dataset`: MnistDataset, NumpySlicesDataset, GeneratorDataset (map, batch, shuffle, repeat,
  get_dataset_size, create_tuple_iterator, create_dict_iterator); `vision`: Rescale, Normalize, HWC2CHW;
  `transforms`: TypeCast.
- `train`: Model (train, fit, eval, predict), LossMonitor, TimeMonitor, ModelCheckpoint, CheckpointConfig,
  EarlyStopping, ReduceLROnPlateau, LearningRateScheduler, History, Callback, metrics by name.

The error for any other name, asked for or imported, says what to use instead.
`value_and_grad` with several outputs and has_aux=False differentiates the sum of all of them, as MindSpore
does. Checkpoint files are torch's, not MindSpore's.
"""

from halfstep.compat.mindspore import (
    _functions,
    _paths,
    _tensor,
    amp,
    common,
    context,
    dataset,
    dtype,
    nn,
    ops,
    train,
)
from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore._functions import *
from halfstep.compat.mindspore._tensor import *
from halfstep.compat.mindspore.context import *
from halfstep.compat.mindspore.dtype import *
from halfstep.compat.mindspore.train import Model

__all__ = ["Model", "amp", "common", "context", "dataset", "dtype", "nn", "ops", "train"]
__all__ += _functions.__all__
__all__ += _tensor.__all__
__all__ += context.__all__
__all__ += dtype.__all__

_paths.register()
__getattr__ = absent("mindspore")
