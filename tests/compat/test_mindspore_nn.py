"""halfstep.compat.mindspore's functions, tensors, cells and optimizers against numbers of MindSpore 2.10."""

import copy
import math

import numpy as np
import pytest
import torch

import halfstep as hs
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import nn, value_and_grad
from halfstep.errors import HalfstepWarning

# --- casting by hand ---------------------------------------------------------------------------------------


def test_to_float_is_recursive_and_the_last_call_wins():
    network = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4)).to_float(ms.float16)
    assert network(torch.randn(2, 4)).dtype == torch.float16
    network.to_float(ms.bfloat16)
    assert network(torch.randn(2, 4)).dtype == torch.bfloat16
    network[0].to_float(ms.float32)
    assert network[0](torch.randn(2, 4)).dtype == torch.float32
    assert network[1](torch.randn(2, 4)).dtype == torch.bfloat16
    assert {p.dtype for p in network.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_to_float_reaches_tensors_made_inside(dtype):
    class Made(nn.Cell):
        def construct(self, x):
            self.seen = (x @ torch.ones(4, 4)).dtype
            return x

    cell = Made().to_float(dtype)
    cell(torch.randn(2, 4))
    assert cell.seen == dtype


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Dense(3, 2), (2, 3)),
        (lambda: nn.Conv2d(3, 2, 3), (1, 3, 5, 5)),
        (lambda: nn.Conv1dTranspose(3, 2, 3), (1, 3, 5)),
        (lambda: nn.PReLU(3), (2, 3)),
        (lambda: nn.LayerNorm((3,)), (2, 3)),
    ],
)
def test_fp32_layers_take_tensors_cast_by_hand(layer, shape, dtype):
    cell = layer()
    x = ms.Tensor(torch.randn(*shape))
    low = cell(x.astype(dtype))
    assert low.dtype == dtype
    torch.testing.assert_close(low.astype(ms.float32), cell(x), rtol=0.02, atol=0.05, check_dtype=False)
    low.astype(ms.float32).sum().backward()
    assert {p.grad.dtype for p in cell.parameters()} == {torch.float32}


# --- functions ---------------------------------------------------------------------------------------------


@pytest.fixture
def three():
    return ms.Parameter(ms.Tensor([3.0]), name="w"), ms.Parameter(ms.Tensor([5.0]), name="u")


X = ms.Tensor([1.0, 2.0])


def numbers(tree):
    return torch.utils._pytree.tree_map(lambda t: t.asnumpy().tolist(), tree)


def test_several_outputs_are_summed_without_has_aux(three):
    w, _ = three

    def two(x):
        return (w * x).sum(), w * x * 10.0

    with pytest.warns(HalfstepWarning, match=r"two returns a loss and \[2\] beside it"):
        outputs, grads = value_and_grad(two, None, [w])(X)
    assert numbers(outputs) == (9.0, [30.0, 60.0])
    assert numbers(grads) == ([33.0],)  # 3 from the first output, 30 from the sum of the second
    assert numbers(value_and_grad(two, None, [w], has_aux=True)(X)[1]) == ([3.0],)


@pytest.mark.filterwarnings("ignore:.* beside it")
@pytest.mark.parametrize(
    ("transform", "grads"),
    [
        (lambda f, w, u: value_and_grad(f, None, w), [3.0]),
        (lambda f, w, u: value_and_grad(f, None, (w, u)), ([3.0], [0.0])),
        (lambda f, w, u: value_and_grad(f), [3.0, 3.0]),
        (lambda f, w, u: value_and_grad(f, (0,)), [3.0, 3.0]),
        (lambda f, w, u: value_and_grad(f, 0, [w]), ([3.0, 3.0], ([3.0],))),
        (lambda f, w, u: value_and_grad(lambda x: w * x, None, [w]), ([3.0],)),
        (lambda f, w, u: value_and_grad(lambda x: (f(x), ms.Tensor([1, 2])), None, [w]), ([3.0],)),
        (lambda f, w, u: value_and_grad(lambda x: (f(x), (w * x, w)), None, [w]), ([7.0],)),
        (lambda f, w, u: value_and_grad(lambda x: {"a": f(x)}, None, [w]), ([3.0],)),
        (lambda f, w, u: lambda x: (None, ms.grad(f)(x)), [3.0, 3.0]),
        (
            lambda f, w, u: lambda x: (None, ms.grad(lambda y: (f(y), y), 0, None, True)(x)),
            ([3.0, 3.0], ([1.0, 2.0],)),
        ),
    ],
)
def test_value_and_grad_gives_mindspores_numbers(three, transform, grads):
    w, u = three
    assert numbers(transform(lambda x: (w * x).sum(), w, u)(X)[1]) == grads


def test_value_and_grad_leaves_no_graph_and_no_grad_behind(three):
    w, _ = three
    with torch.no_grad():
        loss, (gradient,) = value_and_grad(lambda x: (w * x).sum(), None, [w])(X)
    assert not loss.requires_grad
    assert not gradient.requires_grad
    assert w.grad is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: value_and_grad(f, None), "can not be None at the same time"),
        (lambda f: value_and_grad(f, 0, None, True)(X), "requires more than one outputs"),
    ],
)
def test_value_and_grad_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda x: x.sum())


def test_jit_runs_a_branch_on_a_tensor():
    @ms.jit
    def plain(x):
        return x * 2 if x.sum() > 0 else x

    @ms.jit(backend="ms_backend")
    def with_options(x):
        return x * 3 if x.sum() > 0 else x

    assert (plain(X).sum(), with_options(X).sum()) == (6.0, 9.0)


# --- tensors and cells -------------------------------------------------------------------------------------


def test_tensors_convert_to_numpy_and_keep_their_methods():
    x = ms.Tensor(np.array([1.5, 2.0]), ms.float32)
    doubled = torch.relu(x * 2)
    assert isinstance(doubled, ms.Tensor)
    assert doubled.asnumpy().dtype == np.float32
    assert doubled.astype(ms.bfloat16).asnumpy().tolist() == [3.0, 4.0]
    assert ms.Tensor(3.0).dtype == torch.float32
    assert f"{ms.Tensor(0.5).asnumpy():>7f}" == "0.500000"


def test_cells_name_their_parameters():
    network = nn.SequentialCell([nn.Dense(3, 2), nn.ReLU(), nn.Dense(2, 1, has_bias=False)])
    assert [p.name for p in network.trainable_params()] == ["0.weight", "0.bias", "2.weight"]
    assert list(network.name_cells()) == ["0", "1", "2"]
    assert list(network.parameters_dict()) == ["0.weight", "0.bias", "2.weight"]
    assert not network.training
    assert network.set_train().training
    network[0].weight.requires_grad = False
    assert [p.name for p in network.untrainable_params()] == ["0.weight"]
    assert nn.ReLU().cells() == []


def test_parameters_survive_copies():
    network = copy.deepcopy(nn.Dense(3, 2))
    assert isinstance(network.weight, ms.Parameter)
    assert network.weight.name == "weight"
    assert network.weight.set_data(torch.ones(2, 3)).asnumpy().sum() == 6


def test_a_cell_without_construct_says_so():
    class Empty(nn.Cell):
        pass

    with pytest.raises(hs.UnsupportedError, match="Empty has no construct"):
        Empty()(1)


def test_construct_of_a_derived_layer_is_used():
    class Twice(nn.Dense):
        def construct(self, x):
            return 2 * super().construct(x)

    layer = Twice(2, 2, weight_init="ones", bias_init="zeros")
    assert layer(torch.ones(1, 2)).tolist() == [[4.0, 4.0]]


def conv(kind, *arguments, dims=1, **options):
    layer = getattr(nn, kind)(1, 1, *arguments, weight_init="ones", **options)
    size = (5,) * dims
    return layer(torch.arange(5.0**dims).reshape(1, 1, *size)).flatten().tolist()


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "numbers"),
    [
        ("Conv1d", (3, 1), {}, [1, 3, 6, 9, 7]),
        ("Conv1d", (3, 2), {}, [1, 6, 7]),
        ("Conv1d", (4, 2), {}, [3, 10, 7]),
        ("Conv1d", (2, 3), {}, [1, 7]),
        ("Conv1d", (4, 1), {}, [3, 6, 10, 9, 7]),
        ("Conv1d", (3, 1), {"pad_mode": "valid"}, [3, 6, 9]),
        ("Conv1d", (3, 1), {"pad_mode": "pad", "padding": 2}, [0, 1, 3, 6, 9, 7, 4]),
        ("Conv1dTranspose", (3, 1), {}, [1, 3, 6, 9, 7]),
        ("Conv1dTranspose", (3, 2), {}, [0, 0, 1, 1, 3, 2, 5, 3, 7, 4]),
        ("Conv1dTranspose", (4, 2), {}, [0, 1, 1, 3, 3, 5, 5, 7, 7, 4]),
        ("Conv1dTranspose", (2, 3), {}, [0, 0, 0, 1, 1, 0, 2, 2, 0, 3, 3, 0, 4, 4, 0]),
        ("Conv1dTranspose", (4, 1), {}, [1, 3, 6, 10, 9]),
        ("Conv1dTranspose", (3, 2), {"pad_mode": "valid"}, [0, 0, 1, 1, 3, 2, 5, 3, 7, 4, 4]),
        ("Conv1dTranspose", (3, 2), {"pad_mode": "pad", "padding": 1}, [0, 1, 1, 3, 2, 5, 3, 7, 4]),
        ("Conv2d", (3, 2), {"dims": 2}, [12, 27, 24, 63, 108, 81, 72, 117, 84]),
    ],
)
def test_convolutions_pad_as_mindspore_does(kind, arguments, options, numbers):
    assert conv(kind, *arguments, **options) == numbers


def test_batch_norm_counts_its_momentum_as_mindspore_does():
    norm = nn.BatchNorm1d(2).set_train()
    norm(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.2, 0.4]))
    torch.testing.assert_close(norm.running_var, torch.tensor([1.1, 1.7]))


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda p: nn.SGD(p, 0.1, momentum=0.9, weight_decay=0.1), [0.88999999, 0.7321000, 0.60766900]),
        (lambda p: nn.SGD(p, 0.1, momentum=0.9, nesterov=True), [0.81, 0.634, 0.5681]),
        (lambda p: nn.SGD(p, 0.1, momentum=0.9, dampening=0.5), [0.9, 0.785, 0.694]),
        (lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=0.1), [0.88999999, 0.7321000, 0.60766900]),
        (lambda p: nn.Adam(p, 0.1), [0.90000004, 0.80678242, 0.75041670]),
        (lambda p: nn.SGD(p, [0.1, 0.2], loss_scale=2.0), [0.95, 0.9, 0.925]),
    ],
)
def test_optimizers_give_mindspores_numbers(make, values):
    parameter = ms.Parameter(ms.Tensor([1.0]), name="p")
    optimizer = make([parameter])
    seen = []
    for gradient in (1.0, 0.5, -0.25):
        assert optimizer((ms.Tensor([gradient]),)) is True
        seen.append(parameter.item())
    assert seen == pytest.approx(values, abs=2e-6)
    assert (optimizer.global_step, parameter.grad) == (3, None)


def test_optimizers_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="no parameters"):
        nn.SGD([], 0.1)
    with pytest.raises(ValueError, match="1 gradients for 2 parameters"):
        nn.SGD(nn.Dense(2, 2).trainable_params(), 0.1)((torch.ones(2, 2),))


def test_losses_take_integers_of_any_width():
    logits, classes = torch.randn(4, 3), ms.Tensor(np.array([0, 2, 1, 1], np.int32))
    loss = nn.CrossEntropyLoss()(logits, classes)
    assert math.isclose(loss, torch.nn.functional.cross_entropy(logits, classes.long()), rel_tol=1e-6)
    by_sample = nn.SoftmaxCrossEntropyWithLogits(sparse=True)(logits, classes)
    assert by_sample.shape == (4,)
    one_hot = torch.nn.functional.one_hot(classes.long(), 3)
    torch.testing.assert_close(nn.SoftmaxCrossEntropyWithLogits()(logits, one_hot), by_sample)


def test_checkpoints_go_out_and_in(tmp_path):
    network, other = nn.Dense(3, 2), nn.Dense(3, 2)
    ms.save_checkpoint(network, str(tmp_path / "net"))
    loaded = ms.load_checkpoint(tmp_path / "net.ckpt", other)
    assert loaded["weight"].name == "weight"
    torch.testing.assert_close(other.weight, network.weight, rtol=0, atol=0)
    assert ms.load_param_into_net(other, {"weight": loaded["weight"]}) == (["bias"], [])
