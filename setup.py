"""Everything about the package stands in pyproject.toml."""

from setuptools import setup

setup()
