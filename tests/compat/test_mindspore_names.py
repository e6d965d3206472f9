"""Names around MindSpore's precision: context, function transforms, update cells, training cells by hand.

Numbers and types of errors are MindSpore 2.10's own answers to the same calls.
"""

import importlib

import numpy as np
import pytest
import torch

import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import amp, common, context, nn, ops
from halfstep.compat.mindspore import dtype as mstype
from halfstep.compat.mindspore.common import dtype as common_dtype
from halfstep.compat.mindspore.common.initializer import Normal, initializer
from halfstep.compat.mindspore.nn.wrap import cell_wrapper, loss_scale
from halfstep.compat.mindspore.ops import composite as C
from halfstep.compat.mindspore.ops import functional as F
from halfstep.compat.mindspore.ops import operations as P
from halfstep.errors import HalfstepWarning

torch.set_num_threads(1)


def values(nest):
    return [values(t) for t in nest] if isinstance(nest, tuple | list) else nest.detach().tolist()


def two():
    return ms.Tensor([[1.0, 2.0], [3.0, 4.0]]), ms.Tensor([[1.0, 0.0], [0.0, 2.0]])


# --- context ----------------------------------------------------------------------------------------------


def test_settings_that_change_no_number_are_taken():
    context.set_context(mode=ms.GRAPH_MODE, device_target="CPU", max_device_memory="3GB", save_graphs=False)
    assert ms.get_context("mode") == ms.GRAPH_MODE
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert (ms.get_context("mode"), ms.get_context("max_device_memory")) == (1, "3GB")
    ms.set_device("CPU", 0)
    ms.set_auto_parallel_context(parallel_mode=context.ParallelMode.STAND_ALONE)
    context.reset_auto_parallel_context()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ms.set_context(mode=7),
        lambda: ms.set_context(nope=1),
        lambda: ms.set_context(device_target="TPU"),
        lambda: ms.set_context(deterministic="MAYBE"),
        lambda: ms.get_context("nope"),
        lambda: ms.set_device("TPU"),
        lambda: ms.set_device("CPU", -1),
    ],
)
def test_what_mindspore_refuses_is_refused(wrong):
    with pytest.raises(ValueError, match=r".+"):
        wrong()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_absent_is_refused_by_name():
    with pytest.raises(ValueError, match="needs torch's device 'cuda'"):
        ms.set_context(device_target="GPU")
    with pytest.raises(ValueError, match="needs torch's device 'npu'"):
        ms.set_device("Ascend", 0)


def test_deterministic_kernels_are_torchs():
    try:
        ms.set_context(deterministic="ON")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        ms.set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_would_change_numbers_is_told():
    with pytest.warns(HalfstepWarning, match="force_fp16"):
        ms.set_context(ascend_config={"precision_mode": "force_fp16"})
    with pytest.raises(RuntimeError, match="torchrun"):
        ms.set_auto_parallel_context(parallel_mode=context.ParallelMode.DATA_PARALLEL, gradients_mean=True)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (nn, "CTCLoss", "see torch.nn.CTCLoss, whose arguments may differ"),
        (nn, "CosineAnnealingLR", "write a LearningRateSchedule"),
        (ops, "erf", "see torch.erf, whose arguments may differ"),
        (ops, "Erfc", "see torch.erfc, whose arguments may differ"),
        (ops, "normal", "see torch.normal, whose arguments may differ"),
        (ops, "max", "see torch.max, whose arguments may differ"),
        (ms, "linspace", "see torch.linspace, whose arguments may differ"),
        (ms, "Profiler", "torch.profiler"),
        (ms.train, "Dice", "a Metric"),
        (ms.dataset, "Cifar10Dataset", "NumpySlicesDataset"),
        (ms.dataset, "config", "mindspore.set_seed"),
        (amp, "init_status", "hs.prepare"),
    ],
)
def test_an_absent_name_says_what_to_use(module, name, instead):
    with pytest.raises(AttributeError, match=f"has no '{name}'") as error:
        getattr(module, name)
    assert instead in str(error.value)
    with pytest.raises(ImportError, match=f"has no '{name}'") as refusal:
        exec(f"from {module.__name__} import {name}")
    assert instead in str(refusal.value)
    assert not hasattr(module, name)


def test_an_absent_path_says_what_to_use():
    with pytest.raises(ModuleNotFoundError, match="torchrun and train natively"):
        importlib.import_module("halfstep.compat.mindspore.communication.management")
    with pytest.raises(ModuleNotFoundError, match=r"ops has no 'deep'"):
        importlib.import_module("halfstep.compat.mindspore.ops.deep")
    assert importlib.import_module("halfstep.compat.mindspore.ops.operations") is ops


# --- function transforms ----------------------------------------------------------------------------------


def dense():
    net = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
    return net, ms.ParameterTuple(net.trainable_params())


def test_grad_operation_gives_mindspores_gradients():
    (x, y), (net, weights) = two(), dense()

    def fn(a, b):
        return a * a * b

    twos, threes = ms.Tensor([[2.0, 2.0], [2.0, 2.0]]), ms.Tensor([[3.0], [3.0]])
    assert values(ops.GradOperation()(fn)(x, y)) == [[2.0, 0.0], [0.0, 16.0]]
    by_all = [[[2.0, 0.0], [0.0, 16.0]], [[1.0, 4.0], [9.0, 16.0]]]
    assert values(ops.GradOperation(get_all=True)(fn)(x, y)) == by_all
    assert values(C.GradOperation(sens_param=True)(fn)(x, y, twos)) == [[4.0, 0.0], [0.0, 32.0]]
    by_weights = [[[4.0, 6.0]], [2.0]]
    assert values(ops.GradOperation(get_by_list=True)(net, weights)(x)) == by_weights
    assert values(ops.GradOperation(get_by_list=True)(net)(x)) == by_weights
    assert values(ops.GradOperation(get_by_list=True)(net, weights[0])(x)) == [[4.0, 6.0]]
    both = ops.GradOperation(get_all=True, get_by_list=True)(net, weights)(x)
    assert values(both) == [[[[1.0, 1.0], [1.0, 1.0]]], by_weights]
    scaled = ops.GradOperation(get_by_list=True, sens_param=True)(net, weights)(x, threes)
    assert values(scaled) == [[[12.0, 18.0]], [6.0]]
    with pytest.raises(TypeError, match="get_all"):
        ops.GradOperation(get_all=1)


def test_maps_choose_a_body_by_kinds():
    add = C.MultitypeFuncGraph("add")

    @add.register("Tensor", "Tensor")
    def _(a, b):
        return a + b

    @add.register("Tensor", "Number")
    def _(a, b):
        return a - b

    x, y = two()
    added = [[[2.0, 2.0], [3.0, 6.0]]] * 2
    assert values(ops.HyperMap()(add, (x, y), (y, x))) == added
    assert values(ops.Map(add)((x, y), (y, x))) == added
    assert values(add(y, 1)) == [[0.0, -1.0], [-1.0, 1.0]]
    with pytest.raises(TypeError, match="no body"):
        add("a")
    with pytest.raises(RuntimeError, match="Nope"):
        add.register("Nope")


def test_clipping_gives_mindspores_numbers():
    x, y = two()
    clipped = ops.clip_by_global_norm((x, y), 1.0)
    expected = [[0.16903084516525269, 0.33806169033050537], [0.5070925354957581, 0.6761233806610107]]
    np.testing.assert_allclose(values(clipped)[0], expected, rtol=1e-6)
    assert values(ops.clip_by_global_norm((x, y), 100.0)) == values((x, y))
    assert values(ops.clip_by_value((x, y), 1.5, 3.0)) == [[[1.5, 2.0], [3.0, 3.0]], [[1.5, 1.5], [1.5, 2.0]]]
    np.testing.assert_allclose(values(ops.clip_by_norm(x, 1.0)), (x / x.norm()).tolist(), rtol=1e-5)
    assert values(ops.clip_by_norm([x, y], 100.0)) == values([x, y])
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 .* non-finite"):
        ops.clip_by_norm(x * float("nan"), 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="use_norm"):
        ops.clip_by_global_norm((x, y), 1.0, 2.0)


def test_methods_of_tensors_that_torch_spells_otherwise():
    x, _ = two()
    assert x.expand_dims(0).shape == (1, 2, 2)
    twin = x.copy()
    twin += 1
    assert values(twin) != values(x)
    parameter = ms.Parameter(x, name="p")
    assert type(parameter.value()) is ms.Tensor
    parameter.value().sum().backward()
    assert values(parameter.grad) == [[1.0, 1.0], [1.0, 1.0]]
    assert initializer("ones", 2).init_data().tolist() == [1.0, 1.0]


def test_small_names():
    x, _ = two()
    assert ops.depend(x, None) is x
    assert ops.dtype(F.cast(x, mstype.float16)) == ms.float16
    assert values(P.ReduceSum(keep_dims=True)(x, 1)) == [[3.0], [7.0]]
    assert ops.reduce_mean(x).item() == 2.5
    assert P.Cast()(2, ms.float32).dtype == ms.float32
    assert P.Reciprocal()(ms.Tensor([4.0])).item() == 0.25
    assert values(ops.transpose(x, (1, 0))) == [[1.0, 3.0], [2.0, 4.0]]
    assert ms.mutable(x) is x
    assert values(ops.assign(x, ops.zeros_like(x))) == values(P.Sub()(x, x)) == [[0.0, 0.0], [0.0, 0.0]]
    assert values(ops.assign_add(x, 1.0)) == [[1.0, 1.0], [1.0, 1.0]]
    assert P.Reshape()(x, (4,)).shape == P.Transpose()(x, (1, 0)).reshape(-1).shape == (4,)


def test_values_are_made_and_chosen_as_in_mindspore_2_10():
    for fill in (ops.fill, F.fill, P.Fill()):
        filled = fill(ms.float16, (2,), 2.0**20)
        assert (values(filled), filled.dtype, type(filled)) == ([float("inf")] * 2, ms.float16, ms.Tensor)
    assert (ops.fill(ms.bool_, (), 1).item(), ops.fill(None, (1,), 3).dtype) == (True, ms.int64)
    assert values(ops.fill(ms.float32, ms.Tensor([1]), ms.Tensor(3.0))) == [3.0]
    assert ops.fill(ms.float64, (), 0.1).item() == 0.1
    x, which = ms.Tensor([1.0, 2.0]), ms.Tensor([True, False])
    assert (
        values(ops.select(which, x, 1.5)) == values(P.Select()(which, x, ms.Tensor([9.0, 1.5]))) == [1.0, 1.5]
    )
    assert values(P.OnesLike()(x)) == [1.0, 1.0]
    assert P.ZerosLike()(x.astype(ms.float16)).dtype == ms.float16
    assert ops.identity(x) is P.Identity()(x) is x
    assert ops.scalar_to_tensor(True).dtype == ms.float32
    assert P.ScalarToTensor()(2, ms.float16).dtype == ms.float16
    for wrong in (
        lambda: ops.fill(ms.float32, 2, 1.0),
        lambda: ops.select(x, x, x),
        lambda: ops.scalar_to_tensor(x),
    ):
        with pytest.raises(TypeError, match="For '"):
            wrong()


def test_older_scripts_find_names_where_they_look():
    for module, name in (
        ("callback", "LossMonitor"),
        ("loss_scale_manager", "FixedLossScaleManager"),
        ("serialization", "load_checkpoint"),
        ("model", "Model"),
        ("amp", "build_train_network"),
    ):
        assert hasattr(importlib.import_module(f"halfstep.compat.mindspore.train.{module}"), name)
    assert loss_scale.DynamicLossScaleUpdateCell is nn.DynamicLossScaleUpdateCell
    assert cell_wrapper.WithLossCell is nn.WithLossCell
    assert common_dtype.float16 is ms.common.dtype.float16 is ms.float16
    assert (ms.common.tensor.Tensor, ms.common.parameter.Parameter) == (ms.Tensor, ms.Parameter)


def test_a_cell_takes_what_changes_no_number():
    class Scaled(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.insert_param_to_cell("w", ms.Parameter(ms.Tensor([2.0]), name="w", layerwise_parallel=False))
            self.insert_child_to_cell("inner", nn.Identity())

        def construct(self, x):
            return self.inner(x) * self.w

    cell = Scaled().set_grad().add_flags(has_effect=True).set_broadcast_flag()
    cell.set_inputs(None)
    assert cell(ms.Tensor([3.0])).item() == 6.0
    assert [name for name, _ in cell.parameters_and_names()] == ["w"]
    with pytest.warns(HalfstepWarning, match="saves no memory"):
        cell.recompute()


# --- initializers -----------------------------------------------------------------------------------------


def test_initializers_are_names_and_objects():
    ms.set_seed(0)
    layer = nn.Dense(200, 100, weight_init=Normal(0.02, 1.0), bias_init=common.initializer.Constant(3.0))
    assert layer.weight.mean().item() == pytest.approx(1.0, abs=1e-3)
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.bias.tolist() == [3.0] * 100
    cut = initializer(common.initializer.TruncatedNormal(0.5), (100, 100), ms.float16)
    assert (cut.dtype, cut.shape) == (ms.float16, (100, 100))
    assert cut.abs().max().item() <= 1.0
    for name in ("HeNormal", "XavierUniform", "HeUniform", "XavierNormal"):
        ms.set_seed(1)
        by_name = initializer(name, [64, 32])
        ms.set_seed(1)
        assert torch.equal(by_name, initializer(getattr(common.initializer, name)(), [64, 32]))
    assert initializer("ones", 3).tolist() == initializer(common.initializer.One(), 3).tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="unknown initializer"):
        initializer("nope", 3)


# --- losses, optimizers, rates ----------------------------------------------------------------------------


class Absolute(nn.LossBase):
    def construct(self, base, target):
        return self.get_loss((base - target).abs(), 2.0)


def test_losses_give_mindspores_numbers():
    x, y = two()
    assert [Absolute(r)(x, y).item() for r in ("mean", "sum")] == [3.5, 14.0]
    assert values(Absolute("none")(x, y)) == [[0.0, 4.0], [6.0, 4.0]]
    assert Absolute()(x.half(), y.half()).dtype == ms.float16
    assert values(nn.SmoothL1Loss()(x, y)) == [[0.0, 1.5], [2.5, 1.5]]
    assert nn.NLLLoss()(x, ms.Tensor([0, 1], ms.int32)).item() == -2.5


def test_adam_weight_decay_gives_mindspores_numbers():
    p = ms.Parameter(ms.Tensor([1.0, 2.0]), name="p")
    optimizer = nn.AdamWeightDecay([p], 0.1, weight_decay=0.01)
    for gradient in ([0.5, -1.0], [0.25, 0.5]):
        optimizer((ms.Tensor(gradient),))
    np.testing.assert_allclose(p.asnumpy(), [0.28598880767822266, 2.4250855445861816], rtol=5e-5)


def test_groups_have_rates_and_decay_of_their_own_and_an_order():
    first, second = (ms.Parameter(ms.Tensor([1.0]), name=name) for name in "ab")
    groups = [{"params": [second], "lr": [0.1, 0.2]}, {"params": [first], "weight_decay": 0.5}]
    optimizer = nn.Momentum([*groups, {"order_params": [first, second]}], [1.0, 0.5], 0.0)
    assert [id(p) for p in optimizer.parameters] == [id(first), id(second)]
    seen = []
    for _ in range(3):
        optimizer((ms.Tensor([1.0]), ms.Tensor([10.0])))
        seen.append((first.item(), second.item()))
    # first: w - lr * (1 + w / 2) at the rates 1, 0.5, 0.5; second: w - lr * 10 at 0.1, 0.2, 0.2.
    np.testing.assert_allclose(seen, [(-0.5, 0.0), (-0.875, -2.0), (-1.15625, -4.0)], atol=1e-6)
    with pytest.raises(ValueError, match="order_params"):
        nn.SGD([*groups, {"order_params": [first]}], 0.1)
    with pytest.raises(ValueError, match="grad_centralization"):
        nn.SGD([{"params": [first], "grad_centralization": True}], 0.1)
    assert nn.SGD([first], [0.1, 0.2]).get_lr() == 0.1


def test_a_rate_may_be_a_tensor():
    parameter = ms.Parameter(ms.Tensor([1.0]), name="a")
    assert nn.SGD([parameter], ms.Tensor(0.25)).get_lr() == 0.25
    assert nn.Adam([parameter], ms.Tensor([0.5, 0.25])).get_lr() == 0.5


def test_a_model_takes_datasets_alone():
    network, optimizer = problem()
    with pytest.raises(TypeError, match=r"such as NumpySlicesDataset.*got list"):
        ms.Model(network, optimizer=optimizer).train(1, [batch()])


def test_a_gradient_by_what_has_none_is_refused_by_position():
    with pytest.raises(RuntimeError, match=r"argument 1, which is torch\.int32: give a floating tensor"):
        ms.grad(lambda x, i: x * i, grad_position=(0, 1))(ms.Tensor([1.0]), ms.Tensor([2], ms.int32))


def test_rates_give_mindspores_numbers():
    close = np.testing.assert_allclose
    close(nn.exponential_decay_lr(0.1, 0.9, 6, 2, 1), [0.1, 0.1, 0.09, 0.09, 0.081, 0.081])
    close(nn.exponential_decay_lr(0.1, 0.9, 6, 2, 2, True), [0.1, 0.1, 0.1, 0.1, 0.09, 0.09])
    close(nn.cosine_decay_lr(0.01, 0.1, 6, 2, 2), [0.1, 0.1, 0.055, 0.055, 0.01, 0.01])
    close(nn.piecewise_constant_lr([2, 5, 7], [0.1, 0.05, 0.01]), [0.1] * 2 + [0.05] * 3 + [0.01] * 2)
    close(nn.warmup_lr(0.1, 6, 2, 2), [0.0, 0.0, 0.05, 0.05, 0.1, 0.1])


def test_schedules_give_mindspores_numbers():
    schedules = {
        nn.ExponentialDecayLR(0.1, 0.9, 4, True): [0.1, 0.1, 0.1, 0.09, 0.09, 0.081],
        nn.NaturalExpDecayLR(0.1, 0.9, 4, True): [0.1, 0.1, 0.1, 0.0027324, 0.0027324, 0.0000747],
        nn.InverseDecayLR(0.1, 0.9, 4): [0.1, 0.0816327, 0.0597015, 0.0526316, 0.0425532, 0.0330579],
        nn.CosineDecayLR(0.01, 0.1, 4): [0.1, 0.0868198, 0.0231802, 0.01, 0.01, 0.01],
        nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5): [0.1, 0.0879423, 0.055, 0.01, 0.01, 0.01],
        nn.PolynomialDecayLR(0.1, 0.01, 4, 0.5, True): [0.1, 0.0879423, 0.055, 0.01, 0.055, 0.055],
        nn.WarmUpLR(0.1, 2): [0.0, 0.05, 0.1, 0.1, 0.1, 0.1],
    }
    for schedule, rates in schedules.items():
        seen = [schedule(ms.Tensor(step, ms.int32)).asnumpy() for step in (0, 1, 3, 4, 6, 9)]
        np.testing.assert_allclose(seen, rates, atol=1e-7, err_msg=type(schedule).__name__)
    close = np.testing.assert_allclose
    close(nn.inverse_decay_lr(0.1, 0.5, 6, 2, 2), [0.1, 0.1, 0.08, 0.08, 1 / 15, 1 / 15])
    close(nn.natural_exp_decay_lr(0.1, 0.9, 6, 2, 2, True), [0.1] * 4 + [0.1 * np.exp(-1.8)] * 2)
    close(nn.polynomial_decay_lr(0.1, 0.01, 4, 1, 2, 2.0), [0.1, 0.0325, 0.01, 0.01])
    close(nn.polynomial_decay_lr(0.1, 0.01, 4, 1, 2, 1.0, True), [0.1, 0.055, 0.01, 0.0325])
    for wrong, error in (((1, 0.1, 4), TypeError), ((0.0, 0.1, 0), ValueError), ((0.0, 0.0, 4), ValueError)):
        with pytest.raises(error, match="CosineDecayLR"):
            nn.CosineDecayLR(*wrong)


def steps_of(optimizer, count):
    """How far each step with a gradient of 1 went."""
    (parameter,) = optimizer.parameters
    seen = []
    for _ in range(count):
        before = parameter.item()
        optimizer((ms.Tensor([1.0]),))
        seen.append(before - parameter.item())
    return seen


def test_an_optimizer_asks_a_schedule_and_reads_what_is_assigned():
    parameter = ms.Parameter(ms.Tensor([0.0]), name="a")
    scheduled = nn.SGD([parameter], learning_rate=nn.CosineDecayLR(0.01, 0.1, 4))
    np.testing.assert_allclose(steps_of(scheduled, 5), [0.1, 0.0868198, 0.055, 0.0231802, 0.01], atol=1e-6)
    grouped = nn.SGD([{"params": [parameter], "lr": nn.WarmUpLR(0.1, 2)}], learning_rate=0.5)
    np.testing.assert_allclose(steps_of(grouped, 3), [0.0, 0.05, 0.1], atol=1e-6)
    constant = nn.SGD([parameter], learning_rate=0.1)
    assert steps_of(constant, 1) == pytest.approx([0.1])
    ops.assign(constant.learning_rate, ms.Tensor(0.01))
    assert steps_of(constant, 2) == pytest.approx([0.01, 0.01], rel=1e-4)
    constant.torch_optimizer.param_groups[0]["lr"] = 0.5  # as a scheduler of torch's writes it
    assert steps_of(constant, 1) == pytest.approx([0.5])
    with pytest.raises(ValueError, match="numbers or a LearningRateSchedule"):
        nn.SGD([parameter], learning_rate=lambda step: 0.1)


def test_clones_of_parameters_are_their_own():
    original = ms.ParameterTuple([ms.Parameter(ms.Tensor([1.0, 2.0]), name="w")])
    for init, expected in (("same", [1.0, 2.0]), ("zeros", [0.0, 0.0]), ("ones", [1.0, 1.0])):
        (copy,) = original.clone("sum", init)
        assert (copy.name, copy.tolist(), copy.data_ptr() == original[0].data_ptr()) == (
            "sum.w",
            expected,
            False,
        )
    with pytest.raises(ValueError, match="'init' must be one of"):
        original.clone("sum", "normal")


def test_dtypes_have_names_and_numpys_own():
    x = ms.Tensor([1.5])
    for name, dtype in (
        ("float16", ms.float16),
        (np.int32, ms.int32),
        (np.dtype("float64"), ms.float64),
        (float, ms.float64),
        ("bool", ms.bool_),
        ("bfloat16", ms.bfloat16),
        (ms.uint8, ms.uint8),
    ):
        assert x.astype(name).dtype == dtype
    assert x.astype("float32", copy=False) is x
    assert x.astype("float32").data_ptr() != x.data_ptr()
    for wrong in ("nope", None, "str", object()):
        with pytest.raises(TypeError, match=r"dtype|data type|understood|interpret"):
            x.astype(wrong)
    with pytest.raises(TypeError, match="or a 'shape' with an Initializer"):
        ms.Tensor(shape=(2,), dtype=ms.float32)


# --- update cells and training cells ----------------------------------------------------------------------


def test_the_update_cell_gives_mindspores_sequence():
    cell, scale = nn.DynamicLossScaleUpdateCell(8.0, 2, 3), ms.Tensor(8.0)
    seen = []
    for overflow in (0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0):
        assert bool(cell(scale, ms.Tensor(bool(overflow)))) == bool(overflow)
        seen.append(scale.item())
    assert seen == [8, 8, 16, 8, 8, 8, 4, 2, 1, 1, 1, 1, 1, 2, 2, 2, 4]
    assert cell.get_loss_scale() == 8.0
    fixed = nn.FixedLossScaleUpdateCell(4.0)
    assert (fixed.get_loss_scale(), fixed(scale, True)) == (4.0, True)
    assert scale.item() == 4.0


def problem():
    ms.set_seed(0)
    net = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 1))
    return nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.05)


def batch(factor=1.0):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4)).astype(np.float32)
    return ms.Tensor(x * factor), ms.Tensor(x[:, :1].copy())


@pytest.mark.parametrize("kind", ["dynamic", "fixed", "own"])
def test_a_training_cell_follows_an_update_cell(kind):
    class Own(nn.Cell):
        def get_loss_scale(self):
            return 8.0

        def construct(self, loss_scale, overflow):
            ms.Tensor(loss_scale).mul_(0.5 if overflow else 1.0)
            return overflow

    made = {
        "dynamic": lambda: nn.DynamicLossScaleUpdateCell(8.0, 2, 2),
        "fixed": lambda: nn.FixedLossScaleUpdateCell(8.0),
        "own": Own,
    }
    step = nn.TrainOneStepWithLossScaleCell(*problem(), scale_sense=made[kind]())
    seen = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        loss, overflow, scale = step(*batch(factor))
        seen.append((bool(overflow), scale.item()))
    flags = [False, False, True, False]
    expected = {"dynamic": [8.0, 16.0, 8.0, 8.0], "fixed": [8.0] * 4, "own": [8.0, 8.0, 4.0, 4.0]}
    assert seen == list(zip(flags, expected[kind]))
    assert torch.isfinite(loss)


_grad_scale = C.MultitypeFuncGraph("grad_scale")


@_grad_scale.register("Tensor", "Tensor")
def _tensor_grad_scale(scale, grad):
    return grad * F.cast(P.Reciprocal()(scale), F.dtype(grad))


class Classic(nn.TrainOneStepCell):
    """The form in which older scripts write a step without overflow check."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        return F.depend(loss, self.optimizer(self.grad_reducer(grads)))


def test_the_classic_training_cell_of_ones_own_runs_as_written():
    step = Classic(*problem(), sens=1.0)
    losses = [step(*batch(1.0)).item() for _ in range(5)]
    assert losses[-1] < losses[0]


class Documented(nn.TrainOneStepWithLossScaleCell):
    """The form in which MindSpore's documentation has a training cell of one's own written."""

    def construct(self, *inputs):
        weights = self.weights
        loss = self.network(*inputs)
        scaling_sens = self.scale_sense
        status, scaling_sens = self.start_overflow_check(loss, scaling_sens)
        scaling_sens_filled = C.ones_like(loss) * F.cast(scaling_sens, F.dtype(loss))
        grads = self.grad(self.network, weights)(*inputs, scaling_sens_filled)
        grads = self.hyper_map(F.partial(_grad_scale, scaling_sens), grads)
        grads = ops.clip_by_global_norm(grads, 1.0)
        grads = self.grad_reducer(grads)
        cond = self.get_overflow_status(status, grads)
        overflow = self.process_loss_scale(cond)
        if not overflow:
            loss = F.depend(loss, self.optimizer(grads))
        return loss, cond, scaling_sens


def test_a_documented_training_cell_of_ones_own_runs_as_written():
    network, optimizer = problem()
    step = Documented(network, optimizer, nn.DynamicLossScaleUpdateCell(2.0**10, 2, 5))
    step.set_train()
    losses = []
    for _ in range(6):
        loss, cond, scale = step(*batch())
        losses.append(loss.item())
        assert not cond
    assert losses[-1] < losses[0]
    assert scale.item() == 2.0**11
    before = [p.clone() for p in optimizer.parameters]
    _, cond, scale = step(*batch(float("nan")))
    assert bool(cond)
    assert scale.item() == step.scale_sense.item() == 2.0**10
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.parameters))


_clip = C.MultitypeFuncGraph("clip_grad")


@_clip.register("Number", "Tensor")
def _clip_one(bound, grad):
    return nn.ClipByNorm()(grad, F.cast(F.tuple_to_array((bound,)), F.dtype(grad)))


class OfModelZoo(nn.TrainOneStepWithLossScaleCell):
    """The form of MindSpore's model zoo: a scale of its own called `loss_scale`, clipping in a map."""

    def __init__(self, network, optimizer, scale_update_cell):
        super().__init__(network, optimizer, scale_update_cell)
        self.loss_scale = None
        self.loss_scaling_manager = scale_update_cell
        first = ms.Tensor(scale_update_cell.get_loss_scale(), dtype=mstype.float32)
        self.loss_scale = ms.Parameter(first, name="loss_scale")

    def construct(self, x, y):
        loss = self.network(x, y)
        status, scale = self.start_overflow_check(loss, self.loss_scale)
        grads = self.grad(self.network, self.weights)(x, y, P.Cast()(scale, mstype.float32))
        grads = self.hyper_map(F.partial(_grad_scale, scale * 1), grads)
        grads = self.hyper_map(F.partial(_clip, 1.0), grads)
        cond = self.get_overflow_status(status, self.grad_reducer(grads))
        if not self.loss_scaling_manager(self.loss_scale, cond):
            self.optimizer(grads)
        return loss, cond, scale


def test_a_training_cell_of_the_model_zoo_runs_as_written():
    network, optimizer = problem()
    step = OfModelZoo(network, optimizer, nn.DynamicLossScaleUpdateCell(2.0**8, 2, 3))
    losses = [step(*batch())[0].item() for _ in range(4)]
    assert losses[-1] < losses[0]
    assert step.loss_scale.item() == 2.0**9
    _, overflow, scale = step(*batch(float("inf")))
    assert bool(overflow)
    assert scale.item() == 2.0**8


def test_clip_by_norm_works_along_an_axis_and_gives_fp32():
    x = ms.Tensor([[3.0, 4.0], [0.3, 0.4]], ms.float16)
    clipped = nn.ClipByNorm(1)(x, ms.Tensor([1.0]))
    assert clipped.dtype == ms.float32
    np.testing.assert_allclose(clipped.asnumpy(), [[0.6, 0.8], [0.3, 0.4]], rtol=1e-3)
    np.testing.assert_allclose(nn.ClipByNorm()(x, 10.0).asnumpy(), x.float().asnumpy())


def test_it_equals_the_training_cell_of_its_own():
    ours, theirs = problem(), problem()
    step = nn.TrainOneStepWithLossScaleCell(*ours, scale_sense=ms.Tensor(64.0))

    class Plain(Documented):
        def construct(self, *inputs):
            grads = self.grad(self.network, self.weights)(*inputs, ms.Tensor(64.0))
            grads = self.hyper_map(F.partial(_grad_scale, ms.Tensor(64.0)), grads)
            return self.optimizer(grads)

    by_hand = Plain(*theirs, scale_sense=ms.Tensor(64.0))
    for _ in range(3):
        step(*batch())
        by_hand(*batch())
    assert all(torch.equal(a, b) for a, b in zip(ours[1].parameters, theirs[1].parameters))


def test_no_sens_of_zero():
    with pytest.raises(ValueError, match="sens"):
        nn.TrainOneStepCell(*problem(), sens=0)
