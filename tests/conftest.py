"""Settings shared by all tests."""

import importlib.util
import logging

import pytest
from hypothesis import HealthCheck, settings

import dsv4.request
from dsv4.http.telemetry.logs import log_config
from dsv4.testing import interpreter

# Without a GPU, kernels run in Triton's interpreter. It must be chosen before any test imports dsv4.ops.
interpreter.without_gpu()

# The same examples on every run: a red test stays red until the code changes. Speed is not what these tests judge, so
# there is no deadline. `--hypothesis-profile=explore` looks for new examples instead.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
# a first look, for `make quick`
settings.register_profile(
    "quick", deadline=None, derandomize=True, max_examples=10, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def _seeds_are_drawn_alike():
    """Requests without a seed get the same one in every run. `real_seeds` gives them others again."""
    dsv4.request.new_seed, kept = lambda: 0, dsv4.request.new_seed
    yield kept
    dsv4.request.new_seed = kept


@pytest.fixture(scope="module", autouse=True)
def _logging_is_left_as_it_was():
    """A server in this process sets up logging. Its handler holds the stream of a test that has ended."""
    loggers = [logging.getLogger(name) for name in log_config("text")["loggers"]]
    kept = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, kept, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def real_seeds(monkeypatch, _seeds_are_drawn_alike):
    monkeypatch.setattr(dsv4.request, "new_seed", _seeds_are_drawn_alike)


# The modules that take longest begin first, so that no worker runs one of them alone at the end (`make unit-test` keeps
# this order). The first compiles on all cores, the second mostly waits.
LONGEST = ("test_kernels_compile", "test_server_processes", "test_weight_update", "test_hub", "test_docs")


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_report_header():
    """Tests that cannot be collected here are named, not left out in silence."""
    if importlib.util.find_spec("starlette") is None:
        return "left out: the tests of the server, whose libraries (pip install -e '.[serve,dev]') are not installed"
    return None
