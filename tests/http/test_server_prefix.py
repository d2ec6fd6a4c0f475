"""`dsv4 serve --cache-dir` as real processes: killed in the middle of traffic, two on one folder, a disk that is full.

Whatever happens to a server or its files, an answer has the tokens and log-probabilities of a cold run.
"""

import random
import re
import threading
import time

import httpx
import pytest
from server_cases import HEADERS

pytestmark = pytest.mark.slow

DRAW = random.Random(5)
SYSTEM = [DRAW.randrange(2, 200) for _ in range(300)]
CONVERSATIONS = [[*SYSTEM, *(DRAW.randrange(2, 200) for _ in range(60 * length))] for length in range(1, 5)]


def ask(url, token_ids, **fields):
    """Ids and log-probabilities of an answer, and how many tokens of the prompt were known."""
    body = {
        "model": "small", "prompt": token_ids, "max_tokens": 6, "temperature": 0.8, "seed": 11, "logprobs": 3,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip
    response = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()
    choice = answer["choices"][0]
    return (choice["token_ids"], choice["logprobs"]), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def hits(url, tier):
    found = re.search(
        rf'dsv4_prefix_hits_total{{.*tier="{tier}".*}} (\d+)', httpx.get(f"{url}/metrics", headers=HEADERS).text
    )
    return int(found[1])


@pytest.fixture
def cold(start):
    """The answers of a server that keeps nothing for later: each prompt has a salt of its own."""
    process, url, _ = start()
    answers = []
    for place, token_ids in enumerate(CONVERSATIONS):
        answer, num_cached = ask(url, token_ids, cache_salt=f"cold {place}")
        assert num_cached == 0
        answers.append(answer)
    process.kill()
    process.wait()
    return answers


class Traffic:
    """Clients that ask for ever longer conversations, until the server is gone."""

    def __init__(self, url):
        self.url = url
        self.num_answers = 0
        self.wrong = []
        self._threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(3)]
        for thread in self._threads:
            thread.start()

    def _client(self, seed):
        draw = random.Random(seed)
        try:
            while True:
                history = [*draw.choice(CONVERSATIONS), *(draw.randrange(2, 200) for _ in range(draw.randrange(200)))]
                ask(self.url, history, max_tokens=draw.randrange(1, 20))
                self.num_answers += 1
        except httpx.TransportError:
            return
        except AssertionError as error:
            self.wrong.append(str(error))

    def join(self):
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.wrong == []


def check_answers(url, cold):
    """All conversations, each with what it knew from before."""
    found = [ask(url, token_ids) for token_ids in CONVERSATIONS]
    assert [answer for answer, _ in found] == cold
    return [num_cached for _, num_cached in found]


def test_killed_in_the_middle_of_traffic(start, cold, tmp_path):
    folder = tmp_path / "prefixes"
    options = ("--cache-dir", str(folder), "--cache-host-gib", "0.05")
    process, url, log = start(*options)
    check_answers(url, cold)
    for seconds in (1.5, 0.3):
        traffic = Traffic(url)
        deadline = time.monotonic() + 60
        while traffic.num_answers < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(seconds)
        process.kill()
        assert process.wait() == -9
        traffic.join()
        assert "Traceback" not in log.read_text()
        files = list(folder.rglob("*.safetensors"))
        assert files, "something was written before the end"
        (files[0].parent / ".half.1.tmp").write_bytes(b"half a file")
        process, url, log = start(*options)
        known = check_answers(url, cold)
        assert known == [(len(ids) - 1) // 128 * 128 for ids in CONVERSATIONS]
        assert hits(url, "disk") >= 1
    # all files are damaged while nobody looks: those that are wanted are named, and the answers are those of before
    process.kill()
    process.wait()
    for file in folder.rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    process, url, log = start(*options)
    assert check_answers(url, cold)[0] == 0
    process.terminate()
    assert process.wait(60) == 0
    assert not list(folder.rglob("*.tmp"))
    assert "is damaged: its checksum does not match" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_two_servers_on_one_folder(start, cold, tmp_path):
    options = ("--cache-dir", str(tmp_path / "prefixes"), "--cache-host-gib", "0.05")
    first, first_url, _ = start(*options)
    assert check_answers(first_url, cold)[0] == 0
    first.terminate()
    assert first.wait(60) == 0
    first, first_url, first_log = start(*options)
    second, second_url, second_log = start(*options)
    assert "another process writes there" in second_log.read_text()
    assert "another process writes there" not in first_log.read_text()
    for url in (second_url, first_url):
        assert min(check_answers(url, cold)) > 0
        assert hits(url, "disk") >= 1
    first.kill()
    first.wait()
    check_answers(second_url, cold)
    second.terminate()
    assert second.wait(60) == 0
    assert "Traceback" not in second_log.read_text()
    _, third_url, third_log = start(*options)
    assert "only reads" not in third_log.read_text(), "the lock went with the process that held it"
    check_answers(third_url, cold)


def test_files_that_cannot_be_written(start, cold, tmp_path):
    """No file may be longer than a few KB, as on a disk that fills up while one is written."""
    folder = tmp_path / "prefixes"
    process, url, log = start("--cache-dir", str(folder), "--cache-host-gib", "0.05", file_bytes=30_000)
    check_answers(url, cold)
    assert min(check_answers(url, cold)) > 0
    process.terminate()
    assert process.wait(60) == 0
    assert "the prefix cache cannot write" in log.read_text()
    assert "File too large" in log.read_text()
    assert [file.name for file in folder.rglob("*") if file.is_file()] == ["lock"]
