"""In front of PYTHONPATH (see `install.environment`): every Python process of the tree has the device."""

from tests.falsecuda.install import install

install()
