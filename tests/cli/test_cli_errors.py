"""An error names a field; the command line calls it by its option."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields

import pytest
import typer
import typer.testing

from edgespec.cli import app, console
from edgespec.cli.console import option_of
from edgespec.cli.groups import grouped
from edgespec.cli.options import Sampling
from edgespec.decoding.options import Options, WakePolicy
from edgespec.decoding.sampling import SAMPLING, SamplingParams
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, UsageError

NO_OPTIONS = {
    # parts of `Options` that are checked by themselves, or have no option in `run`
    *("params", "cascade", "n_logprobs", "signal", "span"),
    # of the engine: what `run` makes itself
    *("self", "profile", "history", "meter", "signals", "prefix_cache", "keep_packed", "on_message"),
    *("parallel", "n_cells", "learn"),  # options of `serve`, and what follows from them
    *("until", "prompt_logprobs", "stop_tokens"),  # of the server: what answers to requests are told by
}
FIELDS = [
    name
    for names in (
        *([field.name for field in fields(kind)] for kind in (Options, SamplingParams, WakePolicy)),
        inspect.signature(Engine).parameters,
    )
    for name in names
    if name not in NO_OPTIONS
]


@pytest.fixture(scope="module")
def options():
    """The options of `edgespec run`."""
    command = typer.main.get_command(app.app).get_command(None, "run")
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("field", dict.fromkeys(FIELDS))
def test_every_field_that_may_be_wrong_is_an_option(options, field):
    # A grammar's field is the name that the command line gave it: the option and the file.
    assert console.option_of(field) in options


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("must be 1 or more", field="n_ctx", value=0), "--ctx 0: must be 1 or more"),
        (UsageError("a margin is 0 to 1", field="threshold", value="2"), "--threshold 2: a margin is 0 to 1"),
        (UsageError("empty", field="repeat_penalty"), "--repeat-penalty: empty"),
        (UsageError("no such pair", field="--grammar x.gbnf"), "--grammar x.gbnf: no such pair"),
        (UsageError("must be 0", field="temperatures", value=-1), "--temp -1: must be 0"),
        (EdgespecError("--out x: as it was said before"), "--out x: as it was said before"),
    ],
)
def test_the_line_of_an_error(error, line):
    assert console.line_of(error) == line
    assert app._explain(error) == (line, error.exit_code)


def test_every_option_of_sampling_reaches_its_field():
    """Also those that are written otherwise than they are in Python."""
    found = []

    @grouped
    def command(sampling: Sampling) -> None:
        found.append(sampling)

    program = typer.Typer()
    program.command()(command)
    written = {"logit_bias": ["7=-inf", "8=1.5"], "dry_sequence_breakers": ["a", "\n"]}
    values = {name: written.get(name, ["1"]) for name in SAMPLING}
    words = [word for name in values for value in values[name] for word in (option_of(name), value)]
    typer.testing.CliRunner().invoke(program, [*words, "--seed", "5"], catch_exceptions=False)
    (sampling,) = found
    read = {"logit_bias": {7: -math.inf, 8: 1.5}, "dry_sequence_breakers": ("a", "\n")}
    assert sampling == Sampling(params=SamplingParams(**dict.fromkeys(SAMPLING, 1) | read), seed=5)
    found.clear()
    breaker = option_of("dry_sequence_breakers")
    typer.testing.CliRunner().invoke(program, [breaker, "none"], catch_exceptions=False)
    typer.testing.CliRunner().invoke(program, [], catch_exceptions=False)
    assert found == [
        Sampling(params=SamplingParams(dry_sequence_breakers=())),
        Sampling(params=SamplingParams()),
    ]
