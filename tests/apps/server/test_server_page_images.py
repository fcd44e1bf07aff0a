"""Images on the page, in a real browser: dropped, pasted, removed, shrunk, sent."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image
from playwright.sync_api import expect

from browser import Visit, violations
from server_app import serving
from tiny_vocabulary import CHAT_TEMPLATE
from towers import write_tower

BRING = """async ([kind, width, height]) => {
const canvas = Object.assign(document.createElement("canvas"), { width, height });
canvas.getContext("2d").fillRect(0, 0, width, height);
const blob = await new Promise((done) => canvas.toBlob(done));
const transfer = new DataTransfer();
transfer.items.add(new File([blob], "a.png", { type: "image/png" }));
const properties = { bubbles: true, cancelable: true };
const event = kind === "drop"
  ? new DragEvent("drop", { ...properties, dataTransfer: transfer })
  : new ClipboardEvent("paste", { ...properties, clipboardData: transfer });
return !document.getElementById("message").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    target, _ = write_tower("gemma3", tmp_path_factory.mktemp("tower"))
    with serving(target, engine_options={"chat_template": CHAT_TEMPLATE}) as running:
        yield running


def test_images_are_shown_and_sent(browser, seeing):
    visit = Visit(browser, seeing.url)
    page = visit.page
    page.get_by_role("button", name="Image", exact=True).wait_for()
    assert page.evaluate(BRING, ["drop", 3000, 30]) and page.evaluate(BRING, ["paste", 20, 10])
    page.get_by_label("Images").set_input_files(
        [{"name": "b.txt", "mimeType": "text/plain", "buffer": b"no image"}]
    )
    expect(page.locator("#image-failure")).to_contain_text("b.txt")
    expect(page.locator("form img")).to_have_count(2)
    assert not violations(page)
    page.evaluate(BRING, ["paste", 30, 30])
    expect(page.locator("form img")).to_have_count(3)
    page.get_by_role("button", name="Remove image 3").click()
    visit.limit(4)
    visit.ask("What is this?")
    visit.finish()
    assert page.locator("article .question img").count() == 2 and not page.locator("form img").count()
    visit.ask("And now?")
    page.locator("article").nth(1).get_by_role("button", name="Retry").wait_for()
    first, *_, last = visit.bodies[-1]["messages"]
    assert last["content"] == "And now?"
    *images, words = first["content"]
    sizes = [
        Image.open(io.BytesIO(base64.b64decode(each["image_url"]["url"].partition(",")[2]))).size
        for each in images
    ]
    assert sizes == [(2048, 20), (20, 10)] and words == {"type": "text", "text": "What is this?"}
    page.reload()
    expect(page.locator("article .question img")).to_have_count(2)
    visit.close()


def test_a_model_without_an_encoder_is_offered_none(browser, served):
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#model")).not_to_be_empty()
    assert not visit.page.get_by_role("button", name="Image", exact=True).is_visible()
    assert not visit.page.evaluate(BRING, ["paste", 20, 10])
    visit.close()
