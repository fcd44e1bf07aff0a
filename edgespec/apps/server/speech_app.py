"""The application of a server that answers recordings alone."""

from __future__ import annotations

from fastapi import FastAPI

from edgespec.apps.server.api import add_reports, bare_app, complete, speech_facts
from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.audio_routes import OPENAI_NAME, SpeechService, add_audio
from edgespec.apps.server.metrics import Metrics
from edgespec.apps.server.response_schema import ModelList, SpeechModelEntry
from edgespec.platform.messages import MessageFn


def create_speech_app(service: SpeechService, *, metrics: Metrics | None, log: MessageFn) -> FastAPI:
    """Return the application for `service`; `log` takes a line for each failure that is not the client's."""
    app = bare_app("OpenAI's audio API over a local Whisper model.", log)
    add_reports(app, [service.worker], metrics)
    entry = speech_facts(service)

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the one model."""
        return ModelList(data=[entry])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> SpeechModelEntry:
        """Return the model of this name."""
        if name not in (service.name, OPENAI_NAME):
            raise ApiError(404, f"no model {name[:80]!r} here", param="model", code="model_not_found")
        return entry

    add_audio(app, service, log)
    return complete(app)
