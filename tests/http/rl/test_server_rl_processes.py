"""`dsv4 serve --rl` as its user runs it: an engine process and two front ends."""

import shutil

import httpx
from rl_cases import PROMPT, answer_of
from server_cases import HEADERS
from server_processes import front_ends_of, holder

from dsv4 import LLM, SamplingParams


def test_two_front_ends_and_one_engine(start, dsv4, tmp_path):
    """Whichever front end takes the update, both answer with the new weights, and with those alone."""
    other = tmp_path / "weights" / "other"
    other.parent.mkdir()
    assert dsv4("synth", other, "--layers", "2", "--seed", "9").code == 0
    process, url, _ = start("--rl", "--rl-root", str(tmp_path / "weights"), "--front-ends", "2")
    pids = front_ends_of(process)
    clients = {}
    while len(clients) < 2:
        client = httpx.Client(base_url=url, headers=HEADERS, timeout=60)
        with client.stream("GET", "/weight_info") as response:
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            response.read()
            assert response.json() == {"weight_version": "0"}
            clients.setdefault(holder(url, port, pids), client)
    ask = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "temperature": 0, "logprobs": 0}}

    def drawn(client):
        answer = answer_of(client.post("/inference/v1/generate", json=ask))
        choice = answer["choices"][0]
        scores = [one["logprob"] for one in choice["logprobs"]["content"]]
        return answer["weight_version"], choice["token_ids"], scores

    one, two = clients.values()
    before = drawn(one)
    assert drawn(two) == before
    answer_of(one.post("/update_weights", json={"weight_dir": str(other), "weight_version": "next"}))
    after = drawn(two)
    assert drawn(one) == after
    wanted = LLM(other).generate(PROMPT, SamplingParams(max_tokens=8, temperature=0, logprobs=0))[0]
    assert after == ("next", list(wanted.token_ids), [token.logprob for token in wanted.logprobs])
    assert after[2] != before[2]
    shutil.rmtree(other)
    assert drawn(one) == after, "the folder is not needed any more"
