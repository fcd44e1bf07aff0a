"""What a client is told of the errors that engine and worker raise."""

from __future__ import annotations

import pytest

from edgespec.apps.server import api_errors
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.errors import EdgespecError, UsageError


@pytest.mark.parametrize(
    "error",
    [
        UsageError("must be 1 or more", field="n_ctx", value=0),
        EdgespecError("/home/me/model.gguf: damaged"),
        UsageError("--logit-bias 9=1: no field is named"),
        ValueError("of us"),
    ],
)
def test_anything_else_is_told_to_the_log_alone(error):
    logged: list[str] = []
    fault = api_errors.engine_error(error, logged.append)
    assert fault.status == 500
    assert str(error) not in str(fault)
    assert str(error) in logged[0]


def test_every_field_is_one_of_a_request():
    for name in api_errors._FIELDS.values():
        assert name.partition(".")[0] in ChatRequest.model_fields
