"""`pytest -p tests.falsecuda.plugin`: the false CUDA device for a run, checked after each test.

`--default-device cuda` puts the tensors that a test makes on the device, as `torch.set_default_device` does,
also on the ranks that it starts, and goes by `selection`: what cannot run there is skipped with its reason.
Generators of the host serve the device then: a test that makes one for its numbers says nothing of devices.
"""

import os

import pytest

from tests.falsecuda import control, pages, selection
from tests.falsecuda.install import TESTS_DEVICE, install

install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--default-device", default=None, help="where the tests' new tensors lie, e.g. cuda")


def pytest_configure(config: pytest.Config) -> None:
    if device := config.getoption("--default-device"):
        control.library().falsecuda_host_generators_too(1)
        os.environ[TESTS_DEVICE] = device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--default-device") is None:
        return
    for item in items:
        names = (item.nodeid, item.nodeid.split("[")[0], item.nodeid.split("::")[0])
        if reason := next((selection.CANNOT[name] for name in names if name in selection.CANNOT), ""):
            item.add_marker(pytest.mark.skip(reason=reason))
        if example := getattr(item, "example", None):
            pages.move_to_gpu(example)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Before test files are imported, which make tensors too."""
    import torch

    torch.set_default_device(session.config.getoption("--default-device"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let everything arrive: pinned memory that was written under a copy fails the test."""
    control.finish()
    control.take("syncs"), control.take("event waits")
    assert control.take("faults") == []
