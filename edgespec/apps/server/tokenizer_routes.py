"""The routes to the tokenizer: llama-server's /tokenize and /detokenize, vLLM's /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_fields import RequestPart
from edgespec.apps.server.request_reader import Service, check_tokens
from edgespec.llama.weights import Model


class TokenizeRequest(RequestPart):
    """The body of POST /tokenize: the text is `content` in llama-server's API, `prompt` in vLLM's."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = Field(None, description="Add BOS and EOS if the model wants them.")
    add_special_tokens: bool | None = Field(None, description="vLLM's name of add_special.")
    parse_special: bool | None = Field(None, description="Read the names of control tokens; default true.")
    with_pieces: bool | None = Field(None, description="Tell the text of each token, too.")
    return_token_strs: bool | None = Field(None, description="vLLM's: tell the texts in a list.")


class DetokenizeRequest(RequestPart):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class TokenPiece(BaseModel):
    """A token with its text, or its bytes if it is part of a character."""

    id: int
    piece: str | list[int]


class TokenizedText(BaseModel):
    """The answer of /tokenize."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizedText(BaseModel):
    """The answer of /detokenize, under both servers' names."""

    content: str
    prompt: str


class TokenizerFacts(BaseModel):
    """The answer of /tokenizer_info, as vLLM's."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None = None
    add_bos_token: bool
    chat_template: str | None


def add_tokenizer(app: FastAPI, target: Model, service: Service) -> None:
    """Add the routes to `app`."""

    @app.post("/tokenize", response_model_exclude_unset=True)
    async def tokenize(body: TokenizeRequest) -> TokenizedText:
        """Return the tokens of a text."""
        if body.model is not None:
            service.check_name(body.model)
        return await run_in_threadpool(_tokens_of, target, body, service.n_ctx)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizedText:
        """Return the text of tokens."""
        if body.model is not None:
            service.check_name(body.model)
        return await run_in_threadpool(_text_of, target, body)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerFacts:
        """Return what a client must know of the tokenizer."""
        return TokenizerFacts(
            tokenizer_class=target.tokenizer_type,
            bos_token=token_name(target, target.bos) if target.add_bos else None,
            eos_token=token_name(target, target.eos),
            add_bos_token=target.add_bos,
            chat_template=target.chat_template,
        )


def _tokens_of(model: Model, request: TokenizeRequest, n_ctx: int) -> TokenizedText:
    """Return the tokens of a text. Raises ApiError."""
    text = request.content if request.content is not None else request.prompt
    if text is None or None not in (request.content, request.prompt):
        raise ApiError(400, "content: send the text as content, or as prompt", param="content")
    # llama-server adds none by default, vLLM does.
    adds = request.add_special if request.content is not None else request.add_special_tokens is not False
    special = request.parse_special is not False
    tokens = model.tokenize(text, add_special=bool(adds), parse_special=special)
    pieces = [model.piece(token, special=True) for token in tokens]
    found: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": n_ctx}
    if request.with_pieces:
        found["tokens"] = [
            TokenPiece(id=token, piece=_piece(piece)) for token, piece in zip(tokens, pieces, strict=True)
        ]
    if request.return_token_strs:
        found["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
    return TokenizedText(**found)


def _text_of(model: Model, request: DetokenizeRequest) -> DetokenizedText:
    """Return the text of tokens. Raises ApiError."""
    check_tokens(request.tokens, model, "tokens")
    text = b"".join(model.piece(token, special=True) for token in request.tokens).decode(errors="replace")
    return DetokenizedText(content=text, prompt=text)


def token_name(model: Model, token: int | None) -> str | None:
    """Return the text of a token, the names of control tokens too; None for none."""
    return None if token is None else model.piece(token, special=True).decode(errors="replace")


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return [*piece]
