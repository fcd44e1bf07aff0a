"""Grammars over real vocabularies: what is refused, what is masked, and that every text matches."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec import Engine, SamplingParams
from edgespec.errors import EdgespecError, UsageError
from edgespec.grammar.constraint import Constraint
from edgespec.grammar.grammar import Grammar
from edgespec.grammar.grammar_check import check_grammar
from edgespec.grammar.json_schema import schema_to_gbnf
from edgespec.grammar.masking import needs_all
from edgespec.grammar.spelling import Spelling
from edgespec.llama.weights import Model
from tiny_gguf import EOS, IM_END, IM_START, write_tiny_gguf

NO_TOKENS = np.zeros(0, np.int32)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer"},
        "role": {"enum": ["admin", "user"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "age", "role", "tags"],
}


# ---- what is refused, in one line, before the library sees it ----

DIAMONDS = "\n".join(f"a{i} ::= a{i + 1} | a{i + 1}" for i in range(60))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no rules"),
        ('start ::= "a"', "no rule named root"),
        ("root ::= x", "Undefined rule identifier 'x'"),
        ('root ::= "a', "unexpected end of input"),
        ('root ::= root "a" | "b"', "left recursion"),
        ('root ::= "x" r\nr ::= g r "b" | "c"\ng ::= "q"*', "would not get to its end"),
        ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "would not get to its end"),
        (f'root ::= a0\n{DIAMONDS}\na60 ::= "x"', "would not get to its end"),
        ('root ::= "a"{1,100000}', "repeated more than 2,000 times"),
        ('root ::= "a\0"', "byte 0"),
        ("root ::= <[1]>", "single tokens"),
        ('root ::= "\ud800"', "not valid Unicode"),
        ('root ::= "' + "a" * (1 << 18) + '"', "at most 262,144"),
    ],
)
def test_what_the_library_cannot_take_is_refused(text, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        check_grammar(text, "--grammar g.gbnf")
    assert str(error.value).startswith("--grammar g.gbnf: ")
    assert "\n" not in str(error.value)


def test_names_of_rules_in_strings_and_comments_are_none():
    check_grammar('# x ::= y\nroot ::= "a ::= b" [:=]+ # z ::= z', "--grammar")


def test_a_dead_end_is_told_of(tiny_target):
    constraint = Grammar(tiny_target, 'root ::= "a" [z-a]').begin()
    sampler = SamplingParams().sampler(tiny_target.n_vocab, 0)
    constraint.advance([tiny_target.tokenize("a", add_special=False, parse_special=False)[0]])
    with pytest.raises(EdgespecError, match="dead end"):
        constraint.mask(np.zeros(tiny_target.n_vocab, np.float32), (), sampler, NO_TOKENS)


def test_what_begins_a_character_can_be_finished(tiny_target):
    """No byte leads to where none may follow: a surrogate's second would (ED A0, no text in UTF-8)."""
    spelling = Spelling.of(tiny_target)
    state = Grammar(tiny_target, "root ::= [^a-z]").begin()._state(())
    tokens = np.array([t for t in spelling.probes if len(spelling.piece(int(t))) == 1], np.int32)
    seen = 0

    def finish(state, depth):
        nonlocal seen
        allowed = tokens[state.judge(tokens)]
        assert len(allowed), state._tail
        for token in allowed if depth < 2 else allowed[:1]:
            after = state.copy()
            after.accept(int(token))
            if after._tail:
                seen += 1
                finish(after, depth + 1)

    finish(state, 0)
    assert seen > 1000


# ---- schemas ----


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "where a schema should be"),
        ({"type": "strin"}, "none of JSON's"),
        ({"$ref": "https://example.com/a.json"}, "only what is in the schema itself"),
        ({"$ref": "#/$defs/x"}, "points to nothing"),
        ({"enum": []}, "nothing could match"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "more than maxItems"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf of anything but objects"),
        ({"type": "string", "pattern": "a+"}, "must begin with ^"),
        ({"type": "string", "pattern": '^a"$'}, "must be escaped"),
        ({"type": "string", "pattern": "^[!-~]+$"}, "JSON escapes"),
        ({"type": "string", "pattern": "^(?=a)$"}, "Unsupported pattern"),
        ({"type": "object", "properties": {"a": 3}}, "where a schema should be"),
        ({"type": "object", "properties": [1]}, "properties must be an object"),
    ],
)
def test_schemas_that_cannot_be_converted_are_refused(schema, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        schema_to_gbnf(schema)
    assert "\n" not in str(error.value)


def test_a_schema_nested_too_deeply_is_refused():
    schema = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="nested too deeply"):
        schema_to_gbnf(schema)


def test_what_is_not_enforced_is_named():
    schema = {
        "type": "object",
        "title": "a note",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "default": 2},
            "s": {"type": ["string", "null"], "format": "email", "maxLength": 3},
        },
        "minProperties": 1,
    }
    assert schema_to_gbnf(schema).ignored == ("format", "minProperties", "minimum")
    assert schema_to_gbnf(PERSON).ignored == ()


def test_a_definition_is_not_mistaken_for_a_property_of_its_name():
    schema = {
        "type": "object",
        "properties": {"item": {"enum": ["a"]}, "x": {"$ref": "#/$defs/item"}},
        "required": ["item", "x"],
        "$defs": {"item": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
    }
    rules = dict(line.split(" ::= ", 1) for line in schema_to_gbnf(schema).text.splitlines())
    assert rules["item"] == r'"\"a\""'
    assert rules[rules["x"]].startswith('"["')


# ---- masks ----


class Only:
    """A State that allows some tokens, always."""

    def __init__(self, allowed):
        self.allowed = allowed

    def judge(self, ids):
        return self.allowed[ids]

    def accept(self, token):
        assert self.allowed[token]

    def copy(self):
        return self


N_VOCAB = 400


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.005, 0.05, 0.5, 0.98]),
    scale=st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        top_k=st.sampled_from([0, 1, 5, 40, 1000]),
        top_p=st.sampled_from([1.0, 0.95, 0.5]),
        min_p=st.sampled_from([0.0, 0.05, 0.5]),
        typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.7]),
        repeat_penalty=st.sampled_from([1.0, 1.7]),
        presence_penalty=st.sampled_from([0.0, 4.0]),
        logit_bias=st.dictionaries(
            st.integers(0, N_VOCAB - 1), st.sampled_from([-20.0, 3.0, 20.0]), max_size=3
        ),
    ),
)
def test_judging_the_likeliest_is_judging_all(seed, share, scale, params):
    """What the filters make of the masked row is what they make of it with every forbidden token at -inf."""
    rng = np.random.default_rng(seed)
    row = (rng.normal(0, 1, N_VOCAB) * scale).round(1).astype(np.float32)  # with ties
    allowed = rng.random(N_VOCAB) < share
    allowed[rng.integers(N_VOCAB)] = True
    recent = rng.integers(0, N_VOCAB, 20).astype(np.int32)
    sampler = params.sampler(N_VOCAB, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.grammar.constraint._JUDGED", (8, 60))
        constraint = Constraint(Only(allowed), params, N_VOCAB, is_eog=lambda _: False)
        found = {}
        for name, masked in (
            ("likeliest", constraint.mask(row, (), sampler, recent)),
            ("all", np.where(allowed, row, -np.inf).astype(np.float32)),
        ):
            sampler.sample(masked, recent, 0.5, -1)
            found[name] = np.empty(N_VOCAB, np.float32)
            sampler.probs(-1, found[name])
        np.testing.assert_allclose(found["likeliest"], found["all"], atol=1e-6)
        if needs_all(params):
            assert constraint.n_full == 1 or scale == 0.0
        raw = constraint.mask(row, (), sampler, recent, exact=False)
        if raw is not None:
            assert set(np.flatnonzero(np.isfinite(raw))) <= set(np.flatnonzero(allowed))


def test_most_rows_need_few_judgements():
    """With the usual filters the likeliest 64 are enough, wherever some of them are allowed."""
    rng = np.random.default_rng(1)
    n_vocab = 50_000
    params = SamplingParams()
    sampler = params.sampler(n_vocab, 0)
    judged = []

    class Counting(Only):
        def judge(self, ids):
            judged.append(len(ids))
            return super().judge(ids)

    allowed = rng.random(n_vocab) < 0.3
    constraint = Constraint(Counting(allowed), params, n_vocab, is_eog=lambda _: False)
    for _ in range(50):
        row = rng.normal(0, 9, n_vocab).astype(np.float32)  # as far apart as a sure model has them
        constraint.mask(row, (), sampler, NO_TOKENS)
    assert constraint.n_full == 0
    assert sum(judged) < 50 * 200


def test_rows_are_the_constraints_own(tiny_target):
    """Raw rows are needed for logprobs, and a later mask forgets the one before."""
    constraint = Grammar(tiny_target, "root ::= [ab] [cd]").begin()
    sampler = SamplingParams(temperature=0.0).sampler(tiny_target.n_vocab, 0)
    row = np.arange(tiny_target.n_vocab, dtype=np.float32)
    raw = row.copy()
    a, c = (tiny_target.tokenize(text, add_special=False, parse_special=False)[0] for text in "ac")
    first = constraint.mask(row, (), sampler, NO_TOKENS)
    assert {tiny_target.piece(int(t)) for t in np.flatnonzero(np.isfinite(first))} == {b"a", b"b"}
    second = constraint.mask(row, (a,), sampler, NO_TOKENS)
    assert {tiny_target.piece(int(t)) for t in np.flatnonzero(np.isfinite(second))} == {b"c", b"d"}
    ended = constraint.mask(row, (a, c), sampler, NO_TOKENS)
    assert set(np.flatnonzero(np.isfinite(ended))) == {t for t in (EOS, IM_END) if tiny_target.is_eog(t)}
    assert constraint.mask(row, (a, c, EOS), sampler, NO_TOKENS) is None
    assert constraint.mask(row, (c,), sampler, NO_TOKENS) is None
    np.testing.assert_array_equal(row, raw)


def test_a_control_token_is_not_the_text_of_its_name(tiny_target):
    """The library would take it for that text; the reader of the answer sees nothing."""
    constraint = Grammar(tiny_target, 'root ::= [^"]*').begin()
    assert not constraint.allows((), IM_START)
    assert constraint.allows((), EOS)


def test_best_is_after_bias_and_penalties():
    params = SamplingParams(repeat_penalty=2.0, logit_bias={1: 9.0, 2: float("-inf")})
    sampler = params.sampler(6, 0)
    row = np.array([4, 0, 9, 3, -np.inf, 1], np.float32)
    ids, logits = np.empty(8, np.int32), np.empty(8, np.float32)
    assert sampler.best(row, np.array([0], np.int32), ids, logits) == 4
    assert ids[:4].tolist() == [1, 3, 0, 5]
    assert logits[:4].tolist() == [9.0, 3.0, 2.0, 1.0]
    assert [token for token, _ in sampler.likeliest(row, 16)] == [2, 0, 3, 5, 1]


# ---- real text ----


def conforms(value, schema):
    """Say whether a value is what the schema describes, for the keywords that the tests use."""
    if "$ref" in schema or "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(conforms(one, properties[name]) for name, one in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            and all(conforms(one, schema["items"]) for one in value)
        )
    if kind == "string":
        if "pattern" in schema:
            return isinstance(value, str) and re.fullmatch(schema["pattern"], value) is not None
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    return {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]


LEAVES = st.one_of(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]),
    st.sampled_from(
        [
            {"type": "string", "pattern": r"^\d{2}-[^a-z]?\.$"},
            {"type": "string", "pattern": "^(ab|.c){1,2}$"},
        ]
    ),
    st.integers(0, 6).map(lambda n: {"type": "string", "maxLength": n}),
    st.lists(st.one_of(st.integers(-9, 9), st.text('aé"\\\n😀', max_size=3)), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def objects(inner):
    names = st.sampled_from(["a", "name", "é", 'q"', "item", "string", "x y"])
    return st.dictionaries(names, inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties))).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda one: {"type": "array", "items": one, "minItems": 1, "maxItems": 2}),
        st.lists(inner, min_size=2, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def engine(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, profile=False, kernels="off", n_threads=1) as engine:
        yield engine


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
def test_every_text_is_what_the_schema_describes(engine, schema, seed):
    grammar = Grammar.from_json_schema(engine.target, schema)
    hot = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
    for params in (hot, SamplingParams(temperature=0.8)):
        for options in ({"drafter": "none"}, {"rule": "block"}, {"drafter": "model", "gamma": 3}):
            result = engine.generate(
                "hello", params=params, seed=seed, grammar=grammar, n_predict=400, chat=False, **options
            )
            if result.stop_reason != "length":
                assert result.stop_reason == "eog"
                assert conforms(json.loads(result.text), schema), (schema, result.text)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=0)]
)
def test_the_text_does_not_depend_on_what_is_drafted(engine, params):
    grammar = Grammar.from_json_schema(engine.target, PERSON)

    def text(**options):
        found = engine.generate(
            "hello", params=params, seed=5, grammar=grammar, n_predict=200, chat=False, **options
        )
        assert conforms(json.loads(found.text), PERSON)
        return found.token_ids

    plain = text(drafter="none")
    for drafter in ("auto", "chain", "model", "suffix", "staged"):
        for gamma in (None, 1, 4):
            assert text(drafter=drafter, gamma=gamma) == plain


def test_a_grammar_serves_many_generations_and_models_do_not_mix(engine, tiny_target):
    grammar = Grammar(engine.target, 'root ::= "yes" | "no"')
    texts = {engine.generate("hello", seed=seed, grammar=grammar, chat=False).text for seed in range(8)}
    assert texts == {"yes", "no"}
    with pytest.raises(UsageError, match="another model"):
        engine.stream("hello", grammar=Grammar(tiny_target, 'root ::= "a"'))


def test_a_grammar_ends_with_its_model(tiny_path):
    with Model(tiny_path) as model:
        grammar = Grammar(model, 'root ::= "yes"')
        grammar.begin()
    with pytest.raises(EdgespecError, match="closed"):
        grammar.begin()


def test_a_draft_of_another_vocabulary_keeps_to_the_grammar(engine, tiny_path, tmp_path):
    """Its rows are over the target's tokens."""
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=4, texts={256: "Ġx", 257: "xe"})
    grammar = Grammar.from_json_schema(engine.target, PERSON)
    plain = engine.generate("hello", seed=5, grammar=grammar, n_predict=200, chat=False, drafter="none")
    said = []
    with Engine(tiny_path, other, profile=False, kernels="off", n_threads=1, on_message=said.append) as mixed:
        assert any("drafts in another vocabulary" in line for line in said)
        same = Grammar.from_json_schema(mixed.target, PERSON)
        for options in ({"gamma": 3, "drafter": "model"}, {"drafter": "auto"}):
            result = mixed.generate("hello", seed=5, grammar=same, n_predict=200, chat=False, **options)
            assert result.text == plain.text
        result = mixed.generate("hello", rule="block", grammar=same, n_predict=200, chat=False)
        assert conforms(json.loads(result.text), PERSON)


def test_any_json_is_an_object(engine):
    result = engine.generate(
        "hello", seed=3, grammar=Grammar.any_json(engine.target), chat=False, n_predict=300
    )
    assert result.text.startswith("{")
    if result.stop_reason == "eog":
        assert isinstance(json.loads(result.text), dict)


def test_a_lenient_text_matches_too(engine):
    grammar = Grammar.from_json_schema(engine.target, PERSON)
    for params in (SamplingParams(temperature=0.0), SamplingParams()):
        result = engine.generate(
            "hello", params=params, grammar=grammar, chat=False, lenience=0.2, n_predict=200
        )
        assert conforms(json.loads(result.text), PERSON)


# ---- the command line ----


@pytest.fixture
def run(tiny_path, tiny_draft_path, child_environment, tmp_path):
    environment = {**child_environment, "XDG_CACHE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    models = ("--target", str(tiny_path), "--draft", str(tiny_draft_path), "--raw", "--kernels", "off")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "edgespec", "run", "hello", *models, *map(str, arguments)],
            capture_output=True,
            env=environment,
            timeout=120,
            check=False,
            text=True,
        )

    return run


def test_run_fills_a_schema_and_says_what_is_missing(run, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}},
                                "required": ["n"]}))  # fmt: skip
    done = run("--json-schema", path, "--temp", "0", "--no-stats")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout)["n"], int)
    assert f"--json-schema {path}: not enforced: minimum" in done.stderr
    cut = run("--json-schema", path, "--temp", "0", "--no-stats", "-n", "2")
    assert cut.returncode == 0
    assert "the text was cut by -n and may not be whole JSON" in cut.stderr


def test_run_refuses_what_is_no_grammar(run, tmp_path):
    bad = tmp_path / "bad.gbnf"
    bad.write_bytes(b'root ::= "\xff"')
    for arguments, reason in [
        (("--grammar", bad), "not UTF-8 text at byte 10"),
        (("--grammar", tmp_path / "none"), "No such file"),
        (("--json-schema", bad, "--grammar", bad), "contradict each other"),
        (("--grammar", bad, "--mode", "cascade"), "contradict each other"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert reason in done.stderr


@pytest.mark.pair
@pytest.mark.slow
def test_the_real_pair_fills_a_schema(pair):
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"type": "string"}}}
    prompt = "Invent a developer. Answer with a JSON object of name, age, role and tags."
    with Engine(*pair, profile=False) as engine:
        grammar = Grammar.from_json_schema(engine.target, schema)
        texts = []
        for drafter in ("none", "auto"):
            result = engine.generate(prompt, seed=3, grammar=grammar, drafter=drafter)
            value = json.loads(result.text)
            assert set(value) == set(schema["required"])
            texts.append(result.text)
        assert texts[0] == texts[1]
        assert result.sources["forced"][1] > 0
