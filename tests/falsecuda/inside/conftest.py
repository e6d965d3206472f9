"""These tests run on the device alone: `python -m tests.falsecuda -m pytest tests/falsecuda/inside`."""

from tests import falsecuda

collect_ignore_glob = [] if falsecuda.installed() else ["test_*.py"]
