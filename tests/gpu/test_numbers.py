"""A GPU computes what a CPU does, also with a part of the program on the host or a default device."""

import gc
import itertools
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import halfstep as hs
from halfstep.cli._tune_script import run_script
from halfstep.compat.apex import amp
from halfstep.distributed import all_ranks
from halfstep.doctor.process import run_in_process
from halfstep.numerics.replayable import Replayable
from halfstep.trainer import Trainer
from halfstep.tuning.choices import LevelChoice
from tests.gpu.machine import DEVICE, Machine
from tests.session.test_lifetime import alive, train

CPU = torch.device("cpu")
FUSED = partial(torch.optim.AdamW, fused=True)


def numbers() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator)


def on_both(run: Callable[[torch.device], list[float]]) -> None:
    """The same numbers on the device as on the CPU, and a training run that got somewhere."""
    expected = run(CPU)
    assert expected[-1] < expected[0]
    assert run(DEVICE) == pytest.approx(expected, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("loss_scale", ["dynamic", "headroom", 1024.0])
def test_a_loss_on_the_host(gpu: Machine, loss_scale):
    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        net, (x, y), losses = nn.Linear(16, 4).to(device), numbers(), []
        optimizer = hs.optim.SGD(net.parameters(), lr=0.5)
        amp = hs.prepare(net, optimizer, dtype="fp16", loss_scale=loss_scale, kernels="native")
        for _ in range(5):
            with amp.autocast():
                out = net(x.to(device))
            loss = F.cross_entropy(out.float().cpu(), y)
            amp.backward(loss)
            outcome = amp.step()
            losses.append(loss.item())
        return [*losses, outcome.grad_norm]

    on_both(run)


def test_a_loss_on_the_host_by_grad_scaler(gpu: Machine):
    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        net, (x, y), losses = nn.Linear(16, 4).to(device), numbers(), []
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.5), hs.GradScaler(device.type)
        for _ in range(5):
            optimizer.zero_grad()
            with hs.autocast(device.type, "fp16", kernels="native"):
                out = net(x.to(device))
            scaler.scale(out.float().square().mean()).backward(retain_graph=True)
            loss = F.cross_entropy(out.float().cpu(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    on_both(run)


@pytest.mark.parametrize("kind", [torch.optim.SGD, hs.optim.SGD, FUSED])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("loss_on", ["host", "device"])
def test_a_part_of_the_model_on_the_host(gpu: Machine, kind, separate, loss_on):
    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        body, head, (x, y), losses = nn.Linear(16, 16).to(device), nn.Linear(16, 4), numbers(), []
        parts = [body, head] if separate else [nn.ModuleList([body, head])]
        optimizers = [kind(part.parameters(), lr=0.1) for part in parts]
        amp = hs.prepare([body, head], optimizers, dtype="fp16", loss_scale=1024.0, kernels="native")
        weights = [body.weight.detach().cpu().clone(), head.weight.detach().clone()]
        for _ in range(5):
            with amp.autocast():
                hidden = body(x.to(device))
            loss = F.cross_entropy(head(hidden.float().cpu()), y)
            loss = loss.to(device) if loss_on == "device" else loss
            amp.backward(loss)
            for optimizer in optimizers:
                amp.step(optimizer)
            losses.append(loss.item())
        after = body.weight.detach().cpu(), head.weight.detach()
        return [*losses, *(-float((a - b).abs().sum()) for a, b in zip(after, weights))]

    on_both(run)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("loss_on", ["cpu", ""])
@pytest.mark.parametrize("kind", [torch.optim.SGD, hs.optim.SGD, FUSED])
def test_a_part_of_the_model_on_the_host_by_grad_scaler(gpu: Machine, kind, unscales, loss_on):
    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        body, head, (x, y), losses = nn.Linear(16, 16).to(device), nn.Linear(16, 4), numbers(), []
        optimizer = kind([*body.parameters(), *head.parameters()], lr=0.1)
        scaler = hs.GradScaler(device.type, init_scale=1024.0)
        for step in range(6):
            with hs.autocast(device.type, "fp16", kernels="native"):
                hidden = body(x.to(device))
            loss = F.cross_entropy(head(hidden.float().cpu()), y).to(loss_on or device)
            losses.append(loss.item())
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            assert scaler.step(optimizer).taken == (step != 3)
            scaler.update()
            optimizer.zero_grad()
        return losses

    on_both(run)


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O2", "bf16"), ("O3", "bf16")])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, hs.optim.AdamW])
def test_a_model_on_the_host_beside_a_default_device(gpu: Machine, level, dtype, kind, tmp_path):
    def run(default: torch.device) -> list[float]:
        torch.manual_seed(0)
        net, (x, y), losses = nn.Linear(16, 4), numbers(), []
        torch.set_default_device(default)
        try:
            scale = "headroom" if dtype == "fp16" else None
            optimizer = kind(net.parameters(), lr=0.1)
            amp = hs.prepare(net, optimizer, level, dtype=dtype, loss_scale=scale, kernels="native")
            for step in range(4):
                with amp.autocast():
                    loss = F.cross_entropy(net(x).float(), y)
                amp.backward(loss)
                outcome = amp.step(clip_norm=1.0)
                losses += [loss.item(), -outcome.scale]
                if step == 1:
                    amp.load(amp.save(tmp_path / default.type))
        finally:
            torch.set_default_device(None)
        return losses

    expected = run(CPU)
    assert expected[-2] < expected[0]
    assert run(DEVICE) == expected


def test_headroom_of_numbers_beside_a_default_device(gpu: Machine):
    torch.set_default_device(DEVICE)
    try:
        scale = hs.HeadroomLossScale(bits=2).adjust(finite=True, amax=4.0)
    finally:
        torch.set_default_device(None)
    assert (scale.value, scale.history) == (2048.0, (4.0,))


def test_a_trainer_on_the_host_of_batches_on_the_device(gpu: Machine):
    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        net, (x, y) = nn.Linear(16, 4), numbers()
        loss_fn: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(out.float(), y)  # noqa: E731
        optimizer = hs.optim.SGD(net.parameters(), lr=0.5)
        trainer = Trainer(net, optimizer, loss_fn, dtype="bf16", progress=False, kernels="native")
        return trainer.fit([(x.to(device), y.to(device))] * 6, steps=6).losses

    assert run(DEVICE) == run(CPU)


@pytest.fixture
def group_of_the_device():
    """A process group of two ranks that reduces tensors of the device alone, as NCCL's do; the other rank
    agrees with whatever this one says."""
    dist.init_process_group(f"{DEVICE.type}:fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_flags_of_the_host_over_ranks(gpu: Machine, group_of_the_device):
    for flags in ([True, False], [False, False], [False, True], [False] * 33):
        assert all_ranks(torch.tensor(flags)).tolist() == flags


def test_a_trainer_over_ranks_is_not_stopped(gpu: Machine, group_of_the_device):
    net, (x, y) = nn.Linear(16, 4).to(DEVICE), numbers()
    loss_fn: Callable[[Tensor, Tensor], Tensor] = lambda out, y: F.cross_entropy(out.float(), y)  # noqa: E731
    optimizer = hs.optim.SGD(net.parameters(), lr=0.5)
    trainer = Trainer(
        net,
        optimizer,
        loss_fn,
        dtype="bf16",
        progress=False,
        read_every=1,
        wrap=lambda model: model,
        kernels="native",
    )
    history = trainer.fit([(x, y)] * 6, steps=6)
    assert (len(history.losses), history.stopped) == (6, "")


# ---- a device is asked, not remembered -------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": torch.optim.AdamW,
    "fused": lambda params, **options: torch.optim.AdamW(params, fused=True, **options),
    "ours": hs.optim.AdamW,
    "8-bit": lambda params, **options: hs.optim.AdamW(params, state_dtype="8bit", **options),
}


def steps_of(amp: hs.Session, model: nn.Module, device: torch.device, count: int) -> list[float]:
    x, y = (t.to(device) for t in numbers())
    losses: list[float] = []
    for _ in range(count):
        with amp.autocast():
            out = model(x)
            loss = F.cross_entropy(out.float(), y)
        amp.backward(loss)
        assert amp.step().taken
        losses.append(loss.item())
    return losses


#: Levels, optimizers and steps before the move of every day.
MOVES = {
    *(("O1 bf16", "torch", 2), ("O1 fp16", "ours", 0), ("O1 fp16", "fused", 2), ("O2 bf16", "torch", 0)),
    *(("O2 bf16", "fused", 2), ("O2 bf16", "ours", 2), ("O3 bf16", "torch", 2), ("O3 bf16", "ours", 0)),
}


def moves() -> list[Any]:
    levels = ["O1 bf16", "O1 fp16", "O2 bf16", "O3 bf16"]
    cases = itertools.product(levels, KINDS, (0, 2))
    return [pytest.param(*case, marks=() if case in MOVES else pytest.mark.exhaustive) for case in cases]


@pytest.mark.parametrize(("level", "kind", "moved_after"), moves())
def test_a_model_moves_after_prepare(gpu: Machine, level, kind, moved_after):
    level, dtype = level.split()

    def run(first: torch.device, second: torch.device) -> list[float]:
        model = net().to(first)
        amp = hs.prepare(
            model, KINDS[kind](model.parameters(), lr=1e-2), level, dtype=dtype, kernels="native"
        )
        losses = steps_of(amp, model, first, moved_after)
        model.to(second)
        if moved_after and kind in ("torch", "fused") and first != second:  # the norm's, which have no master
            with pytest.raises(hs.ConfigError, match=r"moved to .*load_state_dict"):
                amp.autocast()
            amp.optimizers[0].load_state_dict(amp.optimizers[0].state_dict())
        losses += steps_of(amp, model, second, 3)
        assert amp.device.type == second.type
        amp.revert()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return losses

    expected = run(CPU, CPU)
    assert expected[-1] < expected[0]
    assert run(CPU, DEVICE) == pytest.approx(expected, rel=2e-2)
    assert run(DEVICE, CPU) == pytest.approx(expected, rel=2e-2)


def test_ops_are_cast_where_the_model_was_moved(gpu: Machine):
    model, seen = net(), list[torch.dtype]()
    amp = hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16", kernels="native")
    model.to(DEVICE)
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    steps_of(amp, model, DEVICE, 1)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_first_parameter_is_on_the_host(gpu: Machine, dtype):
    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        table, body = nn.Embedding(10, 16), nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        model, seen, losses = nn.ModuleList([table, body.to(device)]), list[torch.dtype](), list[float]()
        optimizer = hs.optim.SGD(model.parameters(), lr=0.1)
        amp = hs.prepare(model, optimizer, dtype=dtype, loss_scale=64.0, kernels="native")
        body[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        target = torch.zeros(10, dtype=torch.long, device=device)
        for micro in range(4):
            with amp.autocast():
                loss = F.cross_entropy(body(table(torch.arange(10)).to(device)).float(), target)
            amp.backward(loss)
            if micro % 2:
                assert amp.step().taken
            else:
                amp.loss_scale = hs.StaticLossScale(32.0)  # gradients on both devices are brought to it
            losses.append(loss.item())
        assert amp.device.type == device.type
        assert set(seen) == {getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])}
        return losses

    on_both(run)


def test_apex_moves_after_initialize(gpu: Machine):
    def run(device: torch.device) -> list[float]:
        model, losses, (x, y) = net(), list[float](), numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=128.0)
        try:
            model.to(device)
            for _ in range(3):
                optimizer.zero_grad()
                out = model(x.to(device))
                loss = F.cross_entropy(out.float(), y.to(device))
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                losses.append(loss.item())
        finally:
            amp.shutdown()
        return losses

    on_both(run)


def test_apex_names_the_order_at_o1(gpu: Machine):
    if DEVICE.type == "cpu":
        pytest.skip("needs a second device")
    model = net()
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    try:
        model.to(DEVICE)
        with pytest.raises(RuntimeError, match="move the model first"):
            model(numbers()[0].to(DEVICE))
    finally:
        amp.shutdown()


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley", "householder"])
@pytest.mark.parametrize("level", ["O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16"])
def test_orthogonal_weights(gpu: Machine, level, orthogonal_map):
    """torch has no LU and QR in 16 bits, and its matrix exponential gives gradients of NaN in them."""

    def run(device: torch.device, level: str, dtype: str | None = None) -> list[float]:
        model, losses, (x, y) = net().to(device), list[float](), numbers()
        nn.utils.parametrizations.orthogonal(model[3], orthogonal_map=orthogonal_map)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        amp = hs.prepare(model, optimizer, level, dtype=dtype, kernels="native")
        for _ in range(3):
            with amp.autocast():
                loss = F.cross_entropy(model(x.to(device)).float(), y.to(device))
            amp.backward(loss)
            amp.step()
            losses.append(loss.item())
        weight = model[3].weight.detach().float()  # outside of a region too
        return [*losses, float((weight @ weight.T - torch.eye(4, device=device)).abs().max())]

    expected = run(CPU, "O0")
    assert run(DEVICE, *level.split()) == pytest.approx(expected, rel=0.05, abs=0.02)


def test_a_matrix_exponential_of_16_bits_has_gradients(gpu: Machine):
    x = torch.linspace(-0.3, 0.3, 64, device=DEVICE).reshape(8, 8).bfloat16().requires_grad_()
    for function in (torch.matrix_exp, torch.linalg.matrix_exp):
        with hs.autocast(DEVICE.type, "bf16"):
            out = function(x)
        out.float().square().sum().backward()
        assert out.dtype == torch.float32
        assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_that_gives_out_fp32_is_the_device_s_own(gpu: Machine, dtype, monkeypatch):
    policy = hs.Policy(compute_dtype=dtype).with_rules(fp32_out=["linear", "matmul"])
    x, weight, bias = (
        torch.randn(n, device=DEVICE).to(dtype).requires_grad_() for n in ((2, 3, 16), (5, 16), (5,))
    )

    def run(region: Any) -> list[Tensor]:
        with region:
            out = [F.linear(x, weight, bias), x @ weight.t()]
        return [*out, *torch.autograd.grad(out[0].square().sum() + out[1].sum(), (x, weight, bias))]

    seen: list[Any] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **how: seen.append(how) or mm(*args, **how))
    found = run(hs.autocast(DEVICE.type, policy=policy))
    assert seen == [{"out_dtype": torch.float32}] * 2
    assert [t.dtype for t in found] == [torch.float32] * 2 + [dtype] * 3
    x, weight, bias = (t.detach().float().requires_grad_() for t in (x, weight, bias))
    torch.testing.assert_close([t.float() for t in found], run(nullcontext()), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[0], run(nullcontext())[0])


# ---- device tensors stay in their process ----------------------------------------------------------------


@pytest.mark.long
def test_what_a_process_sends_is_on_the_host(gpu: Machine):
    found, said = run_in_process(partial(torch.full, (3,), 2.0, device=DEVICE), os.environ)
    assert said == ""
    assert (found.device, found.tolist()) == (CPU, [2.0] * 3)


SCRIPT = """
import torch
from torch import nn
import halfstep as hs
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to("DEVICE")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
amp = hs.prepare(model, optimizer)
x = torch.randn(8, 16).to("DEVICE")
for _ in range(20):
    with amp.autocast():
        loss = model(x).float().square().mean()
    amp.backward(loss)
    amp.step()
"""


@pytest.mark.long
def test_a_run_of_tune_brings_gradients_of_the_host(gpu: Machine, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("DEVICE", DEVICE.type))
    run = run_script(path, (), LevelChoice("O1", "bf16"), 60)
    assert run.trial.failed is None
    assert {gradient.device for gradient in run.first.gradients.values()} == {CPU}
    assert len(run.first.gradients) == 4


# ---- a replay from the weights of before ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, hs.optim.SGD])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_replay_names_the_op_and_not_its_weights(gpu: Machine, level, kind):
    """The update of a step that is taken whatever its gradients hold has spoiled the weights by then."""

    def run(device: torch.device) -> list[tuple[int, str, str, str]]:
        torch.manual_seed(0)
        model, x = nn.Linear(16, 4).to(device), numbers()[0].to(device)
        session = hs.prepare(model, kind(model.parameters(), lr=0.1), level, dtype="bf16", kernels="native")
        replay = Replayable(session, warn=False)

        def step(x: Tensor, divisor: Tensor) -> Tensor:
            with session.autocast():
                loss = (model(x) / divisor).float().mean()
            session.backward(loss)
            session.step()
            return loss.detach()

        for number in range(3):
            replay.run(step, x, torch.full((), float(number != 2), device=device))
        assert replay.last is not None  # of the step that was just made
        assert not all(p.isfinite().all() for p in model.parameters())  # as without a replay
        return [(n, t.bad.phase, t.bad.op, t.bad.cause.text) for n, t in replay.traces]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.HalfstepWarning)
        expected = run(CPU)
        assert [found[2] for found in expected] == ["div"]
        assert run(DEVICE) == expected


# ---- nothing keeps a model alive --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "kind"),
    [("O1 fp16", "torch"), ("O2 bf16", "torch"), ("O2 bf16", "releases"), ("O3 bf16", "ours")],
)
def test_device_memory_is_free_without_the_collector(gpu: Machine, level, kind):
    """The latest outcomes of a device are not read yet, and refer to their session weakly."""
    torch.optim.AdamW(nn.Linear(1, 1).parameters()).step()
    gc.collect()
    gc.disable()
    try:
        assert alive(train(level, kind, DEVICE)) == {}
    finally:
        gc.enable()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, partial(nn.GroupNorm, 4), nn.BatchNorm1d])
def test_fp32_weights_of_a_norm_are_not_rounded(gpu: Machine, norm, level):
    """bf16 has no number between 1 and 1.0078: a weight of 1.003 counts, its gradient has digits of fp32."""

    def run(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), norm(32)).to(device)
        optimizer = hs.optim.SGD(net.parameters(), lr=0.1)
        amp = hs.prepare(net, optimizer, level=level, dtype="bf16", kernels="native")
        losses = list[float]()
        for more in (0.003, 0.0):
            with amp.autocast():
                loss = net(numbers()[0].to(device)).float().square().mean()
            losses.append(loss.item())
            if more:
                with torch.no_grad():
                    net[1].weight.add_(more)
        amp.backward(loss)
        assert net[1].weight.dtype == torch.float32
        grad = net[1].weight.grad.double()
        assert not torch.equal(grad, grad.bfloat16().double())
        assert losses[1] / losses[0] == pytest.approx(1.003**2, abs=5e-4)
        return [1.0, 0.0, *grad.tolist()]

    on_both(run)


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_skip_of_released_gradients_left_is_said_whoever_looks(gpu: Machine, reads):
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)).to(DEVICE)
    optimizer = hs.optim.SGD(net.parameters(), lr=0.1, release_gradients=True)
    amp = hs.prepare(net, optimizer, dtype="bf16", skip_nonfinite=True, kernels="native")
    before = [p.detach().clone() for p in net.parameters()]
    with amp.autocast():
        out = net[0](numbers()[0].to(DEVICE))
        out.register_hook(lambda grad: grad * torch.inf)
        loss = net[1](out).float().square().mean()
    amp.backward(loss)
    outcome = amp.step()
    if reads:
        outcome.read()
    assert [torch.equal(a, b) for a, b in zip(before, net.parameters())] == [True, True, False, False]
    assert "were released before them were updated" in outcome.reason
    assert not outcome.taken
