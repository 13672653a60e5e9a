"""The plan's page: it says what the plan says, needs no network, and shows well in a real browser."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from triaxis.launch.hardware.hardware import load_hardware
from triaxis.launch.pages.report import memory_bars, nodes, pipeline, time_bars
from triaxis.launch.pages.report_plot import plot
from triaxis.launch.plan import main
from triaxis.launch.planner.search import Plan, Request, search
from triaxis.models.presets import load_config

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZES = ("1280,900", "500,900")
PROBE = """<script>
const page = document.documentElement;
page.dataset.overflow = page.scrollWidth - page.clientWidth;
page.dataset.line = [...document.querySelectorAll('.line')].every(line => line.getBoundingClientRect().width > 0);
page.dataset.bars = [...document.querySelectorAll('.bar')].filter(bar =>
  [...bar.querySelectorAll('span:not(.line)')].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)
  <= bar.getBoundingClientRect().width + 1).length;
page.dataset.plot = document.querySelector('.plot').getBoundingClientRect().width;
</script>"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(
        Request(
            model=load_config("llama2-13b"),
            name="llama2-13b",
            hardware=load_hardware("a100-80g"),
            gpus=32,
            seq=4096,
            global_batch=64,
        )
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "deep" / "plan.html"
    wish = ("--model", "llama2-13b", "--gpus", "32", "--hardware", "a100-80g", "--global-batch", "64")
    assert main([*wish, "--tokens", "2T", "--price", "2", "--report", str(path)]) == 0
    return path


class Outline(html.parser.HTMLParser):
    """Open tags that were never closed, links to elsewhere, and the ids of sections."""

    VOID = {"meta", "link", "br", "line", "circle", "rect"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elsewhere: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href") and not (value or "").startswith("data:"):
                self.elsewhere.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_alone(page: Path, plan: Plan) -> None:
    text = page.read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    assert not outline.open and not outline.elsewhere
    assert {"choice", "start", "memory", "time", "alternatives", "why-not", "topology"} <= set(outline.ids)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "<script" not in text
    best = plan.best
    assert best is not None
    for words in (str(best), "torchrun --nnodes 4", "2T tokens", "GB of 80.0 GB", "node 3"):
        assert words in text


def test_bars_add_up(plan: Plan) -> None:
    best = plan.best
    assert best is not None
    capacity = plan.request.hardware.memory_bytes
    for bar, candidate_bytes in zip(memory_bars(plan, best)[:1], [best.memory_bytes], strict=True):
        share = sum(part.share for part in bar.segments) / 100
        assert share * 1.08 * capacity == pytest.approx(candidate_bytes)
    bars = (*memory_bars(plan, best), *time_bars(plan, best))
    assert all(0 < sum(part.share for part in bar.segments) <= 100 for bar in bars)
    assert len({bar.label for bar in memory_bars(plan, best)}) == len(memory_bars(plan, best))


def test_points_lie_in_the_frame(plan: Plan) -> None:
    best = plan.best
    assert best is not None
    drawn = plot(plan, best)
    assert [point.kind for point in drawn.points].count("chosen") == 1
    assert drawn.points[-1].kind == "chosen", "on top"
    assert all(56 <= point.x <= 757 and drawn.capacity_y <= point.y <= 333 for point in drawn.points)
    left, right, top, bottom = drawn.error
    assert left < drawn.points[-1].x < right and top < drawn.points[-1].y < bottom
    assert 3 <= len(drawn.across) <= 12 and 3 <= len(drawn.up) <= 12


def test_nodes_and_pipeline_are_those_of_the_layout(plan: Plan) -> None:
    piped = next(one for one in plan.candidates if one.topology == (4, 2, 4))
    drawn = nodes(piped)
    assert [cell.rank for node in drawn for cell in node] == list(range(32))
    assert drawn[0][2].text == "rank 2: replica 0, stage 1, tensor part 0"
    assert drawn[0][0].colour == drawn[0][1].colour != drawn[0][2].colour
    shown = pipeline(piped)
    assert shown is not None and shown[0].startswith("<svg") and "pp 4" in shown[1]
    flat = next(one for one in plan.candidates if one.topology == (32, 1, 1))
    assert pipeline(flat) is None


@pytest.mark.parametrize("size", SIZES)
def test_it_shows_in_a_browser(page: Path, plan: Plan, size: str, tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    probed = tmp_path / "probed.html"
    probed.write_text(
        page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8"
    )
    done = subprocess.run(
        [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}", "--enable-logging=stderr"),
            *("--dump-dom", probed.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    found = dict(re.findall(r'data-(overflow|line|bars|plot)="([^"]*)"', done.stdout.split("<head>")[0]))
    assert int(found["overflow"]) <= 0, "the page is wider than the window"
    assert found["line"] == "true", "the GPU's memory is marked on each bar"
    best = plan.best
    assert best is not None
    assert int(found["bars"]) == len(memory_bars(plan, best)) + len(time_bars(plan, best))
    assert float(found["plot"]) > 300
    assert "CONSOLE" not in done.stderr
