"""guidellm: its benchmark on the command line, over every interface it knows of ours."""

import json
import os
import re
import subprocess
import sys

import httpx
import pytest
from server_cases import NAME, SERVED

from dsv4.text.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.client
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 4, 40, 12


def total(url, name):
    """The sum of a metric of the server."""
    return sum(
        float(value) for value in re.findall(rf"^dsv4_{name}{{.*}} (\S+)$", httpx.get(f"{url}/metrics").text, re.M)
    )


@pytest.mark.parametrize(
    ("path", "num_markers"), [("/v1/chat/completions", 4), ("/v1/completions", 0), ("/v1/responses", 4)]
)
def test_its_numbers_are_the_servers(talker, tmp_path, path, num_markers):
    """Tokens to the last one; times within what the server says itself and what the client had to wait for."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(SERVED.vocab_size)), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_sum")
    before = [total(talker, name) for name in names]
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [
            sys.executable, "-m", "guidellm", "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={talker},request_format={path}",
            "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={tmp_path}",
            "--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_OUTPUT}",
            "--output", f"kind=json,path={report}",
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    assert benchmark["config"]["backend"]["model"] == NAME
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {
        "successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS,
    }  # fmt: skip
    shown = {name: metrics[name]["successful"] for name in metrics if "successful" in (metrics[name] or ())}
    prompt_tokens, output_tokens, first_seconds = (
        total(talker, name) - earlier for name, earlier in zip(names, before, strict=True)
    )
    assert shown["output_token_count"]["total_sum"] == output_tokens == NUM_REQUESTS * NUM_OUTPUT
    assert shown["prompt_token_count"]["total_sum"] == prompt_tokens == NUM_REQUESTS * (NUM_PROMPT + num_markers)
    assert shown["time_to_first_token_ms"]["total_sum"] >= 1000 * first_seconds > 0
    for request in benchmark["requests"]["successful"]:
        assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
        assert request["output"] == "Hello there."
        # one chunk a token: no role and no usage counts as the first one, or as any
        assert request["info"]["timings"]["token_iterations"] == NUM_OUTPUT
