"""`pytest -p tests.falsecuda.plugin`: the false CUDA device for a run, checked after each test.

`--default-device cuda` puts the tensors that a test makes on the device, as `torch.set_default_device` does.
"""

from collections.abc import Iterator

import pytest

from tests.falsecuda import control
from tests.falsecuda.install import install

install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--default-device", default=None, help="where the tests' new tensors lie, e.g. cuda")


@pytest.fixture(autouse=True)
def _device_left_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    import torch

    device = request.config.getoption("--default-device")
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)
    control.finish()
    control.take("syncs"), control.take("event waits")
    assert control.take("faults") == []
