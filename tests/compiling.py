"""`model.compile()` without a compiler: what Dynamo traces is noted and runs as it is, in a second."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

Graph = Callable[..., Any]


@contextmanager
def traced(run: Callable[[Graph], Graph] = lambda graph: graph) -> Generator[list[Graph]]:
    """Within, `model.compile()` runs `run(graph)` of each graph that is traced; yields these graphs."""
    graphs, compile = list[Graph](), nn.Module.compile

    def backend(graph: Any, inputs: Any) -> Graph:
        graphs.append(graph.forward)
        return run(graph.forward)

    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", lambda model: compile(model, backend=backend))
        yield graphs
    torch.compiler.reset()
