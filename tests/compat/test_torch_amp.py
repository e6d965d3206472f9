"""torch.amp's users change one import line; install() changes none."""

import gc
import inspect
import sys
import textwrap
import types

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.compat import torch_amp
from halfstep.compat.torch_amp import GradScaler, autocast, custom_bwd, custom_fwd, install
from halfstep.errors import ConfigError, HalfstepWarning

NO_CUDA = not torch.cuda.is_available()
X = torch.ones(2, 4)


@pytest.fixture
def warns_anew():
    torch_amp._warn_once.cache_clear()
    yield
    torch_amp._warn_once.cache_clear()


@pytest.fixture
def quiet():
    """The one warning about absent CUDA has been given."""
    torch_amp._warn_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_amp, "_warn_once", lambda message: None)
        yield


def dtype_in(region):
    with region:
        return torch.nn.functional.linear(X, torch.ones(3, 4)).dtype


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        (lambda: autocast("cpu"), torch.bfloat16),
        (lambda: autocast("cpu", torch.float16), torch.float16),
        (lambda: autocast("cpu", torch.bfloat16, False), torch.float32),
        (lambda: autocast(device_type="cpu", enabled=True, cache_enabled=False), torch.bfloat16),
        (lambda: autocast(), torch.float16),
        (lambda: autocast(True), torch.float16),
        (lambda: autocast(True, torch.bfloat16), torch.bfloat16),
        (lambda: autocast(True, torch.bfloat16, True, False), torch.bfloat16),
        (lambda: autocast(False), torch.float32),
        (lambda: autocast(enabled=False), torch.float32),
        (lambda: autocast("cuda"), torch.float16),
        (lambda: autocast("cuda", enabled=False), torch.float32),
    ],
)
@pytest.mark.skipif(not NO_CUDA, reason="says what happens without CUDA")
def test_signatures_new_and_old(quiet, region, expected):
    assert dtype_in(region()) == expected


@pytest.mark.skipif(not NO_CUDA, reason="says what happens without CUDA")
def test_bare_autocast_without_cuda_warns_once_and_does_not_compute_in_fp32(warns_anew):
    with pytest.warns(HalfstepWarning, match="CUDA is not available: the CPU runs it"):
        region = autocast()
    assert dtype_in(region) == torch.float16
    assert dtype_in(autocast()) == torch.float16  # a second warning would be an error
    autocast(enabled=False)


def test_the_signature_is_torchs():
    ours, torchs = (inspect.signature(c).parameters for c in (autocast, torch.amp.autocast))
    assert list(ours) == list(torchs)


@pytest.mark.parametrize(
    ("scaler", "scale", "enabled"),
    [
        (lambda: GradScaler(), 65536.0, True),
        (lambda: GradScaler("cuda", 1024.0), 1024.0, True),
        (lambda: GradScaler(1024.0, 3.0, 0.25, 7, True), 1024.0, True),
        (lambda: GradScaler(1024, device="cpu"), 1024.0, True),
        (lambda: GradScaler(device="cpu", init_scale=8.0), 8.0, True),
        (lambda: GradScaler(enabled=False), 1.0, False),
    ],
)
def test_scaler_signatures_new_and_old(quiet, scaler, scale, enabled):
    made = scaler()
    assert (made.get_scale(), made.is_enabled()) == (scale, enabled)


def test_old_positional_order(quiet):
    made = GradScaler(1024.0, 3.0, 0.25, 7, True)
    assert (made.get_growth_factor(), made.get_backoff_factor(), made.get_growth_interval()) == (3.0, 0.25, 7)


def train(autocast, scaler, dtype, steps=8):
    """torch's documented loop: autocast, scale, unscale, clip, step, update."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(6, 1, 8, 8), torch.arange(6) % 5
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with autocast(device_type="cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler


def test_a_bf16_loop_gives_torchs_losses_bit_for_bit():
    ours, _ = train(autocast, GradScaler("cpu"), torch.bfloat16)
    torchs, _ = train(torch.autocast, torch.amp.GradScaler("cpu"), torch.bfloat16)
    assert ours == torchs


def test_torch_checkpoints_load_both_ways(quiet):
    settings = {"init_scale": 64.0, "growth_interval": 3}
    _, ours = train(autocast, GradScaler("cpu", **settings), torch.bfloat16)
    _, torchs = train(torch.autocast, torch.amp.GradScaler("cpu", **settings), torch.bfloat16)
    assert ours.state_dict() == torchs.state_dict()
    for source, target in ((ours, torch.amp.GradScaler("cpu")), (torchs, GradScaler())):
        target.load_state_dict(source.state_dict())
        assert target.state_dict() == source.state_dict()


F = nn.functional
HALF = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0)).half()
OPS = {
    "linear": lambda x: F.linear(x.float(), torch.ones(5, 8)),
    "layer_norm": lambda x: F.layer_norm(x.float(), (8,)),
    "softmax": lambda x: F.softmax(x.float(), -1),
    "log_softmax": lambda x: F.log_softmax(F.linear(x, torch.ones(5, 8)), -1),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "cross_entropy": lambda x: F.cross_entropy(x[0], torch.arange(4)),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    "cat": lambda x: torch.cat([x, x.float()]),
    "sum": lambda x: x.sum(),
    "pow": lambda x: x.pow(2),
    "mul": lambda x: x * x,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_torchs_dtype_and_value_also_where_fp16_is_slow(op, dtype):
    with torch.autocast("cpu", dtype):
        torchs = OPS[op](HALF.to(dtype))
    with autocast("cpu", dtype):
        ours = OPS[op](HALF.to(dtype))
    assert ours.dtype == torchs.dtype
    torch.testing.assert_close(ours, torchs)


def test_a_region_of_halfsteps_keeps_its_policy():
    policy = hs.Policy().with_rules(full=["linear"])
    with hs.autocast("cpu", torch.bfloat16, policy=policy):
        assert dtype_in(autocast("cpu", torch.bfloat16)) == torch.float32
    assert dtype_in(autocast("cpu", torch.bfloat16)) == torch.bfloat16


def test_as_a_decorator():
    @autocast("cpu", torch.bfloat16)
    def forward(x):
        return torch.mm(x, x.T)

    assert forward(X).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def make_function(fwd, bwd):
    class Product(torch.autograd.Function):
        @staticmethod
        @fwd
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            ctx.seen = a.dtype
            Product.seen = a.dtype
            return a.mm(b)

        @staticmethod
        @bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad.mm(b.t()), a.t().mm(grad)

    return Product


FUNCTIONS = {
    "torch.amp": lambda: (
        custom_fwd(device_type="cpu", cast_inputs=torch.float32),
        custom_bwd(device_type="cpu"),
    ),
    "torch.cuda.amp": lambda: (custom_fwd(cast_inputs=torch.float32), custom_bwd),
}


@pytest.mark.parametrize("form", FUNCTIONS)
def test_custom_functions(form):
    product = make_function(*FUNCTIONS[form]())
    a, b = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", torch.bfloat16):
        out = product.apply(a.to(torch.bfloat16), b)
    assert (out.dtype, product.seen) == (torch.float32, torch.float32)
    out.sum().backward()
    assert a.grad.tolist() == b.grad.tolist() == [[2.0, 2.0]] * 2


def originals():
    places = {
        "torch": ["autocast", "GradScaler"],
        "torch.amp": ["autocast", "GradScaler", "custom_fwd", "custom_bwd"],
    }
    places |= {"torch.cuda.amp": places["torch.amp"], "torch.cpu.amp": ["autocast", "GradScaler"]}
    return {
        f"{place}.{name}": getattr(sys.modules[place], name)
        for place, names in places.items()
        for name in names
    }


@pytest.fixture
def installed(quiet):
    with install() as installation:
        yield installation


def test_install_stands_in_torchs_place_and_goes_again(quiet):
    before = originals()
    with install() as installation:
        assert set(installation.replaced) >= set(before)
        assert not any(now is was for now, was in zip(originals().values(), before.values()))
    assert all(now is was for now, was in zip(originals().values(), before.values()))


def test_install_goes_after_an_error():
    before = originals()
    with pytest.raises(ArithmeticError), install():
        raise ArithmeticError
    assert all(now is was for now, was in zip(originals().values(), before.values()))


@pytest.mark.skipif(not NO_CUDA, reason="says what happens without CUDA")
def test_under_install_torchs_words_are_ours(installed):
    assert dtype_in(torch.autocast("cpu", torch.bfloat16)) == torch.bfloat16
    assert dtype_in(torch.cuda.amp.autocast()) == torch.float16
    assert dtype_in(torch.cpu.amp.autocast()) == torch.bfloat16
    scaler = torch.cuda.amp.GradScaler(128.0)
    assert (scaler.get_scale(), scaler.is_enabled()) == (128.0, True)
    assert isinstance(GradScaler(), torch.amp.GradScaler)
    assert not isinstance(3, torch.amp.GradScaler)
    assert isinstance(torch.amp.autocast("cpu"), torch.autocast)


@pytest.mark.skipif(not NO_CUDA, reason="needs a machine without CUDA")
@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_custom_functions_for_cuda_know_the_region_that_stands_for_it(quiet, cast_inputs):
    product = make_function(
        custom_fwd(device_type="cuda", cast_inputs=cast_inputs), custom_bwd(device_type="cuda")
    )
    a = torch.full((2, 2), 300.0, requires_grad=True)
    with autocast("cuda"):
        out = product.apply(a.half(), a)
    assert out.dtype is (cast_inputs or torch.float16)
    assert out.isfinite().all() == (cast_inputs is torch.float32)
    out.sum().backward()
    assert a.grad.dtype == torch.float32


@pytest.mark.skipif(not NO_CUDA, reason="needs a machine without CUDA")
def test_a_scaler_for_absent_cuda_says_once_that_it_works(warns_anew):
    with pytest.warns(HalfstepWarning, match="scales losses and gradients all the same") as caught:
        scaler = GradScaler("cuda")
    assert scaler.is_enabled()
    assert caught[0].filename == __file__
    GradScaler("cuda")  # said before
    torch_amp._warn_once.cache_clear()
    assert [s.is_enabled() for s in (GradScaler(), GradScaler("cpu"))] == [True, True]  # without a word
    assert not GradScaler("cuda", enabled=False).is_enabled()
    with install(), pytest.warns(HalfstepWarning, match="scales losses and gradients all the same"):
        torch.cuda.amp.GradScaler()
    with install():
        torch.cpu.amp.GradScaler()


def test_installed_custom_functions(installed):
    fwd = torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    product = make_function(fwd, torch.cuda.amp.custom_bwd)
    a = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = product.apply(a, a.detach())
    out.sum().backward()
    assert (out.dtype, a.grad.dtype) == (torch.float32, torch.float32)


def run_module(name, text):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(textwrap.dedent(text), module.__dict__)
    return module


@pytest.fixture
def modules():
    yield
    for name in ("imported_before", "imported_inside"):
        sys.modules.pop(name, None)


def test_names_imported_before_are_replaced_and_given_back(modules, quiet):
    text = "from torch.cuda.amp import GradScaler\nfrom torch import autocast as ac"
    module = run_module("imported_before", text)
    theirs = module.ac, module.GradScaler
    with install() as found:
        assert {"imported_before.GradScaler", "imported_before.ac"} <= set(found.replaced)
        assert issubclass(module.ac, hs.autocast)
        assert dtype_in(module.ac("cpu", torch.float16)) == torch.float16
        assert isinstance(module.GradScaler(8.0), hs.GradScaler)
    assert (module.ac, module.GradScaler) == theirs


def test_install_without_with_holds(quiet):
    """The object that `install()` gave is gone at once; nothing may be undone by that."""
    before = originals()
    install()
    gc.collect()
    try:
        assert issubclass(torch.autocast, hs.autocast)
        assert isinstance(torch.GradScaler(), hs.GradScaler)
        with install():
            pass
        assert issubclass(torch.autocast, hs.autocast)
    finally:
        torch_amp._in_force[0].__exit__()
    assert originals() == before


def test_names_imported_inside_are_given_back(modules):
    with install():
        module = run_module(
            "imported_inside",
            """
            from torch.amp import autocast, GradScaler
            from torch.cuda.amp import autocast as old, GradScaler as OldScaler, custom_fwd
            from halfstep.compat.torch_amp import autocast as mine
            """,
        )
        assert issubclass(module.autocast, hs.autocast)
    assert module.autocast is torch.amp.autocast
    assert module.old is torch.cuda.amp.autocast
    assert module.GradScaler is torch.amp.GradScaler
    assert module.OldScaler is torch.cuda.amp.GradScaler
    assert module.custom_fwd is torch.cuda.amp.custom_fwd
    assert module.mine is autocast


def test_install_within_install_changes_nothing():
    before = originals()
    with install() as outer:
        with install() as inner:
            assert inner == outer
        assert issubclass(torch.autocast, hs.autocast)
    assert originals() == before


def test_checkpointed_code_under_install(installed):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(net, X, use_reentrant=False) if recompute else net(X)
        out.float().square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("bad", ["nowhere", "cpu:0:1"])
def test_an_unknown_device_is_a_clear_error(bad):
    with pytest.raises((ConfigError, RuntimeError), match=bad.split(":")[0]):
        autocast(bad)
