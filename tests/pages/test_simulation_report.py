"""The simulation's page, in a real browser at two window sizes and in both colour schemes, and its trace."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from triaxis.launch.simulate import main
from triaxis.launch.simulator.chrome import write_trace
from triaxis.launch.simulator.report import write_report
from triaxis.parallel.pipeline.orders import make_schedule
from triaxis.parallel.pipeline.walk import simulate
from triaxis.parallel.places.topology import Topology

WINDOWS = {"laptop": (1280, 800), "phone": (420, 900)}
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path"
)
KINDS = ("parameters", "gradients", "optimizer states", "activations", "gathered parameters", "unreduced gradients",
         "pipeline messages", "temporaries", "other")  # fmt: skip


def example(
    *,
    dp: int = 16,
    tp: int = 8,
    pp: int = 2,
    microbatches: int = 64,
    virtual_stages: int = 1,
    capacity: float = 80e9,
) -> dict[str, Any]:
    """A simulation as `launch/simulate.py` makes it: the spans of a real schedule, plausible figures around them."""
    topology = Topology(dp=dp, tp=tp, pp=pp)
    name = "1f1b" if virtual_stages == 1 else "interleaved"
    spans = simulate(make_schedule(name, pp, microbatches, virtual_stages))
    tick = 0.03 / virtual_stages
    flush = max(span.stop for row in spans for span in row) * tick
    length = flush + 0.5
    rows, curves, ranks = [], [], []
    for stage in range(pp):
        rank = topology.rank(pp=stage)
        compute = [[span.start * tick, span.stop * tick, str(span.action)] for span in spans[stage]]
        compute += [[flush + 0.3, length, "optimizer step"]]
        lanes = {
            "tp": [
                [start + 0.3 * (end - start), start + 0.5 * (end - start)] for start, end, _ in compute[:-1]
            ],
            "dp": [[start, start + 0.7 * (end - start)] for start, end, act in compute if "B" in act]
            + [[flush, flush + 0.3]],
            "pp": [[end, end + 0.1 * tick] for _, end, act in compute[:-1]],
        }
        lanes = {axis: values for axis, values in lanes.items() if topology.size(axis) > 1}
        place = f"dp 0, pp {stage}, tp 0"
        rows.append({"rank": rank, "place": place, "ranks": dp * tp, "compute": compute, "lanes": lanes})
        seconds: list[float] = []
        activations: list[float] = []
        held = 0.0
        for _, end, act in compute[:-1]:
            held += 2.5e9 / virtual_stages * (1 if "F" in act else -1)
            seconds.append(end)
            activations.append(held)
        sizes = {"parameters": 9e9, "gradients": 9e9, "optimizer states": 6e9, "activations": max(activations),
                 "gathered parameters": 3.4e9, "unreduced gradients": 1.7e9, "pipeline messages": 0.3e9,
                 "temporaries": 2.1e9, "other": 0.8e9}  # fmt: skip
        top = activations.index(max(activations))
        peak = sum(sizes.values())
        ranks.append(
            {"rank": rank, "place": place, "peak_bytes": peak, "reserved_bytes": peak * 1.06,
             "at": compute[top][2], "at_seconds": seconds[top], "breakdown": sizes}
        )  # fmt: skip
        held_bytes = {kind: [value] * len(seconds) for kind, value in sizes.items()} | {
            "activations": activations
        }
        curves.append({"rank": rank, "seconds": seconds, "bytes": held_bytes})
    tokens = microbatches * dp * 4096
    needed = max(one["reserved_bytes"] for one in ranks) + 1e9
    return {
        "run": {"model": "llama3-70b", "parameters": 70553706496, "dtype": "bf16", "zero": 3, "schedule": name,
                "virtual_stages": virtual_stages, "microbatches": microbatches, "microbatch_size": 1,
                "global_batch": microbatches * dp, "sequence_length": 4096, "sp": True, "recompute": False},
        "topology": {"dp": dp, "tp": tp, "pp": pp, "order": topology.order, "world_size": topology.world_size,
                     "gpus_per_node": 8, "nodes": -(-topology.world_size // 8)},
        "hardware": {"name": "h100-80g", "memory_bytes": capacity, "source": "data sheet"},
        "proof": {"holds": True, "ranks": topology.world_size, "classes": 2 * pp, "communications": 22383360,
                  "obligations": [{"name": name, "holds": True, "warned": False} for name in
                                  ("agreement", "channels", "progress", "one queue", "handles", "gradients", "memory")],
                  "faults": [], "warnings": []},
        "time": {"step_seconds": length, "tokens_per_second": tokens / length,
                 "tokens_per_second_per_gpu": tokens / length / topology.world_size, "mfu": 0.41, "hfu": 0.47,
                 "model_flops_per_token": 4.49e11, "bubble": [0.02 + 0.003 * stage for stage in range(pp)],
                 "exposed_seconds": {"tp": 1.2, "dp": 0.4, "pp": 0.1, "world": 0.0},
                 "busy_seconds": {"compute": 0.8 * length, "tp": 2.0, "dp": 3.0, "pp": 0.2},
                 "critical_path": [{"what": "compute, stage 0", "seconds": 0.7 * length},
                                   {"what": "tp all_gather", "seconds": 0.12 * length},
                                   {"what": "tp reduce_scatter", "seconds": 0.1 * length},
                                   {"what": "optimizer step", "seconds": 0.05 * length},
                                   {"what": "dp reduce_scatter", "seconds": 0.03 * length}]},
        "memory": {"fits": needed <= capacity, "needed_bytes": needed, "context_bytes": 1e9,
                   "ranks": ranks, "curves": curves},
        "traffic": {"sent_bytes_per_rank": {"tp": 3.1e11, "dp": 5.2e10, "pp": 4.3e9},
                    "messages_per_rank": {"tp": 20480, "dp": 240, "pp": 256}},
        "timeline": {"rows": rows},
    }  # fmt: skip


class Page:
    """A browser's only tab, spoken to through the DevTools protocol over two pipes."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._read = b""
        self._sent = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._session: dict[str, str] = {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """The browser's answer to one command."""
        self._sent += 1
        number = self._sent
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has gone"
            self._read += part
        line, self._read = self._read.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        content = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = content["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded":
                self.complaints.append(content["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(content["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def open(self, path: Path, window: str, scheme: str = "light") -> None:
        """Loads the file and waits until it has drawn."""
        width, height = WINDOWS[window]
        screen = {"deviceScaleFactor": 1, "mobile": window == "phone"}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, **screen)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.complaints.clear()
        self.requests.clear()
        self._loaded = False
        self.ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()
        self.settle()

    def settle(self) -> None:
        """Two frames later what was asked for is drawn."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.ask("Runtime.evaluate", expression=frames, awaitPromise=True)

    def value(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({selector!r}).innerText"))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def press(self, key: str) -> None:
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def corner(self, identifier: str) -> tuple[float, float]:
        """Where the element's top left is, once it is in sight, in pixels of the window."""
        self.value(f"find('{identifier}').scrollIntoView({{block: 'start'}})")
        x, y = self.value(f"(box => [box.x, box.y])(find('{identifier}').getBoundingClientRect())")
        self.settle()
        while self.value("performance.now() - lastScroll <= 250"):  # what scrolls is not zoomed
            time.sleep(0.05)
        return x, y

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))


@contextmanager
def browser() -> Iterator[Page]:
    """A headless browser with a profile of its own; ended at the end."""
    assert BROWSER is not None
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    hears, to_browser, from_browser, says = ends
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-pipe", "--hide-scrollbars")  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{hears} 4>&{says}', BROWSER, *flags, f"--user-data-dir={profile}"],
            pass_fds=(hears, says), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(hears)
        os.close(says)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(to_browser)
            os.close(from_browser)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def write(folder: Path, simulation: Mapping[str, Any]) -> Path:
    path = folder / "report.html"
    write_report(simulation, path)
    return path


def pixel(page: Page, canvas: str, x: float, y: float) -> list[int]:
    """Red, green and blue of a canvas at a point, in pixels of the page."""
    place = f"{x} * devicePixelRatio, {y} * devicePixelRatio, 1, 1"
    found = page.value(f"[...find('{canvas}').getContext('2d').getImageData({place}).data]")
    return list(found[:3])


def css_colour(page: Page, name: str) -> list[int]:
    text = page.value(f"colour('{name}')")
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)]


def centre(page: Page, simulation: Mapping[str, Any], row: int, index: int) -> tuple[float, float]:
    """Where on the timeline's canvas an action of a row is drawn."""
    start, end, _ = simulation["timeline"]["rows"][row]["compute"][index]
    x = page.value(f"timeToX({(start + end) / 2}, find('timeline').clientWidth)")
    return x, 22 + row * page.value("(find('timeline').clientHeight - 22) / timeline.rows.length") + 8


def seen(page: Page) -> tuple[float, float]:
    start, end = page.value("[view.from, view.to]")
    return start, end


@needs_browser
@pytest.mark.parametrize(
    ("pp", "window", "scheme"),
    [(2, "laptop", "light"), (16, "laptop", "dark"), (2, "phone", "dark"), (16, "phone", "light")],
)
def test_it_draws_in_both_windows_and_colours(
    page: Page, tmp_path: Path, pp: int, window: str, scheme: str
) -> None:
    simulation = example(pp=pp, dp=128 if pp == 16 else 16)
    page.open(write(tmp_path, simulation), window, scheme)
    assert page.complaints == []
    assert page.value("document.documentElement.dataset.ready") == "true"
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value("innerWidth") == WINDOWS[window][0]
    assert (
        page.value("document.title")
        == f"llama3-70b on {simulation['topology']['world_size']:,} GPUs · triaxis"
    )
    assert page.value("find('timeline').dataset.rows") == str(pp)
    spans = sum(
        len(row["compute"]) + sum(map(len, row["lanes"].values())) for row in simulation["timeline"]["rows"]
    )
    assert page.value("Number(find('timeline').dataset.blocks)") == spans
    for row in (0, pp - 1):
        x, y = centre(page, simulation, row, -1)
        assert pixel(page, "timeline", x, y - 6) == css_colour(page, "phase")
    ink, paper = (
        page.value(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
    )
    dark, light = (sum(map(int, re.findall(r"\d+", text))) for text in (paper, ink))
    assert (dark < light) == (scheme == "dark")
    outside = "(e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('pre')"
    assert page.value(f"[...document.querySelectorAll('main *, header *')].filter({outside}).length") == 0


@needs_browser
def test_it_needs_no_network(page: Page, tmp_path: Path) -> None:
    path = write(tmp_path, example())
    page.open(path, "laptop")
    assert page.requests == [path.as_uri()]


@needs_browser
def test_the_answer_comes_first_and_is_for_people(page: Page, tmp_path: Path) -> None:
    simulation = example()
    simulation["time"] |= {
        "step_seconds": 12.345,
        "tokens_per_second": 339_821.2,
        "tokens_per_second_per_gpu": 1327.4,
    }
    page.open(write(tmp_path, simulation), "laptop")
    assert page.text("h1") == "Fits and is proved: 340,000 tokens/s"
    assert "70.6 B parameters) on 256 × h100-80g, 32 nodes" in page.text("#what")
    tiles = page.text("#tiles")
    for figure in ("12.3 s a step", "1,327 tokens/s per GPU", "41% MFU", "47% HFU", "449 GFLOPs a token",
                   "40.5 GB of 80 GB", "39.5 GB reserved, 1 GB context",
                   "peak 37.3 GB allocated, rank 0, in the forward of microbatch 1",
                   "✓ no deadlock", "22,383,360 communications"):  # fmt: skip
        assert figure in tiles
    assert page.value("document.querySelectorAll('#proof li').length") == 7
    assert "400 ms of 3 s exposed" in page.text("#traffic")
    assert "52 GB sent a rank and step · 240 messages" in page.text("#traffic")


@needs_browser
def test_figures(page: Page, tmp_path: Path) -> None:
    page.open(write(tmp_path, example(microbatches=2)), "laptop")
    expected = {
        "inBytes(999.9e6)": "1 GB",
        "inBytes(1536)": "1.54 kB",
        "inBytes(0)": "0 B",
        "inBytes(-2e9)": "-2 GB",
        "inSeconds(0)": "0 s",
        "inSeconds(0.00123)": "1.23 ms",
        "inSeconds(7e-7)": "0.7 µs",
        "percent(0.0213)": "2.1%",
        "counted(1, 'rank')": "1 rank",
        "whole(22383360.4)": "22,383,360",
    }
    assert {value: page.value(value) for value in expected} == expected


@needs_browser
def test_the_timeline_zooms_and_pans_by_wheel_buttons_keys_and_dragging(page: Page, tmp_path: Path) -> None:
    simulation = example(pp=4)
    page.open(write(tmp_path, simulation), "laptop")
    everything = seen(page)
    assert everything == (0, simulation["time"]["step_seconds"])
    x, y = page.corner("timeline")
    at = page.value("xToTime(600, find('timeline').clientWidth)")
    page.mouse("mouseWheel", x + 600, y + 40, deltaX=0, deltaY=-300)
    start, end = seen(page)
    assert end - start < 0.6 * everything[1]
    assert page.value("xToTime(600, find('timeline').clientWidth)") == pytest.approx(
        at
    )  # what is pointed at stays
    page.mouse("mousePressed", x + 600, y + 40, button="left", clickCount=1)
    page.mouse("mouseMoved", x + 500, y + 40, button="left", buttons=1)
    page.mouse("mouseReleased", x + 500, y + 40, button="left")
    assert seen(page)[0] > start
    assert page.value("xToTime(500, find('timeline').clientWidth)") == pytest.approx(
        at
    )  # it moves with the hand
    page.value("document.querySelector('[data-do=all]').click()")
    assert seen(page) == everything
    page.value("document.querySelector('[data-do=in]').click()")
    assert seen(page)[1] - seen(page)[0] == pytest.approx(everything[1] / 2)
    page.value("find('timeline').focus()")
    page.press("+")
    assert seen(page)[1] - seen(page)[0] == pytest.approx(everything[1] / 4)
    page.press("0")
    assert seen(page) == everything
    for _ in range(40):
        page.value("ACTS.in()")
    assert seen(page)[1] > seen(page)[0] >= 0
    assert page.complaints == []


@needs_browser
def test_two_fingers_zoom_on_a_phone(page: Page, tmp_path: Path) -> None:
    page.open(write(tmp_path, example(pp=4)), "phone")
    x, y = page.corner("timeline")
    before = seen(page)
    for kind, apart in (("touchStart", 40), ("touchMove", 60), ("touchMove", 80), ("touchEnd", 0)):
        fingers = (
            [{"x": x + 220 + side * apart, "y": y + 40, "id": side + 1} for side in (-1, 1)] if apart else []
        )
        page.ask("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
    page.settle()
    assert seen(page)[1] - seen(page)[0] == pytest.approx((before[1] - before[0]) / 2, rel=0.1)


@needs_browser
def test_the_page_scrolls_past_the_whole_timeline(page: Page, tmp_path: Path) -> None:
    page.open(write(tmp_path, example(pp=4)), "laptop")
    x, y = page.corner("timeline")
    before = page.value("scrollY")
    page.mouse("mouseWheel", x + 600, y + 40, deltaX=0, deltaY=100)
    while page.value("scrollY") <= before:
        time.sleep(0.05)
    assert seen(page)[0] == 0


@needs_browser
def test_pointing_names_action_rank_start_and_duration(page: Page, tmp_path: Path) -> None:
    simulation = example(pp=4, microbatches=8)
    page.open(write(tmp_path, simulation), "laptop")
    x, y = page.corner("timeline")
    inside = centre(page, simulation, 2, 5)
    page.mouse("mouseMoved", x + inside[0], y + inside[1])
    row = simulation["timeline"]["rows"][2]
    start, end, action = row["compute"][5]
    assert page.value("getComputedStyle(find('tip')).visibility") == "visible"
    kind = {"F": "forward", "B": "backward"}[action[1]]
    assert page.text("#tip").splitlines() == [
        f"{action}: {kind} of microbatch {action[2:]}",
        f"rank {row['rank']} ({row['place']})",
        f"from {start * 1e3:.0f} ms for {(end - start) * 1e3:.0f} ms",
    ]
    width = page.value("find('timeline').clientWidth")
    span = row["lanes"]["tp"][3]
    middle = page.value(f"timeToX({sum(span) / 2}, {width})")
    page.mouse("mouseMoved", x + middle, y + inside[1] - 8 + 26 + 4)
    assert page.text("#tip").startswith(f"tp communication\nrank {row['rank']} ")
    idle = page.value(f"timeToX({row['compute'][0][0] / 2}, {width})")
    page.mouse("mouseMoved", x + idle, y + inside[1])
    assert page.text("#tip").startswith("idle\n")


@needs_browser
def test_the_keyboard_walks_through_actions_and_ranks(page: Page, tmp_path: Path) -> None:
    simulation = example(pp=4, microbatches=8)
    page.open(write(tmp_path, simulation), "laptop")
    page.value("find('timeline').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.press(key)
    says = page.text("#timeline-says")
    assert says.startswith("0F0: forward of microbatch 0, rank 8 (dp 0, pp 1, tp 0), from 30 ms for 30 ms")
    assert page.value("find('memory').dataset.rank") == "8"  # the memory below is that rank's
    page.value("show(1, 1.1)")
    for _ in range(3):
        page.press("ArrowRight")
    start, end, _ = simulation["timeline"]["rows"][1]["compute"][3]
    assert seen(page)[0] <= start < end <= seen(page)[1]  # the view follows
    focusable = page.value(
        "[...document.querySelectorAll('button, select, input, canvas')].every(e => e.tabIndex >= 0)"
    )
    assert focusable


@needs_browser
def test_memory_is_stacked_and_named(page: Page, tmp_path: Path) -> None:
    simulation = example()
    page.open(write(tmp_path, simulation), "laptop")
    x, y = page.corner("memory")
    curve = simulation["memory"]["curves"][0]
    at = 11
    middle = (curve["seconds"][at] + curve["seconds"][at + 1]) / 2
    page.mouse("mouseMoved", x + page.value(f"timeToX({middle}, find('memory').clientWidth)"), y + 200)
    total = sum(values[at] for values in curve["bytes"].values())
    assert curve["bytes"]["activations"][at] not in (
        curve["bytes"]["activations"][0],
        curve["bytes"]["activations"][-1],
    )
    told = page.text("#tip").splitlines()
    assert told[0] == f"{middle * 1e3:.3g} ms: {total / 1e9:.3g} GB"
    assert f"activations {curve['bytes']['activations'][at] / 1e9:.3g} GB" in told
    height = page.value("find('memory').clientHeight")
    assert pixel(page, "memory", 600, height - 8) == css_colour(page, "memory-parameters")
    assert page.value("document.querySelectorAll('#peaks .bar').length") == 2
    assert "activations" in page.value("document.querySelector('#peaks .bar').getAttribute('aria-label')")


@needs_browser
@pytest.mark.parametrize("window", WINDOWS)
def test_the_topology_gathers_cells_until_they_fit(page: Page, tmp_path: Path, window: str) -> None:
    for (dp, pp), each in (((16, 2), 1), ((128, 16), 8)):
        simulation = example(microbatches=16, dp=dp, pp=pp)
        page.open(write(tmp_path, simulation), window)
        assert page.value("Number(find('topology').dataset.each)") == each
        assert (
            page.value("Number(find('topology').dataset.cells)")
            == simulation["topology"]["world_size"] // each
        )
        assert page.value("find('topology').clientHeight") <= 530


@needs_browser
@pytest.mark.parametrize("order", ["tp-pp-dp", "tp-dp-pp"])
def test_the_topology_tells_a_gpus_groups(page: Page, tmp_path: Path, order: str) -> None:
    simulation = example(dp=4, tp=2, pp=2, microbatches=4)
    simulation["topology"]["order"] = order
    page.open(write(tmp_path, simulation), "laptop")
    page.value("find('topology').focus()")
    for _ in range(8):
        page.press("ArrowRight")
    says = page.text("#topology-says")
    topology = Topology(dp=4, tp=2, pp=2, order=order)
    assert says.startswith("GPU 7 on node 0")
    for axis in ("tp", "pp", "dp"):
        group, place = topology.group_of(7, axis), topology.coordinates(7)[axis]
        by = f" by {group[1] - group[0]}" if group[1] - group[0] > 1 else ""
        assert f"{axis} {place} with {len(group)} ranks, {group[0]}…{group[-1]}{by}" in says
    before = pixel(page, "topology", 12, 26)
    page.value("document.querySelector('input[value=tp]').click()")
    page.settle()
    assert page.text("#ramp") == "tensor rank 0\ntensor rank 1"
    assert pixel(page, "topology", 12, 26) == before  # the first of each axis has the first colour


@needs_browser
def test_what_does_not_fit_says_so(page: Page, tmp_path: Path) -> None:
    page.open(write(tmp_path, example(capacity=32e9)), "laptop")
    assert page.text("h1") == "Does not fit: 40.5 GB of 32 GB"
    assert page.value("find('verdict').className") == "bad"
    advice = page.text("#next")
    assert "parameters take 9 GB of rank 0's peak; spread the states over more ranks" in advice
    assert "triaxis plan --model" in advice and "--gpus 256 --hardware h100-80g" in advice


@needs_browser
def test_rows_that_read_the_same_are_one(page: Page, tmp_path: Path) -> None:
    simulation = example(pp=4, microbatches=4)
    ranks = simulation["memory"]["ranks"]
    for rank in ranks[2:]:
        rank |= {key: ranks[1][key] for key in ("breakdown", "peak_bytes", "reserved_bytes")}
    page.open(write(tmp_path, simulation), "laptop")
    assert page.value("document.querySelectorAll('#peaks .bar').length") == 2
    assert f"{len(ranks) - 2} kinds of rank with the same figures" in page.text("#peaks")


@needs_browser
def test_a_straggler_leaves_its_trace(page: Page, tmp_path: Path) -> None:
    simulation = example(microbatches=4)
    path = write(tmp_path, simulation)
    page.open(path, "laptop")
    assert "as long" not in page.text("#settings")
    plain = page.value("find('timeline').toDataURL()")
    simulation["run"]["disturbed"] = {"stragglers": {"0": 1.5}, "links": {"3": 4.0}}
    page.open(write(tmp_path, simulation), "laptop")
    assert "rank 0 computes 1.5× as long · rank 3's messages take 4× as long" in page.text("#settings")
    assert page.value("find('timeline').toDataURL()") != plain


@needs_browser
@pytest.mark.parametrize("window", WINDOWS)
def test_a_failed_proof_shows_its_faults_and_no_empty_sections(
    page: Page, tmp_path: Path, window: str
) -> None:
    simulation = example()
    fault = "progress: these wait for each other for ever\n" + "  rank 0 waits for rank 8, action 0B3; " * 12
    simulation["proof"] |= {
        "holds": False,
        "faults": [fault, "channels: <b>another</b>"],
        "warnings": ["one queue: careful"],
    }
    simulation["proof"]["obligations"][2]["holds"] = False
    simulation["proof"]["obligations"][3]["warned"] = True
    simulation |= {"time": None, "timeline": {"rows": []}}
    simulation["memory"] |= {"ranks": simulation["memory"]["ranks"][:1], "curves": []}
    page.open(write(tmp_path, simulation), window)
    assert page.complaints == []
    assert page.text("h1") == "Does not hold: 2 faults"
    shown = page.value("[...document.querySelectorAll('#proof pre')].map(e => e.textContent)")
    assert shown == [fault, "channels: <b>another</b>", "one queue: careful"]
    assert page.value("[...document.querySelectorAll('h2')].map(e => e.textContent)") == [
        "Topology",
        "Peak memory by kind",
        "What was proved",
    ]
    marks = page.value(
        "[...document.querySelectorAll('#proof li b:first-child')].map(e => e.textContent.trim())"
    )
    assert "".join(marks) == "✓✓✗!✓✓✓"
    assert page.value("document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_names_cannot_become_markup(page: Page, tmp_path: Path) -> None:
    simulation = example(microbatches=2)
    name = "</script><script>document.title = 'taken'</script><!--<img src=x>"
    simulation["run"]["model"] = name
    simulation["memory"]["ranks"][0]["place"] = simulation["timeline"]["rows"][0]["place"] = "<i id=planted>"
    page.open(write(tmp_path, simulation), "laptop")
    assert page.complaints == []
    assert page.text("#what b") == name
    assert page.value("document.title").startswith(name)
    assert page.value("find('planted') === null && document.images.length === 0")


def test_a_figure_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    simulation = example(microbatches=2)
    simulation["time"]["mfu"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_report(simulation, tmp_path / "report.html")


def test_the_trace_has_a_track_for_each_rank_and_lane(tmp_path: Path) -> None:
    simulation = example(pp=4, microbatches=8)
    write_trace(simulation, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for row in simulation["timeline"]["rows"]:
        rank = row["rank"]
        assert names[rank] == f"rank {rank} ({row['place']}), and 127 alike"
        for lane, expected in {"compute": row["compute"], **row["lanes"]}.items():
            (thread,) = [tid for (pid, tid), name in tracks.items() if (pid, name) == (rank, lane)]
            found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, thread)]
            assert [e["ts"] for e in found] == pytest.approx([span[0] * 1e6 for span in expected])
            assert [e["dur"] for e in found] == pytest.approx(
                [(span[1] - span[0]) * 1e6 for span in expected]
            )
            if lane == "compute":
                assert [e["name"] for e in found] == [span[2] for span in expected]
    curve = simulation["memory"]["curves"][1]
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == curve["rank"]]
    assert [e["args"]["activations"] * 1e9 for e in counters] == pytest.approx(curve["bytes"]["activations"])
    assert [e["ts"] for e in counters] == pytest.approx([seconds * 1e6 for seconds in curve["seconds"]])


@needs_browser
def test_a_real_simulation_is_drawn(page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, trace = tmp_path / "report.html", tmp_path / "trace.json"
    flags = "--model tiny --gpus 8 --tp 2 --pp 2 --sp --zero 2 --seq 64 --microbatches 4 --json"
    assert main([*flags.split(), "--report", str(report), "--trace", str(trace)]) == 0
    simulation = json.loads(capsys.readouterr().out)
    page.open(report, "phone", "dark")
    assert page.complaints == []
    assert page.text("h1").startswith("Fits and is proved: ")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value("Number(find('timeline').dataset.blocks)") > 2 * 4 * 2
    assert (
        0
        < page.value("document.querySelectorAll('#peaks .bar').length")
        <= len(simulation["memory"]["ranks"])
    )
    assert all(curve["seconds"][0] == 0 for curve in simulation["memory"]["curves"])  # nothing is left blank
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    actions = [span[2] for row in simulation["timeline"]["rows"] for span in row["compute"]]
    assert [e["name"] for e in events if e.get("cat") == "compute"] == actions
    assert {"0F0", "0B3"} <= set(actions)
