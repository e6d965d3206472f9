"""mindspore.common: where scripts take dtypes and initializers from."""

from halfstep.compat.mindspore._functions import set_seed
from halfstep.compat.mindspore._tensor import Parameter, ParameterTuple, Tensor
from halfstep.compat.mindspore.common import dtype, initializer, parameter, tensor

__all__ = ["Parameter", "ParameterTuple", "Tensor", "dtype", "initializer", "parameter", "set_seed", "tensor"]
