"""mindspore.common: where scripts take dtypes and initializers from."""

from halfstep.compat.mindspore._functions import set_seed
from halfstep.compat.mindspore._tensor import Parameter, ParameterTuple, Tensor
from halfstep.compat.mindspore.common import initializer

__all__ = ["Parameter", "ParameterTuple", "Tensor", "initializer", "set_seed"]
