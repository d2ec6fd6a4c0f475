"""instructor: three ways to ask for a model of pydantic's, and a second try."""

import instructor
import openai
import pytest
from client_cases import Place
from pydantic import field_validator
from server_cases import NAME

pytestmark = pytest.mark.client


MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON]


def client_of(url, mode):
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=120), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_instructor(says, mode):
    place = client_of(says('{"city": "Oslo"}'), mode).chat.completions.create(
        model=NAME,
        response_model=Place,
        max_retries=0,
        max_tokens=400,
        messages=[{"role": "user", "content": "Where?"}],
    )
    assert place.city is not None


@pytest.mark.parametrize("mode", MODES)
def test_instructor_asks_again(says, mode):
    """An answer that its validator refuses goes back with what is wrong, and the next one is taken."""
    refused, sent = [], []

    class Checked(Place):
        @field_validator("city")
        @classmethod
        def not_at_once(cls, city):
            if not refused:
                refused.append(city)
                raise ValueError("think again")
            return city

    client = client_of(says('{"city": "Oslo"}'), mode)
    client.on("completion:kwargs", lambda *_, **fields: sent.append(fields["messages"]))
    place = client.chat.completions.create(
        model=NAME, response_model=Checked, max_retries=2, max_tokens=400,
        messages=[{"role": "user", "content": "Where?"}],
    )  # fmt: skip
    assert place.city in ("Oslo", "Rome")
    assert len(refused) == 1
    assert "think again" in str(sent[-1])
