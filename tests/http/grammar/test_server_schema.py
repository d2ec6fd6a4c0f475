"""Requests made from the OpenAPI document, valid and broken: every answer is one the document describes, none a 500."""

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from server_cases import SERVED, make_llm, start_server

from dsv4.http.openapi import openapi_document
from dsv4.http.settings import ServerConfig

CHECKS = (not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance)


@pytest.fixture(scope="module")
def eager(served_params):
    """A server whose model ends as soon as it may, so that an example costs a step or two."""
    llm = make_llm(served_params, max_context_tokens=1024)
    logits = llm.model.logits

    def ending(streams):
        values = logits(streams).clone()
        values[:, SERVED.eos_token_id] += 1000
        assert torch.isfinite(values).all()
        return values

    llm.model.logits = ending
    with start_server(llm, max_output_tokens=24) as server:
        yield server


schema = schemathesis.openapi.from_dict(openapi_document(ServerConfig(name="small")))


@schema.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_described(case, eager):
    case.call_and_validate(base_url=eager.url, checks=CHECKS, timeout=60)
