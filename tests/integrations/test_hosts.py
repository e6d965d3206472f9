"""Of all adapters: no host is imported unasked, and one that is missing or too old is one sentence."""

import subprocess
import sys
from pathlib import Path

import pytest

import halfstep.integrations

FOLDER = Path(halfstep.integrations.__file__).parent
HOSTS = {"accelerate": "accelerate", "transformers": "accelerate", "lightning": "lightning",
         "fabric": "lightning", "torchtitan": "torchtitan"}  # fmt: skip
"""The adapters, and the package that each needs."""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_every_adapter_is_known_here_and_short():
    files = {file.stem: len(file.read_text().splitlines()) for file in FOLDER.glob("[a-z]*.py")}
    assert files.keys() == HOSTS.keys()
    assert max(files.values()) <= 170


def test_halfstep_imports_no_host():
    code = f"import sys, halfstep, halfstep.integrations; print({set(HOSTS) - {'fabric'}} & set(sys.modules))"
    assert run(code).stdout.strip() == "set()"


@pytest.mark.parametrize("adapter", HOSTS)
def test_a_missing_host_is_one_sentence(adapter):
    host = HOSTS[adapter]
    found = run(f"import sys; sys.modules[{host!r}] = None; import halfstep.integrations.{adapter}")
    said = found.stderr.splitlines()[-1]
    assert said.startswith(("ImportError:", "ModuleNotFoundError:"))
    assert f"this module needs {host}, pip install '{host}>=" in said


@pytest.mark.parametrize("adapter", HOSTS)
def test_a_host_that_is_too_old_is_one_sentence(adapter, tmp_path):
    """An older one: a package of this name that has none of the names that are imported."""
    host = HOSTS[adapter]
    (tmp_path / host).mkdir()
    (tmp_path / host / "__init__.py").touch()
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    said = run(f"{path}; import halfstep.integrations.{adapter}").stderr.splitlines()[-1]
    assert f"this module needs {host}, pip install '{host}>=" in said
