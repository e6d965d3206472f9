"""mindspore.nn: Cell, layers, losses, optimizers and the training cells, thin classes over torch."""

from halfstep.compat.mindspore._absent import absent
from halfstep.compat.mindspore.nn._cell import *
from halfstep.compat.mindspore.nn._layers import *
from halfstep.compat.mindspore.nn._rates import *
from halfstep.compat.mindspore.nn._training import *

__getattr__ = absent("nn")
