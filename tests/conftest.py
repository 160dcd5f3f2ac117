"""Starts the framework of the tests that every rank of a launch runs alike; see tests/support/launched.py.

    horovodrun --gloo -np 2 python -m pytest tests/ranks/torch tests/loops

Frameworks take seconds to start, so all tests of a launch share one, and only one is started in it.
tf-keras (Keras 2) is chosen before TensorFlow is imported.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest

LAUNCHED = {"torch": "torch", "loops": "torch", "tensorflow": "tensorflow", "tf_keras": "tf_keras"}


def pytest_configure(config: pytest.Config) -> None:
    """Starts the framework of the folders that were asked for, with the fixtures and hooks of its tests."""
    folders = [parts for one in config.args if {"ranks", "loops"} & {*(parts := Path(one).parts)}]
    if not folders:
        return
    found = {LAUNCHED[part] for parts in folders for part in parts if part in LAUNCHED}
    if len(found) != 1:
        raise pytest.UsageError(
            "ask for tests of one framework: of tests/ranks/torch and tests/loops, for example"
        )
    [framework] = found
    if framework != "torch":
        # Keras imports scikit-learn for wrappers that nothing here uses: it takes each rank a second
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    if framework == "tf_keras":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    plugin = "torch" if framework == "torch" else "tensorflow"
    config.pluginmanager.register(importlib.import_module(f"support.launched_{plugin}"))
