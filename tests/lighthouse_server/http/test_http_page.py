"""Tests the dashboard in a browser, beside real training with a real kill.

The screenshots of the documents are made here, if TORCHFT_SCREENSHOTS names a folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import TOKEN, Served, served

from tools.chaos.fleet import Fleet
from tools.chaos.fork_server import worker_server
from tools.demo.events import Exited
from torchft_svc.core.quorum.lighthouse.overview import GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.lighthouse_server.http import events, timelines
from torchft_svc.lighthouse_server.http.documents import job_document, overview

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
JOB, GROUPS = "digits", {0, 1, 2}
WAIT_MS = 60_000
# A heal that takes a moment, to be seen.
BALLAST = 100_000_000
DESKTOP, PHONE = {"width": 1180, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture
def lighthouse() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "UPDATE_S", 0.1)
        patch.setattr(timelines, "SAMPLE_S", 0.5)
        with served() as server:
            yield server


@pytest.fixture
def fleet(lighthouse: Served, tmp_path: Path) -> Iterator[Fleet]:
    """Three groups that train."""
    with worker_server(TORCHFT_TOKEN=TOKEN) as workers:
        trained = Fleet(workers, tmp_path, lighthouse.grpc, {"job": JOB, "ballast": BALLAST})
        try:
            for group in sorted(GROUPS):
                trained.start(group)
            trained.all_meet(GROUPS)
            yield trained
        finally:
            trained.end()


@pytest.fixture
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Tests may run as root, which its sandbox refuses.
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; whatever it logs as an error fails the test."""
    tab = browser.new_page(viewport=DESKTOP)
    faults: list[str] = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    tab.set_default_timeout(WAIT_MS)
    yield tab
    tab.close()
    assert not [each for each in faults if "401" not in each and "404" not in each]


def keep_screenshot(page: Any, name: str) -> None:
    folder = os.environ.get("TORCHFT_SCREENSHOTS")
    if folder:
        page.evaluate("document.activeElement?.blur()")
        time.sleep(0.7)  # colours fade
        page.screenshot(path=Path(folder) / f"dashboard-{name}.png", full_page=True)


def open_page(page: Any, lighthouse: Served, path: str = "/") -> None:
    """Open a page of the dashboard, by keyboard: the token is typed."""
    page.goto(lighthouse.url + path)
    page.wait_for_selector("#ask-token[open]")
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#link[data-tone=live]")


def row(group: int, state: str = "") -> str:
    states = f"[data-state='{state}']" if state else ""
    return f"tbody tr{states}:has(.named:text-is('group-{group}'))"


def background(page: Any, group: int) -> tuple[int, ...]:
    """The colour behind a group's row, when it has faded in."""
    script = "node => getComputedStyle(node).backgroundColor"
    before, colour = "", "?"
    while colour != before:
        before, colour = colour, page.locator(row(group)).evaluate(script)
        time.sleep(0.1)
    return tuple(int(float(each)) for each in colour.partition("(")[2].rstrip(")").split(",")[:3])


def test_a_killed_group_turns_red_and_heals_and_turns_green(
    lighthouse: Served, fleet: Fleet, page: Any
) -> None:
    open_page(page, lighthouse)
    check_keyboard_and_labels(page)
    check_kill(lighthouse, fleet, page)
    check_drain_by_keyboard(fleet, page)
    check_colours_and_sizes(page)
    check_refused_command(page)


def check_kill(lighthouse: Served, fleet: Fleet, page: Any) -> None:
    for group in GROUPS:
        page.wait_for_selector(row(group, "training"))
    assert page.inner_text("h1").startswith("All 3 groups train")
    page.evaluate(
        """() => {
          window.seen = [];
          const look = () => {
            const row = [...document.querySelectorAll('tbody tr')].find(
              (each) => each.textContent.startsWith('group-2'));
            const state = row?.dataset.state;
            if (state && state !== seen[seen.length - 1]) seen.push(state);
          };
          look();
          new MutationObserver(look).observe(document.querySelector('tbody'),
            {subtree: true, childList: true, attributes: true});
        }"""
    )
    fleet.kill(fleet.lives_of(2)[0], with_manager=True)
    page.wait_for_selector(row(2, "lost"))
    page.wait_for_selector(".state[data-tone=warn]")
    assert page.inner_text("h1").startswith("2 of 3 groups train")
    red, green, blue = background(page, 2)
    assert red > green + 10
    assert red > blue + 10
    keep_screenshot(page, "lost")
    fleet.start(2)
    fleet.all_meet(GROUPS)
    page.wait_for_selector(row(2, "training"))
    page.wait_for_selector(".state[data-tone=good]")
    assert page.locator(row(2)).locator(".chip").inner_text() == "training"
    states = page.evaluate("seen")
    assert states[:2] == ["training", "lost"]
    assert "healing" in states
    assert states[-1] == "training"
    # The same is in the ledger, in the same words.
    kinds = page.locator(".incidents > li b").filter(visible=True).all_inner_texts()
    assert "lost" in kinds
    assert "joined" in kinds
    number = int(page.locator("dt:text-is('Committed step') + dd").inner_text().replace(",", ""))
    step = lighthouse.get(f"/api/v1/jobs/{JOB}").json()["committed_step"]
    assert abs(step - number) < 200


def check_drain_by_keyboard(fleet: Fleet, page: Any) -> None:
    button = page.get_by_role("button", name="Drain group group-1")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Drain group group-1?")
    dialog.wait_for()
    assert page.evaluate("document.activeElement.id") == "confirm-no", "the harmless one"
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Drain")
    page.keyboard.press("Enter")
    page.get_by_label("Reason").fill("a test of the page")
    page.keyboard.press("Enter")
    dialog.wait_for(state="hidden")
    page.wait_for_selector(row(1, "left"))
    (life,) = fleet.lives_of(1)
    ended = fleet.await_event(Exited, 60.0, wanted=lambda event: event.group == 1)
    assert ended.status == 0
    assert "a test of the page" in life.output()
    fleet.start(1)
    fleet.all_meet(GROUPS)
    page.wait_for_selector(row(1, "training"))


def check_refused_command(page: Any) -> None:
    page.get_by_role("button", name="Kill group group-0").click()
    page.evaluate("sessionStorage.setItem('torchft-token', 'x')")
    page.get_by_role("button", name="Kill it").click()
    page.locator("#confirm-error", has_text="the token differs").wait_for()
    page.get_by_role("button", name="Cancel").click()


def check_colours_and_sizes(page: Any) -> None:
    page.wait_for_selector("figure svg .speed")
    for scheme, size, name in (
        ("light", DESKTOP, "light"),
        ("dark", DESKTOP, "dark"),
        ("light", PHONE, "phone"),
    ):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(size)
        keep_screenshot(page, name)
        width, overflow = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
        assert overflow <= width, f"{name} scrolls sideways"
        low = page.evaluate(CONTRASTS)
        assert not low, f"{name}: {low}"


def check_keyboard_and_labels(page: Any) -> None:
    page.wait_for_selector(".card")
    keep_screenshot(page, "jobs")
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(5):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('href')"))
    assert f"#/job/{JOB}" in reached
    page.locator(f"[href='#/job/{JOB}']").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(row(0))
    assert page.evaluate("document.activeElement.tagName") == "H1"
    for role in ("banner", "main", "contentinfo", "navigation"):
        assert page.get_by_role(role).count() == 1, role
    assert page.locator("[aria-live=polite]").count() == 1
    unlabelled = page.locator("button:visible, input:visible, [role=img]").evaluate_all(
        "nodes => nodes.filter(node => !(node.getAttribute('aria-label') ||"
        " node.getAttribute('aria-labelledby') || node.textContent.trim() || node.labels?.length))"
        ".map(node => node.outerHTML)"
    )
    assert not unlabelled


def test_it_comes_back_with_the_lighthouse(page: Any) -> None:
    with served(token=None) as server:
        page.goto(server.url)
        page.wait_for_selector("#link[data-tone=live]")
        assert "Commands are off" in page.inner_text("footer")
        page.goto(f"{server.url}/#/job/nope")
        page.wait_for_selector("#notice:visible")
        assert "serves no job 'nope'" in page.inner_text("#notice")
        assert not page.locator("main h2").filter(visible=True).count(), "there is nothing to show"
        page.goto(server.url)
        page.wait_for_selector("#link[data-tone=live]")
    page.wait_for_selector("#link[data-tone=broken]")
    assert "no connection since" in page.inner_text("#link")


DIFFERENCE = "in the check of step 7, the learning rate differs in b"
DIFFERING = JobStatus(
    job="j",
    quorum_id=9,
    committed_step=7,
    groups=tuple(GroupStatus(replica_id=f"{each}:1", in_quorum=True, step=7) for each in "ab"),
    num_expected=2,
    num_differences=1,
    last_difference=DIFFERENCE,
    prepared_spares=(
        PreparedSpare("s:1", asks=True, silent_s=0.5),
        PreparedSpare("t:1", silent_s=8.0),
    ),
)


def show_status(page: Any, status: JobStatus) -> None:
    """Let the page show a status instead of that of its lighthouse."""

    def answer(route: Any) -> None:
        now, name = time.time(), status.job if "job=" in route.request.url else ""
        document = job_document(status, now, None, (), {}) if name else overview([status], (), now)
        data = json.dumps({"channel": name, "at": now, "document": document})
        body = f"event: document\ndata: {data}\n\n"
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/api/v1/events*", answer)


def test_a_job_whose_states_differ_is_not_green(page: Any) -> None:
    with served(token=None) as server:
        show_status(page, replace(DIFFERING, num_differences=0, last_difference=""))
        page.goto(server.url)
        page.wait_for_selector(".card[data-tone=good]:has-text('All 2 groups train')")
        show_status(page, DIFFERING)
        page.goto(server.url)
        page.reload()
        page.wait_for_selector(".card[data-tone=bad]:has-text('states differed in 1 check')")
        assert f"States differed: {DIFFERENCE}." in page.inner_text(".card")
        page.click(".card")
        page.wait_for_selector(".state[data-tone=bad] h1:has-text('states differed in 1 check')")
        assert page.inner_text(".why") == f"States differed: {DIFFERENCE}."


def test_each_spare_is_shown_with_its_state(page: Any) -> None:
    with served(token=None) as server:
        show_status(page, DIFFERING)
        page.goto(server.url)
        page.wait_for_selector(".card:has-text('2 spares stand by, 1 ready, one silent for')")
        page.click(".card")
        page.wait_for_selector("tbody tr[data-state='ready spare']:has(.named:text-is('s'))")
        silent = "tbody tr[data-state='starting spare']:has(.named:text-is('t'))"
        assert re.search(r"\b\d+ s\b", page.inner_text(f"{silent} [data-label='last sign']"))
        assert not page.evaluate(CONTRASTS)
        keep_screenshot(page, "spares")


# Texts whose contrast to what is behind them is below 4.5 (large ones: 3), as WCAG counts it.
CONTRASTS = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll('main *, header *, footer *')) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || node.closest('svg') || !node.checkVisibility() || node.closest('.unseen')) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(parse(style.color)), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) {
      low.push(`${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
  }
  return low;
}"""
