"""How processes of tests begin in less time, by leaving out what no test of them is about."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HOROVODRUN = (sys.executable, str(Path(__file__).parents[2] / "scripts" / "lib" / "horovodrun.py"), "--gloo")


def without_dynamo() -> None:
    """Keeps PyTorch's optimizers from importing what compiles, of which nothing is used: two seconds."""
    stub: Any = ModuleType("torch._dynamo")
    stub.disable = lambda function, *_, **__: function
    stub.graph_break = stub.add = lambda *_: None
    sys.modules |= {"torch._dynamo": stub, "torch._dynamo.trace_rules": stub}
