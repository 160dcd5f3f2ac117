"""What every engine promises, as one table of tests that runs over each of them.

A launch takes part by a file of its own, which names its engines and takes the tests over:

    from conformance.engines_torch import ENGINES
    from conformance.promises import *

An engine is described in `engine`; what it has (levels, policies ...) decides which tests it takes part in.
"""

import pytest

pytest.register_assert_rewrite("conformance.engine", "conformance.promises")
