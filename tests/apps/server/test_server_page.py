"""The page: what is served, and in a real browser over the real server what it shows and sends."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from browser import Visit, violations
from edgespec.apps.server.gate import Gate, GateLimits
from edgespec.apps.server.page import PATHS
from server_app import serving

PAGE = resources.files("edgespec.apps.server.page")
OWN = sorted(each.name for each in PAGE.iterdir() if each.name.endswith((".html", ".css", ".js")))
TYPES = {"css": "text/css", "js": "text/javascript"}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_the_files_are_served_with_a_strict_policy(served, path):
    with served.client() as client:
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
        )
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(path, headers={"If-None-Match": f'"other", W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert client.head(path).headers["content-type"] == answer.headers["content-type"]


def test_each_file_is_served_with_its_type(served):
    assert {f"/{name}" for name in OWN} == {"/index.html", *PATHS} - {"/"}
    with served.client() as client:
        for path in PATHS:
            kind = client.get(path).headers["content-type"].split(";")[0]
            assert kind == ("text/html" if path == "/" else TYPES[path.rpartition(".")[2]])


@pytest.mark.parametrize("name", OWN)
def test_nothing_names_another_host_or_writes_markup(name):
    text = (
        (PAGE / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    )  # a namespace, which nobody loads
    assert not re.search(
        r"https?://|[\"'(]//\w|@import|innerHTML|insertAdjacentHTML|\beval\b|document\.write", text
    )
    assert not re.search(r"<style|\sstyle=|\son\w+=", text)  # the policy refuses them


# ---- in the browser ----


def streamed(response):
    """The text of a streamed answer."""
    events = [
        line.removeprefix("data: ") for line in response.text().splitlines() if line.startswith("data: {")
    ]
    chunks = [json.loads(each) for each in events]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])


@pytest.fixture
def visit(browser, served):
    made = Visit(browser, served.url)
    yield made
    made.close()


def test_a_conversation_goes_on_and_is_marked(visit):
    visit.limit(24)
    visit.page.get_by_label("System message").fill("Be brief.")
    with visit.page.expect_response("**/v1/chat/completions") as response:
        visit.ask("first")
    visit.finish()
    answer = streamed(response.value)
    assert answer
    origins = {
        span.get_attribute("data-origin") for span in visit.page.locator(".answer [data-origin]").all()
    }
    assert origins <= {"accepted", "resampled", "bonus", "target"} and origins
    figures = " ".join(visit.text(".figures li"))
    assert "24 tokens" in figures and "tokens/s" in figures and "prompt: " in figures
    assert "energy: unavailable" in figures  # nothing measures it here, which is not 0 J
    visit.ask("second")
    visit.finish()
    assert visit.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "second"},
    ]
    assert visit.bodies[1]["temperature"] == 0 and visit.bodies[1]["max_tokens"] == 24
    assert "speculative" not in visit.bodies[1]


def test_the_switch_turns_speculation_off(visit):
    visit.limit(8)
    visit.page.get_by_role("switch", name="Speculation").click()
    visit.ask("plainly")
    visit.finish()
    assert visit.bodies[0]["speculative"] == {"drafter": "none"}
    assert visit.page.locator('.answer [data-origin="accepted"]').count() == 0
    assert "speculation off" in visit.text(".figures li")


def test_compare_asks_twice_with_speculation_first(visit):
    visit.limit(8)
    visit.ask("both ways", "Compare")
    visit.finish()
    assert [body.get("speculative") for body in visit.bodies] == [None, {"drafter": "none"}]
    assert visit.bodies[0]["messages"] == visit.bodies[1]["messages"]
    rows = visit.text(".comparison tbody th")
    assert "Tokens/s" in rows and "Energy a token" in rows
    assert "speculation first" in visit.text(".comparison .note")[0]


def test_stop_ends_what_waits_and_leaves_it_out(visit):
    page = visit.page
    page.route("**/v1/chat/completions", lambda route: None)  # the answer never begins
    visit.ask("for ever")
    page.get_by_role("button", name="Stop").click()
    visit.finish()
    assert "stopped" in visit.text(".figures li")
    page.unroute("**/v1/chat/completions")
    visit.limit(4)
    visit.ask("after")
    visit.finish()
    assert [each["content"] for each in visit.bodies[1]["messages"]] == ["after"]


def test_a_key_is_asked_for_and_kept_for_the_tab(browser, tiny_path):
    with serving(tiny_path) as locked:
        locked.app.add_middleware(Gate, limits=GateLimits(api_key="sesame"))
        visit = Visit(browser, locked.url)
        visit.page.get_by_label("This server asks for an API key").fill("wrong")
        visit.page.get_by_role("button", name="Use the key").click()
        visit.page.get_by_role("alert").get_by_text("the API key is wrong").wait_for()
        visit.page.get_by_label("This server asks for an API key").fill("sesame")
        visit.page.get_by_role("button", name="Use the key").click()
        visit.page.locator("#model", has_text="target").wait_for()
        visit.limit(4)
        visit.ask("open")
        visit.finish()
        assert visit.page.get_by_role("alert").count() == 0
        kept = sorted(visit.page.evaluate("Object.keys(sessionStorage)"))
        assert kept == ["edgespec-api-key", "edgespec-conversation", "edgespec-settings"]
        assert visit.page.evaluate("localStorage.length") == 0
        visit.page.context.close()


def test_the_message_has_the_focus_at_the_start_and_after_an_answer(visit):
    focused = "document.activeElement.id"
    assert visit.page.evaluate(focused) == "message"
    visit.limit(4)
    visit.ask("by the button")
    visit.finish()
    assert visit.page.evaluate(focused) == "message"


def test_marks_are_shown_to_who_asks_for_them(visit):
    visit.limit(24)
    visit.ask("first")
    visit.finish()
    marked = visit.page.locator(".answer [data-origin]").first
    line = "each => getComputedStyle(each).textDecorationLine + getComputedStyle(each).backgroundImage"
    plain = [each.evaluate(line) for each in visit.page.locator(".answer [data-origin]").all()]
    assert {*plain} == {"nonenone"} and not visit.page.locator("#legend").is_visible()
    marked.evaluate("each => { each.dataset.origin = 'accepted'; }")
    visit.page.get_by_label("Mark the drafted tokens").check()
    assert marked.evaluate(line) == "underlinenone" and visit.page.locator("#legend").is_visible()


def test_a_reload_keeps_the_conversation_until_a_new_one(visit):
    page = visit.page
    visit.limit(8)
    page.get_by_label("System message").fill("Be brief.")
    visit.ask("both ways", "Compare")
    visit.finish()
    visit.ask("second")
    visit.finish()
    page.get_by_label("Message", exact=True).fill("not sent yet")
    shown = page.locator("#log").inner_text()
    page.reload()
    visit.finish()
    assert page.locator("#log").inner_text() == shown
    assert page.get_by_label("Message", exact=True).input_value() == "not sent yet"
    visit.ask("third")
    visit.finish()
    before, after = visit.bodies[-2]["messages"], visit.bodies[-1]["messages"]
    assert after[: len(before)] == before and len(after) == len(before) + 2 == 6
    page.get_by_role("button", name="New chat").click()
    page.reload()
    page.get_by_text("Ask the model something.").wait_for()
    assert page.locator("article").count() == 0
    assert page.get_by_label("System message").input_value() == "Be brief."


def test_an_answer_ends_where_the_model_ends_it_and_goes_on_where_a_limit_cut_it(visit):
    page = visit.page
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={}))
    visit.ask("no limit")
    visit.finish()
    assert "max_tokens" not in visit.bodies[0]
    page.unroute("**/v1/chat/completions")
    visit.limit(8)
    visit.ask("cut")
    visit.finish()
    text = page.locator(".answer .text").last.text_content()
    assert "cut off at 8 tokens, the most that Settings allow" in visit.text(".figures li")
    with page.expect_response("**/v1/chat/completions"):
        page.get_by_role("button", name="Go on").click()
    visit.finish()
    asked = visit.bodies[-1]
    assert asked["continue_final_message"] is True
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant"]
    longer = page.locator(".answer .text").last.text_content()
    assert longer.startswith(text) and len(longer) > len(text)
    assert page.locator("article").count() == 2


def test_an_error_is_shown_in_the_servers_words(visit):
    visit.page.get_by_label("Message", exact=True).fill("too long " * 4000)
    visit.page.get_by_role("button", name="Send", exact=True).click()
    alert = visit.page.get_by_role("alert")
    alert.wait_for()
    assert "tokens" in alert.text_content() and "{" not in alert.text_content()


def test_events_survive_any_border(visit):
    """The stream is cut at every byte, within a character too."""
    found = visit.page.evaluate(
        r"""async () => {
            const { events } = await import("/stream.js");
            const text = ': waiting\r\ndata: {"a":"é\u{1F40C}"}\r\n\r\ndata: x\ndata: y\n\n';
            const bytes = new TextEncoder().encode(text);
            const all = [];
            for (let cut = 0; cut <= bytes.length; cut++) {
                const body = new ReadableStream({ start(c) {
                    c.enqueue(bytes.slice(0, cut)); c.enqueue(bytes.slice(cut)); c.close(); } });
                const got = [];
                for await (const event of events(body)) got.push(event);
                all.push(JSON.stringify(got));
            }
            return [...new Set(all)];
        }"""
    )
    assert [json.loads(each) for each in found] == [
        [{"comment": "waiting"}, {"data": '{"a":"é\U0001f40c"}'}, {"data": "x\ny"}]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1000, 1280, 1920])
def test_the_settings_keep_off_the_edges_and_can_be_read(browser, served, width, scheme):
    visit = Visit(browser, served.url, viewport={"width": width, "height": 720}, color_scheme=scheme)
    button = visit.page.get_by_role("button", name="Settings")
    if button.is_visible():
        button.click()
    box = visit.page.get_by_role("complementary", name="Settings").bounding_box()
    assert box["x"] >= 12 and box["x"] + box["width"] <= width - 12
    header = visit.page.get_by_role("banner").bounding_box()
    assert box["y"] >= header["y"] + header["height"] + 8
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    assert violations(visit.page) == []
    visit.close()


def test_settings_open_over_a_long_conversation_where_the_reader_is(browser, served):
    visit = Visit(browser, served.url, viewport={"width": 390, "height": 640})
    visit.limit(48)
    for question in ("one", "two", "three"):
        visit.ask(question)
        visit.finish()
    assert visit.page.evaluate("scrollY") > 0
    visit.page.get_by_role("button", name="Settings").click()
    assert 0 < visit.page.get_by_label("Temperature").bounding_box()["y"] < 640
    visit.ask("four")
    assert not visit.page.get_by_label("Temperature").is_visible()  # nor in the way of the answer
    visit.close()
