"""Two networks that train each other: no gradient of one's loss reaches the other's step unsaid."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from tests.silence import silent

LEFT = r"gradients of this SGD \(optimizer 0\) are the sum of its own loss's and of what the backward"
KINDS = ("one session", "two sessions")


class Gan:
    """A generator and a discriminator; `turn` is one iteration, `amps` the sessions of each."""

    def __init__(self, kind: str, dtype: str = "bf16") -> None:
        torch.manual_seed(0)
        self.d = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.g = nn.Linear(3, 4)
        self.of_d, self.of_g = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.d, self.g))
        options = {"level": "O1", "dtype": dtype}
        if kind == "one session":
            self.amp_d = self.amp_g = hs.prepare([self.d, self.g], [self.of_d, self.of_g], **options)
        else:
            self.amp_d = hs.prepare(self.d, self.of_d, **options)
            self.amp_g = hs.prepare(self.g, self.of_g, **options)
        self.noise = torch.randn(16, 3)
        self.real = torch.randn(16, 4) + 2

    def loss_of_d(self) -> torch.Tensor:
        with self.amp_d.autocast():
            real, fake = self.d(self.real), self.d(self.g(self.noise).detach())
            return F.softplus(-real.float()).mean() + F.softplus(fake.float()).mean()

    def loss_of_g(self) -> torch.Tensor:
        with self.amp_g.autocast():
            return F.softplus(-self.d(self.g(self.noise)).float()).mean()

    def turn(self, clear: bool | None = None, named: bool = False, of_g: int = 1) -> None:
        """`clear`: by `zero_grad(set_to_none=clear)` before each backward; None: not at all."""
        parts = [(self.loss_of_d, self.amp_d, self.of_d), *[(self.loss_of_g, self.amp_g, self.of_g)] * of_g]
        for loss_of, amp, optimizer in parts:
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)
            amp.backward(loss_of(), *([optimizer] if named else []))
            amp.step(optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_the_others_loss_are_told_once_by_name(kind, dtype):
    gan = Gan(kind, dtype)
    gan.turn()  # the first discriminator step is right; what the generator's loss leaves there is added to
    with pytest.warns(hs.HalfstepWarning, match=LEFT) as caught:
        gan.turn()
    assert len(caught) == 1
    gan.turn()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_g", [1, 2])
@pytest.mark.parametrize("to_none", [True, False])
def test_the_usual_loop_with_zero_grad_is_right_and_silent(kind, of_g, to_none):
    gan, plain = Gan(kind), Gan(kind)
    for _ in range(3):
        gan.turn(clear=to_none, of_g=of_g)
        plain.turn(clear=True, of_g=of_g)
    for mine, theirs in zip(
        [*gan.d.parameters(), *gan.g.parameters()], [*plain.d.parameters(), *plain.g.parameters()]
    ):
        assert torch.equal(mine, theirs)


def test_naming_the_optimizer_gives_what_clearing_gives():
    named, cleared = Gan("one session"), Gan("one session")
    for _ in range(4):
        named.turn(named=True)
        cleared.turn(clear=True)
    for mine, theirs in zip(named.d.parameters(), cleared.d.parameters()):
        assert torch.equal(mine, theirs)


def test_one_loss_of_two_optimizers_is_no_leftover():
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    a, b = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (body, head))
    amp = hs.prepare([body, head], [a, b], dtype="bf16")
    with silent():
        for _ in range(4):
            for _ in range(2):  # accumulated
                with amp.autocast():
                    loss = head(body(torch.randn(5, 4))).float().square().mean()
                amp.backward(loss)
            amp.step(a)
            amp.step(b)


def test_gradients_that_a_named_backward_adds_up_over_others_steps_are_meant():
    gan = Gan("one session")
    with silent():
        for turn in range(6):
            gan.amp_d.backward(gan.loss_of_d(), gan.of_d)
            gan.amp_g.backward(gan.loss_of_g(), gan.of_g)
            gan.amp_g.step(gan.of_g)
            if turn % 2:
                gan.amp_d.step(gan.of_d)


def test_two_sessions_with_nothing_in_common_are_silent():
    pairs = []
    for _ in range(2):
        model = nn.Linear(4, 1)
        pairs.append((model, hs.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype="bf16")))
    with silent():
        for turn in range(6):
            for number, (model, amp) in enumerate(pairs):
                with amp.autocast():
                    loss = model(torch.randn(5, 4)).float().square().mean()
                amp.backward(loss)
                if number or turn % 2:  # the first adds up over two turns
                    amp.step()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_kept_by_the_step_are_meant(kind):
    gan = Gan(kind)
    with silent():
        for _ in range(3):
            gan.amp_d.backward(gan.loss_of_d(), gan.of_d)
            gan.amp_d.step(gan.of_d, zero_grad=False)
            gan.of_g.zero_grad()
            with gan.amp_g.autocast():
                loss = gan.g(gan.noise).float().square().mean()
            gan.amp_g.backward(loss, gan.of_g)
            gan.amp_g.step(gan.of_g)
