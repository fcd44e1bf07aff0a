"""What a client is told of the errors that engine and worker raise."""

from __future__ import annotations

import pytest

from edgespec.apps.server import api_errors
from edgespec.apps.server.request_schema import ChatRequest
from edgespec.errors import EdgespecError, UsageError


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (
            UsageError("no draft model was loaded", field="drafter", value="model"),
            "speculative.drafter model: no draft model was loaded",
            "speculative",
        ),
        (
            UsageError("must be 1 or more", field="n_predict", value=0),
            "max_tokens 0: must be 1 or more",
            "max_tokens",
        ),
        (
            EdgespecError("nothing matches", field="response_format"),
            "response_format: nothing matches",
            "response_format",
        ),
        (
            UsageError("no such token", field="logit_bias", value="9=1"),
            "logit_bias 9=1: no such token",
            "logit_bias",
        ),
    ],
)
def test_a_field_that_the_client_set_is_its_mistake(error, message, param):
    logged: list[str] = []
    fault = api_errors.engine_error(error, logged.append)
    assert (fault.status, str(fault), fault.param) == (400, message, param)
    assert not logged


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
