"""Two ranks that do not do the same: no case hangs, is silent, or ends in an error that names nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAIRS = Path(__file__).parents[1] / "support" / "pairs.py"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_each_disagreement_is_named_on_every_rank_that_can_know(kind):
    run = [sys.executable, str(PAIRS), kind]
    found = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ}).stdout
    cases = [json.loads(line) for line in found.splitlines()]
    assert cases
    wrong = [case for case in cases if case["verdict"] in ("hung", "silent", "bare")]
    assert not wrong, "\n".join(f"{one['name']}: {one['verdict']}, {one['ends']}" for one in wrong)
