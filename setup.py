"""README as the package's description; all other metadata is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

# The project states no public address that relative links and pictures could lead to.
IMAGE = r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*"
LINK = r"\[([^\]]*)\]\((?!https?:)[^)]*\)"
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(LINK, r"\1", re.sub(IMAGE, "", readme)),
    long_description_content_type="text/markdown",
)
