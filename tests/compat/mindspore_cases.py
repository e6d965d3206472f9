"""One text for two libraries: MindSpore itself or `halfstep.compat.mindspore`, named by PRECISION_LIBRARY.

    PRECISION_LIBRARY=mindspore python mindspore_cases.py     prints MindSpore's answers (from a copy of
                                                              this file: it writes files beside its source)

`layer_dtypes` puts every layer into a network and notes the dtype that the layer gives inside and the dtype
that the network gives, at every level. `error_types` makes one mistake at a time and notes what it raises.
"""

import importlib
import json
import os
import sys

import numpy as np

ms = importlib.import_module(os.environ.get("PRECISION_LIBRARY", "halfstep.compat.mindspore"))
nn = ms.nn
SEEN = []

LEVELS = ("O0", "O1", "O2", "O3", "auto")

LAYERS = {
    "Dense": (lambda nn: nn.Dense(4, 4), (2, 4)),
    "Dense without bias": (lambda nn: nn.Dense(4, 4, has_bias=False), (2, 4)),
    "Dense with relu": (lambda nn: nn.Dense(4, 4, activation="relu"), (2, 4)),
    "Conv1d": (lambda nn: nn.Conv1d(4, 4, 3), (2, 4, 8)),
    "Conv2d": (lambda nn: nn.Conv2d(4, 4, 3), (2, 4, 8, 8)),
    "Conv2d with bias": (lambda nn: nn.Conv2d(4, 4, 3, has_bias=True), (2, 4, 8, 8)),
    "Conv3d": (lambda nn: nn.Conv3d(4, 4, 3), (2, 4, 4, 4, 4)),
    "Conv1dTranspose": (lambda nn: nn.Conv1dTranspose(4, 4, 3), (2, 4, 8)),
    "Conv2dTranspose": (lambda nn: nn.Conv2dTranspose(4, 4, 3), (2, 4, 8, 8)),
    "Conv3dTranspose": (lambda nn: nn.Conv3dTranspose(4, 4, 3), (2, 4, 4, 4, 4)),
    "BatchNorm1d": (lambda nn: nn.BatchNorm1d(4), (2, 4)),
    "BatchNorm2d": (lambda nn: nn.BatchNorm2d(4), (2, 4, 8, 8)),
    "BatchNorm3d": (lambda nn: nn.BatchNorm3d(4), (2, 4, 4, 4, 4)),
    "LayerNorm": (lambda nn: nn.LayerNorm((4,)), (2, 4)),
    "GroupNorm": (lambda nn: nn.GroupNorm(2, 4), (2, 4, 8, 8)),
    "InstanceNorm2d": (lambda nn: nn.InstanceNorm2d(4), (2, 4, 8, 8)),
    "ReLU": (lambda nn: nn.ReLU(), (2, 4)),
    "PReLU": (lambda nn: nn.PReLU(), (2, 4)),
    "GELU": (lambda nn: nn.GELU(), (2, 4)),
    "LeakyReLU": (lambda nn: nn.LeakyReLU(), (2, 4)),
    "SiLU": (lambda nn: nn.SiLU(), (2, 4)),
    "Sigmoid": (lambda nn: nn.Sigmoid(), (2, 4)),
    "Tanh": (lambda nn: nn.Tanh(), (2, 4)),
    "Softmax": (lambda nn: nn.Softmax(), (2, 4)),
    "LogSoftmax": (lambda nn: nn.LogSoftmax(), (2, 4)),
    "Flatten": (lambda nn: nn.Flatten(), (2, 4, 2)),
    "Dropout": (lambda nn: nn.Dropout(p=0.5), "dense"),
    "MaxPool2d": (lambda nn: nn.MaxPool2d(2, 2), (2, 4, 8, 8)),
    "AvgPool2d": (lambda nn: nn.AvgPool2d(2, 2), (2, 4, 8, 8)),
    "Embedding": (lambda nn: nn.Embedding(5, 4), "indices"),
    "RNNCell": (lambda nn: nn.RNNCell(4, 4), "state"),
    "GRUCell": (lambda nn: nn.GRUCell(4, 4), "state"),
    "LSTMCell": (lambda nn: nn.LSTMCell(4, 4), "states"),
    "GRU": (lambda nn: nn.GRU(4, 4, batch_first=True), "dense"),
    "LSTM": (lambda nn: nn.LSTM(4, 4, batch_first=True), "dense"),
    "MultiheadAttention": (lambda nn: nn.MultiheadAttention(4, 2, batch_first=True), "attention"),
}
"""Each layer, and the shape of its input or how it is called."""


def dtype_name(tensor):
    """float32 and the like, however the library spells it."""
    return str(tensor.dtype).lower().rpartition(".")[2]


def first(output):
    """The first tensor of what a layer gave."""
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output


def note(output):
    """Remember the dtype a layer gave."""
    SEEN.append(dtype_name(first(output)))


class Around(nn.Cell):
    """A network of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x):
        y = self.layer(x)
        note(y)
        return y


class AroundState(nn.Cell):
    """A network of one layer that takes a state, or several outputs of which the first counts."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, h):
        y = self.layer(x, h)
        note(y)
        return y


class AroundStates(nn.Cell):
    """A network of one layer that takes two states."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x, h, c):
        y = self.layer(x, (h, c))
        note(y)
        return y


class BehindDense(nn.Cell):
    """A network of a Dense and one layer whose results have the dtype of what it is given."""

    def __init__(self, layer):
        super().__init__()
        self.dense = nn.Dense(4, 4)
        self.layer = layer

    def construct(self, x):
        y = self.layer(self.dense(x))
        note(y)
        return y


class AroundAttention(nn.Cell):
    """A network of one attention."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, x):
        y = self.layer(x, x, x)
        note(y)
        return y


NETWORKS = {"state": AroundState, "states": AroundStates, "attention": AroundAttention, "dense": BehindDense}


def inputs_for(how):
    """fp32 tensors for a shape, indices, an input with its state or states."""
    ones = np.full((2, 4), 0.5, np.float32)
    if how == "indices":
        return [ms.Tensor(np.array([[0, 1], [2, 3]], np.int32))]
    if how in ("state", "states"):
        return [ms.Tensor(ones)] * (2 if how == "state" else 3)
    shape = (2, 3, 4) if how in ("attention", "dense") else how
    return [ms.Tensor(np.random.default_rng(0).random(shape, np.float32))]


def layer_dtypes():
    """{layer: {level: [dtype inside, dtype of the network]}}."""
    found = {}
    for name, (make, how) in LAYERS.items():
        found[name] = {}
        for level in LEVELS:
            SEEN.clear()
            try:
                network = NETWORKS.get(how, Around)(make(nn))
                network = ms.amp.auto_mixed_precision(network, level, ms.float16)
                given = dtype_name(first(network(*inputs_for(how))))
                found[name][level] = [SEEN[-1] if SEEN else "unseen", given]
            except Exception as error:
                found[name][level] = [type(error).__name__, str(error).partition("\n")[0][:60]]
    return found


def net():
    """A small network to make mistakes with."""
    return nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4), nn.Dense(4, 2))


def sgd(network):
    """Its optimizer."""
    return nn.SGD(network.trainable_params(), 0.1)


def built(level="O0", network=None, loss=None, optimizer=None, **options):
    """A training network."""
    network = net() if network is None else network
    optimizer = sgd(network) if optimizer is None else optimizer
    return ms.amp.build_train_network(network, optimizer, loss, level, **options)


def model(network=None, loss=None, optimizer=None, **options):
    """A Model."""
    network = net() if network is None else network
    return ms.train.Model(network, loss, optimizer, **options)


def gradient(*arguments, **options):
    """value_and_grad of a product, called with two vectors."""
    fn = ms.value_and_grad(lambda x, y: x * y, *arguments, **options)
    return fn(ms.Tensor([1.0, 2.0]), ms.Tensor([3.0, 4.0]))


MISTAKES = {
    "auto_mixed_precision of a number": lambda: ms.amp.auto_mixed_precision(3, "O2"),
    "auto_mixed_precision of a number at auto": lambda: ms.amp.auto_mixed_precision(3, "auto"),
    "auto_mixed_precision of a function at O2": lambda: ms.amp.auto_mixed_precision(lambda x: x, "O2"),
    "auto_mixed_precision at O4": lambda: ms.amp.auto_mixed_precision(net(), "O4"),
    "auto_mixed_precision at o2": lambda: ms.amp.auto_mixed_precision(net(), "o2"),
    "auto_mixed_precision at 2": lambda: ms.amp.auto_mixed_precision(net(), 2),
    "auto_mixed_precision at None": lambda: ms.amp.auto_mixed_precision(net(), None),
    "auto_mixed_precision to fp32": lambda: ms.amp.auto_mixed_precision(net(), "O2", ms.float32),
    "auto_mixed_precision to fp64": lambda: ms.amp.auto_mixed_precision(net(), "O0", ms.float64),
    "auto_mixed_precision to a word": lambda: ms.amp.auto_mixed_precision(net(), "O2", "fp16"),
    "custom without a list": lambda: ms.amp.custom_mixed_precision(net()),
    "custom with both lists": lambda: ms.amp.custom_mixed_precision(net(), white_list=[], black_list=[]),
    "custom of a number": lambda: ms.amp.custom_mixed_precision(3, white_list=[]),
    "custom with a tuple": lambda: ms.amp.custom_mixed_precision(net(), white_list=(nn.Dense,)),
    "custom with an object": lambda: ms.amp.custom_mixed_precision(net(), white_list=[nn.ReLU()]),
    "custom with a foreign class": lambda: ms.amp.custom_mixed_precision(net(), white_list=[int]),
    "custom black with an operator": lambda: ms.amp.custom_mixed_precision(net(), black_list=[ms.ops.ReLU]),
    "custom black with a number": lambda: ms.amp.custom_mixed_precision(net(), black_list=[3]),
    "custom black with a dict": lambda: ms.amp.custom_mixed_precision(net(), black_list={}),
    "custom to fp32": lambda: ms.amp.custom_mixed_precision(net(), white_list=[nn.Dense], dtype=ms.float32),
    "custom by position": lambda: ms.amp.custom_mixed_precision(net(), [nn.Dense]),
    "to_float of fp64": lambda: net().to_float(ms.float64),
    "to_float of int32": lambda: net().to_float(ms.int32),
    "to_float of a word": lambda: net().to_float("float16"),
    "to_float of None": lambda: net().to_float(None),
    "static scale 0": lambda: ms.amp.StaticLossScaler(0),
    "static scale below 1": lambda: ms.amp.StaticLossScaler(0.5),
    "static scale in words": lambda: ms.amp.StaticLossScaler("8"),
    "static scale None": lambda: ms.amp.StaticLossScaler(None),
    "static scale True": lambda: ms.amp.StaticLossScaler(True),
    "dynamic scale 0": lambda: ms.amp.DynamicLossScaler(0, 2, 50),
    "dynamic scale in words": lambda: ms.amp.DynamicLossScaler("8", 2, 50),
    "dynamic factor 0": lambda: ms.amp.DynamicLossScaler(8, 0, 50),
    "dynamic factor float": lambda: ms.amp.DynamicLossScaler(8, 2.0, 50),
    "dynamic factor True": lambda: ms.amp.DynamicLossScaler(8, True, 50),
    "dynamic window 0": lambda: ms.amp.DynamicLossScaler(8, 2, 0),
    "dynamic window float": lambda: ms.amp.DynamicLossScaler(8, 2, 50.0),
    "dynamic window missing": lambda: ms.amp.DynamicLossScaler(8, 2),
    "the scaler's base": lambda: ms.amp.LossScaler(),
    "fixed manager 0": lambda: ms.amp.FixedLossScaleManager(0),
    "fixed manager below 1": lambda: ms.amp.FixedLossScaleManager(0.5),
    "dynamic manager below 1": lambda: ms.amp.DynamicLossScaleManager(0.5),
    "dynamic manager factor 0": lambda: ms.amp.DynamicLossScaleManager(2, 0),
    "dynamic manager factor negative": lambda: ms.amp.DynamicLossScaleManager(2, -2),
    "dynamic manager window 0": lambda: ms.amp.DynamicLossScaleManager(2, 2, 0),
    "dynamic manager window float": lambda: ms.amp.DynamicLossScaleManager(2, 2, 1.5),
    "fixed manager in words": lambda: ms.amp.FixedLossScaleManager("8"),
    "dynamic manager in words": lambda: ms.amp.DynamicLossScaleManager("8"),
    "dynamic manager factor in words": lambda: ms.amp.DynamicLossScaleManager(8, "2"),
    "all_finite of nothing": lambda: ms.amp.all_finite(()),
    "all_finite of a number": lambda: ms.amp.all_finite(3),
    "all_finite of None": lambda: ms.amp.all_finite(None),
    "all_finite of a word": lambda: ms.amp.all_finite("gradients"),
    "build without an optimizer": lambda: ms.amp.build_train_network(net(), None),
    "build with a function for optimizer": lambda: built(optimizer=lambda g: g),
    "build at O4": lambda: built("O4"),
    "build at 2": lambda: built(2),
    "build with an unknown keyword": lambda: built(loss_scale=2),
    "build with fp64": lambda: built(cast_model_type=ms.float64),
    "build with bf16": lambda: built(cast_model_type=ms.bfloat16),
    "build with keep_batchnorm_fp32 1": lambda: built(keep_batchnorm_fp32=1),
    "build with keep_batchnorm_fp32 None": lambda: built(keep_batchnorm_fp32=None),
    "build with a number for manager": lambda: built(loss_scale_manager=128),
    "build with a scaler for manager": lambda: built(loss_scale_manager=ms.amp.StaticLossScaler(8)),
    "build with a function for loss": lambda: built(loss=lambda y, t: y),
    "build with boost O3": lambda: built(boost_level="O3"),
    "model of a function": lambda: model(lambda x: x),
    "model of a number": lambda: model(3),
    "model at O4": lambda: model(amp_level="O4"),
    "model at 2": lambda: model(amp_level=2),
    "model with metrics but no loss": lambda: model(metrics={"accuracy"}),
    "model with an unknown metric": lambda: model(loss=nn.MSELoss(), metrics={"beauty"}),
    "model with a number for metrics": lambda: model(loss=nn.MSELoss(), metrics=3),
    "model with a scale but no optimizer": lambda: model(
        loss=nn.MSELoss(), loss_scale_manager=ms.amp.FixedLossScaleManager()
    ),
    "model with an unknown keyword": lambda: model(optimise=3),
    "model with keep_batchnorm_fp32 1": lambda: model(keep_batchnorm_fp32=1),
    "LossMonitor of a float": lambda: ms.train.LossMonitor(1.5),
    "LossMonitor of -1": lambda: ms.train.LossMonitor(-1),
    "LossMonitor of a word": lambda: ms.train.LossMonitor("1"),
    "LossMonitor of True": lambda: ms.train.LossMonitor(True),
    "CheckpointConfig of -1": lambda: ms.train.CheckpointConfig(save_checkpoint_steps=-1),
    "CheckpointConfig of a float": lambda: ms.train.CheckpointConfig(save_checkpoint_steps=1.5),
    "ModelCheckpoint with a slash": lambda: ms.train.ModelCheckpoint("a/b"),
    "ModelCheckpoint with a number for prefix": lambda: ms.train.ModelCheckpoint(3),
    "ModelCheckpoint with a number for config": lambda: ms.train.ModelCheckpoint("a", config=3),
    "EarlyStopping in mode large": lambda: ms.train.EarlyStopping(mode="large"),
    "EarlyStopping with patience -1": lambda: ms.train.EarlyStopping(patience=-1),
    "EarlyStopping with patience float": lambda: ms.train.EarlyStopping(patience=1.5),
    "EarlyStopping with verbose 1": lambda: ms.train.EarlyStopping(verbose=1),
    "EarlyStopping with min_delta in words": lambda: ms.train.EarlyStopping(min_delta="1"),
    "gradient by nothing": lambda: gradient(None),
    "gradient by a position out of range": lambda: gradient(5),
    "gradient by a word": lambda: gradient("x"),
    "gradient by a float": lambda: gradient(0.5),
    "gradient by an empty tuple": lambda: gradient(()),
    "gradient with has_aux of one output": lambda: gradient(0, has_aux=True),
    "gradient with has_aux 1": lambda: gradient(0, has_aux=1),
    "Dense with an unknown activation": lambda: nn.Dense(2, 2, activation="beautiful"),
    "Dense with a float for size": lambda: nn.Dense(2.5, 2),
    "Dense with size 0": lambda: nn.Dense(0, 2),
    "Dense with an unknown init": lambda: nn.Dense(2, 2, weight_init="beautiful"),
    "Dense with has_bias 1": lambda: nn.Dense(2, 2, has_bias=1),
    "Conv2d with an unknown pad_mode": lambda: nn.Conv2d(2, 2, 3, pad_mode="nice"),
    "Conv2d with group 3 of 4": lambda: nn.Conv2d(4, 4, 3, group=3),
    "Conv2d with kernel 0": lambda: nn.Conv2d(4, 4, 0),
    "LayerNorm of a number": lambda: nn.LayerNorm(4),
    "GroupNorm with 3 of 4": lambda: nn.GroupNorm(3, 4),
    "BatchNorm with size 0": lambda: nn.BatchNorm1d(0),
    "BatchNorm with momentum 2": lambda: nn.BatchNorm1d(4, momentum=2.0),
    "LSTMCell with size 0": lambda: nn.LSTMCell(0, 4),
    "MultiheadAttention with 3 of 4": lambda: nn.MultiheadAttention(4, 3),
    "MSELoss with an unknown reduction": lambda: nn.MSELoss("median"),
    "CrossEntropyLoss with an unknown reduction": lambda: nn.CrossEntropyLoss(reduction="median"),
    "SGD of nothing": lambda: nn.SGD([], 0.1),
    "SGD with a negative rate": lambda: nn.SGD(net().trainable_params(), -0.1),
    "SGD with a rate in words": lambda: nn.SGD(net().trainable_params(), "0.1"),
    "SGD with loss_scale 0": lambda: nn.SGD(net().trainable_params(), 0.1, loss_scale=0.0),
    "SGD with negative momentum": lambda: nn.SGD(net().trainable_params(), 0.1, momentum=-0.5),
    "SGD with nesterov and no momentum": lambda: nn.SGD(net().trainable_params(), 0.1, nesterov=True),
    "Adam with beta1 of 2": lambda: nn.Adam(net().trainable_params(), beta1=2.0),
    "Momentum without momentum": lambda: nn.Momentum(net().trainable_params(), 0.1),
    "a Cell without construct": lambda: nn.Cell()(ms.Tensor([1.0])),
    "a step with a scale of three": lambda: nn.TrainOneStepWithLossScaleCell(
        net(), sgd(net()), ms.Tensor(np.ones(3, np.float32))
    ),
    "a step with a scale in words": lambda: nn.TrainOneStepWithLossScaleCell(net(), sgd(net()), "8"),
}
"""Things that are wrong, each of them once."""


def error_types():
    """{mistake: the builtin classes of what it raised, the nearest first, or "no error"}."""
    found = {}
    for name, mistake in MISTAKES.items():
        try:
            mistake()
            found[name] = ["no error"]
        except Exception as error:
            found[name] = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    return found


def main():
    """Print every answer as JSON."""
    if hasattr(ms, "set_context"):
        ms.set_context(mode=ms.PYNATIVE_MODE)
    answers = {"version": getattr(ms, "__version__", ""), "layer_dtypes": layer_dtypes()}
    json.dump({**answers, "error_types": error_types()}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
