"""A visit to the server's page with a real browser."""

from __future__ import annotations

import json
from typing import Any

from axe_playwright_python.sync_playwright import Axe


class Visit:
    """One open page, with its requests, the bodies of those for answers, and the console's complaints."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.urls, self.complaints, self.bodies = [], [], []
        self.page.on("request", self._request)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        self.url = url

    def _request(self, request):
        self.urls.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(json.loads(request.post_data))

    def limit(self, tokens):
        settings = self.page.get_by_role("button", name="Settings")
        if settings.is_visible() and settings.get_attribute("aria-expanded") == "false":
            settings.click()
        self.page.get_by_label("Most tokens in an answer").fill(str(tokens))

    def ask(self, question, button="Send"):
        self.page.get_by_label("Message", exact=True).fill(question)
        self.page.get_by_role("button", name=button, exact=True).click()

    def finish(self):
        """Wait for the end of the last answer."""
        self.page.locator("article").last.get_by_role("button", name="Retry").wait_for()

    def text(self, selector):
        return self.page.locator(selector).all_text_contents()

    def close(self):
        """Close the page; check that it asked only its own server and logged nothing but statuses."""
        self.page.context.close()
        assert all(url.startswith((self.url, "data:")) for url in self.urls)
        assert not [line for line in self.complaints if "status of" not in line]


def violations(page):
    """Return the accessibility problems that axe-core finds: rules with the elements."""
    found = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['html']}" for rule in found for node in rule["nodes"]]
