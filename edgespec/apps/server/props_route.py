"""llama-server's route /props: what its clients ask of a server before they use it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from edgespec.apps.server.request_reader import Service
from edgespec.apps.server.tokenizer_routes import token_name
from edgespec.apps.server.worker import Worker
from edgespec.decoding.sampling import SAMPLERS, SAMPLING, SamplingParams
from edgespec.engine.engine import Engine

_RANDOM_SEED = (1 << 32) - 1  # llama-server's word for "another each time"


class GenerationSettings(BaseModel):
    """Defaults of a request."""

    n_ctx: int = Field(description="Most tokens of prompt and answer.")
    speculative: bool
    is_processing: bool
    params: dict[str, Any]


class Modalities(BaseModel):
    """Kinds of content besides text that a conversation may hold."""

    vision: bool = False
    audio: bool = False


class ServerProps(BaseModel):
    """The answer of /props."""

    default_generation_settings: GenerationSettings
    total_slots: int = Field(description="Most answers at once.")
    model_alias: str
    model_path: str = Field(description="The file's name, without the folders of this machine.")
    chat_template: str
    chat_template_caps: dict[str, bool]
    modalities: Modalities
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


def add_props(app: FastAPI, engine: Engine, worker: Worker, service: Service, *, takes_tools: bool) -> None:
    """Add the route to `app`."""
    target, defaults = engine.target, SamplingParams()
    params = {
        "n_predict": -1,
        "max_tokens": -1,
        "seed": _RANDOM_SEED,
        **{
            option.request_name(name): getattr(defaults, name)
            for name, option in SAMPLING.items()
            if name != "logit_bias"
        },
        "stop": [],
        "ignore_eos": False,
        "stream": False,
        "n_probs": 0,
        "grammar": "",
        "samplers": SAMPLERS,
    }
    known = ServerProps(
        default_generation_settings=GenerationSettings(
            n_ctx=service.n_ctx,
            speculative=engine.draft is not None,
            is_processing=False,
            params=params,
        ),
        total_slots=worker.parallel,
        model_alias=service.name,
        model_path=target.path.name,
        chat_template=target.chat_template or "",
        chat_template_caps={"supports_tools": takes_tools, "supports_tool_calls": takes_tools},
        modalities=Modalities(),
        bos_token=token_name(target, target.bos if target.add_bos else None) or "",
        eos_token=token_name(target, target.eos) or "",
        build_info=f"edgespec {version('edgespec')}",
    )

    @app.get("/props")
    async def props() -> ServerProps:
        """Describe the server as llama-server does."""
        known.default_generation_settings.is_processing = worker.busy
        return known
