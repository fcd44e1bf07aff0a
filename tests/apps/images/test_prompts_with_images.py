"""Texts after images: the same with drafts as without, in company as alone, after what is known as anew."""

from __future__ import annotations

import io
import json
from array import array
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgespec.apps.bench.measure import encode_images
from edgespec.apps.bench.suites import load_suite
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import EmbeddedSpan, folded_spans
from edgespec.engine.engine import Engine
from edgespec.errors import UsageError
from edgespec.llama.choices import StateRoom
from edgespec.llama.kernels import load as load_kernels
from tiny_models import make_tiny
from towers import TOWERS, write_tower

KINDS = ("gemma3", "qwen2.5vl", "qwen3vl", "llava", "idefics3")
GREEDY = SamplingParams(temperature=0.0)


def plugin_packed() -> int:
    found = load_kernels().plugin
    return found.n_packed() if found else 0


def picture(seed: int, width: int = 64, height: int = 64) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    made = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(made, "PNG")
    return made.getvalue()


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    """A tiny model with an encoder beside it, of weights that edgespec's kernels pack."""
    folder = tmp_path_factory.mktemp("tower")
    path, _ = write_tower(request.param, folder)
    tower = TOWERS[request.param]
    window = {"attention.sliding_window": 512} if request.param == "gemma3" else None
    return make_tiny(tower.text, path, tokens=tower.tokens, weights_type="q8_0", metadata=window)


def engine(target: Path, **options) -> Engine:
    return Engine(target=target, profile=False, **options)


def written(engine: Engine, text: str, images=(), **options) -> tuple[int, ...]:
    return engine.generate(text, images=images, n_predict=48, **options).token_ids


@pytest.mark.parametrize("options", [{"params": GREEDY}, {"seed": 3}], ids=["greedy", "seed"])
def test_drafts_change_no_text_after_images(target, options):
    images = [picture(1), picture(2, 90, 60)]
    with engine(target, drafter="none") as plain, engine(target) as drafting:
        assert drafting.kernels != "stock"
        for text in ("What is this? What is this? What", "And these?"):
            result = drafting.generate(text, images=images, n_predict=48, **options)
            assert result.token_ids == written(plain, text, images, **options)
            assert sum(made for made, _ in result.sources.values())


def test_texts_beside_an_image_are_those_alone(target):
    asked = [("One two one two one", ()), ("What is this?", (picture(1),)), ("And this one?", (picture(2),))]
    with engine(target) as alone, engine(target, parallel=3, n_cells=2048) as shared:
        streams = [shared.stream(text, images=images, n_predict=48, params=GREEDY) for text, images in asked]
        while not all(stream.finished for stream in streams):
            shared.step()
            for stream in streams:
                stream.made()
        for stream, (text, images) in zip(streams, asked, strict=True):
            assert stream.result.token_ids == written(alone, text, images, params=GREEDY)


def test_what_was_read_of_an_image_is_read_once(target, tmp_path):
    first, second, question = picture(1), picture(2), "What is this? It is a picture of something, is it?"
    states = StateRoom(tmp_path, 1 << 30)
    with engine(target, prefix_cache=1 << 30, states=states) as kept, engine(target, drafter="none") as anew:
        expected = written(anew, question, [first], params=GREEDY)
        assert written(kept, question, [first], params=GREEDY) == expected
        again = kept.generate(question, images=[first], n_predict=48, params=GREEDY)
        assert again.token_ids == expected
        assert again.n_cached == again.prompt_tokens - 1
        assert kept._encoder.n_encoded == len(kept.prompt_tokens(question, images=[first]).spans)
        other = kept.generate(question, images=[second], n_predict=48, params=GREEDY)
        tokens = kept.prompt_tokens(question, images=[second])
        assert other.n_cached <= tokens.index(tokens.spans[0].ids[0])
        assert other.token_ids == written(anew, question, [second], params=GREEDY)
        more = kept.generate(f"{question} And now?", images=[first], n_predict=48, params=GREEDY)
        assert more.n_cached > again.n_cached - 40
        assert more.token_ids == written(anew, f"{question} And now?", [first], params=GREEDY)
    with engine(target, prefix_cache=1 << 30, states=states) as later:
        result = later.generate(question, images=[first], n_predict=48, params=GREEDY)
        assert (result.token_ids, later._encoder.n_encoded) == (expected, 0)
        if later.target.header.architecture != "gemma3":  # a window cannot be cut: its state ends elsewhere
            assert result.n_cached == result.prompt_tokens - 1


def test_a_cut_inside_an_image_is_one_before_it(target):
    with engine(target, drafter="none") as one:
        tokens = one.prompt_tokens("What is this?", images=[picture(1, 120, 80)])
        expected = one.generate(tokens, n_predict=24, params=GREEDY).token_ids
        start = tokens.index(tokens.spans[0].ids[0])
        stream = one.stream(tokens, n_predict=24, params=GREEDY)
        session = stream._loop.session
        while session.n_past < start + 2:
            one.step()
        is_folded = bool(folded_spans(array("i", tokens)))
        assert session.rewind(start + 1) == (start if is_folded else start + 1)
        for _ in stream:
            pass
        assert stream.result.token_ids == expected


def test_options_that_images_rule_out(target):
    with engine(target) as one:
        with pytest.raises(UsageError, match="images") as raised:
            one.generate("What?", images=[picture(1)], prompt_logprobs=True, n_logprobs=0)
        assert raised.value.field == "prompt_logprobs"


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_encoders_run_on_our_kernels(kind, tmp_path):
    path, _ = write_tower(kind, tmp_path, weights_type="q8_0")
    start, rows = plugin_packed(), {}
    for kernels in ("auto", "off"):
        with engine(path, kernels=kernels, drafter="none") as one:
            n_own = plugin_packed() - start
            (*_, span) = one.prompt_tokens("What?", images=[picture(1, 120, 80)]).spans
            rows[kernels] = span.start().result()
            if kernels == "auto":
                assert plugin_packed() - start - n_own >= 6, "of the matrices of two layers"
    ours, stock = rows["auto"], rows["off"]
    assert np.abs(ours - stock).max() < 0.05 * np.abs(stock).max()


def test_bench_tells_the_seconds_of_encoding_apart(target, tmp_path):
    (tmp_path / "photo.png").write_bytes(picture(1))
    line = {"question_id": 1, "category": "signs", "turns": ["What does it say?"], "images": ["photo.png"]}
    (tmp_path / "suite.jsonl").write_text(json.dumps(line))
    (prompt,) = load_suite(str(tmp_path / "suite.jsonl")).prompts
    with engine(target) as one:
        assert encode_images(one, [prompt]).startswith("1 images, encoded in ")
        n_encoded = one._encoder.n_encoded
        assert n_encoded
        result = one.generate(prompt.text, images=prompt.images, n_predict=4)
        assert one._encoder.n_encoded == n_encoded
        assert result.stats.embed_s > 0.0, "it asked for the rows, which were there"


def test_ids_say_where_a_span_lies():
    ids = EmbeddedSpan.ids_of(b"one", 12, 4)
    assert max(ids) < 0
    assert min(ids) >= -(1 << 31)
    assert ids == EmbeddedSpan.ids_of(b"one", 12, 4) != EmbeddedSpan.ids_of(b"two", 12, 4)
