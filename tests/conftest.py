"""The fixtures of `support.fixtures`, and what it does with the tests that pytest has found."""

import pytest

pytest.register_assert_rewrite("support")  # a failed check there shows its values, as in a test

from support.fixtures import *  # noqa: E402, F403 (rewritten from here on)
