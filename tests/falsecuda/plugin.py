"""`pytest -p tests.falsecuda.plugin`: the false CUDA device for a run, checked after each test.

`--default-device cuda` puts the tensors that a test makes on the device, as `torch.set_default_device` does,
also on the ranks that it starts, and skips the tests that `selection.CANNOT` names. Generators of the host
serve the device then: a test that makes one for its numbers says nothing of devices.
"""

import os
from collections.abc import Iterator

import pytest

from tests.falsecuda import control, selection
from tests.falsecuda.install import install

install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--default-device", default=None, help="where the tests' new tensors lie, e.g. cuda")


def pytest_configure(config: pytest.Config) -> None:
    if device := config.getoption("--default-device"):
        control.library().falsecuda_host_generators_too(1)
        os.environ["HALFSTEP_TESTS_DEVICE"] = device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--default-device"):
        for item in items:
            if reason := selection.CANNOT.get(item.nodeid) or selection.CANNOT.get(item.nodeid.split("[")[0]):
                item.add_marker(pytest.mark.skip(reason=reason))


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
