"""Law 13, the machine only says by which kernel: choices follow times, keep dtypes, and are data."""

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.casting import kernel_choice
from halfstep.casting.kernel_choice import MARGIN, KernelTable, Row, decide
from halfstep.casting.kinds import convolution, products
from halfstep.casting.kinds.kind import Choice, OpClass
from halfstep.casting.kinds.products import Linear
from halfstep.session import ranks as ranks_module

BF16 = torch.bfloat16

WAYS = ("native", "rounded")


def machine(native: float, rounded: float) -> KernelTable:
    """A machine on which every kernel takes so long, whatever the op."""
    return KernelTable((), lambda cls, direction: {"native": native, "rounded": rounded}, name="measured")


SLOW, FAST = machine(9.0, 1.0), machine(1.0, 9.0)


def test_no_direction_is_slower_than_the_best_by_more_than_the_margin() -> None:
    for native in (0.5, 0.9, 1.0, 1.1, 1.24, 1.26, 2.0, 100.0):
        choice, _ = decide({"forward": {"native": native, "rounded": 1.0}}, 0.0)
        taken = native if choice.forward == "native" else 1.0
        assert taken <= min(native, 1.0) / MARGIN


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def train(amp: hs.Session, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        with amp.autocast():
            loss = amp.model(x).float().square().mean()
        amp.backward(loss)
        amp.step()


def session(kernels: KernelTable | str) -> tuple[hs.Session, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hs.prepare(model, optimizer, dtype=BF16, kernels=kernels), optimizer


def test_the_machine_changes_no_dtype() -> None:
    dtypes = []
    for kernels in (SLOW, FAST):
        amp, _ = session(kernels)
        with amp.autocast():
            out = amp.model(torch.randn(4, 3, 8, 8))
        out.float().sum().backward()
        dtypes.append([out.dtype, *(p.grad.dtype for p in amp.model.parameters())])
    assert dtypes[0] == dtypes[1]
    assert dtypes[0][0] is BF16


@pytest.fixture
def other_bits(monkeypatch):
    """Rounded kernels whose last bits surely are not native's."""
    linear = products.linear
    monkeypatch.setattr(
        products, "linear", lambda how, *args: linear(how, *args) * (1 if how == "native" else 1.01)
    )


@pytest.mark.usefixtures("other_bits")
def test_a_run_resumed_on_another_machine_is_the_run_that_never_stopped() -> None:
    whole, _ = session(SLOW)
    train(whole, range(6))
    first, optimizer = session(SLOW)
    train(first, range(3))
    saved = first.state_dict(), first.model.state_dict(), optimizer.state_dict()
    second, optimizer = session(machine(1.0, 9.0))
    second.load_state_dict(saved[0])
    second.model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    train(second, range(3, 6))
    elsewhere, _ = session(FAST)
    train(elsewhere, range(6))
    pairs = list(zip(whole.model.parameters(), second.model.parameters(), elsewhere.model.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs), (
        "the two machines computed alike: nothing was shown"
    )


@pytest.mark.parametrize("made_with", ["measured", "native", "rounded"])
@pytest.mark.usefixtures("other_bits", "measured_here")
def test_a_run_by_a_file_resumes_by_that_file_whatever_the_session_was_made_with(
    made_with, monkeypatch
) -> None:
    convolve = convolution.convolve
    monkeypatch.setattr(
        convolution,
        "convolve",
        lambda how, *args: convolve(how, *args) * (1 if how == "native" else 1.01),
    )
    given = KernelTable([Row(Choice("rounded"), op="linear")])
    whole, _ = session(given)
    train(whole, range(4))
    first, optimizer = session(given)
    train(first, range(2))
    saved = first.state_dict(), first.model.state_dict(), optimizer.state_dict()
    second, optimizer = session(made_with)
    train(second, range(1))
    for one, state in zip((second, second.model, optimizer), saved, strict=True):
        one.load_state_dict(state)
    train(second, range(2, 4))
    assert all(map(torch.equal, whole.model.parameters(), second.model.parameters()))
    assert second.state_dict()["kernels"] == first.state_dict()["kernels"]


@pytest.fixture
def measured_here(monkeypatch):
    """This machine is one on which everything is faster rounded."""
    monkeypatch.setattr(kernel_choice, "_tables", {**kernel_choice._tables, "measured": machine(9.0, 1.0)})


@pytest.mark.parametrize("made_with", ["native", "rounded"])
@pytest.mark.usefixtures("measured_here")
def test_a_run_that_measured_goes_on_measuring_what_it_had_not_met(made_with) -> None:
    first, _ = session(FAST)
    train(first, range(1))
    second, _ = session(made_with)
    second.load_state_dict(first.state_dict())
    met, new = first.kernels.rows[0].exact, OpClass("bmm", "bf16", "matrices over 64", "large", 1)
    assert met is not None
    assert second.kernels.choose(*met).is_native, "the class that was met is not as saved"
    assert second.kernels.choose(new, "iw") == Choice("rounded", "rounded", "rounded")


def test_all_ranks_take_the_choices_of_rank_0(monkeypatch) -> None:
    ranks = [machine(9.0, 1.0), machine(1.0, 9.0)]
    said: list[object] = []

    def of_rank(number: int) -> KernelTable:
        def gathered(value: object, group: object) -> list[object]:
            if number == 0:
                said.append(value)
            return said

        monkeypatch.setattr(ranks_module, "world_size", lambda group: 2)
        monkeypatch.setattr(ranks_module, "rank", lambda group: number)
        monkeypatch.setattr(ranks_module, "gather", gathered)
        return ranks_module.kernels_of_first_rank(ranks[number], BF16, None)

    tables = [of_rank(0), of_rank(1)]
    met_later = OpClass("convolution", "bf16", "2d depthwise", "large", torch.get_num_threads())
    for table in tables:
        assert not table.measures
        assert table.choose(met_later, "iw") == Choice("rounded", "rounded", "rounded")


def test_what_a_file_pins_no_measurement_moves(tmp_path) -> None:
    file = tmp_path / "kernels.toml"
    file.write_text('format = 1\n[[kernel]]\nop = "linear"\nforward = "rounded"\n')
    x, layer = torch.randn(2, 4), nn.Linear(4, 4)
    amp = hs.prepare(layer, dtype=BF16, kernels=file)
    with amp.autocast():
        out = layer(x)
    wanted = Linear.apply(x.to(BF16), layer.weight.to(BF16), layer.bias.to(BF16), Choice("rounded"))
    assert torch.equal(out, wanted)
    assert amp.kernels.rows == (Row(Choice("rounded"), op="linear"),)


@pytest.mark.parametrize("way", WAYS)
def test_a_class_once_chosen_stays_chosen(way: str) -> None:
    times = iter([(9.0, 1.0) if way == "rounded" else (1.0, 9.0), *[(5.0, 5.0)] * 9])
    table = KernelTable((), lambda cls, direction: dict(zip(WAYS, next(times))))
    cls = OpClass("linear", "bf16", "plain", "tiny", 1)
    assert table.choose(cls, "").forward == way
    assert table.choose(cls, "").forward == way
