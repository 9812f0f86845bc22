"""
What the console is made of, beside what it could be made of: its server and starlette on uvicorn, its charts and libraries.

Both servers read the status of the same stopped pipeline and send it, a connection each as a page asks for it. Both charts
draw the same two series of a day in the same browser. Peers are installed into an environment of their own in the user's cache.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from measure import Bench, environment

from penstock.runtime.telemetry import STATUS_FILE, Telemetry
from penstock.runtime.telemetry.history import COARSE_SECS, FIELDS, Rings
from penstock.source import HealthStatus
from penstock.testing.mosquitto import free_port
from penstock.testing.s3 import cache

REQUESTS = int(os.environ.get("BENCH_REQUESTS", 2000))
DRAWS = int(os.environ.get("BENCH_DRAWS", 200))
PAGES = 20
"""Open pages that the server has to keep up with; each asks for four things in two seconds."""
FIRST_PAINT_BYTES = 200_000
PYTHON_PEERS = ("starlette==0.50.0", "uvicorn==0.38.0")
CHARTS = {"uplot@1.6.32": "dist/uPlot.iife.min.js", "chart.js@4.4.9": "dist/chart.umd.js"}
STATIC = Path(__file__).resolve().parent.parent / "src" / "penstock" / "web" / "static"


def main() -> None:
    bench = Bench("console", "The console: its server and its charts, beside libraries")
    with tempfile.TemporaryDirectory(prefix="bench-console-") as home:
        state = Path(home, "state")
        stopped_pipeline(state)
        servers(bench, state)
        charts(bench, state)
    bench.finish()


def stopped_pipeline(state: Path) -> None:
    """What a pipeline of twenty topics leaves: its status, and a day of history."""
    state.mkdir(mode=0o700)
    topics = [f"topic_{number}" for number in range(20)]
    telemetry = Telemetry("shop", sources=topics, sinks=["lake", "warehouse"])
    telemetry.publish(state)
    for topic in topics:
        telemetry.state(f"source:{topic}", HealthStatus.healthy())
    telemetry.close()
    rings, now = Rings(state), time.time()
    for minute in range(1440):
        at = now - 86_400 + minute * COARSE_SECS
        rings.coarse.put(int(at // COARSE_SECS), at, [float(minute % 97 * 1000)] * len(FIELDS))


# -- the server -----------------------------------------------------------------------------------------------------------


def servers(bench: Bench, state: Path) -> None:
    peers = environment("console", *PYTHON_PEERS)
    python = str(peers / "bin" / "python")
    told = {}
    for name, command in {
        "ours": [sys.executable, "-m", "penstock", "console", str(state), "--port", "PORT"],
        "starlette": [
            python,
            str(Path(__file__).parent / "modules" / "console_peer.py"),
            "PORT",
            str(state / STATUS_FILE),
        ],
    }.items():
        told[name] = served(command)
        rate, cpu, slowest = told[name]
        note = f"{cpu * 1e6:,.0f} µs of CPU each, {slowest * 1000:.1f} ms at the 99th percentile"
        bench.row(f"{name}: answers per second, one after the other", f"{rate:,.0f}", note)
    bare, ours, theirs = (
        imported(p, m) for p, m in ((python, ""), (python, "http.server"), (python, "uvicorn, starlette.applications"))
    )
    for name, (spent, memory) in (("http.server", ours), ("uvicorn and starlette", theirs)):
        bench.row(
            f"import of {name}", f"{(memory - bare[1]) / 1e6:.1f} MB", f"{max(0.0, spent - bare[0]) * 1000:.0f} ms"
        )
    bench.row("packages of uvicorn and starlette", f"{packages(peers) / 1e6:.1f} MB", "http.server comes with Python")
    needed = PAGES * 4 / 2
    bench.claim("console_answers_vs_20_pages", told["ours"][0] / needed, ">=", 5)
    bench.claim("console_cpu_vs_starlette", told["ours"][1] / told["starlette"][1], "<=", 2)
    bench.claim("console_server_memory_vs_starlette", (ours[1] - bare[1]) / (theirs[1] - bare[1]), "<=", 1)


def packages(environment: Path) -> int:
    """Bytes of what was installed besides pip."""
    (site,) = environment.glob("lib/python*/site-packages")
    kept = (each for each in site.iterdir() if not each.name.startswith("pip"))
    return sum(file.stat().st_size for each in kept for file in [each, *each.rglob("*")] if file.is_file())


def served(command: list[str]) -> tuple[float, float, float]:
    """Answers per second, CPU seconds of the server for each, and the time of the slowest of a hundred."""
    port = free_port()
    command = [str(port) if word == "PORT" else word for word in command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            path = status_path(port)
            for _ in range(50):
                ask(port, path)
            watched = psutil.Process(process.pid)
            before, began, times = watched.cpu_times(), time.perf_counter(), []
            for _ in range(REQUESTS):
                at = time.perf_counter()
                ask(port, path)
                times.append(time.perf_counter() - at)
            spent, after = time.perf_counter() - began, watched.cpu_times()
        finally:
            process.kill()
    cpu = after.user + after.system - before.user - before.system
    return REQUESTS / spent, cpu / REQUESTS, statistics.quantiles(times, n=100)[98]


def status_path(port: int) -> str:
    """Where the status is: in the console under the id of the pipeline."""
    give_up = time.monotonic() + 60
    while True:
        try:
            found = ask(port, "/api/pipelines")
            return f"/api/p/{json.loads(found)['pipelines'][0]['id']}/status"
        except OSError:
            assert time.monotonic() < give_up, "the server does not answer"
            time.sleep(0.05)
        except (ValueError, KeyError, IndexError):
            return "/status"


def ask(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def imported(python: str, modules: str) -> tuple[float, float]:
    """Seconds and memory of a process that imports these and ends; the best of five."""
    code = f"{f'import {modules}' if modules else ''}\nprint(open('/proc/self/statm').read().split()[1])"
    found = []
    for _ in range(5):
        began = time.perf_counter()
        said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        found.append((time.perf_counter() - began, float(said) * os.sysconf("SC_PAGE_SIZE")))
    return min(each[0] for each in found), min(each[1] for each in found)


# -- the charts -----------------------------------------------------------------------------------------------------------

SERIES = """
    const points = Array.from({ length: 1440 }, (_, i) => [1.7e9 + i * 60, (i % 97) * 1000]);
    const other = points.map(([at, v]) => [at, v / 2]);
    const place = document.createElement('div');
    document.body.append(place);
    const times = [];
    for (let n = 0; n < arguments[0]; n++) {
        const began = performance.now();
        DRAW
        place.offsetHeight;
        times.push(performance.now() - began);
        place.replaceChildren();
    }
    place.remove();
    return times.sort((a, b) => a - b)[Math.floor(times.length / 2)];
"""
OURS = """
    const both = [{ name: 'in', kind: 'one', points }, { name: 'out', kind: 'two', points: other }];
    place.append(...[chart(both, short, 'x')].flat());
"""
UPLOT = """
    const data = [points.map((p) => p[0]), points.map((p) => p[1]), other.map((p) => p[1])];
    const series = [{}, { label: 'in', stroke: 'blue' }, { label: 'out', stroke: 'green' }];
    new uPlot({ width: 600, height: 150, series }, data, place);
"""


def charts(bench: Bench, state: Path) -> None:
    whole = sum(file.stat().st_size for file in STATIC.iterdir())
    pictures = (STATIC / "app.js").read_text()
    own = len(pictures[pictures.index("// -- pictures") : pictures.index("// -- actions")].encode())
    bench.row("the whole page", f"{whole / 1000:.1f} kB", "HTML, script, style and icon, not compressed")
    bench.row("its charts and its flow alone", f"{own / 1000:.1f} kB")
    libraries = {name: library(name, file) for name, file in CHARTS.items()} if shutil.which("npm") else {}
    for name, file in libraries.items():
        bench.row(name, f"{file.stat().st_size / 1000:.1f} kB", "charts alone")
        bench.claim(
            f"console_charts_vs_{name.partition('@')[0].replace('.', '')}_bytes", own / file.stat().st_size, "<=", 1
        )
    bench.claim("console_page_vs_200kB", whole / FIRST_PAINT_BYTES, "<=", 1)
    if not (libraries and shutil.which("chromium") and shutil.which("chromedriver")):
        return
    with browser(state) as page:
        ours = page.execute_script(SERIES.replace("DRAW", OURS), DRAWS)
        code = libraries[next(iter(CHARTS))].read_text()
        theirs = page.execute_script(code + SERIES.replace("DRAW", UPLOT), DRAWS)
    bench.row("our chart drawn, two series of a day", f"{ours:.2f} ms", "SVG, with its layout")
    bench.row("uPlot's", f"{theirs:.2f} ms", "canvas, which paints later")
    bench.claim("console_chart_vs_16ms_frame", ours / 16, "<=", 1)


def library(name: str, file: str) -> Path:
    """A file of an npm package; fetched once."""
    home = cache() / "bench-console-charts" / name.replace("@", "-")
    if not (home / "package" / file).is_file():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        subprocess.run(["npm", "pack", "--silent", name], check=True, cwd=home, stdout=subprocess.DEVNULL)
        (packed,) = home.glob("*.tgz")
        shutil.unpack_archive(packed, home, filter="data")
    return home / "package" / file


@contextlib.contextmanager
def browser(state: Path) -> Iterator[Any]:
    """The console's page, open in a browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    from penstock.web import serve_all

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    with serve_all([state], "127.0.0.1", 0, None) as server:
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            driver.get(server.url)
            yield driver
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
