"""MindSpore's mixed precision under its own names: change the import lines and go on.

    import halfstep.compat.mindspore as ms
    from halfstep.compat.mindspore import nn, value_and_grad
    from halfstep.compat.mindspore.amp import auto_mixed_precision, DynamicLossScaler, all_finite

Here is what its mixed-precision tutorial names, and what goes with that, as thin classes over torch:

- `mindspore`: Tensor (astype, asnumpy), Parameter, dtypes from float16 to bool_, value_and_grad, grad, jit,
  set_seed, save_checkpoint, load_checkpoint, load_param_into_net.
- `amp`: auto_mixed_precision, custom_mixed_precision, get_white_list, get_black_list, build_train_network,
  LossScaler, StaticLossScaler, DynamicLossScaler, all_finite, LossScaleManager, FixedLossScaleManager,
  DynamicLossScaleManager, GroupLossScaleManager.
- `nn`: Cell (construct, to_float, set_train, trainable_params ...), SequentialCell, CellList, Dense, the
  convolutions and their transposes, BatchNorm1d to 3d, LayerNorm, LSTMCell, RNNCell, GRUCell, ReLU, PReLU,
  Sigmoid, Tanh, Softmax, Flatten, Dropout, MaxPool2d; CrossEntropyLoss, SoftmaxCrossEntropyWithLogits,
  MSELoss, L1Loss, BCEWithLogitsLoss; SGD, Momentum, Adam, called with gradients; WithLossCell, WithEvalCell,
  TrainOneStepCell, TrainOneStepWithLossScaleCell.
- `ops`: MatMul, BatchMatMul, ReLU, PReLU, Ger as objects; a few functions.
- `dataset`: MnistDataset, NumpySlicesDataset (map, batch, shuffle, repeat, get_dataset_size,
  create_tuple_iterator, create_dict_iterator); `vision`: Rescale, Normalize, HWC2CHW; `transforms`: TypeCast.
- `train`: Model (train, fit, eval, predict), LossMonitor, TimeMonitor, ModelCheckpoint, CheckpointConfig,
  EarlyStopping, History, Callback, metrics by name.

`value_and_grad` with several outputs and has_aux=False differentiates the sum of all of them, as MindSpore
does. Checkpoint files are torch's, not MindSpore's.
"""

from halfstep.compat.mindspore import amp, dataset, nn, ops, train
from halfstep.compat.mindspore._functions import (
    grad,
    jit,
    load_checkpoint,
    load_param_into_net,
    save_checkpoint,
    set_seed,
    value_and_grad,
)
from halfstep.compat.mindspore._tensor import (
    Parameter,
    Tensor,
    bfloat16,
    bool_,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
)
from halfstep.compat.mindspore.train import Model

__all__ = [
    "Model",
    "Parameter",
    "Tensor",
    "amp",
    "bfloat16",
    "bool_",
    "dataset",
    "float16",
    "float32",
    "float64",
    "grad",
    "int8",
    "int16",
    "int32",
    "int64",
    "jit",
    "load_checkpoint",
    "load_param_into_net",
    "nn",
    "ops",
    "save_checkpoint",
    "set_seed",
    "train",
    "uint8",
    "value_and_grad",
]
