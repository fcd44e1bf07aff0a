"""A file of requests, line by line: its formats, and what is wrong with a line."""

from __future__ import annotations

import json
import os
import threading

import pytest

from batch_parts import write_lines
from edgespec.apps.batch import lines
from edgespec.apps.batch.lines import CHAT, PLAIN, TEXT, open_input
from edgespec.errors import EdgespecError


@pytest.fixture
def read(tmp_path):
    """Return the requests of these lines."""

    def read(*given):
        found = open_input(write_lines(tmp_path / "in.jsonl", [*given]), tmp_path)
        with found.file:
            requests = [*found.requests()]
        assert [request.place for request in requests] == [*range(found.n_requests)]
        return requests

    return read


def refusal(request):
    """Return the line that says what is wrong with a request."""
    assert request.refused.status == 400
    error = json.loads(request.refused.body)["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"]


def test_the_formats(read):
    body = {"model": "edgespec", "messages": [{"role": "user", "content": "a"}]}
    requests = read(
        {"custom_id": "one", "method": "POST", "url": CHAT, "body": body},
        {"custom_id": "two", "url": TEXT, "body": {"model": "m", "prompt": "b"}},
        '"a plain prompt"',
        {"prompt": "another", "custom_id": "four", "max_tokens": 3},
        {"messages": body["messages"]},
    )
    assert [(r.custom_id, r.url, r.body) for r in requests] == [
        ("one", CHAT, body),
        ("two", TEXT, {"model": "m", "prompt": "b"}),
        ("line-3", PLAIN, {"prompt": "a plain prompt"}),
        ("four", PLAIN, {"prompt": "another", "max_tokens": 3}),
        ("line-5", PLAIN, {"messages": body["messages"]}),
    ]
    assert not any(request.refused for request in requests)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", ("not valid JSON", "column 2", "quotation marks")),
        ("Write a quicksort.", ("not valid JSON", "quotation marks")),
        ('{"prompt": "a", "prompt": "b"}', ("a name occurs twice",)),
        ("[1]", ("neither a JSON object nor a string",)),
        ("null", ("neither",)),
        ("{}", ("prompt, or messages",)),
        ('{"prompt": "a", "messages": []}', ("prompt, or messages",)),
        ({"url": "/v1/embeddings", "method": "POST", "body": {}}, ("url", "/v1/embeddings", CHAT, TEXT)),
        ({"url": 7, "body": {}}, ("url",)),
        ({"method": "GET", "url": CHAT, "body": {}}, ("method", "'GET'", "POST")),
        ({"url": CHAT}, ("body: must be an object",)),
        ({"url": CHAT, "body": "x"}, ("body: must be an object",)),
        ({"custom_id": 7, "prompt": "a"}, ("custom_id: must be a string",)),
        ({"custom_id": "", "prompt": "a"}, ("custom_id: must be a string",)),
        ('{"prompt": "\\ud800"}', ("surrogate",)),
        ("[" * 100_000, ("too deeply nested",)),
    ],
)
def test_a_line_that_is_no_request_is_refused_and_the_next_one_is_read(read, line, words):
    refused, after = read(line, {"prompt": "good"})
    for word in words:
        assert word in refusal(refused)
    assert refused.custom_id == "line-1"
    assert after.body == {"prompt": "good"}


def test_bytes_that_are_not_utf8(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf"with a mark"\r\n"\xff"\n"no newline"')
    found = open_input(file, None)
    first, second, third = found.requests()
    assert (first.body, third.body) == ({"prompt": "with a mark"}, {"prompt": "no newline"})
    assert "not UTF-8 at byte 1" in refusal(second)


def test_a_custom_id_of_an_earlier_line_is_refused_and_names_stay_unique(read):
    requests = read(
        {"custom_id": "a", "prompt": "1"},
        {"custom_id": "a", "prompt": "2"},
        {"custom_id": "line-4", "prompt": "3"},
        '"4"',
        {"custom_id": "line-2", "prompt": "5"},
        {"custom_id": "b", "url": "/v1/embeddings"},
        {"custom_id": "b", "prompt": "6"},
    )
    assert [r.custom_id for r in requests] == ["a", "line-2", "line-4", "line-4-", "line-5", "b", "line-7"]
    assert [bool(r.refused) for r in requests] == [False, True, False, False, True, True, True]
    assert refusal(requests[1]) == "custom_id 'a' is that of an earlier line"


def test_blank_lines_are_skipped_and_count_in_names(read):
    assert [r.custom_id for r in read("", '"a"', "  ", '"b"')] == ["line-2", "line-4"]


def test_a_line_that_is_too_long_is_not_held_in_memory(read, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE", 1 << 20)
    before, refused, after = read('"a"', json.dumps("x" * (5 << 20)), '"b"')
    assert "longer than 1 MiB" in refusal(refused)
    assert (before.custom_id, refused.custom_id, after.custom_id) == ("line-1", "line-2", "line-3")
    fits, _ = read(json.dumps("x" * ((1 << 20) - 3)), '"b"')
    assert fits.refused is None


def test_lines_are_read_only_when_asked_for(tmp_path):
    found = open_input(write_lines(tmp_path / "in.jsonl", ['"a"'] * 100_000), None)
    requests = found.requests()
    next(requests)
    assert found.file.tell() < 10_000
    assert found.n_requests == 100_000


def test_a_pipe_is_read_like_the_file(tmp_path):
    file = write_lines(tmp_path / "in.jsonl", ['"a"', '"b"'])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=pipe.write_bytes, args=(file.read_bytes(),))
    thread.start()
    piped, read = open_input(pipe, tmp_path), open_input(file, None)
    thread.join()
    assert (piped.sha256, [*piped.requests()]) == (read.sha256, [*read.requests()])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "pipe"]


def test_an_input_that_changes_while_it_is_read(tmp_path):
    long = json.dumps("a" * 300_000)  # more than is read ahead
    file = write_lines(tmp_path / "in.jsonl", [long, '"b"'])
    found = open_input(file, None)
    with file.open("a") as more:
        more.write('"c"\n')
    assert len([*found.requests()]) == 2  # what is added later is not of this batch
    write_lines(file, [long, '"x"'])
    with pytest.raises(EdgespecError, match="was changed while it was read"):
        list(found.requests())
