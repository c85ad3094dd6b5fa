"""Version of the installed package, which pyproject.toml states."""

from importlib.metadata import version

__version__ = version("megatron-lowbit")
