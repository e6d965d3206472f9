"""The end of a pass over ranks: told to stop then, no rank trains a step more."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run


class Stream:
    """Batches without a length, `count` of them in a pass."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([(torch.ones(4, 3), torch.ones(4, 1))] * self.count)


class StopAtPass(hs.trainer.Callback):
    def on_epoch_end(self, trainer):
        trainer.stop("one pass")


def trained(rank, counts, trace):
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    trainer = hs.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, dtype="bf16", wrap=DDP,
        callbacks=[StopAtPass()], trace=trace, progress=False,
    )  # fmt: skip
    history = trainer.fit(Stream(counts[rank]), steps=9)
    return trainer.step, history.stopped, trainer.state_dict()["position"]["served"]


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("counts", [(3, 3), (5, 3)])
def test_a_stop_at_the_end_of_a_pass_without_length_trains_no_step_more(counts, trace):
    (step, stopped, served), (other, why, _) = run(trained, 2, counts, trace)
    assert (step, other, served) == (3, 3, 3)
    assert {stopped, why} <= {"one pass", "another rank stopped"}
