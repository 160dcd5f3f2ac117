"""What every engine promises, as tables of tests that run over each of them.

A launch takes part by a file of its own, which names its engines and takes the tests over:

    from conformance.engine import *
    from conformance.engines_torch import ENGINES
    from conformance.promises import *

An engine is described in `engine`; what it has (levels, policies ...) decides which tests it takes part in.
"""

import pytest

for _name in ("engine", "promises", "failures", "levels", "pytorch", "keras"):
    pytest.register_assert_rewrite(f"conformance.{_name}")
