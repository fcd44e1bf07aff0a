"""`edgespec serve` with several models: the server in front of them, and how each one's own is started."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.apps.server.router.preset import (
    KEEP_ALIVE,
    PresetModel,
    check_names,
    duration_s,
    plain_name,
    read_preset,
)
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.groups import as_words
from edgespec.cli.options import ModelChoice, named_drafter, refuse_contradictions
from edgespec.cli.progress import pull_named
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.resolve import locate

if TYPE_CHECKING:
    from edgespec.apps.server.commands.serve import ServedModels, ServerOptions, SpeechServing
    from edgespec.apps.server.router.pool import ModelSpec


def _shared(options: ServerOptions) -> Iterator[str]:
    """Yield the options of each model's own server; a preset's come after them, and win."""
    yield from as_words(options.loading)
    yield from as_words(options.limits)
    yield from as_words(replace(options.speech, speech=None, speech_draft="auto"))
    if options.assume_watts is not None:
        yield f"--assume-watts={options.assume_watts}"
    if options.output.quiet:
        yield "--quiet"


def serve_several(models: ServedModels, options: ServerOptions) -> int:
    """Serve several models at one address; return the exit code."""
    from edgespec.apps.server.commands.serve import address_of, read_key
    from edgespec.apps.server.gate import Gate, GateLimits, is_loopback
    from edgespec.apps.server.http_server import bind, serve
    from edgespec.apps.server.router.app import create_router
    from edgespec.apps.server.router.pool import Pool

    refuse_contradictions(
        {
            "--models and a model": models.models is not None
            and bool(models.target or models.model or models.pair or options.speech.speech),
            "several models and --draft, --pair or MODEL": bool(models.draft or models.pair or models.model),
            "several models and --alias": bool(models.alias),
        }
    )
    tables, where = _tables(models, options.speech)
    key, address = read_key(options.address.api_key_file), options.address
    with bind(address.host, address.port) as bound:
        loopback = address.host.endswith(".sock") or is_loopback(bound.getsockname()[0])
        address.check_reach(loopback=loopback, key=key)
        folder = Path(tempfile.mkdtemp(prefix="edgespec-models-"))  # which only this user reaches
        try:
            shared = [f"--turns={folder}", *_shared(options)]
            specs = [_spec(name, table, shared, options, where) for name, table in tables.items()]
            for files in (spec.files for spec in specs):
                pull_named(files.target, files.draft, files.speech)
            limits = options.limits
            pool = Pool(specs, folder, err.print, max_queue=limits.max_queue, max_seconds=limits.max_seconds)
            accepted = GateLimits(
                max_body=limits.max_body << 20,
                max_audio=options.speech.max_audio << 20,
                api_key=key,
                loopback=loopback,
            )
            gate = Gate(create_router(pool, message), accepted)
            hurried = serve(
                options.output.logged(gate),
                pool,
                bound,
                max_queue=limits.max_queue,
                on_ready=lambda: _announce(address_of(bound), specs, json_wanted=options.output.json),
                on_message=message,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return INTERRUPTED if hurried else 0


def _tables(models: ServedModels, speech: SpeechServing) -> tuple[dict[str, PresetModel], str]:
    """Return the models by name, and where they were named. Raises UsageError."""
    if models.models is not None:
        where, tables = str(models.models), read_preset(models.models)
    else:
        where = "--model"
        named = [(plain_name(one), PresetModel(target=one)) for one in models.target or ()]
        if speech.speech is not None:
            table = PresetModel(speech=speech.speech, speech_draft=speech.speech_draft)
            named.append((plain_name(speech.speech), table))
        check_names([(name, ()) for name, _ in named], where)
        tables = dict(named)
    check_names([(name, table.aliases) for name, table in tables.items()], where)
    return tables, where


def _spec(name: str, table: PresetModel, shared: list[str], options: ServerOptions, where: str) -> ModelSpec:
    """Return how a model is started. Raises UsageError for one whose files cannot be."""
    from edgespec.apps.server.router.model_facts import ModelNames
    from edgespec.apps.server.router.pool import ModelSpec
    from edgespec.apps.speech.speech_model import speech_ref

    loading = options.loading
    target = draft = None
    try:
        if table.speech is None or table.target or table.pair:
            drafter = named_drafter(table.drafter or loading.drafter)
            choice = ModelChoice(target=table.target, draft=table.draft, pair=table.pair)
            if not (table.target or table.pair):
                choice = choice.with_model(name)
            target, draft = choice.choose(drafter, loading.compute, chat_template=table.chat_template)
        speech = None if table.speech is None else speech_ref(table.speech)
        if speech is not None:
            locate(speech)
    except EdgespecError as error:
        kind = UsageError if isinstance(error, UsageError) else EdgespecError
        raise kind(f"{where}: models.{name}: {error}" if where != "--model" else str(error)) from None
    words = [f"--target={target or 'none'}", *([f"--draft={draft}"] if draft else [])]
    aliases = [f"--alias={one}" for one in (name, *table.aliases)]
    return ModelSpec(
        files=ModelNames(name, target, draft, speech, table.ctx or loading.ctx),
        options=(*words, *aliases, *shared, *table.options()),
        aliases=table.aliases,
        keep=table.keep,
        keep_alive_s=duration_s(KEEP_ALIVE if table.keep_alive is None else table.keep_alive),
        parallel=table.parallel or loading.parallel or 16,
        embeddings=table.embeddings,
    )


def _announce(address: str, specs: list[ModelSpec], *, json_wanted: bool) -> None:
    names = [spec.name for spec in specs]
    if json_wanted:
        sys.stdout.write(json.dumps({"address": address, "models": names}) + "\n")
    else:
        out.print(f"serving {', '.join(names)} at {address}, each when it is asked (Ctrl-C ends it)")
    sys.stdout.flush()
