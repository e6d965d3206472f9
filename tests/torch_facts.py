"""What the running torch can do, for tests that need it of it."""

import pytest

from halfstep.torch_private import dynamo_traces_autocast

one_graph = pytest.mark.skipif(
    not dynamo_traces_autocast(), reason="compiled code breaks at each region: this Dynamo traces no autocast"
)
