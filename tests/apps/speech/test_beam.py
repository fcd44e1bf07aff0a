"""Beam search against a slow statement of it that reads every text anew."""

import numpy as np
import pytest
from test_rules import by_the_book

from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.rules import SpeechRules
from edgespec.apps.speech.windows import BeamSearch
from toy_speech import END, RULES, START, ToyDecoderCache, random_decoder

N_CTX = 40


def slow_search(model, n_beams, patience, penalty):
    """The best text and its logprob."""
    beams, finished = {(): 0.0}, {}
    n_wanted = round(n_beams * patience)
    for _ in range(N_CTX // 2):
        scores = {}
        for text, logprob in beams.items():
            row = by_the_book(model((START, *text)), text).astype(np.float32).astype(np.float64)
            logprobs = row - np.log(np.exp(row).sum())
            for token in np.argsort(-logprobs, kind="stable")[: n_beams + 1]:
                if logprobs[token] > -np.inf:
                    scores[(*text, int(token))] = logprob + logprobs[token]
        beams, ended = {}, {}
        for text in sorted(scores, key=scores.get, reverse=True):
            if text[-1] == END:
                ended[text] = scores[text]
                continue
            beams[text] = scores[text]
            if len(beams) == n_beams:
                break
        for text, logprob in ended.items():
            if len(finished) < n_wanted:
                finished[text] = logprob
        if len(finished) >= n_wanted:
            break
    for text in sorted(beams, key=beams.get, reverse=True):
        if len(finished) >= n_beams:
            break
        finished[(*text, END)] = beams[text]

    def score(text):
        n = len(text) - 1
        return finished[text] / (n if penalty is None else ((5 + n) / 6) ** penalty)

    best = max(finished, key=score)
    return list(best[:-1]), finished[best] / len(best)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("n_beams", "patience", "penalty"), [(1, 1.0, None), (3, 1.0, None), (5, 2.0, 0.6), (4, 0.5, 1.0)]
)
def test_the_search_finds_what_a_slow_one_finds(seed, n_beams, patience, penalty):
    model = random_decoder(seed, sharpness=3.0)
    cache = ToyDecoderCache(model, n_beams)
    options = SpeechOptions(beam=n_beams, patience=patience, length_penalty=penalty)
    search = BeamSearch(cache, SpeechRules(RULES), options, n_ctx=N_CTX)
    (rows,) = cache.forward([batch_of([START])])
    found = search.run(rows[0], 1)
    tokens, logprob = slow_search(model, n_beams, patience, penalty)
    assert found.tokens == tokens
    assert found.avg_logprob == pytest.approx(logprob, abs=1e-4)
    assert max(cache.passes) <= n_beams, "each pass holds one token of each beam"


def batch_of(tokens):
    from edgespec.apps.speech.whisper_model import SequenceBatch

    return SequenceBatch(0, tokens)
