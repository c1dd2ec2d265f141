"""The fixtures of the package's tests: `pythonpath` of the root's pyproject.toml names the folder of `support`."""

import pytest

pytest.register_assert_rewrite("support", "benches", "speeds")  # a failed check there shows its values, as in a test

from support.fixtures import *  # noqa: E402, F403 (rewritten from here on)
