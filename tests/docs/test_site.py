"""The site: old addresses lead on, the reference shows a step's arguments, and the search finds what users look for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import griffe
import pytest
import yaml
from docs.signatures import UnpackedArguments
from installed import ROOT
from markdown import Markdown
from report.browser import PROGRAM, Browser

from rrfp.runtime.steps.plan import EvaluateArguments, StepArguments

DOCS = ROOT / "docs"
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
(REDIRECTS,) = (each["redirects"]["redirect_maps"] for each in CONFIG["plugins"] if "redirects" in each)

#: What is typed into the search, and the address that is to be among the first three.
SEARCHES = {
    "deadlock": "stuck/",
    "memory": "memory/",
    "Megatron": "how-to/megatron/",
    "learning rate": "how-to/training-loop/",
}


@pytest.mark.parametrize("old", REDIRECTS)
def test_an_old_address_leads_to_a_heading_that_exists(old: str) -> None:
    page, _, anchor = REDIRECTS[old].partition("#")
    assert not (DOCS / old).exists()
    converter = Markdown(extensions=["toc", "pymdownx.superfences"])
    assert f'id="{anchor}"' in converter.convert((DOCS / page).read_text())


def test_the_reference_shows_the_keyword_arguments_of_a_step() -> None:
    package = griffe.load(
        "rrfp",
        search_paths=[ROOT],
        extensions=griffe.load_extensions(UnpackedArguments()),
        docstring_parser=griffe.Parser.google,
    )
    for name, arguments in (("step", StepArguments), ("evaluate", EvaluateArguments)):
        function = package[f"pipeline.faces.PipelineHandle.{name}"]
        expected = ["inputs", "targets", *arguments.__annotations__]
        assert [parameter.name for parameter in function.parameters] == ["self", *expected]
        (table,) = (part for part in function.docstring.parsed if part.kind is griffe.DocstringSectionKind.parameters)
        assert [row.name for row in table.value if row.description] == expected
    assert "options" in [parameter.name for parameter in package["pipeline.api.local"].parameters]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and prints no line for each."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The built site, served."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=400, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def awaited(browser: Browser, expression: str) -> Any:
    """The value of an expression once it is true or not empty; within half a minute."""
    for _ in range(300):
        try:
            value = browser.run(f"new Promise(done => setTimeout(() => done({expression}), 100))")
        except AssertionError as error:
            if "navigated" not in str(error):  # else a page that leads to another was left meanwhile
                raise
        else:
            if value:
                return value
    raise AssertionError(f"{expression} stayed empty")


def found(browser: Browser, address: str, words: str) -> list[str]:
    """The pages that the search lists, the best first."""
    browser.call("Page.navigate", url=address)
    query = "document.querySelector('[data-md-component=search-query]')"
    awaited(browser, f"document.readyState == 'complete' && {query} != null")
    browser.run(f"{query}.focus()")
    browser.call("Input.insertText", text=words)
    links: list[str] = awaited(
        browser, "[...document.querySelectorAll('.md-search-result__item > a:first-child')].map(each => each.href)"
    )
    return [link.removeprefix(address).partition("?")[0] for link in links]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (Debian's package chromium)")
def test_the_search_finds_the_page_among_the_first_three(address: str) -> None:
    with Browser() as browser:
        browser.resize(1400, 900)
        results = {words: found(browser, address, words)[:3] for words in SEARCHES}
    assert {words: SEARCHES[words] in pages for words, pages in results.items()} == dict.fromkeys(SEARCHES, True), (
        results
    )


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (Debian's package chromium)")
def test_an_old_address_opens_its_new_page_in_a_browser(address: str) -> None:
    with Browser() as browser:
        browser.call("Page.navigate", url=f"{address}how-to/slurm/")
        awaited(browser, "location.hash")
        assert browser.run("location.href") == f"{address}how-to/several-hosts/#slurm"
