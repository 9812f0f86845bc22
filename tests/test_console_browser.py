"""The console in a real browser: every panel with live data, every action, labels, contrast, keyboard, a phone."""

# ruff: noqa: E501 (scripts for the browser)
from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from console_pipeline import HOSTILE_LETTER, TOKEN, Running, until
from penstock.config import Secret
from penstock.errors import FatalError
from penstock.runtime.commands import read_audit
from penstock.runtime.epochs import EpochReport
from penstock.runtime.telemetry import Looks, Telemetry, history
from penstock.runtime.telemetry.history import add_run
from penstock.sink import WriteResult
from penstock.source import ConnectorMetrics, HealthStatus
from penstock.tables import TableState
from penstock.testing.postgres import PostgresServer
from penstock.web import serve_all

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.processes]

PANELS = [
    "flow", "totals", "rates", "bytes", "lag", "latency", "epochs", "journal", "retries", "parts", "slots", "tables",
    "schemas", "errors", "letters", "file", "about", "audit",
]  # fmt: skip


SLOT = {"slot_reserved": 1.0, "slot_held_bytes": 12e6, "slot_safe_bytes": 9e8}
RUN_BEFORE = {
    "started_at": "2026-01-01T08:00:00Z", "updated_at": "2026-01-01T09:00:00Z", "state": "dead", "reason": "killed",
    "epochs": 7, "retries": {}, "rows": {"out": 70},
}  # fmt: skip


@pytest.fixture(scope="module")
def browser(need: Callable[[object, str], None]) -> Iterator[Any]:
    need(shutil.which("chromium") and shutil.which("chromedriver"), "chromium and its driver are not installed")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
                 "disable-component-update", "disable-sync", "disable-dev-shm-usage"):  # fmt: skip
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(120)
    driver.set_window_size(1400, 1000)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    os.environ["CONSOLE_TEST_TOKEN"] = TOKEN
    sys.path.insert(0, str(Path(__file__).parent))
    before, history.FINE_SECS = history.FINE_SECS, 1
    home = tmp_path_factory.mktemp("browser")
    (home / "state").mkdir(mode=0o700)
    add_run(home / "state", RUN_BEFORE)
    made = Running(home)
    made.telemetry.counters["source:database"] = lambda: ConnectorMetrics(custom=SLOT)
    until(lambda: made.telemetry.status()["epochs"] > 2 and made.telemetry.status()["dead_letters"])
    made.telemetry.retry("sink:lake", "the store is away", 0.0)
    yield made
    made.end()
    history.FINE_SECS = before


@pytest.fixture
def page(browser: Any, running: Running) -> Any:
    browser.get("about:blank")
    browser.set_window_size(1400, 1000)
    browser.get(running.url)
    until(lambda: script(browser, "return document.querySelectorAll('.panel').length") == len(PANELS))
    return browser


def script(browser: Any, code: str, *given: Any) -> Any:
    return browser.execute_script(code, *given)


def text(browser: Any, panel: str) -> str:
    return str(script(browser, "return document.querySelector('#panel-' + arguments[0]).innerText", panel))


def click(browser: Any, panel: str, name: str, row: str = "") -> None:
    """Click a button of a panel by what it says; in the row that holds a text."""
    code = """
        const [panel, name, row] = arguments;
        const inside = [...document.querySelectorAll('#panel-' + panel + ' button, #ends button')];
        const found = inside.find((b) => b.textContent === name && (!row || b.closest('tr').innerText.includes(row)));
        if (!found || found.disabled) return false;
        found.click();
        return true;
    """
    until(lambda: script(browser, code, panel, name, row))


def answer(browser: Any, yes: bool) -> None:
    until(lambda: script(browser, "return document.getElementById('ask').open"))
    value = "yes" if yes else "no"
    script(browser, "document.querySelector(`#ask button[value=${arguments[0]}]`).click()", value)
    until(lambda: not script(browser, "return document.getElementById('ask').open"))


def unlock(browser: Any) -> None:
    script(browser, "document.getElementById('unlock').click()")
    until(lambda: script(browser, "return document.getElementById('ask').open"))
    script(browser, "document.getElementById('ask-input').value = arguments[0]", TOKEN)
    answer(browser, yes=True)
    until(lambda: script(browser, "return document.getElementById('unlock').textContent") == "Lock")


def test_every_panel_shows_live_data_without_a_reload(page: Any, running: Running) -> None:
    expected: dict[str, Callable[[str], bool]] = {
        "flow": lambda text: "sensors" in text and "/readings" in text and "lake" in text,
        "rates": lambda text: "out" in text and "Not enough" not in text,
        "bytes": lambda text: "Not enough" not in text,
        "lag": lambda text: "sensors" in text and "rows behind" in text and "Not enough" not in text,
        "latency": lambda text: "Not enough" not in text and ("s" in text),
        "epochs": lambda text: "commit" in text and "epoch" in text,
        "journal": lambda text: "sensors" in text and "of 1.1 GB" in text,
        "retries": lambda text: "sink:lake" in text and "Runs before" in text and "killed" in text,
        "parts": lambda text: "row " in text and "healthy" in text,
        "slots": lambda text: "reserved" in text and "12.0 MB" in text and "900.0 MB" in text,
        "tables": lambda text: "public.orders" in text and "active" in text,
        "schemas": lambda text: "/readings: 2 columns" in text,
        "errors": lambda text: "PEN-5012" in text and "the store is away" in text,
        "letters": lambda text: "json.syntax" in text,
        "file": lambda text: 'connector_name = "shop"' in text and "hunter2" not in text,
        "about": lambda text: "pyarrow" in text and "127.0.0.1:" in text,
        "totals": lambda text: "ROWS IN" in text.upper(),
        "audit": lambda text: "Audit" in text,
    }
    assert set(expected) == set(PANELS)
    for panel, holds in expected.items():
        until(lambda panel=panel, holds=holds: holds(text(page, panel)))
    script(page, "window.stays = 1")
    before = text(page, "totals")
    until(lambda: text(page, "totals") != before)
    assert script(page, "return window.stays") == 1
    assert script(page, "return document.querySelectorAll('#panel-epochs svg rect.stage').length") > 2


def test_no_request_goes_to_another_host(page: Any, running: Running) -> None:
    asked = script(page, "return performance.getEntriesByType('resource').map((each) => each.name)")
    assert len(asked) > 4
    assert [each for each in asked if not each.startswith(running.url)] == []
    first = script(
        page, "return performance.getEntriesByType('resource').slice(0, 8).reduce((sum, e) => sum + e.transferSize, 0)"
    )
    assert first < 200_000


def test_without_the_token_every_action_is_off(page: Any) -> None:
    script(page, "sessionStorage.clear()")
    page.refresh()
    until(lambda: script(page, "return document.querySelectorAll('#panel-tables button').length") >= 8)
    off = "return [...document.querySelectorAll('.panel button, #ends button')].every((each) => each.disabled)"
    until(lambda: script(page, off))


def test_each_action_asks_once_and_is_done(page: Any, running: Running) -> None:
    unlock(page)
    audit = lambda: read_audit(running.directory / "state", 1000)  # noqa: E731
    before = len(audit())
    click(page, "tables", "pause", "public.customers")
    answer(page, yes=False)
    assert len(audit()) == before, "a no does nothing"
    number = 5000
    for verb, becomes in (("pause", "paused"), ("resume", "active"), ("skip", "skipped"), ("resync", "active")):
        click(page, "tables", verb, "public.customers")
        answer(page, yes=True)
        until(lambda before=before: len(audit()) > before)
        before = len(audit())
        number += 1
        running.database.put("public.orders", number, verb)

        def shown(becomes: str = becomes) -> bool:
            lines = text(page, "tables").splitlines()
            return any(
                "public.customers" in line and becomes in "\n".join(lines[at : at + 2]) for at, line in enumerate(lines)
            )

        until(shown)
    for verb in ("replay", "drop"):
        click(page, "letters", verb, "json.syntax")
        answer(page, yes=True)
        until(lambda before=before: len(audit()) > before)
        before = len(audit())
        assert audit()[0]["action"] == f"letters {verb}"
        assert audit()[0]["detail"] == {"topic": "/readings", "code": "PEN-3001", "rule": "json.syntax"}
    until(lambda: "letters drop" in text(page, "audit"))


def test_a_keyboard_is_enough(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    script(page, "sessionStorage.clear()")
    page.refresh()
    until(lambda: script(page, "return document.querySelectorAll('.panel').length") == len(PANELS))
    keys = lambda *pressed: ActionChains(page).send_keys(*pressed).perform()  # noqa: E731
    script(page, "document.body.focus()")
    for _ in range(12):
        keys(Keys.TAB)
        if script(page, "return document.activeElement.id") == "unlock":
            break
    assert script(page, "return document.activeElement.id") == "unlock"
    keys(Keys.ENTER)
    until(lambda: script(page, "return document.getElementById('ask').open"))
    keys(Keys.ESCAPE)
    until(lambda: not script(page, "return document.getElementById('ask').open"))
    keys(Keys.ENTER)
    until(lambda: script(page, "return document.getElementById('ask').open"))
    script(page, "document.getElementById('ask-input').focus()")
    keys(TOKEN, Keys.ENTER)
    until(lambda: script(page, "return document.getElementById('unlock').textContent") == "Lock")
    script(page, "document.querySelector('#panel-tables button').focus()")
    key = script(page, "return document.activeElement.dataset.key")
    drawn = text(page, "parts")
    until(lambda: text(page, "parts") != drawn)
    assert script(page, "return document.activeElement.dataset.key") == key, "what is drawn again keeps the focus"


def test_everything_has_a_name(page: Any) -> None:
    problems = script(
        page,
        """
        const wrong = [];
        for (const b of document.querySelectorAll('button, a')) if (!(b.textContent.trim() || b.ariaLabel)) wrong.push(b.outerHTML);
        for (const i of document.querySelectorAll('input')) if (!i.labels.length) wrong.push(i.outerHTML);
        for (const s of document.querySelectorAll('main svg')) if (!s.getAttribute('aria-label') && !s.ariaHidden) wrong.push(s.outerHTML);
        for (const p of document.querySelectorAll('progress')) if (!p.ariaLabel) wrong.push(p.outerHTML);
        for (const t of document.querySelectorAll('table')) if (!t.querySelector('th[scope=col]')) wrong.push('table without heads');
        for (const s of document.querySelectorAll('section')) if (!document.getElementById(s.getAttribute('aria-labelledby'))) wrong.push(s.id);
        for (const i of document.querySelectorAll('img')) if (!i.hasAttribute('alt')) wrong.push(i.outerHTML);
        if (document.documentElement.lang !== 'en') wrong.push('lang');
        if (document.querySelectorAll('h1').length !== 1) wrong.push('h1');
        return wrong;
    """,
    )
    assert problems == []


CONTRAST = """
    const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
    const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const box = node.tagName === 'g' && node.querySelector('rect.node');
            if (box) return parse(getComputedStyle(box).fill);
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour[3] > .99) return colour;
        }
        return [255, 255, 255, 1];
    };
    document.documentElement.dataset.theme = arguments[0];
    for (const each of document.querySelectorAll('details')) each.open = true;
    const low = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (walk.nextNode()) {
        const on = walk.currentNode.parentElement;
        if (!walk.currentNode.textContent.trim() || !on.getClientRects().length || on.closest('title, button:disabled')) continue;
        const style = getComputedStyle(on), [x, y] = [parse(on.ownerSVGElement ? style.fill : style.color), ground(on)]
            .map((c) => light(c.slice(0, 3))).sort((p, q) => q - p);
        seen += 1;
        if ((x + .05) / (y + .05) < 4.5) low.push([walk.currentNode.textContent.slice(0, 40), (x + .05) / (y + .05)]);
    }
    delete document.documentElement.dataset.theme;
    return [seen, low];
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("where", ["running", "failed"])
def test_every_text_has_enough_contrast_with_what_it_is_drawn_on(page: Any, many: str, where: str, theme: str) -> None:
    if where == "failed":
        page.get(many)
        until(lambda: script(page, "return document.querySelectorAll('.panel').length") == len(PANELS))
    seen, low = script(page, CONTRAST, theme)
    assert low == []
    assert seen > 100


def test_charts_show_as_much_time_as_is_asked_for(page: Any, running: Running) -> None:
    now = time.time()
    rings = history.Rings(running.directory / "state")
    for hours, rows in ((1, 6e6), (12, 12e6)):
        at = now - hours * 3600
        rings.coarse.put(int(at // history.COARSE_SECS), at, [rows] * len(history.FIELDS))
    page.get("about:blank")
    page.get(running.url)
    choose = "const s = document.getElementById('span'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    until(lambda: script(page, "return document.getElementById('span') !== null"))
    for hours, peaks in (("0.25", (False, False)), ("2", (True, False)), ("24", (False, True))):
        script(page, choose, hours)
        shown = lambda: tuple(peak in text(page, "rates") for peak in ("100.0k", "200.0k"))  # noqa: E731
        until(lambda shown=shown, peaks=peaks: shown()[1] == peaks[1] and (peaks[1] or shown()[0] == peaks[0]))
    lines = script(page, "return document.querySelector('#panel-rates path.one').getAttribute('d')")
    assert lines.count("M") >= 3, "no line is drawn through the hours in which nothing ran"
    script(page, "localStorage.removeItem('hours')")


def test_a_page_that_stays_open_keeps_one_sample_of_each_minute(page: Any) -> None:
    samples = lambda: script(page, "return history_.fine.length")  # noqa: E731
    before = samples()
    until(lambda: samples() > before + 8)
    twice = "const m = history_.coarse.map((row) => Math.floor(row[0] / 60)); return m.length - new Set(m).size"
    assert script(page, twice) == 0


def test_a_phone_has_no_sideways_scroll_and_can_be_read(page: Any, running: Running) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        until(lambda: script(page, "return window.innerWidth") <= 400)
        wide = script(page, "return document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0
        page.get("about:blank")
        page.get(running.url)
        until(lambda: script(page, "return document.querySelectorAll('#panel-flow svg text').length") > 4)
        least = """return Math.min(...[...document.querySelectorAll('#panel-flow svg, #panel-rates svg, #panel-epochs svg')]
            .map((s) => 11 * s.getBoundingClientRect().width / s.viewBox.baseVal.width).filter((px) => px > 0))"""
        assert script(page, least) > 9, "what a picture says can be read"
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_code_leads_to_its_meaning_and_back(page: Any) -> None:
    until(lambda: "PEN-5012" in text(page, "errors"))
    script(page, "document.querySelector('#panel-errors a').click()")
    until(lambda: "an unexpected failure" in script(page, "return document.getElementById('main').innerText"))
    shown = script(page, "return document.querySelector('tr.warn').innerText")
    assert "stops" in shown
    assert "run it again with --verbose" in shown, "what to do about it"
    script(page, "history.back()")
    until(lambda: script(page, "return document.querySelectorAll('.panel').length") == len(PANELS))


def test_the_last_state_stays_when_the_pipeline_is_stopped_from_the_page(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Running(tmp_path)
    try:
        until(lambda: made.telemetry.status()["epochs"] > 1)
        browser.get("about:blank")
        browser.get(made.url)
        until(lambda: script(browser, "return document.querySelectorAll('#ends button').length") == 2)
        if script(browser, "return document.getElementById('unlock').textContent") != "Lock":
            unlock(browser)
        click(browser, "ends", "Drain")
        answer(browser, yes=True)
        until(lambda: read_audit(tmp_path / "state") and read_audit(tmp_path / "state")[0]["action"] == "drain")
        click(browser, "ends", "Stop")
        answer(browser, yes=True)
        made.thread.join(90)
        assert not made.thread.is_alive()
        until(lambda: "not reachable" in script(browser, "return document.getElementById('link').textContent"))
        assert "shop" in script(browser, "return document.getElementById('main').innerText")
        before = "return getComputedStyle(document.getElementById('state'), '::before').content"
        assert "was" in script(browser, before), "what is shown is not called the state of now"
    finally:
        made.end()


def test_on_another_address_the_page_says_that_it_needs_the_token_and_takes_it(
    browser: Any, many: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_TEST_TOKEN", TOKEN)
    with serve_all([tmp_path], "0.0.0.0", 0, Secret(env="CONSOLE_TEST_TOKEN")) as server:
        browser.get("about:blank")
        browser.get(f"http://127.0.0.1:{server.port}")
        main = "return document.getElementById('main').innerText"
        until(lambda: "needs the token: Unlock actions" in script(browser, main))
        assert LONG not in script(browser, main)
        unlock(browser)
        until(lambda: script(browser, "return document.querySelectorAll('.panel').length") == len(PANELS))
        script(browser, "sessionStorage.clear()")


def test_a_dead_letter_that_would_be_html_is_shown_as_it_came(page: Any) -> None:
    shown = HOSTILE_LETTER.decode()
    payloads = "return [...document.querySelectorAll('#panel-letters details pre')].map((each) => each.textContent)"
    until(lambda: shown in script(page, payloads))
    script(page, "document.querySelectorAll('#panel-letters details').forEach((each) => { each.open = true; })")
    assert script(page, "return document.querySelectorAll('main img, main script').length") == 0
    assert script(page, "return window.pwned") is None
    assert "sensors/readings → /readings at readings@" in text(page, "letters"), (
        "where it came from, as `dlq show` says it"
    )


CAPTURE = """
connector_name = "captured"
[processing]
metrics_port = 0
lag_interval_secs = 1
epoch_interval_ms = 200
[source]
connector = "postgres_cdc"
name = "orders"
dsn = "{dsn}"
tables = ["public.orders"]
slot = "shown_in_the_console"
[sink]
connector = "files"
path = "lake/{{topic}}"
"""


def test_the_slot_and_the_position_of_a_real_database_are_shown(
    browser: Any, server: PostgresServer, tmp_path: Path
) -> None:
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE shown_in_the_console")
    dsn = server.dsn.rpartition("/")[0] + "/shown_in_the_console"
    (tmp_path / "pipeline.toml").write_text(CAPTURE.format(dsn=dsn))
    with psycopg.connect(dsn) as writer:
        writer.execute("CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (1)")
        writer.commit()
        writer.execute("INSERT INTO orders VALUES (2)")  # until it ends, no slot can be made
        made = Running(tmp_path, prepared=False)
        try:
            browser.get("about:blank")
            browser.get(made.url)
            until(lambda: script(browser, "return document.querySelectorAll('.panel').length") == len(PANELS))
            until(lambda: "not made yet" in text(browser, "slots"))
            assert script(browser, "return document.querySelectorAll('#panel-slots .bad').length") == 0
            writer.commit()
            until(lambda: "reserved" in text(browser, "slots"))
            until(lambda: made.telemetry.status()["sinks"]["files"]["rows"] == 2)
            at = writer.execute(
                "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'shown_in_the_console'"
            )
            assert at.fetchone() is not None, "the slot is of this server"
            until(lambda: "public.orders" in text(browser, "tables") and "active" in text(browser, "tables"))
            shown = made.telemetry.status()["sources"]["orders"]
            assert shown["own"]["slot_reserved"] == 1
            until(lambda: made.telemetry.status()["sources"]["orders"]["position"] in text(browser, "parts"))
        finally:
            made.end()
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_drop_replication_slot('shown_in_the_console')")
        admin.execute("DROP DATABASE shown_in_the_console WITH (FORCE)")


HOSTILE = '<img src=x onerror="window.pwned = 1">'
LONG = "a_rather_long_name_of_a_table_in_the_ledger_of_the_northern_warehouses_"


@pytest.fixture
def many(tmp_path: Path) -> Iterator[str]:
    """The address of a pipeline that has failed, with many tables, long names and hostile ones."""
    telemetry = Telemetry(f"{LONG}{HOSTILE}", sources=[f"{LONG}source"], sinks=[f"{LONG}sink"])
    telemetry.publish(tmp_path)
    source, sink = f"{LONG}source", f"{LONG}sink"
    telemetry.looks = Looks(
        flows=lambda: [(source, f"/{LONG}{n}", sink) for n in range(200)],
        positions=lambda: {source: f"{HOSTILE} at {LONG} " * 60},
        schemas=lambda: {f"/{LONG}{n}": {HOSTILE: "int64", "id": "string"} for n in range(200)},
    )
    telemetry.state(f"sink:{LONG}sink", HealthStatus.healthy())
    telemetry.counters[f"source:{source}"] = lambda: ConnectorMetrics(custom=SLOT)
    telemetry.ports = [{"address": "127.0.0.1", "port": 8601, "program": "python"}]
    tables = {f"public.{LONG}{n}": TableState("active", rows=n) for n in range(200)}
    why = {"code": "PEN-4001", "error": HOSTILE, "hint": HOSTILE}
    telemetry.tables(f"{LONG}source", {**tables, HOSTILE: TableState("failed", **why)})
    rows_out = {(f"{LONG}sink", f"/{LONG}{n}"): WriteResult(10, 100) for n in range(200)}
    telemetry.epoch(EpochReport(number=1, rows_in={f"{LONG}source": 2000}, rows_out=rows_out, seconds={"stage": 0.1}))
    telemetry._history.take()
    telemetry.close(FatalError(f"{HOSTILE} {'x' * 500}", hint=HOSTILE))
    with serve_all([tmp_path], "127.0.0.1", 0, None) as server:
        yield server.url


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_long_and_hostile_names_neither_run_nor_push_the_page_apart(browser: Any, many: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get("about:blank")
        browser.get(many)
        until(lambda: script(browser, "return document.querySelectorAll('.panel').length") == len(PANELS))
        assert script(browser, "return window.pwned") is None
        assert script(browser, "return document.querySelectorAll('main img').length") == 0
        assert HOSTILE in text(browser, "tables")
        assert HOSTILE in text(browser, "errors")
        over = "return document.scrollingElement.scrollWidth - document.documentElement.clientWidth"
        assert script(browser, over) <= 0
        tall = "return Math.max(...[...document.querySelectorAll('.panel')].map((each) => each.offsetHeight))"
        assert script(browser, tall) < 1000, "no panel takes the whole page"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_what_has_failed_shows_why_and_no_rates_or_good_health(browser: Any, many: str) -> None:
    browser.get("about:blank")
    browser.get(many)
    until(lambda: script(browser, "return document.querySelectorAll('.panel').length") == len(PANELS))
    assert HOSTILE in script(browser, "return document.getElementById('problems').innerText")
    assert script(browser, "return document.querySelectorAll('#panel-flow .good, #panel-slots .good').length") == 0
    assert "was reserved" in text(browser, "slots")
    assert "No open port is known" in text(browser, "about")
    assert script(browser, "return document.getElementById('unlock').hidden"), "there is no token that could unlock it"
    rates = script(
        browser, "return [...document.querySelectorAll('#panel-flow text:not(.name)')].map((e) => e.textContent)"
    )
    assert set(rates) == {"0 rows/s"}
    ends = "return new Set([...document.querySelectorAll('#panel-flow text.name')].map((e) => e.textContent)).size"
    assert script(browser, ends) == 14, "names that begin alike are told apart"


def test_copies_show_their_progress_and_end_and_topics_their_changes(browser: Any, tmp_path: Path) -> None:
    now = [1000.0]
    telemetry = Telemetry("copying", sources=["database"], sinks=["lake"], clock=lambda: now[0])
    columns = {"id": "int64"}
    telemetry.looks = Looks(schemas=lambda: {"/orders": dict(columns)})
    telemetry.publish(tmp_path)
    telemetry.state("pipeline", HealthStatus.healthy())
    telemetry.tables("database", {"public.orders": TableState("seeding", rows=0, estimate=2000)})
    telemetry._history.take()
    now[0] += 10
    telemetry.tables("database", {"public.orders": TableState("seeding", rows=500, estimate=2000)})
    columns["note"] = "string"
    telemetry._history.take()
    with serve_all([tmp_path], "127.0.0.1", 0, None) as server:
        browser.get("about:blank")
        browser.get(server.url)
        until(lambda: script(browser, "return document.querySelectorAll('.panel').length") == len(PANELS))
        until(lambda: "500 of 2,000" in text(browser, "tables"))
        assert "30 s" in text(browser, "tables"), "at this pace the rest takes as long"
        bar = "const p = document.querySelector('#panel-tables progress'); return [p.value, p.max]"
        assert script(browser, bar) == [500, 2000]
        assert "/orders: 2 columns, 1 change" in text(browser, "schemas")
        assert "+ note string" in script(browser, "return document.getElementById('panel-schemas').textContent")
    telemetry.close()


def test_one_table_of_many_is_found_by_its_name_or_state(browser: Any, many: str) -> None:
    browser.get("about:blank")
    browser.get(many)
    rows = "return document.querySelectorAll('#panel-tables tbody tr').length"
    until(lambda: script(browser, rows) == 201)
    field = browser.find_element("css selector", "#panel-tables input")
    field.send_keys("_199")
    until(lambda: script(browser, rows) == 1)
    field = browser.find_element("css selector", "#panel-tables input")
    field.clear()
    field.send_keys("failed")
    until(lambda: script(browser, rows) == 1 and HOSTILE in text(browser, "tables"))
    assert script(browser, "return document.activeElement.type") == "search", "it keeps the focus while one types"
