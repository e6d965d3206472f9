"""mindspore.train.amp: where older scripts take levels and training networks from."""

from halfstep.compat.mindspore.amp import auto_mixed_precision, build_train_network

__all__ = ["auto_mixed_precision", "build_train_network"]
