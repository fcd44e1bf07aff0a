"""Answers on the page, in a real browser: markdown as it streams, its marks, and what is copied."""

from __future__ import annotations

import pytest

from browser import Visit, violations

FENCE = "```"
ANSWER = f"""\
Sorting has **two ways** and *one* name &amp; no more:
- `list.sort()` in place
- `sorted(x)` makes a new one
  1. any iterable
  2. *nothing* lost

### Example
> quoted **words
> go on**
>
> - item

{FENCE}python
def f(x):

    return x < 1 & x
{FENCE}

| Case | Cost |
|:-----|-----:|
| sorted | `n` |
| any \\| other<br>one | n log n |

Setext
---
para
***bold*** and snake_case_name, 2 * 3 * 4

- [x] done
- [ ] [open](https://example.com/a_(b)) ~~gone~~

1. one

   {FENCE}
   nested

   code
   {FENCE}
2. two
"""


CODE = "def f(x):\n\n    return x < 1 & x"


@pytest.fixture
def visit(browser, scripted):
    made = Visit(browser, scripted.url)
    yield made
    made.close()


def test_an_answer_has_code_lists_a_table_and_the_rest(visit, scripted):
    answer = scripted.show(visit, ANSWER)
    page = visit.page
    assert answer.locator("> ul").first.locator("> li").count() == 2
    assert answer.locator("ul > li > ol > li").all_text_contents() == ["any iterable", "nothing lost"]
    assert answer.locator("pre code").first.text_content() == CODE
    assert answer.locator(".code .bar span").all_text_contents() == ["python", "code"]
    assert answer.locator("ol pre code").text_content() == "nested\n\ncode"
    assert answer.locator("table th").all_text_contents() == ["Case", "Cost"]
    assert answer.locator("table tbody td").all_inner_texts()[2:] == ["any | other\none", "n log n"]
    assert answer.locator("tbody td").nth(1).evaluate("e => getComputedStyle(e).textAlign") == "right"
    assert answer.locator("blockquote p strong").inner_text() == "words\ngo on"
    assert answer.locator("blockquote li").text_content() == "item"
    assert answer.locator("h3").all_text_contents() == ["Example", "Setext"]
    assert answer.locator("p").first.text_content() == "Sorting has two ways and one name & no more:"
    assert answer.locator("em strong, strong em").text_content() == "bold"
    assert answer.locator("del").text_content() == "gone"
    assert answer.locator("li.task").all_text_contents() == ["\u2611 done", "\u2610 open gone"]
    assert answer.get_by_text("snake_case_name, 2 * 3 * 4").count() == 1
    assert page.locator(".question .text").text_content() == "question"
    assert violations(page) == []


@pytest.mark.parametrize("width", [320, 1280])
def test_long_code_and_wide_tables_scroll_in_themselves(browser, scripted, width):
    visit = Visit(browser, scripted.url, viewport={"width": width, "height": 720})
    row = "|" + " unbreakable_words |" * 30
    scripted.answer(f"{FENCE}\n{'long ' * 200}\n{FENCE}\n\n{row}\n|{'-|' * 30}\n{row}\n\n{'w' * 500}\n", 99)
    visit.ask("wide")
    visit.finish()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == width
    for each in visit.page.locator(".text pre, .text .wide").all():
        assert each.evaluate("e => e.scrollWidth > e.clientWidth")
    assert violations(visit.page) == []
    visit.close()


def test_what_the_reader_writes_is_plain_text(visit, scripted):
    scripted.answer("yes")
    visit.ask("**not bold** <b>nor this</b>\n- no list")
    visit.finish()
    own = visit.page.locator(".question .text")
    assert own.text_content() == "**not bold** <b>nor this</b>\n- no list"
    assert own.locator("*").count() == 0


# ---- while it streams ----


def test_half_a_code_block_is_code_while_it_grows(visit, scripted):
    page = visit.page
    scripted.say(f"Like this:\n\n{FENCE}python\nprint(")
    visit.ask("code")
    running = page.locator('.answer[data-state="running"]')
    running.locator("pre code", has_text="print(").wait_for()
    assert running.locator(".bar span").text_content() == "python"
    assert running.locator("pre .caret").count() == 1
    scripted.say("1)\n# **no** heading\n")
    running.locator("pre code", has_text="**no** heading").wait_for()
    scripted.say(f"{FENCE}\n\nafter")
    running.locator("p", has_text="after").wait_for()
    assert running.locator("pre").text_content() == "print(1)\n# **no** heading"
    scripted.end()
    visit.finish()
    assert page.locator(".caret").count() == 0


def test_thoughts_stand_apart_and_are_opened_by_who_wants_them(visit, scripted):
    page = visit.page
    scripted.think("2 + 2\n<b>is</b> ")
    scripted.think("**4**")
    scripted.answer("It is *four*.")
    visit.ask("sum")
    visit.finish()
    thoughts = page.locator(".answer .thoughts")
    assert thoughts.locator("p").text_content() == "2 + 2\n<b>is</b> **4**"
    assert thoughts.locator("p *").count() == 0
    assert not thoughts.locator("p").is_visible()
    thoughts.locator("summary").click()
    assert thoughts.locator("p").is_visible()
    assert page.locator(".answer .text").text_content() == "It is four."
    scripted.answer("none")
    visit.ask("again")
    visit.finish()
    assert not page.locator(".answer .thoughts").last.is_visible()


def test_who_waits_sees_its_place_in_the_queue(visit, scripted):
    scripted.wait(3)
    visit.ask("late")
    running = visit.page.locator('.answer[data-state="running"]')
    running.get_by_text("Waiting, 2 before you").wait_for()
    scripted.wait(1)
    running.get_by_text("Waiting, 0 before you").wait_for()
    scripted.wait(0)
    running.get_by_text("Reading the prompt").wait_for()
    scripted.read(4096, 16384)
    running.get_by_text("Reading the prompt: 25").wait_for()
    assert running.get_by_role("progressbar", name="Prompt read").get_attribute("value") == "4096"
    scripted.answer("yes")
    visit.finish()
    assert visit.page.locator(".answer .text").text_content() == "yes"
    assert visit.page.get_by_role("progressbar").count() == 0


HALVES = {
    "a **bo": "a <strong>bo</strong>",
    "a **bold*": "a <strong>bold</strong>",
    "a *": "a ",
    "an *em": "an <em>em</em>",
    "a `co": "a <code>co</code>",
    "2 * 3": "2 * 3",
    "a\n-": "a",
    "a\n1.": "a",
    f"a\n{FENCE[:2]}": "a",
    "a\n---": "a",
    "[a](": "[a](",
}


def test_what_is_half_written_does_not_flicker(visit):
    """A line of dashes is no heading before it is complete, and ** is not seen before its words are bold."""
    script = """async (source) => {
        const { GrowingText } = await import("/growing.js");
        const text = new GrowingText();
        text.append(source, "target");
        while (!text.element.firstChild) await new Promise(requestAnimationFrame);
        text.element.querySelectorAll(".caret").forEach((each) => each.remove());
        text.element.querySelectorAll("span").forEach((each) => each.replaceWith(...each.childNodes));
        return text.element.firstElementChild.innerHTML;
    }"""
    assert {source: visit.page.evaluate(script, source) for source in HALVES} == HALVES


def test_the_head_of_a_table_is_one_before_its_second_line(visit, scripted):
    scripted.say("Look:\n\n| Case | Cost |")
    visit.ask("table")
    running = visit.page.locator('.answer[data-state="running"]')
    running.locator("th", has_text="Cost").wait_for()
    scripted.say("\n|--")
    scripted.say("-|---|\n| a | b |\n")
    running.locator("td", has_text="b").wait_for()
    scripted.say("| c")
    running.locator("td", has_text="c").locator(".caret").wait_for()  # not in the cell that is empty yet
    scripted.end()
    visit.finish()
    assert visit.page.locator("table tr").count() == 3


@pytest.mark.parametrize(
    ("source", "step"),
    [(ANSWER, 3), (f"one\n\npara\n{FENCE}a`b` is no code\n\npara\n***bold***\n\nlast\n", 1)],
)
def test_each_frame_shows_what_the_text_so_far_is(visit, source, step):
    """Drawn in pieces, of which the finished ones are left alone, it is what it would be drawn at once."""
    different = visit.page.evaluate(
        """async ([source, step]) => {
            const { GrowingText } = await import("/growing.js");
            const growing = new GrowingText();
            for (let end = step; end < source.length + step; end += step) {
                growing.append(source.slice(end - step, end), "target");
                const whole = new GrowingText();
                whole.append(source.slice(0, end), "target");
                const same = () => growing.element.innerHTML === whole.element.innerHTML;
                for (let i = 0; i < 900 && !(whole.element.firstChild && same()); i++)
                    await new Promise(requestAnimationFrame);
                if (!same()) return [growing.element.innerHTML, whole.element.innerHTML];
            }
            return null;
        }""",
        [source, step],
    )
    assert different is None


def test_finished_blocks_are_left_alone_and_a_selection_stays(visit, scripted):
    page = visit.page
    scripted.say("".join(f"Paragraph {i} is here.\n\n" for i in range(20)) + "The last one gr")
    visit.ask("many")
    page.locator(".answer p", has_text="The last one gr").wait_for()
    page.evaluate(
        """() => {
            const paragraphs = [...document.querySelectorAll(".answer .text p")];
            window.touched = new Set();
            const of = (node) => paragraphs.findIndex((each) => each.contains(node));
            const all = { childList: true, characterData: true, subtree: true };
            new MutationObserver((changes) => changes.forEach(({ target }) => window.touched.add(of(target))))
                .observe(document.querySelector(".answer .text"), all);
            const words = paragraphs.at(-1).querySelector("span").firstChild;
            getSelection().setBaseAndExtent(paragraphs[18].firstChild, 0, words, 8);
        }"""
    )
    selected = page.evaluate("getSelection().toString()")
    assert selected.startswith("Paragraph 18") and selected.endswith("The last")
    for word in ("ows", " and", " grows.", "\n\nAnd another."):
        scripted.say(word)
    page.locator(".answer p", has_text="And another.").wait_for()
    assert page.evaluate("getSelection().toString()") == selected
    assert min(set(page.evaluate("[...window.touched]")) - {-1}) >= 19  # -1: the list of paragraphs itself
    scripted.end()
    visit.finish()
    assert page.evaluate("getSelection().toString()") == selected


def test_only_the_end_of_a_long_answer_is_read_again(visit, scripted):
    """While it grows. At its end it is read once, whole."""
    asked = []
    visit.page.on("request", lambda each: asked.append(each) if "/page/markdown" in each.url else None)
    visit.ask("long")
    n_each = len("Paragraph 10.\n\n")
    for i in range(10, 40):
        scripted.say(f"Paragraph {i}.\n\n")
        visit.page.locator(".answer p", has_text=f"Paragraph {i}.").wait_for()
    scripted.end()
    visit.finish()
    *growing, whole = [(each.url.endswith("?open"), len(each.post_data)) for each in asked]
    assert whole == (False, 30 * n_each)
    assert len(growing) >= 30 and all(is_open and n <= 3 * n_each for is_open, n in growing)


def test_what_the_server_does_not_read_is_shown_as_written(visit, scripted):
    page = visit.page
    scripted.say("One **bold**.\n\nTwo.\n\nThree.\n\nFour.")
    visit.ask("lost")
    page.locator(".answer p", has_text="Four.").wait_for()
    page.route("**/page/markdown*", lambda route: route.abort())
    scripted.say(" *Five*.")
    scripted.end()
    visit.finish()
    answer = page.locator(".answer .text").last
    assert answer.locator("p").all_text_contents() == ["One bold.", "Two.", "Three.\n\nFour. *Five*."]
    visit.complaints.clear()


def test_a_name_may_be_told_after_the_link_to_it(visit, scripted):
    answer = scripted.show(
        visit,
        "See [the docs].\n\nMore.\n\nAnd more.\n\nStill more.\n\n[the docs]: https://example.com/docs\n",
    )
    assert answer.get_by_role("link", name="the docs").get_attribute("href") == "https://example.com/docs"


def test_stop_leaves_what_was_written_and_it_is_part_of_the_conversation(visit, scripted):
    page = visit.page
    scripted.say(f"Begun:\n\n{FENCE}js\nlet a")
    visit.ask("first")
    page.locator("pre code", has_text="let a").wait_for()
    page.get_by_role("button", name="Stop").click()
    visit.finish()
    assert "stopped" in visit.text(".figures li")
    assert page.locator("pre code").text_content() == "let a" and page.locator(".caret").count() == 0
    scripted.end()  # of what nobody reads any more
    scripted.answer("second")
    visit.ask("go on")
    visit.finish()
    assert visit.bodies[1]["messages"][1]["content"] == f"Begun:\n\n{FENCE}js\nlet a"


def test_compare_shows_two_answers_side_by_side(visit, scripted):
    scripted.answer(ANSWER)
    scripted.answer(ANSWER)
    visit.ask("both", "Compare")
    visit.finish()
    assert visit.page.locator(".columns .answer pre").count() == 4
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 1280


def test_marks_are_on_the_words_that_were_drafted(visit):
    """Each word of a text that has all kinds of markup keeps its own origin."""
    found = visit.page.evaluate(
        r"""async (source) => {
            const { GrowingText } = await import("/growing.js");
            const text = new GrowingText();
            const origins = ["target", "accepted", "resampled", "bonus"];
            const words = source.split(/(?<=\w)(?=\W)|(?<=\W)(?=\w)/);
            words.forEach((word, i) => text.append(word, origins[i % 4]));
            await text.finish();
            const right = new Set(words.map((word, i) => `${word} ${origins[i % 4]}`));
            return [...text.element.querySelectorAll("[data-origin]")]
                .map((each) => `${each.textContent.trim()} ${each.dataset.origin}`)
                .filter((each) => /^\w+ /.test(each) && !right.has(each));
        }""",
        ANSWER,
    )
    assert found == []


def test_what_is_not_shown_of_a_link_has_its_own_origin(visit):
    """The point is not taken for the one within the address."""
    found = visit.page.evaluate(
        """async () => {
            const { GrowingText } = await import("/growing.js");
            const text = new GrowingText();
            text.append("See [a](https://b.example/c)", "target");
            text.append(".", "accepted");
            await text.finish();
            const accepted = text.element.querySelectorAll("[data-origin=accepted]");
            return [...accepted].map((each) => each.textContent);
        }"""
    )
    assert found == ["."]


# ---- copying ----


def pasted(page):
    page.get_by_label("Message", exact=True).fill("")
    page.get_by_label("Message", exact=True).press("Control+V")
    return page.get_by_label("Message", exact=True).input_value()


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "without TLS"])
def test_code_and_the_whole_answer_are_copied_as_they_were_written(browser, scripted, clipboard):
    context = {"permissions": ["clipboard-read", "clipboard-write"]} if clipboard else {}
    visit = Visit(browser, scripted.url, **context)
    if not clipboard:  # as on a page from http://192.168.1.2:8080
        visit.page.evaluate("delete Navigator.prototype.clipboard")
    scripted.answer(ANSWER)
    visit.ask("copy")
    visit.finish()
    whole = visit.page.locator(".answer .below").get_by_role("button", name="Copy")
    whole.click()
    visit.page.locator(".below button", has_text="Copied").wait_for()
    assert pasted(visit.page) == ANSWER
    visit.page.locator(".code").first.get_by_role("button", name="Copy").click()
    visit.page.locator(".code button", has_text="Copied").wait_for()
    assert pasted(visit.page) == CODE
    visit.close()
