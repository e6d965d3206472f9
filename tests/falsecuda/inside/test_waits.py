"""The steady step waits for nothing, or for what is said: law 10, counted over training loops."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from tests import falsecuda

CUDA = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore:.*too coarse for a step")  # O3 with torch's AdamW
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "hs": hs.optim.AdamW,
    "hs bf16 states": lambda p: hs.optim.AdamW(p, state_dtype="bf16"),
    "hs 8-bit states": lambda p: hs.optim.AdamW(p, state_dtype="8bit"),
    "fused": lambda p: torch.optim.AdamW(p, eps=1e-4, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, eps=1e-4, foreach=True),
    "capturable": lambda p: torch.optim.AdamW(p, eps=1e-4, foreach=True, capturable=True),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 10)).to(CUDA)


def loop(optimizer: str, level: str, dtype: str, clip_norm: float | None = 1.0, **options):
    """A function that takes one step."""
    net = network()
    amp = hs.prepare(net, OPTIMIZERS[optimizer](net.parameters()), level=level, dtype=dtype, **options)
    x, y = torch.randn(64, 16, device=CUDA), (torch.arange(64) % 10).to(CUDA)

    def step() -> hs.Outcome:
        with amp.autocast():
            loss = F.cross_entropy(net(x), y)
        amp.backward(loss)
        return amp.step(clip_norm=clip_norm)

    return step


def waits_of(step: Callable[[], object], steps: int = 2) -> list[str]:
    """The waits of steady steps, without those for outcomes of two steps before."""
    with falsecuda.arrival("when waited for"):
        for _ in range(3):
            step()
        with falsecuda.counted_waits() as waits:
            for _ in range(steps):
                step()
    return waits.names


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2", pytest.param("O3", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=pytest.mark.exhaustive if "states" in name else ()) for name in OPTIMIZERS],
)
def test_waits_of_the_steady_step(optimizer, level, dtype):
    waits = waits_of(loop(optimizer, level, dtype))
    reads_a_flag = optimizer in ("foreach", "capturable") and dtype == "fp16" and level != "O3"
    assert len(waits) == (2 if reads_a_flag else 0), waits


@pytest.mark.parametrize("optimizer", ["hs", "fused"])
@pytest.mark.parametrize(
    "options", [{"skip_nonfinite": True}, {"on_nonfinite": "raise"}, {"clip_norm": None}]
)
def test_waits_of_a_step_with_options(optimizer, options):
    assert waits_of(loop(optimizer, "O2", "bf16", **options)) == []


def scaled_loop(scaler, optimizer: str) -> Callable[[], None]:
    net = network()
    opt, x, y = (
        OPTIMIZERS[optimizer](net.parameters()),
        torch.randn(64, 16, device=CUDA),
        torch.arange(64) % 10,
    )

    def step() -> None:
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(net(x), y.to(CUDA))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    return step


@pytest.mark.parametrize("optimizer", ["hs", "fused", "foreach"])
def test_hs_grad_scaler_waits_no_more_than_torchs(optimizer):
    ours = waits_of(scaled_loop(hs.GradScaler("cuda"), optimizer))
    assert len(ours) <= len(waits_of(scaled_loop(torch.amp.GradScaler("cuda"), optimizer)))


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("optimizer", ["fused", "fused SGD"])
def test_a_flag_on_the_device_skips_as_one_that_is_read(optimizer, level):
    """Weights, states and counts of steps stay as they were, from the first step on."""
    net = network()
    opt = OPTIMIZERS[optimizer](net.parameters())
    amp = hs.prepare(net, opt, level=level, dtype="fp16")
    x, y = torch.randn(64, 16, device=CUDA), (torch.arange(64) % 10).to(CUDA)
    for step in range(6):
        before = copy.deepcopy([p.detach().cpu() for p in net.parameters()])
        states = copy.deepcopy([s for p in opt.state.values() for s in p.values()])
        with amp.autocast():
            loss = F.cross_entropy(net(x), y)
        amp.backward(loss * float("inf") if step in (0, 3) else loss)
        assert amp.step(clip_norm=1.0).taken == (step not in (0, 3))
        same = all(torch.equal(a, b.cpu()) for a, b in zip(before, net.parameters()))
        assert same == (step in (0, 3))
        if step == 3:
            after = [s for p in opt.state.values() for s in p.values()]
            assert all(map(torch.equal, after, states))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("change", ["in place", "data", "nothing"])
def test_weights_set_by_hand_reach_their_masters_unread(change, dtype):
    net = network()
    opt = OPTIMIZERS["fused"](net.parameters())
    amp = hs.prepare(net, opt, level="O2", dtype=dtype)
    first = next(net.parameters())
    exact = amp.masters[0].masters()[first].clone()
    with torch.no_grad():
        if change == "in place":
            first[3:5].fill_(0.3)
        elif change == "data":
            first.data[3:5].fill_(0.3)
    if change != "nothing":
        exact[3:5] = torch.tensor(0.3, dtype=first.dtype).item()
    with falsecuda.counted_waits() as waits:
        master = amp.masters[0].masters()[first]
    assert waits.names == []
    assert torch.equal(master, exact)


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_stay_carry_no_scale_and_nothing_is_read(level, spoiled):
    net = network()
    amp = hs.prepare(net, OPTIMIZERS["fused"](net.parameters()), level=level, dtype="fp16", loss_scale=64.0)
    x, y = torch.randn(64, 16, device=CUDA), (torch.arange(64) % 10).to(CUDA)
    for number in range(3):
        with amp.autocast():
            loss = F.cross_entropy(net(x), y)
        amp.backward(loss)
        params = [p for group in amp.optimizers[0].param_groups for p in group["params"]]
        first = next(net.parameters())
        if spoiled and first.grad is not None:
            first.grad[0, 0] = float("inf")
        expected = [p.grad.float() / 64 for p in net.parameters() if p.grad is not None]
        with falsecuda.counted_waits() as waits:
            outcome = amp.step(zero_grad=False)
        assert waits.names == [] or number == 0
        assert outcome.taken != spoiled
        for p, one in zip(params, expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, one)
            p.grad = None
        net.zero_grad()


def test_evaluating_waits_once_for_all_weights():
    """To know which were set within; it used to read each one's answer."""
    net = network()
    optimizer = hs.optim.SGD(net.parameters(), lr=0.1)
    amp = hs.prepare(net, optimizer, level="O2", dtype="bf16")
    x = torch.randn(4, 16, device=CUDA)
    before = hs.optim.fp32_state_dict(net, optimizer)
    with falsecuda.counted_waits(events=True) as waits, amp.evaluating():
        net(x)
        net[0].bias.zero_()
    assert len(waits.names) == 1
    after = hs.optim.fp32_state_dict(net, optimizer)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["0.bias"]
    assert not after["0.bias"].any()
