"""TRL's `VLLMClient` against a live server with `--rl`: everything it does without NCCL."""

import math

import pytest
import requests
import torch
import trl.generation.vllm_client as trl_client
from server_cases import NAME, SERVED, make_llm, start_server

from dsv4 import LLM, SamplingParams
from dsv4.loader.write.synth import write_checkpoint

pytestmark = pytest.mark.client
PROMPTS = [[0, 261, 106], [0, 261, 107, 40]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    write_checkpoint(folder / "b", SERVED, experts="bf16", seed=2)
    return folder


@pytest.fixture(scope="module")
def server(params, root):
    with start_server(make_llm(params), rl=True, rl_roots=(str(root),)) as server:
        yield server


@pytest.fixture(scope="module")
def llm(params):
    """The same model in this process."""
    return make_llm(params)


@pytest.fixture(scope="module")
def client(server):
    """The client asks whether vLLM is installed, which only its weight transfer needs."""
    patch = pytest.MonkeyPatch()
    patch.setattr(trl_client, "is_vllm_available", lambda *versions, **more: True)
    patch.setattr(trl_client, "get_ip", lambda: "127.0.0.1", raising=False)
    yield trl_client.VLLMClient(base_url=server.url)
    patch.undo()


def test_it_finds_the_server(client):
    assert client.model == NAME
    assert client.get_world_size() == 1
    info = client.get_server_info()
    assert info["weight_transfer_config"] is None
    assert info["model_config"]["max_model_len"] == 2048


def test_generate(llm, client):
    """Eight answers to each of two prompts in one request, with the log-probabilities of the engine."""
    found = client.generate(PROMPTS, n=8, max_tokens=6, logprobs=2, generation_kwargs={"seed": 5})
    assert found["prompt_ids"] == PROMPTS
    params = [SamplingParams(max_tokens=6, seed=5 + place, logprobs=2) for place in range(16)]
    wanted = llm.generate([prompt for prompt in PROMPTS for _ in range(8)], params)
    assert found["completion_ids"] == [list(one.token_ids) for one in wanted]
    for logprobs, ids, one in zip(found["logprobs"], found["logprob_token_ids"], wanted, strict=True):
        for values, token_ids, drawn in zip(logprobs, ids, one.logprobs, strict=True):
            assert dict(zip(token_ids, values, strict=True)) == {**dict(drawn.top), drawn.token_id: drawn.logprob}


def test_generate_text_and_patterns(client):
    found = client.generate(["ab"], max_tokens=4, structured_outputs_regex="x{4}", logprobs=None)
    assert len(found["completion_ids"][0]) <= 5
    assert found["logprobs"] is None


def test_chat(client):
    """Tools are rendered, and not called: the caller reads them from the answer."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    found = client.chat(messages, n=2, max_tokens=4, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    assert len(found["prompt_ids"]) == 2
    assert len(found["completion_ids"]) == len(found["logprobs"]) == 4
    assert all(map(math.isfinite, (value for one in found["logprobs"] for row in one for value in row)))


def test_sequence_logprobs(llm, client):
    """A teacher's scores of given sequences, with the 100 likeliest tokens of each place."""
    found = client.get_sequence_logprobs(PROMPTS, [1, 2], top_logprobs=100)
    scored = llm.score(PROMPTS, num_top=100)
    for place, (start, one) in enumerate(zip([1, 2], scored, strict=True)):
        assert found["actual_token_ids"][place] == [[token] for token in PROMPTS[place][start:]]
        for actual, top, token in zip(
            found["actual_logprobs"][place], found["logprobs"][place], one[start:], strict=True
        ):
            assert top == [value for _, value in token.top]
            assert actual == [token.logprob]


def test_features(client):
    """Token ids through `/inference/v1/generate`, as prompts with images would go."""
    plain = client.generate(PROMPTS, max_tokens=4, generation_kwargs={"seed": 1})
    found = client.generate(PROMPTS[:1], features=[None], max_tokens=4, generation_kwargs={"seed": 1})
    assert found["completion_ids"] == plain["completion_ids"][:1]
    assert found["logprobs"] == plain["logprobs"][:1]


def test_new_weights_and_their_prefixes(server, client, root):
    """The frame of an update as TRL sends it; the tensors come from a folder, as NCCL needs a GPU."""
    with client.weight_update():
        requests.post(
            f"{server.url}/update_weights", json={"weight_dir": str(root / "b")}, timeout=60
        ).raise_for_status()
    client.reset_prefix_cache()
    found = client.generate(PROMPTS[:1], temperature=0, max_tokens=6)
    wanted = LLM(root / "b", numerics="exact", dtype=torch.float32).generate(
        PROMPTS[0], SamplingParams(max_tokens=6, temperature=0)
    )[0]  # fmt: skip
    assert found["completion_ids"] == [list(wanted.token_ids)]


def test_its_transfer_is_not_offered(client):
    """It joins by a pickle; the client says what the server lacks before it tries."""
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        client.init_communicator(0)
