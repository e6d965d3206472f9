"""mindspore.train.model: where older scripts take Model from."""

from halfstep.compat.mindspore.train._model import Model

__all__ = ["Model"]
