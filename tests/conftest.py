"""No test reads or fills the user's cache."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("COMPVL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
