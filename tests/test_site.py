"""Does the site build, and does a real browser show it within its width, light and dark?"""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
WIDTHS = (1280, 390)
SCHEMES = ("default", "slate")
"""The theme's names of light and dark."""
SHOWN = ("", "support/")
"""The pages that pictures are taken of: the first, and the one with the largest tables."""
MEASURE = """<!doctype html><body><script>
(async () => {
  const found = [];
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style = "height: 900px; border: 0; width: 1280px";
    frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    for (const [scheme, width] of SCHEMES.flatMap(scheme => WIDTHS.map(width => [scheme, width]))) {
      frame.style.width = width + "px";
      frame.contentDocument.body.dataset.mdColorScheme = scheme;
      const root = frame.contentDocument.documentElement, article = root.querySelector("article");
      const check = (what, wide, most) => {
        if (wide > most + 1) found.push([page, scheme, width, what, wide, most]);
      };
      check("page", root.scrollWidth, width);
      for (const element of article.querySelectorAll("table, img"))
        check(element.tagName, element.getBoundingClientRect().width, article.clientWidth);
    }
    frame.remove();
  }
  await fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""
"""Loads each page in a frame, of each scheme and width in turn, and posts what is too wide."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, and keeps what a page posts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.posted: Any = None
        self.came = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that ends leaves requests behind."""


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.server.came.set()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[Server]:
    with Server(site) as running:
        yield running
        running.shutdown()


def browser(*options: str) -> subprocess.Popen[bytes]:
    assert CHROMIUM is not None
    always = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
              "--hide-scrollbars", "--force-prefers-reduced-motion")  # fmt: skip
    return subprocess.Popen(
        [CHROMIUM, *always, *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def end(running: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGTERM)
    running.wait(30)


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where no Chromium is, or where it shows not even an empty page (as in some sandboxes)."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is on the PATH")
    folder = tmp_path_factory.mktemp("profile")
    running = browser(f"--user-data-dir={folder}", "--dump-dom", "about:blank")
    try:
        code = running.wait(60)
    except subprocess.TimeoutExpired:
        code = -1
    end(running)
    if code:
        pytest.skip(f"{CHROMIUM} doesn't start here")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    reference = (site / "reference" / "polyattn" / "index.html").read_text()
    assert 'id="polyattn.select"' in reference and 'id="polyattn.LayerSpec"' in reference
    start = (site / "index.html").read_text()
    assert 'href="plugins/"' in start, "the README's links lead to the site's pages"
    assert '<td data-column="command">' in start, "a cell knows its column's name"


@pytest.mark.slow
def test_nothing_is_wider_than_the_page(
    site: Path, server: Server, starts: None, tmp_path: Path
) -> None:
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("index.html"))
    assert len(pages) > 25
    text = MEASURE
    for name, values in (("PAGES", pages), ("WIDTHS", WIDTHS), ("SCHEMES", SCHEMES)):
        text = text.replace(name, json.dumps(values))
    # A page with a table that is too wide shows that the measure sees one.
    wide = '<article><table><td style="min-width: 2000px">x</td></table></article>'
    (site / "wide.html").write_text(wide)
    (site / "measure.html").write_text(text.replace('["', '["wide.html", "', 1))
    url = f"http://127.0.0.1:{server.server_port}/measure.html"
    running = browser("--remote-debugging-port=0", f"--user-data-dir={tmp_path}", url)
    try:
        assert server.came.wait(120), "the browser measured nothing"
    finally:
        end(running)
    own = [found for found in server.posted if found[0] == "wide.html"]
    seen = {(scheme, width, what) for _, scheme, width, what, *_ in own}
    assert seen >= {(scheme, width, "TABLE") for scheme in SCHEMES for width in WIDTHS}
    assert [found for found in server.posted if found not in own] == []


@pytest.mark.slow
def test_pictures_of_the_site(server: Server, starts: None, tmp_path: Path) -> None:
    """To look at: pytest -m slow tests/test_site.py --basetemp=FOLDER leaves them in FOLDER."""
    brightness = {}
    for page, width in itertools.product(SHOWN, WIDTHS):
        for scheme, dark in (("light", 1), ("dark", 0)):
            picture = tmp_path / f"{page.strip('/') or 'first'}-{width}-{scheme}.png"
            running = browser(
                f"--blink-settings=preferredColorScheme={dark}", f"--window-size={width},900",
                f"--user-data-dir={tmp_path / picture.stem}", f"--screenshot={picture}",
                f"http://127.0.0.1:{server.server_port}/{page}",
            )  # fmt: skip
            assert running.wait(60) == 0
            pixels = imread(picture)
            assert pixels.shape[:2] == (900, width)
            brightness[page, width, scheme] = float(pixels[..., :3].mean())
    for page, width in itertools.product(SHOWN, WIDTHS):
        assert brightness[page, width, "light"] > 0.7 > 0.6 > brightness[page, width, "dark"]
