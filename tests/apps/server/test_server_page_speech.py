"""The page's microphone button, in a real browser whose microphone is a tone."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from browser import Visit, violations
from server_app import serving
from speech_app import speech_service

TONE = """() => {
navigator.mediaDevices.getUserMedia = async () => {
  const context = new AudioContext();
  const tone = new OscillatorNode(context, { frequency: 440 });
  const end = context.createMediaStreamDestination();
  tone.connect(end);
  tone.start();
  return end.stream;
};
}"""
REFUSED = """() => {
navigator.mediaDevices.getUserMedia = async () => { throw new DOMException("Denied"); };
}"""


@pytest.fixture(scope="module")
def speech(tiny_path):
    with speech_service(tiny_path) as found:
        yield found


@pytest.fixture(scope="module")
def served(tiny_path, speech):
    with serving(tiny_path, speech=speech.service) as running:
        yield running


@pytest.fixture
def visit(browser, served):
    made = Visit(browser, served.url)
    yield made
    made.close()


def test_what_is_said_comes_into_the_message(visit, speech):
    page = visit.page
    page.evaluate(TONE)
    button = page.get_by_role("button", name="Speak")
    button.wait_for()
    page.get_by_label("Message", exact=True).fill("First:")
    button.click()
    done = page.get_by_role("button", name="Done")
    done.wait_for()
    assert done.get_attribute("aria-pressed") == "true" and not violations(page)
    page.wait_for_timeout(300)
    done.click()
    button.wait_for()
    message = page.get_by_label("Message", exact=True)
    assert message.input_value() == "First: Hello there. Good bye."
    heard = speech.model.mels[-1]
    assert heard.shape == (80, 3000) and heard[:, :20].max() > 0.5  # the tone, not silence
    assert not violations(page)


def test_writing_can_be_stopped_and_failures_are_told(visit, speech):
    page = visit.page
    page.evaluate(TONE)
    speech.model.gate.clear()
    page.get_by_role("button", name="Speak").click()
    page.get_by_role("button", name="Done").wait_for()
    page.wait_for_timeout(200)
    page.get_by_role("button", name="Done").click()
    page.get_by_role("button", name="Stop writing").click()
    page.get_by_role("button", name="Speak").wait_for()
    speech.model.gate.set()
    assert page.get_by_label("Message", exact=True).input_value() == ""
    page.evaluate(REFUSED)
    page.get_by_role("button", name="Speak").click()
    assert page.get_by_role("alert").text_content() == "The microphone cannot be used: Denied"


def test_without_speech_there_is_no_button(browser, tiny_path):
    with serving(tiny_path) as plain:
        visit = Visit(browser, plain.url)
        expect(visit.page.locator("#model")).not_to_be_empty()
        assert not visit.page.get_by_role("button", name="Speak").is_visible()
        visit.close()
