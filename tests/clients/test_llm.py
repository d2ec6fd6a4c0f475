"""`llm` on the command line."""

import os
import subprocess
import sys

import pytest
from server_cases import NAME

pytestmark = pytest.mark.client


def test_llm_on_the_command_line(talker, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {NAME}\n  api_base: {talker}/v1\n  api_key_name: none\n", encoding="utf-8"
    )
    (tmp_path / "keys.json").write_text('{"none": "unused"}', encoding="utf-8")
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    command = [sys.executable, "-m", "llm", "-m", "here"]
    for more in ([], ["--no-stream"], ["-c"]):
        ran = subprocess.run(
            [*command, *more, "Hello"], env=environment, capture_output=True, timeout=120, check=False
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr.decode()
        assert ran.stdout.decode().strip() == "Hello there."
