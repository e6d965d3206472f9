"""mindspore.nn.wrap: where older scripts take training cells from."""

from halfstep.compat.mindspore.nn.wrap import cell_wrapper, loss_scale

__all__ = ["cell_wrapper", "loss_scale"]
