"""Every public name of Apex's last commit with amp is here or refused by name; and what some of them do."""

import copy
import warnings

import pytest
import torch
from torch import nn

from halfstep.compat import apex
from halfstep.compat.apex import amp, fp16_utils, optimizers, parallel
from halfstep.compat.apex.normalization import fused_layer_norm as normalization
from halfstep.compat.apex.parallel.LARC import LARC
from halfstep.errors import CheckpointError, UnsupportedError

torch.set_num_threads(1)
F16, F32 = torch.float16, torch.float32

GIVEN = {
    apex: "amp fp16_utils optimizers normalization parallel",
    amp: """init half_function float_function promote_function register_half_function register_float_function
        register_promote_function scale_loss disable_casts initialize state_dict load_state_dict master_params
        _amp_state""",
    optimizers: "FusedSGD FusedAdam FusedNovoGrad FusedLAMB FusedAdagrad FusedMixedPrecisionLamb",
    normalization: """FusedLayerNorm MixedFusedLayerNorm FusedRMSNorm MixedFusedRMSNorm fused_layer_norm
        fused_layer_norm_affine mixed_dtype_fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine
        mixed_dtype_fused_rms_norm_affine""",
    parallel: """DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model LARC ReduceOp
        create_syncbn_process_group""",
    fp16_utils: """BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads tofp16
        master_params_to_model_params to_python_float clip_grad_norm convert_module convert_network FP16Model
        FP16_Optimizer LossScaler DynamicLossScaler""",
}
REFUSED = ("RNN", "contrib", "fused_dense", "mlp", "multi_tensor_apply", "reparameterization", "transformer")
OF_THE_OPTIMIZER = """optimizer fp16_groups fp32_from_fp16_groups fp32_from_fp32_groups all_fp16_params
    all_fp32_from_fp16_params all_fp32_from_fp32_params dynamic_loss_scale loss_scaler overflow
    first_closure_call_this_step clip_grad_norm maybe_print zero_grad clip_master_grads state_dict
    load_state_dict step backward update_master_grads inspect_master_grad_data loss_scale state param_groups
    verbose"""


@pytest.fixture(autouse=True)
def _taken_down():
    yield
    amp.shutdown()


def wrapped(lr=0.5, **options):
    torch.manual_seed(0)
    model = fp16_utils.network_to_half(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    return model, fp16_utils.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=lr), verbose=False, **options
    )


def loss_of(model):
    torch.manual_seed(1)
    return model(torch.randn(6, 4)).float().square().mean()


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", GIVEN, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_name_is_here(module):
    assert [name for name in GIVEN[module].split() if not hasattr(module, name)] == []


def test_files_that_scripts_name_are_where_they_look():
    assert LARC is parallel.LARC
    assert apex.normalization.FusedLayerNorm is normalization.FusedLayerNorm


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_about_precision_is_refused_with_what_to_use(name):
    with pytest.raises(
        AttributeError, match=f"no '{name}', which is not about precision: use torch|halfstep"
    ):
        getattr(apex, name)


def test_the_old_api_is_refused_with_the_new_one():
    with pytest.raises(amp.AmpError, match=r"amp\.initialize\(model, optimizer"):
        amp.init(enabled=True)


# --- FP16_Optimizer ---------------------------------------------------------------------------------------


class ApexScaler:
    """What Apex pickles with its optimizer."""

    _loss_scale, _unskipped, dynamic = 512.0, 3, True


def apexs_file():
    """A saved optimizer as Apex lays it out, its masters between two numbers of fp16, and those masters."""
    masters = [p.detach().float() * (1 + 2.0**-14) for p in wrapped()[1].all_fp16_params]
    norm = [torch.full((8,), 1.0), torch.zeros(8)]
    twins = [t.clone().requires_grad_() for t in (*masters[:2], *norm, *masters[2:])]
    plain = torch.optim.SGD(twins, lr=0.25, momentum=0.9)
    for t in twins:
        t.grad = torch.ones_like(t)
    plain.step()
    masters = [t.detach() for t in (*twins[:2], *twins[4:])]
    return masters, {
        "loss_scaler": ApexScaler(),
        "dynamic_loss_scale": True,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": plain.state_dict(),
        "fp32_from_fp16": [masters],
    }


def test_fp16_optimizer_takes_apexs_own_file_with_its_masters():
    masters, saved = apexs_file()
    _, optimizer = wrapped(lr=0.5)
    optimizer.load_state_dict(saved)
    assert all(map(torch.equal, optimizer.all_fp32_from_fp16_params, masters))
    assert all(map(torch.equal, optimizer.all_fp16_params, [m.half() for m in masters]))
    assert (optimizer.loss_scale, optimizer.loss_scaler.unskipped) == (512.0, 3)
    assert optimizer.dynamic_loss_scale
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(optimizer.state[masters_of(optimizer)[0]]["momentum_buffer"], torch.ones(8, 4))


def masters_of(optimizer):
    return optimizer.fp32_from_fp16_groups[0]


def test_fp16_optimizer_saves_apexs_layout_with_every_master_once(tmp_path):
    _, optimizer = wrapped()
    saved = optimizer.state_dict()
    inner = saved["optimizer_state_dict"]["masters"]
    assert [t is u for t, u in zip(saved["fp32_from_fp16"][0], inner.values(), strict=True)] == [True] * 4
    torch.save(saved, tmp_path / "both.pt")
    torch.save({**saved, "fp32_from_fp16": None}, tmp_path / "once.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("both.pt", "once.pt")]
    assert sizes[0] - sizes[1] < 1000
    optimizer.load_state_dict(torch.load(tmp_path / "both.pt"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fp32_from_fp16": [[torch.zeros(2)]]}, r"fp32_from_fp16\[0\] has masters of shapes \[\[2\]\]"),
        ({"fp32_from_fp16": []}, "expected a list of masters for each of 1 groups"),
        ({"loss_scaler": object()}, "is no loss scaler"),
    ],
)
def test_fp16_optimizer_refuses_masters_of_others_and_changes_nothing(wrong, says):
    _, optimizer = wrapped()
    before = [p.clone() for p in masters_of(optimizer)]
    with pytest.raises(CheckpointError, match=says):
        optimizer.load_state_dict({**apexs_file()[1], **wrong})
    assert all(map(torch.equal, masters_of(optimizer), before))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_fp16_optimizer_has_apex_attributes():
    _, optimizer = wrapped()
    assert [name for name in OF_THE_OPTIMIZER.split() if not hasattr(optimizer, name)] == []


def test_its_groups_tell_weights_from_masters():
    model, optimizer = wrapped()
    (low,), (masters,), (wide,) = (
        optimizer.fp16_groups,
        optimizer.fp32_from_fp16_groups,
        optimizer.fp32_from_fp32_groups,
    )
    weights = list(model.parameters())
    assert [id(p) for p in low] == [id(p) for p in weights if p.dtype == F16]
    assert [id(p) for p in wide] == [id(p) for p in weights if p.dtype == F32]
    assert [m.dtype for m in masters] == [F32] * len(low)
    assert all(torch.equal(m.half(), w) for m, w in zip(masters, low))
    assert [id(p) for p in optimizer.all_fp16_params] == [id(p) for p in low]
    assert len(optimizer.param_groups[0]["params"]) == len(masters) + len(wide)


def test_gradients_can_be_inspected_unscaled(capsys):
    model, optimizer = wrapped(static_loss_scale=128.0)
    twin = copy.deepcopy(model)
    optimizer.zero_grad(set_grads_to_None=True)
    assert optimizer.inspect_master_grad_data() == [[None] * 6]
    optimizer.backward(loss_of(model))
    loss_of(twin).backward()
    (seen,) = optimizer.inspect_master_grad_data()
    assert [g.dtype for g in seen] == [F32] * 6
    for ours, theirs in zip(seen, twin.parameters()):
        torch.testing.assert_close(ours, theirs.grad.float(), rtol=1e-2, atol=1e-4)

    _, optimizer = overflown()
    assert optimizer.inspect_master_grad_data() is None
    assert "None to inspect" in capsys.readouterr().out


def overflown():
    model, optimizer = wrapped(dynamic_loss_scale=True)
    optimizer.backward(loss_of(model) * float("inf"))
    return model, optimizer


def test_the_scale_backs_off_in_backward_as_in_apex():
    _, optimizer = overflown()
    assert (optimizer.overflow, optimizer.loss_scale) == (True, 2.0**15)
    assert optimizer.loss_scaler.loss_scale() == 2.0**15
    optimizer.loss_scaler._loss_scale = 8.0
    assert optimizer.loss_scale == 8.0


def test_dynamic_arguments_are_those_of_apex():
    _, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**30})
    assert optimizer.loss_scale == 2.0**24  # max_loss_scale
    assert optimizer.loss_scaler.value.interval == 2000
    with pytest.raises(TypeError, match="scale_windows"):
        wrapped(dynamic_loss_scale=True, dynamic_loss_args={"scale_windows": 3})


def test_gradients_are_zeroed_by_default():
    model, optimizer = wrapped()
    optimizer.backward(loss_of(model))
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


class Twice(torch.optim.SGD):
    """An optimizer that moves the weights and asks its closure again."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        super().step()
        with torch.enable_grad():
            return closure()


def test_a_closure_sees_the_weights_that_the_optimizer_moved():
    torch.manual_seed(0)
    model = nn.Linear(4, 2).half()
    optimizer = fp16_utils.FP16_Optimizer(Twice(model.parameters(), lr=0.5), verbose=False)
    losses, first = [], []

    def closure():
        first.append(optimizer.first_closure_call_this_step)
        optimizer.zero_grad()
        loss = loss_of(lambda x: model(x.half()))
        optimizer.backward(loss)
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[1] < losses[0]
    assert first == [False, False]
    assert optimizer.first_closure_call_this_step


def test_a_closure_is_called_again_while_it_overflows():
    model, optimizer = wrapped(dynamic_loss_scale=True)
    factors = iter((float("inf"), float("inf"), 1.0))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model) * next(factors)
        optimizer.backward(loss)
        return loss

    before = [p.clone() for p in model.parameters()]
    assert torch.isfinite(optimizer.step(closure))
    assert optimizer.loss_scale == 2.0**14
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_it_is_saved_by_its_state_and_not_copied():
    _, optimizer = wrapped()
    with pytest.raises(UnsupportedError, match="state_dict"):
        copy.deepcopy(optimizer)


# --- one step ---------------------------------------------------------------------------------------------


def amp_model(level, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def test_clipping_the_models_parameters_is_clipping_the_masters():
    """After scale_loss a weight has its master's gradient: unscaled, in fp32."""
    steps = []
    for clipped in (lambda model, optimizer: amp.master_params(optimizer), lambda m, o: m.parameters()):
        model, optimizer = amp_model("O2", loss_scale=128.0)
        for factor in (1.0, 3.0):  # the second loss adds to the first one's gradients
            with amp.scale_loss(loss_of(model) * factor, optimizer) as scaled:
                scaled.backward()
        before = [m.detach().clone() for m in amp.master_params(optimizer)]
        assert nn.utils.clip_grad_norm_(clipped(model, optimizer), 1e-3) > 1e-3
        assert {p.grad.dtype for p in model.parameters()} == {F32}
        optimizer.step()
        steps.append([a - b for a, b in zip(before, amp.master_params(optimizer))])
        amp.shutdown()
    assert all(map(torch.equal, *steps))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_inside_the_body_is_refused(level):
    model, optimizer = amp_model(level)
    with (
        pytest.raises(amp.AmpError, match=r"SGD\.step\(\) while its gradients carry"),
        amp.scale_loss(loss_of(model), optimizer) as scaled,
    ):
        scaled.backward()
        optimizer.step()
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


# --- a scale set by hand ----------------------------------------------------------------------------------


def test_the_scale_may_be_set_under_apex_private_name():
    _, optimizer = amp_model("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**20
    with amp.scale_loss(torch.ones(()), optimizer) as scaled:
        assert scaled.item() == 2.0**20
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**20, "unskipped": 1}
    optimizer.step()


# --- normalization and parallel ---------------------------------------------------------------------------

NORMS = {
    "FusedLayerNorm": nn.LayerNorm,
    "FusedRMSNorm": nn.RMSNorm,
    "MixedFusedLayerNorm": nn.LayerNorm,
    "MixedFusedRMSNorm": nn.RMSNorm,
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("x", "w"), [(F32, F32), (F16, F16), (F16, F32), (F32, F16), (torch.bfloat16, F32)])
def test_norms_give_torchs_numbers_in_apex_dtypes(name, x, w):
    torch.manual_seed(0)
    norm, exact = getattr(normalization, name)(8).to(w), NORMS[name](8, eps=1e-5)
    given = torch.randn(3, 8).to(x).requires_grad_()
    output = norm(given)
    assert output.dtype == (w if name.startswith("Mixed") else x)
    torch.testing.assert_close(output.float(), exact(given.float()), rtol=1e-2, atol=1e-2)
    output.float().square().sum().backward()
    assert (given.grad.dtype, norm.weight.grad.dtype) == (x, w)


def test_a_mixed_norm_rounds_once():
    torch.manual_seed(0)
    given = torch.randn(3, 8).half()
    ours = normalization.MixedFusedLayerNorm(8)(given)
    assert torch.equal(ours, nn.LayerNorm(8)(given.float()))


def test_norms_without_a_weight_and_apex_options():
    given = torch.randn(3, 2, 4)
    plain = normalization.FusedLayerNorm([2, 4], elementwise_affine=False, memory_efficient=True)
    assert torch.equal(plain(given), nn.LayerNorm([2, 4])(given))
    assert torch.equal(normalization.fused_rms_norm(given, (4,)), nn.RMSNorm(4, eps=1e-6)(given))
    mixed = normalization.MixedFusedRMSNorm(4, elementwise_affine=False)
    assert torch.equal(mixed(given), nn.RMSNorm(4, eps=1e-5)(given))


@pytest.mark.parametrize("kind", optimizers.__all__)
def test_copies_of_an_optimizer_keep_its_options(kind):
    optimizer = getattr(optimizers, kind)(nn.Linear(2, 2).parameters(), lr=0.1, set_grad_none=False)
    twin = copy.deepcopy(optimizer)
    assert {name for name in vars(optimizer) if not name.startswith("_")} <= vars(twin).keys()
    assert twin.set_grad_none is False


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_norms_train_at_every_level(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), normalization.FusedLayerNorm(8), nn.Linear(8, 2))
    optimizer = optimizers.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = loss_of(model).item()
    for _ in range(5):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert loss_of(model).item() < before


def test_batch_norms_take_apex_options():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = parallel.convert_syncbn_model(model, process_group=None, channel_last=False)
    assert isinstance(converted[1], nn.SyncBatchNorm)
    with pytest.raises(RuntimeError, match="channels_last"):
        parallel.convert_syncbn_model(model, channel_last=True)
    with pytest.raises(RuntimeError, match="channels_last"):
        parallel.SyncBatchNorm(2, channel_last=True)
    assert (
        parallel.SyncBatchNorm(2, fuse_relu=True).eval()(torch.randn(2, 2, 3, 3), torch.ones(())).min() >= 0
    )


def test_options_of_streams_are_taken_at_their_defaults_and_refused_beyond():
    for options in ({"num_allreduce_streams": 2}, {"retain_allreduce_buffers": True}, {"prof": True}):
        with pytest.raises(TypeError, match=next(iter(options))):
            parallel.DistributedDataParallel(nn.Linear(2, 2), **options)
