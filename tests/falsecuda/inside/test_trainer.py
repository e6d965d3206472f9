"""The Trainer where batches or a part of the model lie on the device, or on the host."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.trainer import Trainer
from tests import falsecuda

pytestmark = pytest.mark.filterwarnings("ignore:.*gradients hold inf or NaN and the step was taken")


def make(model: nn.Module, **options) -> Trainer:
    return Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        lambda out, y: (out.float() - y).square().mean(),
        dtype="bf16",
        progress=False,
        kernels="native",
        **options,
    )


def batches(bad: int | None, value: float, device: str = "cuda") -> list[tuple[Tensor, Tensor]]:
    found = [(torch.ones(4, 6, device=device), torch.ones(4, 1, device=device)) for _ in range(6)]
    if bad is not None:
        found[bad][0][2, 3] = value
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_batch_of_the_device_is_named_when_its_loss_is_read(value):
    trainer = make(nn.Linear(6, 1).cuda(), read_every=3)
    with pytest.raises(hs.DataError, match="the input of the batch for step 2 holds inf or NaN"):
        trainer.fit(batches(1, value), steps=6)
    assert trainer.step == 3


def test_no_checkpoint_is_written_of_a_step_with_a_bad_batch(tmp_path: Path):
    trainer = make(nn.Linear(6, 1).cuda(), checkpoints=tmp_path, checkpoint_every=1)
    with pytest.raises(hs.DataError, match="for step 3"):
        trainer.fit(batches(2, float("nan")), steps=6)
    assert trainer.folder is not None
    assert [trainer.folder.has(step) for step in (1, 2, 3)] == [True, True, False]


def test_evaluate_names_a_bad_batch_of_the_device():
    with pytest.raises(hs.DataError, match="the input of the batch for step 1"):
        make(nn.Linear(6, 1).cuda()).evaluate(batches(1, float("nan")))


def test_batches_of_the_device_are_looked_at_without_a_wait():
    class Counting(hs.trainer.Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.step == 2:
                falsecuda.take("syncs")
            if trainer.step == 5:
                self.waits = falsecuda.take("syncs")

    counting = Counting()
    make(nn.Linear(6, 1).cuda(), callbacks=[counting]).fit(batches(None, 0.0), steps=6)
    assert counting.waits == []


def test_batches_go_to_the_accelerator_where_a_part_of_the_model_is_on_the_host():
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8).cpu()
            self.rest = nn.Linear(8, 1).cuda()

        def forward(self, x: Tensor) -> Tensor:
            devices.add(x.device.type)
            return self.rest(self.first(x.cpu()).cuda())

    devices = set[str]()
    trainer = make(Offloaded())
    trainer.fit(batches(None, 0.0, "cpu"), steps=2)
    assert devices == {"cuda"}
    assert trainer.device.type == "cuda"
    assert len(trainer.history.steps) == 2
