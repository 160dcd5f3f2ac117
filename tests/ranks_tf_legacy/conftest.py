"""Tests of tf-keras (Keras 2), which needs a process of its own; see tests/support/launched.py.

TF_USE_LEGACY_KERAS=1 horovodrun --gloo -np 2 python -m pytest tests/ranks_tf_legacy
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

from support.launched_tensorflow import *  # noqa: F403
