"""The OpenAPI description says what the service does: what is generated from it is answered as described."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from imprint.serve.access.roles import Role
from tests.serve.hostile.target import Target

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES = 200
HOST = {"Host": "127.0.0.1"}


KNOWN = {
    "sequence": 1,
    "source": "publisher-0",
    "period": "2026-10",
    "name": "publisher-0.csv",
    "policy": "house rules@1",
}


@pytest.mark.system
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("role", ["admin", "publisher", None])
def test_what_is_generated_from_the_description_is_answered_as_described(
    target: Target, mode: GenerationMode, role: Role | None
) -> None:
    schema = openapi.from_asgi("/v1/openapi.json", target.app, headers=HOST)
    key = {} if role is None else {"Authorization": f"Bearer {target.held.keys[role]}"}
    operations: list[Any] = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) >= 15
    drawn = st.sampled_from(operations).flatmap(lambda operation: operation.as_strategy(generation_mode=mode))

    @given(drawn, st.sets(st.sampled_from(sorted(KNOWN))))
    @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def check(case: Case[Any], known: set[str]) -> None:
        for values in (case.path_parameters, case.query):
            values.update({name: KNOWN[name] for name in known & values.keys()})
        case.call_and_validate(headers=HOST | key, checks=CHECKS)

    with TestClient(target.app, base_url="http://127.0.0.1"):
        check()


def test_the_description_names_the_form_of_queries_and_the_key(target: Target) -> None:
    client = TestClient(target.app, base_url="http://127.0.0.1")
    found = client.get("/v1/openapi.json").json()
    assert found["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    needing = {
        path
        for path, methods in found["paths"].items()
        for about in methods.values()
        if {"HTTPBearer": []} in about.get("security", [])
    }
    assert needing == {path for path in found["paths"] if path.startswith("/v1/")}
    assert "values" in json.dumps(found["components"]["schemas"]["AttributionRequest"])
