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
from edgespec.decoding.constraint import Constraint
from edgespec.decoding.grammars import Grammar, GrammarSource
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.weights import Model
from matching import accepts, verdicts
from tiny_gguf import EOS, IM_END, IM_START, write_tiny_gguf

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["name", "age", "role", "tags"],
}


# ---- what is refused, in one line, before a model is loaded ----


def deep(n, means):
    """Rules that refer to each other one after the other."""
    return "".join(f'r{i}{means}"x" r{i + 1}\n' for i in range(n)) + f'r{n}{means}"y"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x ::= [a]", "No 'root' rule found"),
        ('start ::= "a"', "No 'root' rule found"),
        ("root ::= x", "Rule 'x' not found"),
        ('root ::= "a', "Unexpected end of input"),
        ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "nested too deeply"),
        ('a ::= "x"\nroot ::= a\na ::= "y"', "the rule a is defined twice"),
        (deep(12_000, " ::= ") + "root ::= r0", "has 12,002 rules; at most 3,000"),
        ("root ::= " + "[" * 200_000, "Unexpected end of input"),  # which takes no time
        ("root ::= " + '"\\' * 100_000, "index out of range"),
        ("root ::= <[1]>", "Expected name"),
        ("root ::= 'a'", "Expected name"),
        (r'root ::= "\ud800"', "is no character"),
        ('root ::= "\ud800"', "not valid Unicode"),
        ("root ::= [b-a]", "invalid"),
        ('root ::= "' + "a" * (1 << 18) + '"', "at most 262,144"),
    ],
)
def test_what_is_no_gbnf_is_refused(text, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        GrammarSource.any(text, "--grammar g.gbnf")
    assert str(error.value).startswith("--grammar g.gbnf: ")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (GrammarSource.lark, "start: x", "unknown name"),
        (GrammarSource.lark, "start: /(?=a)/", "look-ahead"),
        (GrammarSource.lark, "start: " + "(" * 60_000 + '"a"' + ")" * 60_000, "too deeply nested"),
        (
            GrammarSource.lark,
            "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(30)) + 'A30: "x"',
            "too big",
        ),
        (GrammarSource.regex, "(", "unclosed group"),
        (GrammarSource.regex, r"\bword\b", "not supported"),
        (GrammarSource.regex, "(" * 60_000 + "a" + ")" * 60_000, "invalid regex"),
        (GrammarSource.choice, [], "at least one"),
        (GrammarSource.choice, ["a", ""], "none that is empty"),
    ],
)
def test_what_is_no_grammar_is_refused(read, text, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        read(text, "grammar")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


def test_rules_that_refer_to_rules_without_end_end_no_process(tiny_target):
    """The library descends into each: 8 MB of stack are too few for what a text of 256 KiB can hold."""
    constraint = Grammar.from_lark(tiny_target, "start: r0\n" + deep(12_000, ": ")).begin()
    assert constraint.fitting((), tokens_of(tiny_target, "xxxx")) == 4
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(12_000)} | {"d12000": {"type": "string"}}
    Grammar.from_json_schema(tiny_target, {"$ref": "#/$defs/d0", "$defs": chain}).begin().mask(
        np.zeros(tiny_target.n_vocab, np.float32), ()
    )


def tokens_of(model, text):
    return model.tokenize(text, add_special=False, parse_special=False)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ("root ::= [\\u0041-\\u005a]+", ["AZ"], ["a", "u"]),
        ('root ::= "\\u00e9\\x41" [^a-z\\n]', ["éAX"], ["éAa", "éA\n"]),
        ('root ::= "\\U0001F600" [😀-😂]?', ["😀", "😀😁"], ["😀a"]),
        ('# x ::= y\nroot ::= "a ::= b" [:=]+ # z ::= z', ["a ::= b:="], ["a ::= b"]),
        ('root ::= "a" | x "b"{2,3}\nx ::= "q"?', ["a", "bb", "qbbb"], ["b", "q"]),
        ("root ::= .", ["a", "é", "\n"], ["ab", ""]),
        ("root ::= [ab&&c]+", ["a&&c"], ["d"]),
        ("root ::= [a~~b] [+--]", ["~-", "a,"], ["~x"]),
        ('root ::= start\nstart ::= "x" start-rule2\nstart-rule2 ::= "."', ["x."], ["x"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a"]),
        ('root ::= "[.]" [.] "." "\\"" "#"', ['[.].."#'], ["[.]a"]),
        ("root ::= (\n [a-z] | # one\n [0-9] )+", ["a1"], ["A"]),
    ],
)
def test_gbnf_means_what_llama_cpp_makes_of_it(tiny_target, text, good, bad):
    grammar = Grammar(tiny_target, text)
    assert [one for one in good if not accepts(grammar, one)] == []
    assert [one for one in bad if accepts(grammar, one)] == []


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (lambda m: Grammar.from_lark(m, 'start: "a" B+\nB: /[bc]/'), ["abcb"], ["a", "b"]),
        (
            lambda m: Grammar.from_lark(m, 'start: "x=" %json {"type": "integer", "minimum": 3}'),
            ["x=3"],
            ["x=2"],
        ),
        (lambda m: Grammar.from_regex(m, "a|bc"), ["a", "bc"], ["ac", "b"]),
        (lambda m: Grammar.from_regex(m, "^(yes|no)$"), ["yes"], ["yesno"]),
        (lambda m: Grammar.from_choice(m, ["a", "ab", 'q"\n\\']), ["a", "ab", 'q"\n\\'], ["b", ""]),
        (Grammar.any_json, ['{"a": [1, null, {"b": "c"}]}'], ["[1]", "{} "]),
    ],
)
def test_the_other_forms(tiny_target, grammar, good, bad):
    made = grammar(tiny_target)
    assert [one for one in good if not accepts(made, one)] == []
    assert [one for one in bad if accepts(made, one)] == []


def test_a_token_is_named_by_its_number(tiny_target):
    constraint = Grammar.from_lark(tiny_target, f'start: "a" <[{IM_START}]>').begin()
    assert constraint.forced(tokens_of(tiny_target, "a")) == IM_START


# ---- schemas ----


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ({"type": "strin"}, "Invalid type"),
        ({"$ref": "https://example.com/a.json"}, "retrieving it failed"),
        ({"$ref": "#/$defs/x"}, "does not exist"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "greater than maxItems"),
        ({"type": "object", "properties": {"a": 3}}, "schema"),
        ({"const": float("nan")}, "not JSON compliant"),
        ({"description": "x" * (1 << 20)}, "at most 1,048,576"),
    ],
)
def test_schemas_that_cannot_be_converted_are_refused(schema, reason):
    with pytest.raises(UsageError, match=re.escape(reason)) as error:
        GrammarSource.json_schema(schema, "--json-schema s.json")
    assert str(error.value).startswith("--json-schema s.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("depth", [200, 3000])
def test_a_schema_nested_too_deeply_is_refused(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match=r"nested too deeply|recursion limit"):
        GrammarSource.json_schema(schema, "schema")


UNENFORCED = {
    "type": "object",
    "title": "a note",
    "properties": {
        "n": {"type": "integer", "minimum": 1, "default": 2},
        "s": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
    "not": {"required": ["n"]},
}


def test_what_is_not_enforced_is_named_and_strictly_refused():
    found = GrammarSource.json_schema(UNENFORCED, "schema").warnings
    assert [word for word in ("not", "uniqueItems") if not any(word in line for line in found)] == []
    assert GrammarSource.json_schema(PERSON, "schema").warnings == ()
    with pytest.raises(UsageError, match=r"schema: .*not"):
        GrammarSource.json_schema(UNENFORCED, "schema", strict=True)


# ---- masks ----

N_VOCAB = 400


@settings(max_examples=100, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.005, 0.05, 0.5, 0.98]), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 30),
    n_row=st.sampled_from([N_VOCAB, N_VOCAB - 70]),
)
def test_a_row_is_masked_whatever_stood_in_its_place(shares, seed, n_row):
    rng = np.random.default_rng(seed)
    wanted = [rng.random(N_VOCAB) < share for share in shares]
    for allowed in wanted:
        allowed[rng.integers(n_row)] = True

    class Changing:
        """A Matcher that allows something else after each token."""

        n = 0

        def mask(self, out):
            out[:] = 0
            out.view(np.uint8)[: (N_VOCAB + 7) // 8] = np.packbits(wanted[self.n], bitorder="little")

        def consume(self, token):
            self.n += 1

        def rollback(self, n):
            self.n -= n

    constraint = Constraint(Changing, N_VOCAB, is_eog=lambda _: False)
    for allowed in wanted:
        row = rng.normal(size=n_row).astype(np.float32)
        raw = row.copy()
        masked = constraint.mask(row, ())
        np.testing.assert_array_equal(masked, np.where(allowed[:n_row], raw, -np.inf))
        np.testing.assert_array_equal(row, raw)
        if constraint.fitting((), (first := [int(np.flatnonzero(allowed)[0])])) and allowed is not wanted[-1]:
            constraint.advance(first)


def test_rows_are_the_constraints_own(tiny_target):
    """Raw rows are needed for logprobs, and a later mask forgets the one before."""
    constraint = Grammar(tiny_target, "root ::= [ab] [cd]").begin()
    row = np.arange(tiny_target.n_vocab, dtype=np.float32)
    raw = row.copy()
    a, c = (tokens_of(tiny_target, text)[0] for text in "ac")
    first = constraint.mask(row, ())
    assert {tiny_target.piece(int(t)) for t in np.flatnonzero(np.isfinite(first))} == {b"a", b"b"}
    second = constraint.mask(row, (a,))
    assert {tiny_target.piece(int(t)) for t in np.flatnonzero(np.isfinite(second))} == {b"c", b"d"}
    ended = constraint.mask(row, (a, c))
    assert set(np.flatnonzero(np.isfinite(ended))) == {t for t in (EOS, IM_END) if tiny_target.is_eog(t)}
    assert constraint.mask(row, (a, c, EOS)) is None
    assert constraint.mask(row, (c,)) is None
    np.testing.assert_array_equal(row, raw)


def test_a_dead_end_is_told_of(tiny_target):
    constraint = Grammar.from_lark(tiny_target, 'start: "a" B\nB: /b/ & /c/').begin()
    with pytest.raises(EdgespecError, match="grammar: no text can follow"):
        constraint.mask(np.zeros(tiny_target.n_vocab, np.float32), tokens_of(tiny_target, "a"))


def test_a_bias_that_forbids_what_the_grammar_allows_is_told_of(tiny_target):
    a, b = (tokens_of(tiny_target, text)[0] for text in "ab")
    params = SamplingParams(logit_bias={a: float("-inf")})
    constraint = Grammar(tiny_target, "root ::= [ab] [a]").begin(params)
    assert constraint.fitting((), [a]) == 0
    with pytest.raises(EdgespecError, match="logit bias forbids"):
        constraint.mask(np.zeros(tiny_target.n_vocab, np.float32), (b,))


def test_a_control_token_is_not_the_text_of_its_name(tiny_target):
    """Its reader sees nothing."""
    constraint = Grammar(tiny_target, 'root ::= [^"]*').begin()
    assert constraint.fitting((), [IM_START]) == 0
    assert constraint.fitting((), [EOS]) == 1


def test_text_is_always_utf8(tiny_target):
    """No byte leads to where none may follow: a surrogate's second would (ED A0)."""
    single = {tiny_target.piece(token): token for token in range(tiny_target.n_vocab)}
    constraint = Grammar(tiny_target, "root ::= [^a-z]*").begin()
    for text, n in (
        (b"\xed\x9f\xbf", 3),
        (b"\xed\xa0", 1),
        (b"\xc0", 0),
        (b"\xf4\x90", 1),
        ("😀".encode(), 4),
    ):
        assert constraint.fitting((), [single[text[i : i + 1]] for i in range(len(text))]) == n


# ---- real text ----


LEAVES = st.one_of(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]),
    st.sampled_from(
        [{"type": "string", "pattern": r"^\d{2}-[^a-z]?\.$"}, {"type": "string", "pattern": "^(ab|.c){1,2}$"}]
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
                assert all(verdicts(schema, json.loads(result.text))), (schema, result.text)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=0)]
)
def test_the_text_does_not_depend_on_what_is_drafted(engine, params):
    grammar = Grammar.from_json_schema(engine.target, PERSON)

    def text(**options):
        found = engine.generate(
            "hello", params=params, seed=5, grammar=grammar, n_predict=200, chat=False, **options
        )
        assert all(verdicts(PERSON, json.loads(found.text)))
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
        assert all(verdicts(PERSON, json.loads(result.text)))


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
        assert all(verdicts(PERSON, json.loads(result.text)))


# ---- the command line ----


@pytest.fixture
def run(tiny_path, tiny_draft_path, child_environment, tmp_path):
    environment = {**child_environment, "XDG_CACHE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    models = ("--target", str(tiny_path), "--draft", str(tiny_draft_path), "--raw", "--kernels", "off")

    def run(*arguments, stdin=None):
        given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [sys.executable, "-m", "edgespec", "run", "hello", *models, *map(str, arguments)],
            **given,
            capture_output=True,
            env=environment,
            timeout=120,
            check=False,
            text=True,
        )

    return run


def test_run_fills_a_schema_and_says_what_is_missing(run, tmp_path):
    path = tmp_path / "s.json"
    n = {"type": "integer", "minimum": 3, "maximum": 40}
    schema = {"type": "object", "properties": {"n": n}, "required": ["n"], "not": {"const": 1}}
    path.write_text(json.dumps(schema))
    done = run("--json-schema", path, "--temp", "0", "--no-stats")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"] >= 3
    assert f'--json-schema {path}: not enforced: "not"' in done.stderr
    cut = run("--json-schema", path, "--temp", "0", "--no-stats", "-n", "2")
    assert cut.returncode == 0
    assert "the text was cut by -n and may not be whole JSON" in cut.stderr


SMALL = json.dumps({"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]})


@pytest.mark.parametrize(
    ("arguments", "files", "stdin", "text"),
    [
        (("--json-schema", SMALL), {}, None, '{"n": 7}'),
        (("--json-schema", "-"), {}, SMALL, '{"n": 7}'),
        (("--json-schema", "s.json"), {"s.json": "\ufeff" + SMALL}, None, '{"n": 7}'),
        (("--grammar", "g.gbnf"), {"g.gbnf": '\ufeffroot ::= "ab"'}, None, "ab"),
        (("--grammar", "g.lark"), {"g.lark": 'start: "ab"'}, None, "ab"),
        (("--grammar", "-"), {}, 'root ::= "ab"', "ab"),
        (("--regex", "a{3}b"), {}, None, "aaab"),
    ],
    ids=["inline", "stdin", "a byte order mark", "gbnf", "lark", "a grammar from stdin", "regex"],
)
def test_what_the_text_must_match_comes_as_users_give_it(run, tmp_path, arguments, files, stdin, text):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    given = [tmp_path / one if one in files else one for one in arguments]
    done = run(*given, "--no-stats", "--temp", "0", stdin=stdin)
    assert (done.returncode, done.stdout.strip()) == (0, text), done.stderr


@pytest.mark.pair
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
