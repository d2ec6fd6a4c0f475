"""Routes for trainers: what they do to a live engine, and to whom they are closed."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rl_cases import PROMPT, another_front_end, answer_of, differing, greedy, start_rl
from safetensors.torch import load_file
from server_cases import HEADERS, SERVED, TOKENIZER, make_llm, start_server
from server_processes import wait_for
from shared_cases import FakeDriver

from dsv4 import LLM
from dsv4.engine.weights.group import WeightGroup
from dsv4.engine.weights.shared import share
from dsv4.http.apis.rl.routes import CALLS, PATHS
from dsv4.loader.write.synth import write_checkpoint
from dsv4.request import SamplingParams

SEQUENCES = json.loads((Path(__file__).parents[2] / "data" / "rl_sequences.json").read_text(encoding="utf-8"))
METHODS = [(method, call.path) for call in CALLS for method in call.methods]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Checkpoints `a` and `b` of the served model, one of another, and a link that leads out."""
    folder, outside = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("elsewhere")
    for name, seed in (("a", 1), ("b", 2)):
        write_checkpoint(folder / name, SERVED, experts="bf16", seed=seed)
    write_checkpoint(outside / "c", SERVED, experts="bf16", seed=3)
    (folder / "link").symlink_to(outside / "c")
    (folder / "pickled").mkdir()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    return folder


@pytest.fixture(scope="module")
def server(served_params, root):
    server = start_rl(served_params, root)
    yield server
    server.wait_until_free()
    server.stop()


def fresh(folder):
    """What an engine that starts with this folder draws."""
    llm = LLM(folder, numerics="exact")
    completion = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, logprobs=0))[0]
    return list(completion.token_ids), [one.logprob for one in completion.logprobs]


# ---- weights ----


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk"])
def test_new_weights_are_those_of_a_fresh_engine(server, root, path):
    field = {"/update_weights": "weight_dir"}.get(path, "model_path")
    fingerprints, drawn = [], {}
    for name in ("a", "b", "a"):
        answer_of(server.post(path, {field: str(root / name), "weight_version": f"{name}!"}))
        found = greedy(server)
        assert drawn.setdefault(name, found) == found
        assert answer_of(server.get("/weight_info")) == {"weight_version": f"{name}!"}
        fingerprints.append(answer_of(server.chat())["system_fingerprint"])
    assert drawn["a"] != drawn["b"]
    assert drawn == {name: fresh(root / name) for name in drawn}
    assert fingerprints[0] != fingerprints[1], "answers of other weights have the same fingerprint"


GROUP = {
    "sglang": ("/init_weights_update_group", "/update_weights_from_distributed", lambda fields: fields, ("dtypes",)),
    "vllm": (
        "/init_weight_transfer_engine", "/update_weights", lambda fields: {"update_info": fields}, ("dtype_names",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dialect", GROUP)
def test_new_weights_of_a_trainers_group(server, root, dialect):
    """The trainer's half runs in a thread: it waits for the engine to join, then sends in two pieces."""
    join, update, body, (dtypes,) = GROUP[dialect]
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    where = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as trainer:
        making = trainer.submit(WeightGroup, "127.0.0.1", port, rank=0, world_size=2)
        answer_of(server.post(join, where if dialect == "sglang" else {"init_info": {**where, "packed": False}}))
        tensors = [*load_file(next((root / "b").glob("*.safetensors"))).items()]
        answer_of(server.post("/pause?mode=keep"))
        for part in (tensors[:9], tensors[9:]):
            sending = trainer.submit(making.result().send, part)
            fields = {
                "names": [name for name, _ in part], dtypes: [str(one.dtype) for _, one in part],
                "shapes": [list(one.shape) for _, one in part],
            }  # fmt: skip
            answer = answer_of(server.post(update, body(fields)))
            sending.result(30)
            assert answer["is_whole"] == (part[-1] is tensors[-1])
            went_on = server.post("/resume")
            assert went_on.status_code == (200 if answer["is_whole"] else 409), went_on.text
            finished = server.post("/finish_weight_update", {"weight_version": "whole"})
            if not answer["is_whole"]:
                assert finished.status_code == 409
                assert "come in part" in finished.json()["error"]["message"]
    assert answer_of(server.get("/weight_info")) == {"weight_version": "whole"}
    assert greedy(server) == fresh(root / "b")


@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_tensor"])
def test_new_weights_of_a_shared_gpu(server, root, path, monkeypatch):
    """In two calls; the trainer overwrites what it sent after each. What cannot be opened changes nothing."""
    driver = FakeDriver(monkeypatch)
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))
    tensors = [*load_file(next((root / "b").glob("*.safetensors"))).items()]
    dead = {"shared_tensors": [{**one, "device": "GPU-7"} for one in share(tensors)]}
    refused = server.post(path, dead)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert "cannot be opened" in refused.json()["error"]["message"]
    assert greedy(server) == fresh(root / "a")
    for part in (tensors[:9], tensors[9:]):
        given, memory = driver.trainers(dict(part))
        answer = answer_of(server.post(path, {"shared_tensors": share(given), "weight_version": "shared"}))
        memory.fill_(0xFF)
        assert answer["is_whole"] == (part[-1] is tensors[-1])
    assert answer["weight_version"] == "shared"
    assert driver.num_open == 0
    assert greedy(server) == fresh(root / "b")


def test_prefixes_of_old_weights_are_not_used(server, root):
    prompt = [0, *range(10, 210)]
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))
    greedy(server, prompt)
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "b")}))
    after = greedy(server, prompt)
    answer_of(server.post("/reset_prefix_cache"))
    assert greedy(server, prompt) == after


@pytest.mark.parametrize("name", ["missing", "pickled"])
def test_a_folder_without_weights_changes_nothing(server, root, name):
    before = greedy(server)
    refused = server.post("/update_weights", {"weight_dir": str(root / name)})
    assert refused.status_code == 400, refused.text
    assert name in refused.json()["error"]["message"]
    assert greedy(server) == before
    assert answer_of(server.get("/is_paused")) == {"is_paused": False}


def test_a_version_can_be_named_later(server):
    assert answer_of(server.post("/finish_weight_update", {"weight_version": "x"})) == {"weight_version": "x"}
    assert answer_of(server.post("/update_weight_version", {"new_version": "y"})) == {"weight_version": "y"}
    assert answer_of(server.post("/generate", {"input_ids": PROMPT}))["meta_info"]["weight_version"] == "y"


def test_any_front_end_drives_the_engine(server, root):
    client, stop = another_front_end(server, rl_roots=(str(root),))
    answer_of(client.post("/update_weights", json={"weight_dir": str(root / "b"), "weight_version": "two"}))
    assert answer_of(server.get("/get_weight_version")) == {"weight_version": "two"}
    prints = [
        answer_of(one.get("/v1/models") and one.post("/v1/completions", json={"prompt": "x"}))
        for one in (client, server.client)
    ]
    assert prints[0]["system_fingerprint"] == prints[1]["system_fingerprint"]
    answer_of(client.post("/pause"))
    assert answer_of(server.get("/is_paused")) == {"is_paused": True}
    answer_of(server.post("/resume"))
    stop()


# ---- pause ----


class Asked(threading.Thread):
    """A request that another thread waits for."""

    def __init__(self, server, path, body):
        super().__init__(daemon=True)
        self._ask = lambda: server.post(path, body)
        self.answer = None
        self.start()

    def run(self):
        self.answer = self._ask()

    def result(self):
        self.join(30)
        return answer_of(self.answer)


def long_rollout(server, request_id="long", num_tokens=400):
    body = {
        "token_ids": PROMPT, "request_id": request_id,
        "sampling_params": {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 0, "seed": 1},
    }  # fmt: skip
    before = server.llm.engine.stats().num_output_tokens
    asked = Asked(server, "/inference/v1/generate", body)
    wait_for(lambda: server.llm.engine.stats().num_output_tokens > before + 3)
    return asked


def test_what_is_kept_goes_on_with_the_new_weights(server, root):
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a"), "weight_version": "old"}))
    asked = long_rollout(server)
    answer_of(server.post("/pause?mode=keep&clear_cache=false"))
    num_steps = server.llm.engine.stats().num_steps
    waiting = Asked(server, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "b"), "weight_version": "new"}))
    time.sleep(0.1)
    assert server.llm.engine.stats().num_steps == num_steps, "a paused engine made a step"
    assert asked.is_alive()
    assert waiting.is_alive()
    answer_of(server.post("/resume"))
    choice = asked.result()["choices"][0]
    (first, old), (second, new) = choice["weight_versions"]
    assert (first, old, new) == (0, "old", "new")
    assert 0 < second < len(choice["token_ids"]) == 400
    assert waiting.result()["meta_info"]["weight_version"] == "new"


@pytest.mark.parametrize("pause", ["/pause?mode=abort", "/pause_generation"])
def test_aborted_rollouts_keep_what_they_have(server, pause):
    asked = long_rollout(server, num_tokens=1500)
    answer_of(server.post(pause))
    choice = asked.result()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["content"]) < 1500
    answer_of(server.post("/resume"))


@pytest.mark.parametrize(
    ("path", "body"), [("/abort_requests", {"request_ids": ["one"]}), ("/abort_request", {"rid": "one"})]
)
def test_one_request_is_aborted_by_its_id(server, path, body):
    client, stop = another_front_end(server)  # not the one that has it
    one, two = long_rollout(server, "one", 1500), long_rollout(server, "two", 40)
    answer_of(client.post(path, json=body))
    assert one.result()["choices"][0]["finish_reason"] == "abort"
    assert two.result()["choices"][0]["finish_reason"] == "length"
    stop()


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}, "abort"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}, "abort"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}, "abort"),
    ],
)
def test_every_interface_says_that_it_was_aborted(server, path, body, found):
    before = server.llm.engine.stats().num_output_tokens
    asked = Asked(server, path, body)
    wait_for(lambda: server.llm.engine.stats().num_output_tokens > before + 3)
    answer_of(server.post("/abort_requests"))
    answer = asked.result()
    reason = (
        answer["meta_info"]["finish_reason"]["type"] if "meta_info" in answer else answer["choices"][0]["finish_reason"]
    )
    assert reason == found


# ---- rollouts ----


def test_rollouts_of_both_dialects_are_those_of_the_engine(server, root):
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))
    llm = LLM(root / "a", numerics="exact")
    params = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=0)
    wanted = llm.generate(PROMPT, params)[0]
    scores = [one.logprob for one in wanted.logprobs]
    fields = {"max_tokens": 6, "seed": 3, "logprobs": 2, "prompt_logprobs": 0}
    choice = answer_of(server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": fields}))[
        "choices"
    ][0]
    assert choice["token_ids"] == list(wanted.token_ids)
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == scores
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in wanted.token_ids]
    body = {
        "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "sampling_seed": 3}, "return_logprob": True,
        "top_logprobs_num": 2, "logprob_start_len": 0,
    }  # fmt: skip
    answer = answer_of(server.post("/generate", body))
    meta = answer["meta_info"]
    assert answer["output_ids"] == list(wanted.token_ids)
    assert answer["text"] == TOKENIZER.decode(wanted.token_ids)
    assert [one[:2] for one in meta["output_token_logprobs"]] == [
        [a, b] for a, b in zip(scores, wanted.token_ids, strict=True)
    ]
    assert [[one[1] for one in top] for top in meta["output_top_logprobs"]] == [
        [i for i, _ in one.top] for one in wanted.logprobs
    ]
    assert [one[0] for one in meta["input_token_logprobs"][1:]] == [one.logprob for one in wanted.prompt_logprobs[1:]]


def test_replay_data_of_both_dialects_are_those_of_the_engine(server, root):
    """Compact in vLLM's route; in SGLang's as its clients read them: flat int32."""
    answer_of(server.post("/update_weights", {"weight_dir": str(root / "a")}))
    llm = LLM(root / "a", numerics="exact")
    for start in (0, 2):
        params = SamplingParams(max_tokens=6, seed=3, routed_experts=True, indexer_topk=True, replay_start=start)
        wanted = llm.generate(PROMPT, params)[0]
        asked = {
            "return_routed_experts": True, "return_indexer_topk": True, "routed_experts_start_len": start,
        }  # fmt: skip
        fields = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "seed": 3}}
        choice = answer_of(server.post("/inference/v1/generate", {**fields, **asked}))["choices"][0]
        fields = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "sampling_seed": 3}}
        meta = answer_of(server.post("/generate", {**fields, **asked}))["meta_info"]
        for name in ("routed_experts", "indexer_topk"):
            rows, compact = getattr(wanted, name), choice[name]
            assert len(rows) == len(PROMPT) + 6 - 1 - start
            assert (compact["shape"], compact["dtype"], compact["start"]) == ([*rows.shape], str(rows.dtype), start)
            data = np.frombuffer(base64.b64decode(compact["data"]), dtype=compact["dtype"]).reshape(compact["shape"])
            assert np.array_equal(data, rows)
            flat = np.frombuffer(base64.b64decode(meta[name]), dtype=np.int32)
            assert np.array_equal(flat.reshape(meta[f"{name}_shape"]), rows)
        assert meta["routed_experts_start_len"] == start
    plain = answer_of(server.post("/inference/v1/generate", {"token_ids": PROMPT}))["choices"][0]
    assert not {"routed_experts", "indexer_topk"} & set(plain)


def test_a_streamed_rollout_is_the_whole_one(server):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 0, "n": 2}}
    whole = answer_of(server.post("/inference/v1/generate", body))["choices"]
    streamed = [[], []]
    lines = server.post("/inference/v1/generate", {**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
    assert streamed == [choice["token_ids"] for choice in whole]


def test_a_rendered_conversation_gives_the_chat_answer(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
    rendered = answer_of(server.post("/v1/chat/completions/render", body))
    fields = {name: rendered[name] for name in ("token_ids", "sampling_params")}
    choice = answer_of(server.post("/inference/v1/generate", fields))["choices"][0]
    chat = answer_of(server.post("/v1/chat/completions", {**body, "return_token_ids": True}))
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert choice["token_ids"] == chat["choices"][0]["token_ids"]


# ---- trainers ----


@pytest.mark.parametrize("trainer", SEQUENCES)
def test_the_requests_of_a_trainer(served_params, root, trainer):
    """As its documentation has them, one after the other, on a server of their own."""
    server = start_rl(served_params, root)
    for one in SEQUENCES[trainer]:
        method, path = one["send"].split()
        body = json.loads(json.dumps(one.get("body")).replace("{folder}", str(root / "b")))
        response = (
            server.get(path) if method == "GET" else server.post(path, body) if body is not None else server.post(path)
        )
        assert differing(one["expect"], answer_of(response)) == [], one["send"]
    server.stop()


# ---- closed doors ----


def test_absent_unless_asked_for(served_params):
    server = start_server(make_llm(served_params), api_key="k")
    found = {
        (path, method): server.client.request(method, path, headers=HEADERS).status_code
        for method in ("GET", "POST")
        for path in PATHS
    }
    assert set(found.values()) == {404}
    server.stop()


def test_closed_without_the_key(served_params, root):
    server = start_rl(served_params, root, api_key="k")
    rollouts = [("POST", path) for path in PATHS if path not in {path for _, path in METHODS}]
    assert len(rollouts) == 3
    for method, path in (*METHODS, *rollouts):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert server.client.request(method, path, headers=headers).status_code == 401, path
    with_key = {"authorization": "Bearer k"}
    assert answer_of(server.client.get("/is_paused", headers=with_key)) == {"is_paused": False}
    assert server.client.post("/pause", headers=with_key).status_code == 200
    server.stop()


@pytest.mark.parametrize(
    "way", ["/etc", "{root}/..", "{root}/link", "{root}/../elsewhere0/c", "relative", "{root}/a/../../x"]
)
@pytest.mark.parametrize("path", ["/update_weights", "/update_weights_from_disk"])
def test_no_folder_outside_is_read(server, root, path, way):
    before = greedy(server)
    field = {"/update_weights": "weight_dir"}.get(path, "model_path")
    refused = server.post(path, {field: way.replace("{root}", str(root))})
    assert refused.status_code == 403, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("folder_not_allowed", field)
    assert str(root) in error["message"]
    assert greedy(server) == before


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_no_file_outside_is_read(server, root, file):
    """A folder inside whose index names a neighbour outside, or whose files are links that lead out."""
    before = greedy(server)
    outside = (root / "link").resolve()
    (stolen := root / f"stolen {file}").mkdir()
    for name in ("model.safetensors", "config.json"):
        source = next(outside.glob("*.safetensors")) if name == "model.safetensors" else outside / name
        (stolen / name).symlink_to(source) if name == file else shutil.copyfile(source, stolen / name)
    where = root
    if file.endswith("index.json"):
        where = stolen  # the root itself: what lies beside it is outside
        (stolen / "model.safetensors").unlink()
        names = load_file(next(outside.glob("*.safetensors")))
        shutil.copytree(outside, root / "beside")
        weight_map = {name: f"../beside/{next(outside.glob('*.safetensors')).name}" for name in names}
        (stolen / file).write_text(json.dumps({"weight_map": weight_map}))
    client, stop = another_front_end(server, rl_roots=(str(where),))
    refused = client.post("/update_weights", json={"weight_dir": str(stolen)})
    stop()
    assert refused.status_code == 403, refused.text
    assert refused.json()["error"]["code"] == "folder_not_allowed"
    assert greedy(server) == before


def test_without_a_root_no_folder_is_read(served_params, root):
    server = start_rl(served_params)
    refused = server.post("/update_weights", {"weight_dir": str(root / "a")})
    assert refused.status_code == 403
    assert "--rl-root" in refused.json()["error"]["message"]
    server.stop()


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}])
def test_no_web_page_drives_the_engine(server, headers):
    """A browser sends a POST without a body to any address, unasked; its page cannot read the answer."""
    for method, path in METHODS:
        assert server.client.request(method, path, headers=headers).status_code == 403, path
    assert server.post("/pause", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert answer_of(server.get("/is_paused")) == {"is_paused": False}


BAD = [
    ("/pause?mode=now", None, "mode"),
    ("/pause?mode=keep&mode=wait", None, "mode"),
    ("/pause?mode=keep", {"mode": "keep"}, "mode"),
    ("/pause", {"modus": "keep"}, "modus"),
    ("/sleep?level=3", None, "level"),
    ("/wake_up?tags=brain", None, "tags[0]"),
    ("/update_weights", {}, "update_info"),
    ("/update_weights", {"weight_dir": 3}, "weight_dir"),
    ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": [[1]]}}, "update_info.names"),
    ("/update_weights", {"weight_dir": "a", "shared_tensors": []}, "shared_tensors"),
    ("/update_weights", {"shared_tensors": [{"name": "a"}]}, "shared_tensors[0].dtype"),
    ("/update_weight_version", {}, "weight_version"),
    ("/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}, "init_info.master_port"),
    (
        "/init_weight_transfer_engine",
        {"init_info": {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2}},
        "init_info.packed",
    ),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": [[1]]}, "names"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors"),
    ("/abort_request", {}, "rid"),
    ("/generate", {"text": "x", "input_ids": [1]}, "input_ids"),
    ("/generate", {"input_ids": [1], "stream": True}, "stream"),
    ("/generate", {"input_ids": [1], "sampling_params": {"lora_path": "x"}}, "sampling_params.lora_path"),
    ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": "x"}}, "sampling_params.max_tokens"),
    ("/generate", {"input_ids": [9999]}, "prompt"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [1], "stream": True, "return_routed_experts": True}, "stream"),
    ("/inference/v1/generate", {"token_ids": [1], "routed_experts_start_len": 2}, "routed_experts_start_len"),
    (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"temperature": 9}},
        "sampling_params.temperature",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
def test_bad_bodies_are_named(server, path, body, field):
    refused = server.post(path, body) if body is not None else server.post(path)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == field, error
    assert answer_of(server.get("/is_paused")) == {"is_paused": False}


def test_the_document_has_every_route(server, live):
    paths = server.get("/openapi.json").json()["paths"]
    assert {path: set(paths[path]) for _, path in METHODS} == {
        call.path: {method.lower() for method in call.methods} for call in CALLS
    }
    assert set(PATHS) <= set(paths)
    assert not set(PATHS) & set(live.get("/openapi.json").json()["paths"])
