"""Tests of the front ends that every rank of a launch runs alike; see tests/support/launched.py.

    horovodrun --gloo -np 2 python -m pytest tests/ranks/torch

Frameworks take seconds to start, so all tests of a folder share a launch, and only one is started in it.
tf-keras (Keras 2) is chosen before TensorFlow is imported.
"""

import importlib
import os
import sys
from pathlib import Path

import pytest

LAUNCHED = {"torch": "torch", "tensorflow": "tensorflow", "tf_keras": "tensorflow"}


def pytest_configure(config: pytest.Config) -> None:
    """Starts the framework of the folder that was asked for, with the fixtures and hooks of its tests."""
    folders = {part for argument in config.args for part in Path(argument).parts if part in LAUNCHED}
    if len(folders) != 1:
        raise pytest.UsageError(f"ask for tests of one of the folders {', '.join(LAUNCHED)}")
    [folder] = folders
    if LAUNCHED[folder] == "tensorflow":
        # Keras imports scikit-learn for wrappers that nothing here uses: it takes each rank a second
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    if folder == "tf_keras":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    config.pluginmanager.register(importlib.import_module(f"support.launched_{LAUNCHED[folder]}"))
