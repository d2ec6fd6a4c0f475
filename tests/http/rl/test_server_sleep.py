"""Sleep and memory routes of both dialects, in the orders in which trainers send them."""

import pytest
from rl_cases import answer_of, greedy, start_rl
from server_cases import SERVED

from dsv4.loader.write.synth import write_checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for name, seed in (("a", 1), ("b", 2)):
        write_checkpoint(folder / name, SERVED, experts="bf16", seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(served_params, root):
    server = start_rl(served_params, root)
    yield server
    server.wait_until_free()
    server.stop()


@pytest.fixture(scope="module")
def drawn(server, root):
    """What the server draws with each of the weights."""
    found = {}
    for name in "ba":
        answer_of(server.post("/update_weights", {"weight_dir": str(root / name)}))
        found[name] = greedy(server)
    assert found["a"] != found["b"]
    return found


def state(server):
    info = server.llm.info()
    return info["asleep"], info["is_paused"]


BOTH = ["kv_cache", "weights"]


@pytest.mark.parametrize(
    "steps",
    [
        [("/sleep?level=1", BOTH), ("/wake_up", [])],
        [("/sleep", BOTH), ("/wake_up?tags=weights", ["kv_cache"]), ("/wake_up?tags=kv_cache", [])],
        [("/sleep?level=1&mode=keep", BOTH), ("/sleep?level=0", BOTH), ("/wake_up", [])],
        [("/sleep?level=0", []), ("/wake_up", [])],
        [("/sleep?level=0&mode=wait", []), ("/wake_up?tags=scheduling", [])],
        [("/sleep?level=1", BOTH), ("/wake_up?tags=weights&tags=kv_cache&tags=scheduling", [])],
        [("/release_memory_occupation", BOTH), ("/resume_memory_occupation", [])],
        [("/release_memory_occupation {kv_cache}", ["kv_cache"]), ("/resume_memory_occupation {kv_cache}", [])],
        [
            ("/release_memory_occupation {kv_cache}", ["kv_cache"]), ("/release_memory_occupation {weights}", BOTH),
            ("/resume_memory_occupation {weights}", ["kv_cache"]), ("/release_memory_occupation {weights}", BOTH),
            ("/resume_memory_occupation {weights,kv_cache,cuda_graph}", []),
        ],
        [
            ("/release_memory_occupation {cuda_graph}", []), ("/resume_memory_occupation {cuda_graph}", []),
        ],
    ],
    ids=lambda steps: steps[0][0],
)  # fmt: skip
def test_there_and_back(server, drawn, steps):
    """Each step leaves asleep what it says; after the last the engine goes on, with the same bits."""
    for step, asleep in steps:
        path, _, tags = step.partition(" ")
        answer_of(server.post(path, {"tags": tags[1:-1].split(",")} if tags else {}))
        assert state(server)[0] == asleep
        assert answer_of(server.get("/is_sleeping")) == {"is_sleeping": bool(asleep)}
    assert state(server) == ([], False)
    assert greedy(server) == drawn["a"]


def test_waking_does_not_end_a_pause(server, drawn):
    for pause, resume in (("/pause", "/resume"), ("/pause_generation", "/continue_generation")):
        answer_of(server.post(pause))
        answer_of(server.post("/sleep"))
        answer_of(server.post("/wake_up"))
        assert state(server) == ([], True)
        answer_of(server.post(resume))
        assert greedy(server) == drawn["a"]


def test_what_sleeps_says_so(server, drawn):
    answer_of(server.post("/sleep"))
    for path in ("/sleep", "/release_memory_occupation", "/resume", "/wake_up?tags=scheduling"):
        refused = server.post(path)
        assert refused.status_code == 400, path
        assert "sleeps" in refused.json()["error"]["message"]
    assert answer_of(server.get("/health_generate")) == {"status": "ok"}
    answer_of(server.post("/wake_up"))
    assert state(server) == ([], False)
    assert greedy(server) == drawn["a"]


def test_the_order_of_slime(server, root, drawn):
    """offload; onload the weights, update them inside of a pause, and only then onload the cache and the graphs."""
    answer_of(server.get("/flush_cache"))
    answer_of(server.post("/release_memory_occupation", {}))
    answer_of(server.post("/resume_memory_occupation", {"tags": ["weights"]}))
    answer_of(server.post("/pause_generation", {}))
    answer_of(server.get("/flush_cache"))
    answer_of(server.post("/update_weights_from_disk", {"model_path": str(root / "b"), "weight_version": "7"}))
    answer_of(server.post("/continue_generation", {}))
    assert state(server) == (["kv_cache"], True)
    answer_of(server.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}))
    assert state(server) == ([], False)
    assert greedy(server) == drawn["b"]
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))


def test_the_order_of_a_trainer_that_drops_weights(server, root, drawn):
    """vLLM's level 2, as verl and others send it."""
    answer_of(server.post("/sleep?level=2"))
    answer_of(server.post("/wake_up?tags=weights"))
    refused = server.post("/finish_weight_update", {})
    assert refused.status_code == 409
    assert "dropped" in refused.json()["error"]["message"]
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "b")}))
    answer_of(server.post("/finish_weight_update", {}))
    answer_of(server.post("/wake_up?tags=kv_cache"))
    assert state(server) == ([], False)
    assert greedy(server) == drawn["b"]
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))
