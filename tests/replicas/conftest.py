"""A local Ray with two replicas of the miniature. Run by `make ray-test`, which installs Ray into an environment of its
own; left out everywhere else."""

import importlib.util
import socket

import pytest

if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def address():
    """Where the application listens."""
    import ray
    from ray import serve

    from dsv4.http.ray_app import Options, build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(Options(replicas=2, requests=4, context=2048, drain_seconds=5.0)))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
