"""mindspore.common.dtype, imported as `mstype`: the names of `mindspore.dtype`."""

from halfstep.compat.mindspore.dtype import *  # noqa: F403
from halfstep.compat.mindspore.dtype import __all__ as __all__
