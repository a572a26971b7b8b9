"""What tests share; no test reads or fills the user's cache."""

import signal

import pytest


def pytest_configure(config):
    """Small files in released formats have fewer items than was published, on purpose."""
    config.addinivalue_line("filterwarnings", "ignore:.* items were read from .*published")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("COMPVL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def listen_to_interrupts():
    """Let SIGINT stop a child process: a shell starts its background jobs with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
