"""The routes of OpenAI's audio API, asked by the official client, over a model that says a script."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import openai
import pytest

from edgespec.apps.server import streaming
from edgespec.apps.server.audio_routes import SpeechService, SpeechWorker
from edgespec.apps.server.gate import Gate, GateLimits
from edgespec.apps.server.request_worker import Abandoned
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.transcriber import open_transcriber
from server_app import serving
from speech_app import noise, recording, speech_service, wav
from tiny_whisper import write_tiny_whisper
from worker_jobs import items_of

TEXT = "Hello there. Good bye."


@pytest.fixture(scope="module")
def speech(tiny_path):
    with speech_service(tiny_path, max_queue=1) as found:
        yield found


@pytest.fixture(scope="module")
def served(tiny_path, speech):
    with serving(tiny_path, speech=speech.service) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(client, **fields):
    return client.audio.transcriptions.create(file=recording(), model="whisper-1", **fields)


def test_json_and_text(client, speech):
    answer = ask(client)
    assert answer.text == TEXT and answer.usage.type == "duration" and answer.usage.seconds == 1.0
    assert ask(client, response_format="text") == f"{TEXT}\n"
    assert speech.model.heard[-1][-3:] == tuple(speech.model.tokenizer.start("de"))  # as detected


def test_verbose_json(client):
    answer = ask(client, response_format="verbose_json", language="fr")
    assert (answer.language, answer.duration, answer.text) == ("french", 1.0, TEXT)
    assert [(s.id, s.start, s.end, s.text) for s in answer.segments] == [
        (0, 0.0, 0.5, " Hello there."),
        (1, 0.5, 0.9, " Good bye."),
    ]
    assert answer.segments[0].temperature == 0.0 and answer.words is None
    assert answer.edgespec["complete"] and answer.edgespec["windows"] == 1


def test_subtitles(client):
    assert ask(client, response_format="srt") == (
        "1\n00:00:00,000 --> 00:00:00,500\nHello there.\n\n2\n00:00:00,500 --> 00:00:00,900\nGood bye.\n\n"
    )
    assert ask(client, response_format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nHello")


def test_a_stream(client):
    events = list(ask(client, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:2]).strip() == events[2].text == TEXT
    assert events[2].usage.output_tokens > 4


def test_options_reach_the_model(client, speech):
    tokens = speech.model.tokenizer
    ask(client, language="en", prompt="Names: Ada.")
    assert speech.model.heard[-1][-3:] == tuple(tokens.start("en"))
    assert tokens.decode(speech.model.heard[-1]).strip() == "Names: Ada."
    ask(client, language="German", temperature=0.4)
    assert speech.model.heard[-1][-2] == tokens.language_token("de")
    client.audio.translations.create(file=recording(), model="whisper-tiny")
    assert speech.model.heard[-1][-1] == tokens.translate
    answer = client.audio.translations.create(
        file=recording(), model="whisper-tiny", response_format="verbose_json"
    )
    assert answer.text == TEXT and answer.language == "german"


def test_the_list_of_models(client, served):
    with served.client() as plain:
        names = [model["id"] for model in plain.get("/v1/models").json()["data"]]
    assert names[1] == "whisper-tiny"
    found = client.models.retrieve("whisper-1")
    assert found.id == "whisper-tiny" and found.edgespec["speech"] and "de" in found.edgespec["languages"]


def test_languages_are_named_as_on_the_command_line(client, speech):
    tokens = speech.model.tokenizer
    for language, code in (("en-US", "en"), ("Deutsch", "de"), ("auto", "de")):
        ask(client, language=language)
        assert speech.model.heard[-1][-2] == tokens.language_token(code)


def test_silence_is_left_out_where_it_is_asked_for(served, speech):
    pytest.importorskip("webrtcvad")
    spoken = {"file": ("a.wav", wav(np.concatenate([np.zeros(20 * 16_000), 3 * noise(2), np.zeros(8000)])))}
    n = len(speech.model.mels)
    form = {"vad_filter": "true", "response_format": "verbose_json"}
    answer = post(served, spoken, form).json()
    assert not speech.model.mels[n][:, 400:].any(), "the joined speech alone, not 22 seconds"
    assert answer["segments"][0]["start"] > 19.0 and answer["duration"] == 22.5
    quiet = post(served, {"file": ("a.wav", wav(np.full(16_000, 0.01)))}, {"vad_filter": "true"})
    assert quiet.json()["text"] == ""
    assert quiet.headers["x-edgespec-warning"] == "file: no speech in 1.0 s of sound"


def test_vad_filter_without_its_detector(served, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    answer = post(served, {"file": recording()}, {"vad_filter": "1"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "vad_filter"
    assert "vad_filter needs webrtcvad: pip install" in answer.json()["error"]["message"]


def test_silence_is_said(served):
    silent = {"file": ("a.wav", wav(np.zeros(16_000)))}
    answer = post(served, silent)
    assert answer.json()["text"] == ""
    assert answer.headers["x-edgespec-warning"] == "file: silent: no sound above -80 dB in 1.0 s"
    answer = post(served, silent, {"response_format": "verbose_json"})
    assert answer.json()["edgespec"]["silent"] is True
    lines = post(served, silent, {"stream": "true"}).text.splitlines()
    done = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert done[-1]["edgespec"]["silent"] is True


def post(served, files=None, data=None, path="transcriptions", **more):
    with served.client() as client:
        return client.post(f"/v1/audio/{path}", files=files, data=data, **more)


def test_bad_recordings_are_told(served):
    for data, message in (
        (b"", "file: empty, 0 bytes"),
        (b"no sound at all, but a text", "file: not a recording that can be read"),
        (wav(noise(0)), "file: no sound in it, not one sample"),
        (wav(np.zeros(101 * 16_000)), "file: longer than 100 s; cut it into parts"),
    ):
        answer = post(served, {"file": ("a.wav", data)})
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "file"
    assert not served.log


def test_forms_that_are_none(served):
    answer = post(served, json={"file": "x"})
    assert answer.status_code == 415 and "multipart/form-data" in answer.json()["error"]["message"]
    answer = post(served, data={"file": "x"})
    assert answer.status_code == 415
    answer = post(served, {"other": ("a.wav", wav(noise(1)))})
    assert answer.status_code == 400 and "file: is missing" in answer.json()["error"]["message"]
    answer = post(
        served, content=b"--x\r\nbroken", headers={"Content-Type": "multipart/form-data; boundary=y"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    answer = post(served, {"file": ("a", b"x")}, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403
    twice = [("file", ("a.wav", wav(noise(1)))), ("file", ("b.wav", wav(noise(1))))]
    answer = post(served, twice)
    assert answer.status_code == 400 and "file: is there 2 times" in answer.json()["error"]["message"]
    assert not served.log


def test_what_was_wrong_with_a_recording_is_a_warning(served):
    answer = post(served, {"file": ("a.wav", wav(noise(1.0))[:-2000])})
    assert answer.json()["text"] == TEXT
    assert "cut off after 0.9 s of 1.0 s" in answer.headers["x-edgespec-warning"]


def test_a_full_queue_and_a_client_that_leaves(served, speech):
    speech.model.gate.clear()
    speech.model.begun.clear()
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(post(served, {"file": ("a.wav", wav(noise(1)))})))
        for _ in range(2)
    ]
    threads[0].start()
    assert speech.model.begun.wait(60)
    threads[1].start()
    while not speech.worker.n_waiting:
        pass
    refused = post(served, {"file": ("a.wav", wav(noise(1)))})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "queue_full"
    with served.client() as client:
        health, metrics = client.get("/health").json(), client.get("/metrics").text
    assert health == {"status": "ok", "busy": True, "running": 1, "waiting": 1, "parallel": 2}
    for line in ("edgespec_running 1.0", "edgespec_queue_length 1.0", "edgespec_busy 1.0"):
        assert f"\n{line}\n" in metrics
    assert speech.worker.busy
    speech.model.gate.set()
    for thread in threads:
        thread.join(20)
    assert [answer.json()["text"] for answer in answers] == [TEXT, TEXT]

    speech.model.gate.clear()
    speech.model.begun.clear()
    long = {"file": ("a.wav", wav(noise(95)))}
    with (
        served.client() as client,
        client.stream("POST", "/v1/audio/transcriptions", files=long, data={"stream": "true"}) as stream,
    ):
        assert stream.status_code == 200
        assert speech.model.begun.wait(60)
    while not all(running.cancelled for running in speech.worker._running):  # until the server has noticed
        pass
    n = len(speech.model.mels)
    speech.model.gate.set()
    assert post(served, {"file": ("a.wav", wav(noise(1)))}).json()["text"] == TEXT
    assert len(speech.model.mels) <= n + 3  # not the four windows of the one that left


def test_a_recording_that_waits_sends_comments(served, speech, monkeypatch):
    monkeypatch.setattr(streaming, "ALIVE_S", 0.01)
    speech.model.gate.clear()
    speech.model.begun.clear()
    before = threading.Thread(target=lambda: post(served, {"file": recording()}))
    before.start()
    assert speech.model.begun.wait(60)
    asked = {"files": {"file": recording()}, "data": {"stream": "true"}}
    with served.client() as client, client.stream("POST", "/v1/audio/transcriptions", **asked) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": queue 1"
        assert ": transcribing" in lines
        speech.model.gate.set()
        rest = list(lines)
    before.join(20)
    assert rest.index(": queue 0") < min(n for n, line in enumerate(rest) if line.startswith("data:"))
    assert json.loads(rest[-2].removeprefix("data: "))["text"] == TEXT


def test_the_only_one_that_waits_may_leave_as_its_turn_comes(tiny_path):
    """The thread finds nobody where it saw somebody, and answers the next one."""
    with speech_service(tiny_path, max_seconds=20) as speech:
        worker = speech.worker

        async def ask():
            return [item async for item in items_of(worker.run(noise(1), SpeechOptions(), client="one"))]

        async def main():
            leaver = asyncio.create_task(ask())
            while not worker.n_waiting:
                await asyncio.sleep(0)
            (request,) = worker._queue.in_order([])
            next_one, looked = worker._next, threading.Event()

            def next_once_it_left():
                worker._cancel(request, Abandoned())
                found = next_one()
                looked.set()
                return found

            worker._next = next_once_it_left
            worker.start()
            with pytest.raises(Abandoned):
                await leaver
            await asyncio.to_thread(looked.wait)
            heard = await ask()
            await worker.stop(grace_s=5)
            return heard

        assert asyncio.run(main())[-1].text == TEXT


def test_a_failure_of_the_model_is_no_traceback(served, speech, monkeypatch):
    encode, n_good = speech.model.encode, 0

    def fail(mel):
        nonlocal n_good
        if not n_good:
            raise RuntimeError("/secret/path is broken")
        n_good -= 1
        return encode(mel)

    monkeypatch.setattr(streaming, "_SETTLE_S", 20.0)  # a busy machine takes its time to fail
    monkeypatch.setattr(speech.model, "encode", fail)
    for fields in ({}, {"stream": "true"}):  # at once: a stream has its own status too
        answer = post(served, {"file": recording()}, fields)
        assert answer.status_code == 500 and "secret" not in answer.text
        assert answer.json()["error"]["type"] == "server_error"
    n_good = 1
    answer = post(served, {"file": ("a.wav", wav(noise(95)))}, {"stream": "true"})
    said, *_, last = [line for line in answer.text.splitlines() if line.startswith("data:")]
    assert answer.status_code == 200 and json.loads(said.removeprefix("data: "))["delta"] == " Hello there."
    assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith("the server failed")
    assert [served.log.pop().partition(":")[0] for _ in range(3)] == ["RuntimeError"] * 3


def test_english_models_do_not_translate(tiny_path):
    with (
        speech_service(tiny_path, multilingual=False) as english,
        serving(tiny_path, speech=english.service) as served,
    ):
        answer = post(served, {"file": recording()}, path="translations")
        assert answer.status_code == 400 and "does not translate" in answer.json()["error"]["message"]
        assert post(served, {"file": recording()}).json()["text"] == TEXT


def test_a_real_model_answers_alike_beside_a_chat(tiny_path, tmp_path):
    """A tiny random one: what it says is nonsense, and the same each time, as is the chat's text."""
    path = write_tiny_whisper(tmp_path / "random.gguf", n_text_ctx=64)
    with open_transcriber(str(path)) as transcriber:
        worker = SpeechWorker(transcriber)
        with serving(tiny_path, speech=SpeechService("random", worker)) as served, served.client() as client:
            asked = {"prompt": "once", "max_tokens": 40, "temperature": 0, "model": "edgespec"}

            def chat():
                return client.post("/v1/completions", json=asked).json()["choices"][0]["text"]

            fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
            alone, first = chat(), post(served, {"file": recording(2.0)}, fields)
            assert first.status_code == 200, first.text
            said: list[str] = []
            other = threading.Thread(target=lambda: said.append(chat()))
            other.start()
            again = post(served, {"file": recording(2.0)}, fields)
            other.join(30)
            assert said == [alone]
            for answer in (first, again):
                found = answer.json()
                assert found["duration"] == 2.0 and found["edgespec"]["tokens"] > 0
                found.pop("edgespec")
            assert first.json()["segments"] == again.json()["segments"]
            metrics = client.get("/metrics").text
    assert served.log == []
    assert 'edgespec_recordings_total{outcome="finished"} 2.0' in metrics
    assert "edgespec_audio_seconds_total 4.0" in metrics


def test_bodies_with_recordings_may_be_larger_than_others():
    async def answered(path, n):
        sent = []

        async def app(scope, receive, send):
            sent.append(len((await receive())["body"]))

        async def receive():
            return {"type": "http.request", "body": b"x" * n, "more_body": False}

        async def send(message):
            sent.append(message.get("status", 0))

        gate = Gate(app, GateLimits(max_body=10, max_audio=1000, loopback=False))
        await gate({"type": "http", "path": path, "headers": [], "method": "POST"}, receive, send)
        return sent[0]

    assert asyncio.run(answered("/v1/audio/transcriptions", 900)) == 900
    assert asyncio.run(answered("/v1/audio/transcriptions", 1001)) == 413
    assert asyncio.run(answered("/v1/completions", 900)) == 413
