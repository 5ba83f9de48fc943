"""A small result with awkward tokens, for what is drawn of it."""

import pytest

from tests.show.made import made


@pytest.fixture(scope="session")
def small():
    """12 tokens, 13 layers, awkward tokens among them."""
    return made()
