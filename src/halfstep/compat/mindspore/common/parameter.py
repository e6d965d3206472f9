"""mindspore.common.parameter: where older scripts take parameters from."""

from halfstep.compat.mindspore._tensor import Parameter, ParameterTuple

__all__ = ["Parameter", "ParameterTuple"]
