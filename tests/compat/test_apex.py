"""halfstep.compat.apex: options, scaling, several losses, function casts, and taking it all down."""

import copy
import math
import pickle
import types

import pytest
import torch
from torch import nn

from halfstep.compat.apex import amp, fp16_utils, optimizers
from halfstep.errors import HalfstepWarning

torch.set_num_threads(1)
F16, F32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _taken_down():
    yield
    amp.shutdown()


def make(lr=0.1, momentum=0.9):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def init(*args, **kwargs):
    return amp.initialize(*args, verbosity=0, **kwargs)


def step(model, optimizer, **kwargs):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 4)).float().square().mean()
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled:
        scaled.backward()
    optimizer.step()
    return scaled / loss


# --- options ----------------------------------------------------------------------------------------------

WRONG = {
    "level with a zero": {"opt_level": "02"},
    "unknown level": {"opt_level": "O7"},
    "O1 casts no model": {"opt_level": "O1", "cast_model_type": F16},
    "O1 has no masters": {"opt_level": "O1", "master_weights": True},
    "O1 keeps batch norm by itself": {"opt_level": "O1", "keep_batchnorm_fp32": True},
    "O1 keeps batch norm by itself (text)": {"opt_level": "O1", "keep_batchnorm_fp32": "False"},
    "only O1 patches": {"opt_level": "O2", "patch_torch_functions": True},
    "not a boolean": {"opt_level": "O2", "keep_batchnorm_fp32": "yes"},
    "not a scale": {"opt_level": "O2", "loss_scale": "big"},
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_inconsistent_options_raise_as_in_apex(options):
    model, optimizer = make()
    with pytest.raises(RuntimeError):
        init(model, optimizer, **options)
    assert all(p.dtype == F32 for p in model.parameters())


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(("given", "expected"), [("128.0", 128.0), (64, 64.0), ("dynamic", 2.0**16)])
def test_loss_scale_takes_numbers_and_text(level, given, expected):
    init(*make(), opt_level=level, loss_scale=given)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == expected


@pytest.mark.parametrize("given", [False, "False", True, "True"])
def test_keep_batchnorm_takes_booleans_and_text(given):
    model, optimizer = init(*make(), opt_level="O2", keep_batchnorm_fp32=given)
    assert model[1].weight.dtype == (F32 if str(given) == "True" else F16)
    assert model[1].running_mean.dtype == model[1].weight.dtype
    step(model, optimizer)


@pytest.mark.parametrize(
    ("bounds", "first"),
    [({"max_loss_scale": 2.0**10}, 2.0**10), ({"min_loss_scale": 2.0**17}, 2.0**17), ({}, 2.0**16)],
)
def test_loss_scale_bounds(bounds, first):
    init(*make(), opt_level="O1", **bounds)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == first


def test_lists_come_back_as_lists():
    (m1, o1), (m2, o2) = make(), make()
    models, made = init([m1, m2], [o1, o2], opt_level="O2")
    assert models[0] is m1
    assert made[1] is o2
    amp.shutdown()
    assert init(m1, opt_level="O0") is m1
    with pytest.raises(TypeError, match="models"):
        init("model", o1)
    with pytest.raises(TypeError, match="optimizers"):
        init(m1, "optimizer")


def test_what_may_not_come_in():
    model, optimizer = make()
    with pytest.raises(RuntimeError, match="float32"):
        init(make()[0].half(), optimizer)
    with pytest.raises(RuntimeError, match=r"after amp\.initialize"):
        init(nn.DataParallel(model), optimizer)
    init(model, optimizer, opt_level="O2")
    with pytest.raises(RuntimeError, match="only once"):
        init(make()[0], optimizer)
    wrapped = fp16_utils.FP16_Optimizer(torch.optim.SGD(make()[0].half().parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="bare optimizer"):
        init(make()[0], wrapped)


def test_a_level_in_the_place_of_enabled_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(amp.AmpError, match="a level goes by name, opt_level="):
        amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2")


def test_scale_loss_needs_initialize_and_known_optimizers():
    model, optimizer = make()
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(torch.ones(()), optimizer):
        pass
    init(model, optimizer, opt_level="O2")
    with pytest.raises(RuntimeError, match="did not come from"), amp.scale_loss(torch.ones(()), make()[1]):
        pass
    with (
        pytest.raises(RuntimeError, match="num_losses"),
        amp.scale_loss(torch.ones(()), optimizer, loss_id=1),
    ):
        pass
    with pytest.raises(RuntimeError, match="closures"):
        optimizer.step(lambda: 0.0)


def test_disabled_is_plain_pytorch():
    (model, optimizer), (twin, other) = make(), make()
    assert init(model, optimizer, enabled=False) == (model, optimizer)
    for m, o, run in ((model, optimizer, True), (twin, other, False)):
        torch.manual_seed(1)
        loss = m(torch.randn(6, 4)).square().mean()
        if run:
            with amp.scale_loss(loss, o) as scaled:
                assert scaled is loss
                scaled.backward()
        else:
            loss.backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_verbosity(capsys):
    init(*make(), opt_level="O1")
    assert capsys.readouterr().out == ""
    amp.shutdown()
    amp.initialize(*make(), opt_level="O2")
    assert "Selected optimization level O2" in capsys.readouterr().out


# --- scaling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_gradients_are_unscaled_whatever_the_scale(level):
    found = []
    for scale in (1.0, 1024.0):
        model, optimizer = init(*make(), opt_level=level, loss_scale=scale)
        torch.manual_seed(2)
        loss = model(torch.randn(6, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            assert scaled.dtype == F32
            scaled.backward()
        found.append([p.grad.float().clone() for p in amp.master_params(optimizer)])
        amp.shutdown()
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-3)


def test_growth_and_backoff_follow_apex():
    init(*make(lr=0.0), opt_level="O2")
    scaler = amp._amp_state.loss_scalers[0]
    for found in [True, False, False, True]:
        scaler.update(found)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 0}
    for _ in range(1999):
        scaler.update(False)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**14, "unskipped": 1999}
    scaler.update(False)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    assert scaler.loss_scale() == 2.0**15


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_skips_the_step_once_and_halves_the_scale(level, capsys):
    model, optimizer = amp.initialize(*make(), opt_level=level, loss_scale="dynamic", verbosity=1)
    step(model, optimizer)
    before = [p.clone() for p in model.parameters()]
    moments = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    loss = model(torch.randn(6, 4)).float().square().mean()
    with amp.scale_loss(loss * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert "Skipping step, loss scaler 0 reducing loss scale to" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert all(torch.equal(a, s["momentum_buffer"]) for a, s in zip(moments, optimizer.state.values()))
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale / 2, "unskipped": 0}
    step(model, optimizer)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_anywhere_skips_every_optimizer_of_the_loss(level, bad):
    (m1, o1), (m2, o2) = make(), make()
    init([m1, m2], [o1, o2], opt_level=level)
    before = [p.clone() for m in (m1, m2) for p in m.parameters()]
    x = torch.randn(6, 4)
    losses = [m(x).float().square().mean() for m in (m1, m2)]
    losses[bad] = losses[bad] * float("inf")
    with amp.scale_loss(losses[0] + losses[1], [o1, o2]) as scaled:
        scaled.backward()
    o1.step()
    o2.step()
    assert all(torch.equal(a, b) for a, b in zip(before, [*m1.parameters(), *m2.parameters()]))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15


def test_a_static_scale_does_not_skip_but_says_so():
    model, optimizer = init(*make(), opt_level="O2", loss_scale=8.0)
    loss = model(torch.randn(6, 4)).square().mean() * float("inf")
    with pytest.warns(HalfstepWarning, match="static") as told, amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert told[0].filename == __file__


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("delayed", [False, True])
def test_accumulation_over_losses_with_scales_of_their_own(level, delayed):
    torch.manual_seed(3)
    batches = [torch.randn(6, 4) for _ in range(3)]
    model, optimizer = init(*make(), opt_level=level, num_losses=3, loss_scale="dynamic")
    if not delayed:
        for index, scale in enumerate((4.0, 64.0, 1024.0)):
            amp._amp_state.loss_scalers[index].load(scale, 0)
    for index, batch in enumerate(batches):
        loss = model(batch).float().square().mean()
        where = {"delay_unscale": index < 2} if delayed else {"loss_id": index}
        with amp.scale_loss(loss, optimizer, **where) as scaled:
            scaled.backward()
        if delayed and index == 0:
            with pytest.raises(RuntimeError, match="delay_unscale"):
                optimizer.step()
    got = [p.grad.float().clone() for p in amp.master_params(optimizer)]
    twin, _ = make()
    sum(twin(batch).square().mean() for batch in batches).backward()
    for ours, exact in zip(got, twin.parameters()):
        assert torch.allclose(ours, exact.grad, rtol=3e-2, atol=3e-3)
    optimizer.step()


def test_zero_grad_between_losses_forgets_what_was_set_aside():
    model, optimizer = init(*make(), opt_level="O2", loss_scale=16.0)
    for _ in range(2):
        optimizer.zero_grad()
        torch.manual_seed(4)
        with amp.scale_loss(model(torch.ones(6, 4)).square().mean(), optimizer) as scaled:
            scaled.backward()
        grads = [p.grad.clone() for p in amp.master_params(optimizer)]
    once = grads
    amp.shutdown()
    model, optimizer = init(*make(), opt_level="O2", loss_scale=16.0)
    model(torch.ones(6, 4))
    with amp.scale_loss(model(torch.ones(6, 4)).square().mean(), optimizer) as scaled:
        scaled.backward()
    for a, b in zip(once, amp.master_params(optimizer)):
        assert torch.allclose(a, b.grad, rtol=1e-2, atol=1e-4)


def test_clipping_masters_reaches_the_step():
    model, optimizer = init(*make(lr=1.0, momentum=0.0), opt_level="O2", loss_scale=1024.0)
    before = [m.clone() for m in amp.master_params(optimizer)]
    with amp.scale_loss(model(torch.randn(6, 4)).square().mean() * 100, optimizer) as scaled:
        scaled.backward()
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
    assert norm > 0.5
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, amp.master_params(optimizer))]).norm()
    assert moved.item() == pytest.approx(0.5, rel=1e-3)


def test_state_dict_loads_apexs_own_and_refuses_others():
    init(*make(), opt_level="O1", num_losses=2)
    saved = {
        "loss_scaler0": {"loss_scale": 512.0, "unskipped": 7},
        "loss_scaler1": {"loss_scale": 8.0, "unskipped": 0},
    }
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    with pytest.raises(RuntimeError, match="scaler"):
        amp.load_state_dict({"scaler": 1})
    with pytest.warns(HalfstepWarning, match="1 entries, while 2"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    assert amp.state_dict()["loss_scaler1"]["loss_scale"] == 8.0


def test_training_resumes_bit_for_bit():
    def run(model, optimizer, steps):
        for seed in steps:
            torch.manual_seed(seed)
            step(model, optimizer)

    model, optimizer = init(*make(), opt_level="O2")
    run(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    run(model, optimizer, range(3, 6))
    expected = [p.clone() for p in model.parameters()]
    amp.shutdown()
    model, optimizer = init(*make(), opt_level="O2")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    run(model, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters()))


# --- function casts ---------------------------------------------------------------------------------------


def test_decorated_functions_cast_at_o1_only():
    seen = []

    @amp.half_function
    def half(x, *, y=None):
        seen.append((x.dtype, None if y is None else y.dtype))

    @amp.float_function
    def full(x):
        seen.append(x.dtype)

    @amp.promote_function
    def promoted(x, y):
        seen.append((x.dtype, y.dtype))

    low, wide = torch.ones(2, dtype=F16), torch.ones(2)
    half(wide)
    init(*make(), opt_level="O1")
    half(wide, y=wide)
    full(low)
    promoted(low, wide)
    with amp.disable_casts():
        half(wide)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F32
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F16
    amp.shutdown()
    half(wide)
    assert seen == [(F32, None), (F16, F16), F32, (F32, F32), (F32, None), (F32, None)]


def test_registered_functions_are_replaced_and_put_back():
    module = types.SimpleNamespace(
        scale=lambda x: x.dtype, widen=lambda x: x.dtype, both=lambda x, y: (x + y).dtype
    )
    originals = dict(vars(module))
    amp.register_half_function(module, "scale")
    amp.register_float_function(module, "widen")
    amp.register_promote_function(module, "both")
    with pytest.raises(ValueError, match="no function named missing"):
        amp.register_half_function(module, "missing")
    init(*make(), opt_level="O1")
    assert module.scale(torch.ones(2)) == F16
    assert module.widen(torch.ones(2, dtype=F16)) == F32
    assert module.both(torch.ones(2, dtype=F16), torch.ones(2)) == F32
    amp.shutdown()
    assert vars(module) == originals


# --- taking down ------------------------------------------------------------------------------------------


def bound(thing):
    return {k: dict(v) if "hooks" in k else None for k, v in vars(thing).items()} | {"class": type(thing)}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_nothing_is_rebound_and_shutdown_undoes_everything(level):
    model, optimizer = make()
    before = [bound(m) for m in (*model.modules(), optimizer)]
    init(model, optimizer, opt_level=level, cast_model_outputs=F32)
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)
    assert "zero_grad" not in vars(optimizer)
    step(model, optimizer)
    weights = [m.detach().clone() for m in amp.master_params(optimizer)]
    amp.shutdown()
    amp.shutdown()
    after = [bound(m) for m in (*model.modules(), optimizer)]
    assert [row.keys() for row in after[:-1]] == [row.keys() for row in before[:-1]]
    assert all(a[k] == b[k] for a, b in zip(after, before) for k in b if "hooks" in k)
    assert all(p.dtype == F32 for p in model.parameters())
    assert all(torch.equal(p, w.float()) for p, w in zip(model.parameters(), weights))
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match=r"amp\.initialize"), amp.scale_loss(torch.ones(()), optimizer):
        pass
    init(model, optimizer, opt_level=level)
    step(model, optimizer)


def test_models_may_come_one_by_one_and_a_failure_leaves_the_others():
    (m1, o1), (m2, o2) = make(), make()
    init(m1, o1, opt_level="O2")
    init(m2, o2, opt_level="O2")
    third, _ = make()
    refused = torch.optim.LBFGS(third.parameters())
    with pytest.raises(RuntimeError, match="LBFGS"):
        init(third, refused, opt_level="O2")
    assert third[0].weight.dtype == F32
    step(m1, o1)
    step(m2, o2)
    assert m1[0].weight.dtype == m2[0].weight.dtype == F16
    assert not refused._optimizer_step_pre_hooks


# --- optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: optimizers.FusedAdam(p, lr=0.01),
        lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9),
        lambda p: optimizers.FusedLAMB(p, lr=0.01),
    ],
)
def test_fused_optimizers_train_at_every_level(level, make_optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = init(model, make_optimizer(model.parameters()), opt_level=level)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize(("adam_w", "theirs"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_torchs(adam_w, theirs):
    a, b = smooth(), smooth()
    ours = optimizers.FusedAdam(a.parameters(), lr=0.01, weight_decay=0.1, adam_w_mode=adam_w)
    other = theirs(b.parameters(), lr=0.01, weight_decay=0.1)
    for x in torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1)):
        for m, o in ((a, ours), (b, other)):
            m(x).square().mean().backward()
            o.step()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    ours.zero_grad()
    assert all(p.grad is None for p in a.parameters())
    ours.zero_grad(set_to_none=False)
    assert pickle.loads(pickle.dumps(ours)).adam_w_mode == adam_w


@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd_is_torchs(nesterov):
    a, b = smooth(), smooth()
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    ours = optimizers.FusedSGD(a.parameters(), 0.01, **options)
    other = torch.optim.SGD(b.parameters(), 0.01, **options)
    for x in torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(1)):
        for m, o in ((a, ours), (b, other)):
            m(x).square().mean().backward()
            o.step()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    ours.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in a.parameters())


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adam_w", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fused_adam_by_apexs_formula(decay, adam_w, bias_correction):
    """csrc/multi_tensor_adam.cu: m / c1 / (sqrt(v / c2) + eps), decay * w there (AdamW) or in g (Adam)."""
    w, m, v, lr, b1, b2, eps = 0.5, 0.0, 0.0, 1e-3, 0.9, 0.999, 1e-8
    p = nn.Parameter(torch.full((4,), w))
    options = {"bias_correction": bias_correction, "adam_w_mode": adam_w, "weight_decay": decay}
    optimizer = optimizers.FusedAdam([p], **options)
    for step, grad in enumerate((0.3, -0.1, 2.0, 0.0, 1e-3, -0.7), start=1):
        p.grad = torch.full_like(p, grad)
        optimizer.step()
        g = grad if adam_w else grad + decay * w
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1**step, 1 - b2**step) if bias_correction else (1.0, 1.0)
        w -= lr * ((m / c1) / (math.sqrt(v / c2) + eps) + (decay * w if adam_w else 0.0))
        assert p.tolist() == pytest.approx([w] * 4, rel=1e-6)
        optimizer = pickle.loads(pickle.dumps(optimizer))
        (p,) = optimizer.param_groups[0]["params"]
    (state,) = optimizer.state_dict()["state"].values()
    assert state["exp_avg"].tolist() == pytest.approx([m] * 4, rel=1e-5)
    assert state["exp_avg_sq"].tolist() == pytest.approx([v] * 4, rel=1e-5)


def test_fused_adams_defaults_are_apexs():
    group = optimizers.FusedAdam([nn.Parameter(torch.ones(1))]).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]) == (
        *(1e-3, (0.9, 0.999), 1e-8, 0.0, True),
    )


def test_a_state_dict_carries_bias_correction_as_in_apex():
    a, b = smooth(), smooth()
    first = optimizers.FusedAdam(a.parameters(), bias_correction=False)
    second = optimizers.FusedAdam(b.parameters())
    second.load_state_dict(first.state_dict())
    for x in torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)):
        for m, o in ((a, first), (b, second)):
            m(x).square().mean().backward()
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"momentum": 0.9}])
def test_decay_after_momentum_is_taken_where_the_order_does_not_matter(options):
    a, b = smooth(), smooth()
    after = optimizers.FusedSGD(a.parameters(), 0.1, wd_after_momentum=True, **options)
    before = torch.optim.SGD(b.parameters(), 0.1, **options)
    for x in torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)):
        for m, o in ((a, after), (b, before)):
            m(x).square().mean().backward()
            o.step()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    both = {"params": [nn.Parameter(torch.ones(2))], "momentum": 0.9, "weight_decay": 0.1}
    with pytest.raises(RuntimeError, match="wd_after_momentum"):
        after.add_param_group(both)
    assert len(after.param_groups) == 1
    again = pickle.loads(pickle.dumps(after))
    again.param_groups[0].update(momentum=0.9, weight_decay=0.1)
    again.param_groups[0]["params"][0].grad = torch.ones(8, 4)
    with pytest.raises(RuntimeError, match="wd_after_momentum"):
        again.step()


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
def test_fused_names_are_one_pass_and_keep_what_16_bits_lack(dtype):
    p = nn.Parameter(torch.ones(8, dtype=dtype))
    for optimizer in (optimizers.FusedAdam([p], lr=1e-6), optimizers.FusedSGD([p], lr=1e-6)):
        assert optimizer.one_pass
        before = optimizer.master_of(p).clone()
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert not torch.equal(optimizer.master_of(p), before)
    bare = optimizers.FusedAdam([p], lr=1e-6, master=None)
    before = p.detach().clone()
    bare.step()
    assert torch.equal(p, before), "as in Apex, an update below the spacing is lost"


def test_fp16_optimizer_around_fused_adam_steps_its_masters():
    torch.manual_seed(0)
    model, exact = nn.Linear(4, 2).half(), nn.Linear(4, 2)
    exact.load_state_dict(model.state_dict())
    optimizer = fp16_utils.FP16_Optimizer(
        optimizers.FusedAdam(model.parameters(), lr=1e-2), static_loss_scale=128.0, verbose=False
    )
    other = torch.optim.AdamW(exact.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        x = torch.randn(5, 4).half()
        optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        other.zero_grad()
        exact(x.float()).square().mean().backward()
        other.step()
    assert [m.dtype for m in optimizer.masters.params()] == [F32, F32]
    for master, twin in zip(optimizer.masters.params(), exact.parameters()):
        torch.testing.assert_close(master.detach(), twin.detach(), rtol=1e-2, atol=2e-3)


def test_lamb_follows_its_paper():
    torch.manual_seed(0)
    weight, grad = torch.randn(3, 2), torch.randn(3, 2) * 10
    p = nn.Parameter(weight.clone())
    p.grad = grad.clone()
    optimizers.FusedLAMB([p], lr=0.1, weight_decay=0.02, eps=1e-6).step()
    g = grad / grad.norm()
    update = (0.1 * g / 0.1) / ((0.001 * g * g / 0.001).sqrt() + 1e-6) + 0.02 * weight
    expected = weight - 0.1 * weight.norm() / update.norm() * update
    assert torch.allclose(p, expected, rtol=1e-4, atol=1e-6)


REFUSED = {
    "amsgrad of Adam": (
        lambda p: optimizers.FusedAdam(p, amsgrad=True),
        r"torch\.optim\.AdamW\(params, amsgrad",
    ),
    "amsgrad of LAMB": (
        lambda p: optimizers.FusedLAMB(p, amsgrad=True),
        "FusedLAMB does not support amsgrad",
    ),
    "late decay": (
        lambda p: optimizers.FusedSGD(p, 0.1, 0.9, weight_decay=0.1, wd_after_momentum=True),
        "does not support wd_after_momentum=True with momentum and weight decay: .* leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_fused_optimizers_refuse(case):
    wrong, says = REFUSED[case]
    with pytest.raises(RuntimeError, match=says):
        wrong(make()[0].parameters())


def test_masters_are_wanted_or_not():
    with pytest.raises(ValueError, match="master_weights=True and master=None contradict"):
        optimizers.FusedAdam(make()[0].parameters(), master_weights=True, master=None)
    assert optimizers.FusedAdam(make()[0].parameters(), master_weights=True, capturable=True).one_pass


# --- FP16_Optimizer ---------------------------------------------------------------------------------------


def test_fp16_optimizer_by_its_own_loop():
    torch.manual_seed(0)
    model = fp16_utils.network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    assert [p.dtype for p in model.parameters()] == [F16, F16, F32, F32, F16, F16]
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fp16_utils.FP16_Optimizer(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 3},
        verbose=False,
    )
    for expected in (2.0**10, 2.0**10, 2.0**11):
        optimizer.zero_grad()
        optimizer.backward(model(torch.randn(6, 4)).float().square().mean())
        assert optimizer.clip_master_grads(0.1) > 0
        optimizer.step()
        assert optimizer.loss_scale == expected
    saved = optimizer.state_dict()
    before = [p.clone() for p in model.parameters()]
    optimizer.backward(model(torch.randn(6, 4)).float().square().mean() * float("inf"))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(0.1) == -1
    optimizer.step()
    assert optimizer.loss_scale == 2.0**10
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    optimizer.load_state_dict(saved)
    assert optimizer.loss_scale == 2.0**11
    optimizer.loss_scale = 4.0
    assert optimizer.loss_scale == 4.0
    optimizer.revert()
    assert inner.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize("update", [True, False])
def test_fp16_optimizer_accumulates_losses(update):
    torch.manual_seed(0)
    model = nn.Linear(4, 2).half()
    twin = nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    optimizer = fp16_utils.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=128.0
    )
    for _ in range(3):
        x = torch.randn(5, 4)
        optimizer.backward(model(x.half()).float().square().mean(), update_master_grads=update)
        twin(x).square().mean().backward()
    optimizer.update_master_grads()
    for ours, exact in zip(optimizer.masters.params(), twin.parameters()):
        assert torch.allclose(ours.grad, exact.grad, rtol=1e-2, atol=1e-3)
    optimizer.step()
