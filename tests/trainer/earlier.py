"""Files as earlier versions of the Trainer wrote them."""

import torch

from halfstep import checkpoint, rng
from halfstep.names import fqns
from halfstep.session.saving import optimizer_names


def state_of(trainer):
    """What such a file holds of a Trainer; `ranks` may be added, with `random` and `position` of each."""
    model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    names, (own,) = fqns(model), optimizer_names(trainer.amp)
    place, groups = trainer._position, optimizer["param_groups"]
    return {
        "format": 1,
        "threads": torch.get_num_threads(),
        "model": {names[name]: value for name, value in model.items()},
        "optimizer": {
            **optimizer,
            "algorithm": checkpoint.algorithm_of(trainer.optimizer),
            "state": {own[key]: value for key, value in optimizer["state"].items()},
            "param_groups": [dict(g, params=[own[i] for i in g["params"]]) for g in groups],
        },
        "amp": trainer.amp.state_dict(),
        "step": trainer.step,
        "epoch": trainer.epoch,
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "random": rng.random_state(),
        "position": None if place is None else place.state_dict(),
    }


def write(trainer, folder, **changes):
    """Such a file in a folder, by the number of the step."""
    path = folder / f"step-{trainer.step:08d}.pt"
    return checkpoint.save(path, {**state_of(trainer), **changes})
