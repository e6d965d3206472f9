"""halfstep.compat.mindspore's amp, scalers and functions against numbers and messages of MindSpore 2.10."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfstep.compat.mindspore as ms
from halfstep.compat.mindspore import amp, nn, ops
from halfstep.errors import HalfstepWarning, LossScaleCollapsed

# --- scalers -----------------------------------------------------------------------------------------------


def mindspore_rule(scale, factor, window, flags):
    """(scale, counter, skipped) after each step, by MindSpore 2.10's DynamicLossScaler, in fp32."""
    scale, factor, counter = np.float32(scale), np.float32(factor), 0
    with np.errstate(over="ignore"):
        for finite in flags:
            if finite:
                product = scale * factor
                if counter == window - 1 and np.isfinite(product):
                    scale = product
                counter = (counter + 1) % window
            else:
                scale = max(np.float32(1), scale / factor)
                counter = 0
            yield float(scale), counter, not finite


def run_scaler(scaler, flags):
    """The same from ours, driven as the tutorial's step drives it."""
    for finite in flags:
        grads = (ms.Tensor([1.0, 2.0]), ms.Tensor([0.0 if finite else float("inf")]))
        is_finite = amp.all_finite(grads)
        skipped = True
        if is_finite:
            skipped = False
        scaler.adjust(is_finite)
        yield float(scaler.scale_value.asnumpy()), int(scaler.counter.asnumpy()), skipped


@settings(max_examples=150, deadline=None)
@given(
    st.floats(1.0, 2.0**127, width=32),
    st.integers(1, 5),
    st.integers(1, 6),
    st.lists(st.booleans(), min_size=1, max_size=12),
)
def test_dynamic_scaler_follows_mindspores_rule(scale, factor, window, flags):
    ours = list(run_scaler(amp.DynamicLossScaler(scale, factor, window), flags))
    assert ours == list(mindspore_rule(scale, factor, window, flags))


GOLDEN = [
    (
        (1024, 2, 3),
        "oxooooooooxooo",
        [1024, 512, 512, 512, 1024, 1024, 1024, 2048, 2048, 2048, 1024, 1024, 1024, 2048],
        [1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0],
    ),
    (
        (3.0, 3, 2),
        "oxoxxoooxooooo",
        [3, 1, 1, 1, 1, 1, 3, 3, 1, 1, 3, 3, 9, 9],
        [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1],
    ),
    (
        (1e38, 2, 1),
        "ooxo",
        [1.9999999360571385e38] * 2 + [9.999999680285692e37, 1.9999999360571385e38],
        [0] * 4,
    ),
    (
        (3e38, 3, 1),
        "ooxooxxxoo",
        [
            3.0000000054977558e38,
            3.0000000054977558e38,
            9.999999680285692e37,
            3.0000000054977558e38,
            3.0000000054977558e38,
            9.999999680285692e37,
            3.3333331422518575e37,
            1.1111110896723058e37,
            3.3333333957819775e37,
            1.0000000694406173e38,
        ],
        [0] * 10,
    ),
    ((5, 1, 2), "oooxx", [5] * 5, [1, 0, 1, 0, 0]),
    ((100.1, 7, 1), "xxxxo", [14.300000190734863, 2.0428571701049805, 1, 1, 7], [0] * 5),
]
"""(scale, factor, window), o finite and x overflow, scales and counters: recorded from MindSpore 2.10."""


@pytest.mark.parametrize(("arguments", "steps", "scales", "counters"), GOLDEN)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_dynamic_scaler_gives_the_recorded_numbers(arguments, steps, scales, counters, as_tensor):
    scaler = amp.DynamicLossScaler(*arguments)
    seen = []
    for step in steps:
        assert scaler.adjust(ms.Tensor(step == "o") if as_tensor else step == "o") is True
        seen.append((float(scaler.scale_value.asnumpy()), int(scaler.counter.asnumpy())))
    assert seen == list(zip(scales, counters))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: amp.StaticLossScaler(0), ValueError, "scale_value"),
        (lambda: amp.StaticLossScaler("8"), TypeError, "scale_value"),
        (lambda: amp.DynamicLossScaler(0.5, 2, 5), ValueError, "scale_value"),
        (lambda: amp.DynamicLossScaler(True, 2, 5), TypeError, "scale_value"),
        (lambda: amp.DynamicLossScaler(float("inf"), 2, 5), ValueError, "fit float32"),
        (lambda: amp.DynamicLossScaler(1, 0, 5), ValueError, "scale_factor"),
        (lambda: amp.DynamicLossScaler(1, 2.0, 5), TypeError, "'scale_factor' must be int, but got 'float'"),
        (lambda: amp.DynamicLossScaler(1, True, 5), TypeError, "scale_factor"),
        (lambda: amp.DynamicLossScaler(1, 2, 0), ValueError, "scale_window"),
        (lambda: amp.DynamicLossScaler(1, 2, 2.5), TypeError, "scale_window"),
        (lambda: amp.FixedLossScaleManager(0.5), ValueError, "loss_scale"),
        (lambda: amp.DynamicLossScaleManager(0.5), ValueError, "init_loss_scale"),
        (lambda: amp.DynamicLossScaleManager(2, 0), ValueError, "scale_factor"),
        (lambda: amp.DynamicLossScaleManager(2, 2, 0), ValueError, "scale_window"),
        (lambda: amp.DynamicLossScaleManager(2, 2, 1.5), TypeError, "scale_window"),
        (lambda: amp.GroupLossScaleManager(4096, []).start(), ValueError, "no groups"),
        (lambda: amp.LossScaler(), TypeError, "abstract"),
    ],
)
def test_scalers_refuse_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_scale_above_fp16_is_no_inf_and_small_fp16_gradients_survive():
    scaler = amp.StaticLossScaler(2**20)
    scaled = scaler.scale(ms.Tensor([1.5], ms.float16))
    assert scaled.dtype == torch.float32
    assert scaled.asnumpy().tolist() == [1.5 * 2**20]
    # 1/scale would be 0 in fp16, and with it the gradient.
    gradient = scaler.unscale((ms.Tensor([64.0], ms.float16),))[0]
    assert (gradient.dtype, gradient.asnumpy().tolist()) == (torch.float16, [2.0**-14])


def test_scalers_take_nests_and_leave_integers():
    scaler = amp.StaticLossScaler(8)
    first, (second, third) = scaler.scale((ms.Tensor([1.0]), [ms.Tensor([2]), ms.Tensor([0.5])]))
    assert (first.item(), second.item(), third.item()) == (8.0, 2, 4.0)
    assert scaler.adjust(ms.Tensor(False)) is False
    assert scaler.scale_value.asnumpy() == 8


def test_a_scaler_of_ones_own():
    class Doubling(amp.LossScaler):
        value = 1.0

        def scale(self, inputs):
            return inputs * self.value

        def unscale(self, inputs):
            return inputs / self.value

        def adjust(self, grads_finite):
            self.value *= 2
            return True

    scaler = Doubling()
    scaler.adjust(True)
    assert scaler.scale(ms.Tensor([3.0])).item() == 6.0


@pytest.mark.parametrize(
    ("arguments", "steps", "scales"),
    [
        ((2**24, 2, 3), "oooxooo", [2**24, 2**24, 2**25, 2**24, 2**24, 2**24, 2**25]),
        ((16, 2, 2), "ooooxxxxoxxooo", [16, 32, 32, 64, 32, 16, 8, 4, 4, 2, 1, 1, 2, 2]),
    ],
)
def test_dynamic_manager_gives_the_recorded_numbers(arguments, steps, scales):
    manager = amp.DynamicLossScaleManager(*arguments)
    seen = []
    for step in steps:
        manager.update_loss_scale(step == "x")
        seen.append(manager.get_loss_scale())
    assert seen == scales


def test_more_than_1000_overflows_in_a_row_raise():
    manager = amp.DynamicLossScaleManager()
    for _ in range(1000):
        manager.update_loss_scale(True)
    manager.update_loss_scale(False)
    for _ in range(1000):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="1001 steps in a row") as caught:
        manager.update_loss_scale(True)
    assert isinstance(caught.value, LossScaleCollapsed)
    scaler = amp.DynamicLossScaler(8, 2, 50)
    for finite in (*[False] * 1000, True, *[ms.Tensor(False)] * 1000):
        scaler.adjust(finite)
    with pytest.raises(LossScaleCollapsed, match="1001 steps in a row"):
        scaler.adjust(False)


def test_fixed_manager():
    manager = amp.FixedLossScaleManager()
    manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 128.0
    assert manager.get_drop_overflow_update()
    assert amp.FixedLossScaleManager(8, False).get_update_cell() is None


# --- levels ------------------------------------------------------------------------------------------------


class Probe(nn.Cell):
    """Notes the dtype each layer gives."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Dense(4, 3)
        self.relu = nn.ReLU()
        self.matmul = ops.MatMul(transpose_b=True)
        self.seen = {}

    def construct(self, x):
        self.seen["in"] = x.dtype
        for name in ("first", "norm", "second", "relu"):
            x = getattr(self, name)(x)
            self.seen[name] = x.dtype
        product = self.matmul(x, x)
        self.seen["matmul"] = product.dtype
        self.seen["exp"] = ops.exp(x).dtype
        return product


FULL, LOW = "full", "low"
LEVELS = {
    "O0": dict(dict.fromkeys(("in", "first", "norm", "second", "relu", "matmul", "exp"), FULL)),
    "O1": dict(dict.fromkeys(("in", "first", "norm", "second", "relu", "matmul", "exp"), FULL)),
    "O2": dict(dict.fromkeys(("in", "first", "norm", "second", "relu", "matmul", "exp"), LOW)),
    "O3": dict(dict.fromkeys(("in", "first", "norm", "second", "relu", "matmul", "exp"), LOW)),
    "auto": {
        "in": FULL,
        "first": FULL,
        "norm": FULL,
        "second": FULL,
        "relu": FULL,
        "matmul": LOW,
        "exp": FULL,
    },
}
"""What each layer gives: as recorded from MindSpore 2.10; at auto a Dense adds its bias in fp32."""


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_give_mindspores_dtypes(level, dtype):
    network = amp.auto_mixed_precision(Probe(), level, dtype)
    output = network(torch.randn(5, 4))
    wanted = {name: dtype if kind == LOW else torch.float32 for name, kind in LEVELS[level].items()}
    assert network.seen == wanted
    assert output.dtype == (dtype if level == "auto" else torch.float32)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    output.sum().backward()
    assert {p.grad.dtype for p in network.parameters()} == {torch.float32}


def rounded(t):
    return t.half().float()


def test_low_layers_compute_on_rounded_numbers_and_accumulate_in_fp32():
    layer = nn.Dense(300, 3)
    x = torch.randn(7, 300)
    exact = rounded(x).double() @ rounded(layer.weight).double().T + rounded(layer.bias).double()
    for network in (amp.auto_mixed_precision(layer, "O1"), nn.Dense(300, 3).to_float(ms.float16)):
        if network is not layer:
            network.load_state_dict(layer.state_dict())
        got = network(x).double()
        assert ((got - exact).abs() <= exact.abs() * 2**-10 + 1e-4).all()
        assert (got == got.half()).all()


def test_o2_runs_the_black_list_in_fp32_inside():
    class Spy(nn.LayerNorm):
        def construct(self, x):
            self.seen = x.dtype
            return super().construct(x)

    network = nn.SequentialCell(nn.Dense(4, 4), Spy((4,)), nn.Dense(4, 4))
    amp.auto_mixed_precision(network, "O2")(torch.randn(2, 4))
    assert network[1].seen == torch.float32
    network = nn.SequentialCell(nn.Dense(4, 4), Spy((4,)), nn.Dense(4, 4))
    amp.auto_mixed_precision(network, "O3")(torch.randn(2, 4))
    assert network[1].seen == torch.float16


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_a_users_to_float_is_respected(level):
    class Spy(nn.Dense):
        def construct(self, x):
            self.seen = x.dtype
            return super().construct(x)

    network = nn.SequentialCell(nn.Dense(4, 4), Spy(4, 4).to_float(ms.float32), nn.Dense(4, 4))
    amp.auto_mixed_precision(network, level)
    assert network(torch.randn(2, 4)).dtype == torch.float32
    assert network[1].seen == torch.float32


def test_torch_layers_inside_a_cell_follow_the_lists():
    network = nn.SequentialCell(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    seen = []
    for module in network:
        module.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    amp.auto_mixed_precision(network, "O1")(torch.randn(3, 4))
    # a hook of one's own stands before the one that casts the output back
    assert (
        seen == [(torch.float16, torch.float16), (torch.float32, torch.float32)]
        or seen[1][0] == torch.float32
    )


def test_a_second_conversion_warns_and_replaces_the_first():
    network = amp.auto_mixed_precision(Probe(), "O2")
    with pytest.warns(HalfstepWarning, match="adjusted from O2 to O1"):
        amp.auto_mixed_precision(network, "O1")
    network(torch.randn(2, 4))
    assert set(network.seen.values()) == {torch.float32}
    with pytest.warns(HalfstepWarning, match="adjusted from O1 to a white list"):
        amp.custom_mixed_precision(network, white_list=amp.get_white_list())


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_converted_networks_are_copied_with_their_precision(level, copied):
    network = amp.auto_mixed_precision(Probe(), level)
    other = copied(network)
    x = torch.randn(3, 4)
    assert torch.equal(network(x), other(x))
    assert other.seen == network.seen
    assert isinstance(other.first.weight, ms.Parameter)


def test_auto_takes_functions():
    @ms.jit
    def product(a, b):
        seen.append((a @ b).dtype)
        return a @ b

    seen = []
    low = amp.auto_mixed_precision(product, "auto")
    assert low(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float16
    assert seen == [torch.float16]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.auto_mixed_precision(Probe(), "O4"), ValueError, "The amp level O4 is not supported"),
        (
            lambda: amp.auto_mixed_precision(Probe(), "O2", ms.float32),
            ValueError,
            "The dtype should be one of",
        ),
        (lambda: amp.auto_mixed_precision(lambda x: x, "O2"), TypeError, "the network type should be Cell"),
        (lambda: amp.auto_mixed_precision(3, "auto"), TypeError, "should be Cell or function"),
        (lambda: amp.custom_mixed_precision(Probe()), ValueError, "must be provided"),
        (
            lambda: amp.custom_mixed_precision(Probe(), white_list=[], black_list=[]),
            ValueError,
            "cannot be provided at the same time",
        ),
        (lambda: amp.custom_mixed_precision(3, white_list=[]), TypeError, "'network' must be Module"),
        (lambda: amp.custom_mixed_precision(Probe(), white_list=(nn.Dense,)), TypeError, "must be list"),
        (lambda: amp.custom_mixed_precision(Probe(), white_list=[3]), TypeError, "must be type"),
        (lambda: amp.custom_mixed_precision(Probe(), white_list=[int]), TypeError, "'Cell' and 'Primitive'"),
        (lambda: amp.custom_mixed_precision(Probe(), black_list=[ops.ReLU]), TypeError, "one of 'Cell'"),
        (lambda: nn.Dense(2, 2).to_float(ms.float64), ValueError, "'dst_type' must be mstype.float32"),
    ],
)
def test_wrong_use_gets_mindspores_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_lists_are_copies_with_mindspores_contents():
    white, black = amp.get_white_list(), amp.get_black_list()
    assert [c.__name__ for c in white] == [
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "Conv1dTranspose",
        "Conv2dTranspose",
        "Conv3dTranspose",
        "Dense",
        "LSTMCell",
        "RNNCell",
        "GRUCell",
        "Conv2D",
        "Conv3D",
        "Conv2DTranspose",
        "Conv3DTranspose",
        "Conv2DBackpropInput",
        "MatMul",
        "BatchMatMul",
        "PReLU",
        "ReLU",
        "Ger",
    ]
    assert [c.__name__ for c in black] == ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"]
    white.clear()
    black.append(nn.Dense)
    assert len(amp.get_white_list()) == 20
    assert len(amp.get_black_list()) == 4


class Inputs(nn.Cell):
    """Notes the dtype each layer is given."""

    def __init__(self):
        super().__init__()
        self.flatten, self.dense, self.matmul = nn.Flatten(), nn.Dense(4, 4), ops.MatMul()
        self.norm = nn.BatchNorm1d(4)
        self.seen = {}
        for name in ("flatten", "dense", "matmul", "norm"):
            getattr(self, name).register_forward_hook(self.note(name))

    def note(self, name):
        return lambda module, args, output: self.seen.update({name: args[0].dtype})

    def construct(self, x):
        x = self.dense(self.flatten(x))
        return self.norm(self.matmul(x, x))


@pytest.mark.parametrize("extra", [nn.Flatten, None])
def test_a_white_list_of_ones_own(extra):
    network = Inputs()
    amp.custom_mixed_precision(network, white_list=[ops.MatMul, *([extra] if extra else [])])
    assert network(torch.randn(4, 4)).dtype == torch.float32
    assert network.seen == {
        "flatten": torch.float16 if extra else torch.float32,
        "dense": torch.float32,
        "matmul": torch.float16,
        "norm": torch.float32,
    }


def test_a_black_list_of_ones_own_warns_for_what_it_lacks():
    network = Inputs()
    with pytest.warns(HalfstepWarning) as caught:
        amp.custom_mixed_precision(network, black_list=[nn.Dense, nn.BatchNorm1d], dtype=ms.bfloat16)
    removed = [str(w.message) for w in caught]
    assert [
        kind for kind in ("BatchNorm2d", "BatchNorm3d", "LayerNorm") if any(kind in r for r in removed)
    ] == [
        "BatchNorm2d",
        "BatchNorm3d",
        "LayerNorm",
    ]
    assert len(removed) == 3
    network(torch.randn(4, 4))
    assert network.seen["dense"] == network.seen["norm"] == torch.float32
    assert network.seen["matmul"] == torch.bfloat16
