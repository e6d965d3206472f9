"""mindspore.train.serialization: where older scripts take checkpoints from."""

from halfstep.compat.mindspore._functions import load_checkpoint, load_param_into_net, save_checkpoint

__all__ = ["load_checkpoint", "load_param_into_net", "save_checkpoint"]
