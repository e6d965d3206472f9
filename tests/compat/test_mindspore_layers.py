"""Layers of the compat MindSpore that level auto builds itself, and what levels say of odd networks."""

import numpy as np
import pytest
import torch

import halfstep as hs
import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import amp, nn, ops

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_at_auto_compute_what_torchs_cells_do(cell, bias):
    torch.manual_seed(0)
    layer = cell(4, 5, has_bias=bias)
    state = torch.randn(6, 5)
    state = (state, torch.randn(6, 5)) if cell is nn.LSTMCell else state
    x = torch.from_numpy(X)
    wanted = layer(x, state)
    with hs.autocast("cpu", torch.float16, policy="mindspore"):
        got = layer(x, state)
    first = got[0] if isinstance(got, tuple) else got
    assert bias is False or first.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=0, check_dtype=False)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dense(4, 3), (6, 4)),
        (nn.Conv2d(2, 3, 3, has_bias=True), (2, 2, 5, 5)),
        (nn.Conv2dTranspose(2, 3, 3, stride=2, has_bias=True), (2, 2, 5, 5)),
        (nn.Conv1dTranspose(2, 3, 3, has_bias=True), (2, 2, 5)),
    ],
)
def test_biases_are_added_in_fp32_at_auto(layer, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.bias.fill_(1 + 2**-12)  # lost in fp16, kept in fp32
        wanted = layer(x)
        with hs.autocast("cpu", torch.float16, policy="mindspore"):
            got = layer(x)
            products = got - layer.bias.view(-1, *(1,) * (len(shape) - 2))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, atol=5e-3, rtol=2e-3)
    if not isinstance(layer, nn.Conv1dTranspose):  # whose product is not on MindSpore's list
        torch.testing.assert_close(products, products.half().float(), atol=3e-7, rtol=0)


def test_the_new_layers_compute_what_torchs_functions_do():
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    F = torch.nn.functional
    same = torch.testing.assert_close
    same(nn.GELU()(x), F.gelu(x, approximate="tanh"))
    same(nn.GELU(approximate=False)(x), F.gelu(x))
    same(nn.LeakyReLU()(x), F.leaky_relu(x, 0.2))
    same(nn.LogSoftmax(axis=1)(x), F.log_softmax(x, 1))
    same(nn.AvgPool2d(2, 2)(x), F.avg_pool2d(x, 2))
    same(nn.AvgPool2d(2, 2, pad_mode="same")(torch.ones(1, 1, 5, 5)), torch.ones(1, 1, 3, 3))
    same(nn.GroupNorm(2, 4)(x), F.group_norm(x, 2))
    same(nn.InstanceNorm2d(4)(x), F.instance_norm(x))
    table = nn.Embedding(7, 3, padding_idx=0)
    ids = torch.tensor([[0, 6], [2, 2]])
    hot = nn.Embedding(7, 3, use_one_hot=True, embedding_table=table.weight.detach())
    same(table(ids), hot(ids))
    assert not table(ids)[0, 0].any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_stop_where_their_lengths_say(kind):
    layer = kind(4, 3, batch_first=True)
    x = torch.from_numpy(X).view(2, 3, 4)
    whole, _ = layer(x)
    cut, last = layer(x, seq_length=ms.Tensor([3, 1], ms.int32))
    torch.testing.assert_close(cut[0], whole[0])
    assert not cut[1, 1:].any()
    last = last[0] if isinstance(last, tuple) else last
    torch.testing.assert_close(last[0, 1], whole[1, 0])


def test_operators_of_convolutions_take_their_weight_with_the_call():
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    w = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    y = ops.Conv2D(5, 3)(x, w)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w))
    back = ops.Conv2DTranspose(5, 3)(y, w, (2, 3, 6, 6))
    torch.testing.assert_close(back, torch.nn.functional.conv_transpose2d(y, w))
    assert ops.Conv2DBackpropInput(5, 3)(y, w, (2, 3, 6, 6)).equal(back)
    cube = torch.randn(1, 2, 4, 4, 4), torch.randn(3, 2, 3, 3, 3)
    assert ops.Conv3DTranspose(3, 3)(ops.Conv3D(3, 3)(*cube), cube[1]).shape == cube[0].shape


class Operators(nn.Cell):
    """No parameter anywhere."""

    def construct(self, x):
        return ops.relu(x)


@pytest.mark.parametrize(("level", "inside"), [("O1", "float32"), ("O2", "float16"), ("O3", "float16")])
def test_networks_without_parameters_are_converted_too(level, inside):
    network = Operators()
    seen = []
    network.register_forward_hook(lambda m, args, out: seen.append(str(args[0].dtype)))
    amp.auto_mixed_precision(network, level)
    assert network(ms.Tensor(X)).dtype == torch.float32
    assert seen == [f"torch.{inside}"]


def test_a_part_after_the_whole_keeps_its_own_output():
    network = nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 2))
    network.to_float(ms.float16)
    assert network(ms.Tensor(X)).dtype == torch.float16
    network[1].to_float(ms.float32)
    assert network(ms.Tensor(X)).dtype == torch.float32


def test_all_finite_gives_a_tensor_and_refuses_what_holds_none():
    flag = amp.all_finite((ms.Tensor([1.0]), [ms.Tensor([float("nan")])]))
    assert not flag.asnumpy()
    with pytest.raises(ValueError, match="at least one Tensor"):
        amp.all_finite(())
    with pytest.raises(TypeError, match="'inputs' must be"):
        amp.all_finite(3)
