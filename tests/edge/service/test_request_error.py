"""Errors of requests have a code."""

from __future__ import annotations

import pytest

from edgerun import errors
from edgerun.edge.service.request_error import ErrorCode, RequestError, describe


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ContextError("context full: 527 of 512 tokens", "send less"), "context_length_exceeded"),
        (errors.TemplateError("roles must alternate"), "template_error"),
        (errors.BusyError("64 requests wait"), "busy"),
        (errors.BundleError("no model"), "model_error"),
        (errors.CheckpointError("damaged"), "model_error"),
        (errors.HubError("not reached"), "model_error"),
        (errors.DeviceError("no provider"), "model_error"),
        (errors.InputError("top-k is -1"), "invalid_request"),
        (errors.EdgeError("infinite logits"), "server_error"),
    ],
)
def test_every_error_gets_its_code_and_keeps_its_message(error: errors.EdgeError, code: str) -> None:
    described = describe(error)
    assert (described.code, described.param) == (code, None)
    assert str(described) == str(error)
    assert described.__cause__ is error


def test_an_error_with_a_code_keeps_it() -> None:
    error = RequestError("no model of the name x", code=ErrorCode.MODEL_NOT_FOUND, param="model")
    assert describe(error) is error
