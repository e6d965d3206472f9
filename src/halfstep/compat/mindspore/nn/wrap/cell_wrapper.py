"""mindspore.nn.wrap.cell_wrapper: cells around a network."""

from halfstep.compat.mindspore.nn._training import TrainOneStepCell, WithEvalCell, WithLossCell

__all__ = ["TrainOneStepCell", "WithEvalCell", "WithLossCell"]
