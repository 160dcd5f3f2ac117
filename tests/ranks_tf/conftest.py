"""Tests of the TensorFlow front end that every rank of a launch runs alike; see tests/support/launched.py.

    horovodrun --gloo -np 2 python -m pytest tests/ranks_tf

TensorFlow takes seconds to start, so all of them share one launch.
"""

from __future__ import annotations

from support.launched_tensorflow import *  # noqa: F403
