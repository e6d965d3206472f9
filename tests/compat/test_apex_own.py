"""What Apex's own tests ask of amp, at its last commit with it (tests/L0/run_amp and run_fp16util), on a CPU.

Each test here is named after theirs and asks the same. Not here, since they drive CUDA kernels of amp_C and
no behaviour of amp: test_multi_tensor_axpby (2), test_multi_tensor_l2norm, test_multi_tensor_scale,
test_multi_tensor_unscale_l2norm, test_update_scale_hysteresis. Their four of test_fused_sgd run as
`test_multiple_models` does, with FusedSGD as the optimizer.
"""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.compat.apex import amp, fp16_utils, optimizers, parallel

B, C, H, T = 4, 4, 8, 3
FLOAT, HALF = torch.float32, torch.float16
MATCH = {FLOAT: FLOAT, HALF: HALF}
ALWAYS_HALF, ALWAYS_FLOAT = dict.fromkeys(MATCH, HALF), dict.fromkeys(MATCH, FLOAT)


@pytest.fixture
def o1():
    """amp casting around functions."""
    torch.manual_seed(0)
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    yield
    amp.shutdown()


@pytest.fixture(autouse=True)
def _shut_down():
    yield
    amp.shutdown()


def run_layer_test(functions, expected, shape, backward=True):
    """Each function gives the dtype expected for each input, and gradients in the input's."""
    for fn, (given, wanted) in itertools.product(functions, expected.items()):
        x = torch.randn(shape, dtype=given).requires_grad_()
        y = fn(x)
        assert y.dtype == wanted
        if backward:
            y.float().sum().backward()
            assert x.grad.dtype == given


@pytest.mark.usefixtures("o1")
class TestBasicCasts:
    def test_linear_is_half(self):
        m = nn.Linear(H, H)
        run_layer_test([m, lambda x: F.linear(x, m.weight, m.bias)], ALWAYS_HALF, (B, H))

    def test_conv2d_is_half(self):
        m = nn.Conv2d(C, C, 3)
        run_layer_test([m, lambda x: F.conv2d(x, m.weight, m.bias)], ALWAYS_HALF, (B, C, H, H))

    def test_softmax_is_float(self):
        run_layer_test([nn.Softmax(dim=1), lambda x: F.softmax(x, dim=1)], ALWAYS_FLOAT, (B, H))

    def test_group_norm_is_float(self):
        run_layer_test([nn.GroupNorm(2, C)], ALWAYS_FLOAT, (B, C, H, H))

    def test_mse_loss_is_float(self):
        target = torch.randn(B, H)
        run_layer_test(
            [lambda x: nn.MSELoss()(x, target), lambda x: F.mse_loss(x, target)], ALWAYS_FLOAT, (B, H)
        )

    def test_relu_is_match(self):
        run_layer_test([nn.ReLU(), F.relu], MATCH, (B, H))

    def test_batch_norm_is_match(self):
        m = nn.BatchNorm2d(C).eval()
        run_layer_test([m], MATCH, (B, C, H, H), backward=False)

    def test_bce_raises_by_default(self):
        for fn in (nn.BCELoss(), F.binary_cross_entropy):
            with pytest.raises(NotImplementedError, match="banned"):
                fn(torch.rand(B, H, dtype=HALF), torch.rand(B, H))

    def test_bce_is_float_with_allow_banned(self):
        import halfstep as hs

        allowed = hs.Policy(compute_dtype=HALF, table="apex").with_rules(full=["binary_cross_entropy"])
        with hs.autocast("cpu", policy=allowed):
            assert F.binary_cross_entropy(torch.rand(B, H, dtype=HALF), torch.rand(B, H)).dtype == FLOAT

    def test_matmul_method_is_half(self):
        other = torch.randn(H, H)
        run_layer_test([lambda x: x.matmul(other), other.matmul], ALWAYS_HALF, (H, H))

    def test_matmul_op_is_half(self):
        other = torch.randn(H, H)
        run_layer_test([lambda x: x @ other, lambda x: other @ x], ALWAYS_HALF, (H, H))

    def test_pow_method_is_float(self):
        run_layer_test([lambda x: x.pow(2.0)], ALWAYS_FLOAT, (B, H))

    def test_pow_op_is_float(self):
        run_layer_test([lambda x: x**2.0], ALWAYS_FLOAT, (B, H))

    def test_sum_is_float(self):
        run_layer_test([lambda x: x.sum()], ALWAYS_FLOAT, (B, H))


class OneWeight(nn.Module):
    """A weight in a dtype of its own under an op of the white list, the black list, or the promoting one."""

    def __init__(self, dtype, op):
        super().__init__()
        self.weight, self.op = nn.Parameter(torch.ones(B, B, dtype=dtype) / 8), op

    def forward(self, x):
        return self.op(x, self.weight)


@pytest.mark.parametrize("weight", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("whitelist", lambda x, w: x.mm(w)),
        ("blacklist", lambda x, w: (x + w).pow(2.0)),
        ("promote", lambda x, w: x * w),
    ],
)
@pytest.mark.usefixtures("o1")
def test_cache(kind, op, weight):
    """Their six tests of test_cache: eval, then training, then eval again see the weight as it is."""
    model = OneWeight(weight, op)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(B, B)
    seen = []
    for _ in range(3):
        with torch.no_grad():
            seen.append(model(x).float().sum().item())
        optimizer.zero_grad()
        model(x).float().sum().backward()
        assert model.weight.grad.dtype == weight
        optimizer.step()
    assert len(set(seen)) == 3


class TestCheckpointing:
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    def test_restoring(self, level):
        def train(model, optimizer, steps):
            for step in range(steps):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                loss = model(x).float().square().mean()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()

        def build():
            torch.manual_seed(1)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")

        model, optimizer = build()
        train(model, optimizer, 3)
        saved = [model.state_dict(), optimizer.state_dict(), amp.state_dict()]
        saved = [torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, each) for each in saved]
        train(model, optimizer, 3)
        wanted = {k: v.clone() for k, v in model.state_dict().items()}
        assert {v.dtype for v in wanted.values()} == {FLOAT}
        amp.shutdown()
        model, optimizer = build()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        amp.load_state_dict(saved[2])
        train(model, optimizer, 3)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0 if level != "O3" else 2e-3)

    def test_loss_scale_decrease(self):
        losses, steps = 3, [1, 2, 4]
        models = [nn.Linear(2, 2) for _ in range(losses)]
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
        models, optimizer = amp.initialize(
            models, optimizer, opt_level="O2", num_losses=losses, verbosity=0, loss_scale="dynamic"
        )
        for index, count in enumerate(steps):
            for _ in range(count):
                optimizer.zero_grad()
                loss = models[index](torch.full((2, 2), 1e4)).float().sum() * 1e9
                with amp.scale_loss(loss, optimizer, loss_id=index) as scaled:
                    scaled.backward()
                optimizer.step()
        state = amp.state_dict()
        for index, count in enumerate(steps):
            assert state[f"loss_scaler{index}"] == {"loss_scale": 2.0**16 / 2**count, "unskipped": 0}

    def test_state_dict(self):
        model = nn.Linear(2, 2)
        model, _ = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0
        )
        for key, value in model.state_dict().items():
            assert "FP32" not in key
            assert value.dtype == FLOAT


class Own(nn.Module):
    """A model of one fp32 weight."""

    def __init__(self, first):
        super().__init__()
        self.weight = nn.Parameter(first + torch.arange(2, dtype=FLOAT))

    def forward(self, x):
        return (x * self.weight.float()).sum()


def make(kind, groups):
    return (
        torch.optim.SGD(groups, momentum=0.125, lr=1.0)
        if kind == "torch"
        else optimizers.FusedSGD(groups, momentum=0.125)
    )


def _touched(optims, part):
    """The optimizers that hold parameters of these models."""
    mine = {id(p) for n in part for p in n.parameters()}
    return [o for o in optims if any(id(p) in mine for g in o.param_groups for p in g["params"])]


def run(kind, level, models, sharing, bad=None):
    """Two steps of two losses over models; `bad` (step, loss) overflows. Returns the weights."""
    nets = [Own(i + 1) for i in range(models)]
    per = [[nets[0], nets[1]], [nets[-1], nets[0]] if models == 3 else [nets[1]]]
    if sharing:
        groups = [[{"params": n.parameters(), "lr": 0.25 * 2**i} for i, n in enumerate(nets)]]
    else:
        split = [nets[:1], nets[1:]]
        groups = [[{"params": n.parameters(), "lr": 0.25} for n in part] for part in split]
    optims = [make(kind, g) for g in groups]
    if level is not None:
        nets, optims = amp.initialize(
            nets,
            optims,
            opt_level=level,
            num_losses=2,
            verbosity=0,
            loss_scale="dynamic",
            cast_model_type=False,
        )
        scale = amp.scale_loss
    for step in range(3):
        for o in optims:
            o.zero_grad()
        for number, part in enumerate(per):
            wrong = bad == (step, number)
            loss = sum(n(torch.full((2,), float("inf") if wrong else 0.5)) for n in part)
            if level is None:
                if not wrong:
                    loss.backward()
                continue
            with scale(loss, _touched(optims, part), loss_id=number) as scaled:
                scaled.backward()
        hit = _touched(optims, per[bad[1]]) if bad is not None and bad[0] == step else []
        for o in optims:
            if level is not None or o not in hit:
                o.step()
    values = [n.weight.detach().clone() for n in nets]
    amp.shutdown()
    return values


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("bad", [None, (1, 0), (1, 1)])
@pytest.mark.parametrize("models", [2, 3])
def test_multiple_models_losses1optimizer(kind, models, bad):
    """Their 2models2losses1optimizer and 3models2losses1optimizer, of torch's SGD and of FusedSGD."""
    wanted = run(kind, None, models, True, bad)
    for level in ("O0", "O1"):
        for value, reference in zip(run(kind, level, models, True, bad), wanted, strict=True):
            torch.testing.assert_close(value, reference)


@pytest.mark.parametrize("kind", ["torch", "fused"])
@pytest.mark.parametrize("bad", [None, (1, 0), (1, 1)])
@pytest.mark.parametrize("models", [2, 3])
def test_multiple_models_losses2optimizers(kind, models, bad):
    """Their 2models2losses2optimizers and 3models2losses2optimizers; only who shares the bad loss skips."""
    wanted = run(kind, None, models, False, bad)
    for level in ("O0", "O1"):
        for value, reference in zip(run(kind, level, models, False, bad), wanted, strict=True):
            torch.testing.assert_close(value, reference)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_add_param_group(level, accumulate):
    def train(with_amp):
        first, second = Own(1), Own(2)
        optimizer = torch.optim.SGD([{"params": first.parameters(), "lr": 0.25}], momentum=0.125, lr=1.0)
        if with_amp:
            models = amp.initialize(
                [first, second], optimizer, opt_level=level, cast_model_type=False, verbosity=0
            )
            [first, second], optimizer = models
        for step in range(3):
            optimizer.zero_grad()
            loss = first(torch.ones(2)) + (second(torch.ones(2)) if step else 0.0)
            for last in [False, True] if accumulate else [True]:
                if with_amp:
                    with amp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward(retain_graph=not last)
                else:
                    loss.backward(retain_graph=not last)
            optimizer.step()
            if step == 0:
                optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
        values = first.weight.detach().clone(), second.weight.detach().clone()
        amp.shutdown()
        return values

    torch.testing.assert_close(train(True), train(False))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_larc_mixed_precision(level):
    model = Own(1)
    inner = torch.optim.SGD([{"params": model.parameters(), "lr": 0.25}], momentum=0.125, lr=1.0)
    model, optimizer = amp.initialize(
        model, parallel.LARC(inner), opt_level=level, loss_scale=128.0, verbosity=0
    )
    before = model.weight.detach().float().clone()
    loss = model(torch.ones(2))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    # rate = min(0.02 * |w| / |g| / lr, 1) and the step is lr * rate * g
    norm = before.norm()
    moved = 0.02 * norm / torch.full((2,), 1.0).norm()
    torch.testing.assert_close(model.weight.detach().float(), before - moved, rtol=2e-3, atol=0)


@pytest.mark.usefixtures("o1")
class TestPromotion:
    def pairs(self, functions, in_place=False):
        for fn, (a, b) in itertools.product(functions, itertools.product((HALF, FLOAT), repeat=2)):
            leaf = torch.randn(B, dtype=a).requires_grad_()
            x = leaf.clone() if in_place else leaf
            out = fn(x, torch.randn(B, dtype=b))
            assert out.dtype == (a if in_place else FLOAT if FLOAT in (a, b) else HALF)
            out.float().sum().backward()
            assert leaf.grad.dtype == a

    def test_atan2_matches_widest(self):
        self.pairs([torch.atan2, lambda x, y: x.atan2(y)])

    def test_mul_matches_widest(self):
        self.pairs([torch.mul, lambda x, y: x.mul(y)])

    def test_cat_matches_widest(self):
        halves = [torch.randn(B, dtype=HALF) for _ in range(5)]
        assert torch.cat([*halves, torch.randn(B)]).dtype == FLOAT
        assert torch.cat(halves).dtype == HALF

    def test_inplace_exp_is_error_for_half(self):
        x = torch.randn(B)
        assert x.exp_().dtype == FLOAT
        with pytest.raises(NotImplementedError, match="exp_ on 16 bits is banned"):
            torch.randn(B, dtype=HALF).exp_()

    def test_inplace_add_matches_self(self):
        self.pairs([lambda x, y: x.add_(y)], in_place=True)


@pytest.mark.usefixtures("o1")
class TestRnn:
    @pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
    def test_cell_is_half(self, cell):
        layer = cell(H, H)
        for given in (FLOAT, HALF):
            xs = [torch.randn(B, H, dtype=given).requires_grad_() for _ in range(T)]
            zero = torch.zeros(B, H, dtype=given)
            hidden = (zero, zero) if cell is nn.LSTMCell else zero
            for x in xs:
                hidden = layer(x, hidden)
                output = hidden[0] if cell is nn.LSTMCell else hidden
                assert output.dtype == HALF
            output.float().sum().backward()
            assert {x.grad.dtype for x in xs} == {given}

    @pytest.mark.parametrize(("layers", "both"), [(1, False), (2, False), (2, True)])
    @pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
    def test_rnn_is_half(self, kind, layers, both):
        layer = kind(H, H, layers, bidirectional=both)
        for given in (FLOAT, HALF):
            x = torch.randn(T, B, H, dtype=given).requires_grad_()
            zero = torch.zeros(layers * (1 + both), B, H, dtype=given)
            output, _ = layer(x, (zero, zero) if kind is nn.LSTM else zero)
            assert output.dtype == HALF
            output[-1].float().sum().backward()
            assert x.grad.dtype == given

    def test_rnn_packed_sequence(self):
        layer = nn.RNN(H, H, 2)
        lengths = sorted((random.Random(0).randint(1, T) for _ in range(B)), reverse=True)
        lengths[0] = T
        for given in (FLOAT, HALF):
            x = torch.randn(T, B, H, dtype=given).requires_grad_()
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
            output, _ = layer(packed, torch.zeros(2, B, H, dtype=given))
            assert output.data.dtype == HALF
            output.data.float().sum().backward()
            assert x.grad.dtype == given


class TestFp16Util:
    def model(self):
        block = nn.Sequential(nn.Conv2d(10, 10, 2), nn.BatchNorm2d(10, affine=True))
        plain = nn.Sequential(nn.Conv2d(3, 10, 2), nn.BatchNorm2d(10, affine=False), block)
        return fp16_utils.FP16Model(nn.Sequential(nn.BatchNorm2d(3, affine=True), plain))

    def test_params_and_buffers(self):
        model = self.model()
        exempt = [model.network[0], model.network[1][2][1]]
        for module in model.modules():
            wanted = FLOAT if module in exempt else HALF
            assert all(p.dtype == wanted for p in module.parameters(recurse=False))
            assert all(b.dtype in (wanted, torch.int64) for b in module.buffers(recurse=False))

    def test_output_is_half(self):
        assert self.model()(torch.randn(2, 3, 6, 6)).dtype == HALF


# --- what users of its other names meet --------------------------------------------------------------------


class Batch:
    """A batch object that knows how to cast itself."""

    def __init__(self, x, note):
        self.x, self.note = x, note

    def to(self, dtype):
        return Batch(self.x.to(dtype), self.note)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_batch_of_ones_own_is_cast_by_its_own_to(level):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, batch, again=None):
            assert batch.note == "kept"
            assert again is None or again["b"].x.dtype == HALF
            return self.linear(batch.x)

    net = Net()
    net, _ = amp.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), opt_level=level, verbosity=0)
    batch = Batch(torch.randn(4, 3), "kept")
    assert net(batch, again={"b": batch}).dtype == FLOAT
    assert batch.x.dtype == FLOAT


def test_fused_sgd_takes_its_rate_by_group():
    weight = nn.Parameter(torch.ones(2))
    optimizer = optimizers.FusedSGD([{"params": [weight], "lr": 0.5}])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="given no lr"):
        optimizers.FusedSGD([weight])


def test_masters_by_hand():
    torch.manual_seed(0)
    for flat in (False, True):
        model = nn.Linear(3, 2).half()
        params, masters = fp16_utils.prep_param_lists(model, flat_master=flat)
        assert {m.dtype for m in masters} == {FLOAT}
        optimizer = torch.optim.SGD(masters, lr=0.5)
        before = [p.detach().clone() for p in params]
        model(torch.ones(1, 3, dtype=HALF)).float().sum().backward()
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        optimizer.step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), old - 0.5)


def test_scalers_by_hand_follow_apex_rule():
    scaler = fp16_utils.DynamicLossScaler(init_scale=8, scale_factor=2.0, scale_window=3)
    seen = []
    for overflow in (0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1):
        scaler.update_scale(bool(overflow))
        seen.append(scaler.loss_scale)
    assert seen == [8, 8, 16, 8, 8, 8, 16, 8, 4, 2, 1, 1, 1]
    weight = nn.Parameter(torch.ones(2))
    scaler.backward((weight * float("inf")).sum())
    assert scaler.has_overflow([weight])
    assert fp16_utils.LossScaler(4).scale_gradient(None, (torch.ones(1),), None)[0].item() == 4


APEX_NAMES = """
BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads master_params_to_model_params
tofp16 to_python_float clip_grad_norm convert_module convert_network FP16Model FP16_Optimizer LossScaler
DynamicLossScaler
"""


def test_fp16_utils_has_apex_names():
    assert set(APEX_NAMES.split()) == set(fp16_utils.__all__)


def test_fused_adagrad_is_torchs():
    torch.manual_seed(0)
    one, two = (nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    ours = optimizers.FusedAdagrad([one], lr=0.1, weight_decay=0.01)
    theirs = torch.optim.Adagrad([two], lr=0.1, weight_decay=0.01)
    for _ in range(4):
        one.grad = torch.randn(6)
        two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("inside", [False, True])
def test_fused_novograd_follows_its_formula(inside):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = optimizers.FusedNovoGrad(
        [weight], lr=0.1, betas=(0.9, 0.5), weight_decay=0.01, reg_inside_moment=inside, init_zero=True
    )
    value, moment, square = weight.detach().double(), torch.zeros(6, dtype=torch.float64), 0.0
    for step in range(1, 5):
        weight.grad = torch.randn(6)
        grad = weight.grad.double()
        optimizer.step()
        square = 0.5 * square + 0.5 * float(grad.square().sum())
        below = (square / (1 - 0.5**step)) ** 0.5 + 1e-8
        moment = 0.9 * moment + 0.1 * (grad / below + 0.01 * value if inside else grad)
        update = moment / (1 - 0.9**step)
        value = value - 0.1 * (update if inside else update / below + 0.01 * value)
    torch.testing.assert_close(weight.detach().double(), value, rtol=1e-5, atol=1e-6)


def test_mixed_precision_lamb_keeps_what_fp16_loses():
    half, full = nn.Parameter(torch.ones(4).half()), nn.Parameter(torch.ones(4))
    options = {"lr": 1e-5, "weight_decay": 0.0, "max_grad_norm": 0.0}
    ours = optimizers.FusedMixedPrecisionLamb([half], **options)
    theirs = optimizers.FusedLAMB([full], **options)
    for _ in range(100):
        half.grad, full.grad = torch.ones(4).half(), torch.ones(4)
        ours.step()
        theirs.step()
    assert torch.equal(half.detach(), full.detach().half())
    assert half[0] < 1
