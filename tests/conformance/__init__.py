"""What every engine promises, in tables of tests: a launch's file names its engines and imports them."""

import pytest

for _name in ("engine", "promises", "failures", "levels", "pytorch", "keras"):
    pytest.register_assert_rewrite(f"conformance.{_name}")
