"""The report, the dashboard's page and that of a server in a headless Chromium: they draw or talk, answer the pointer, and log no error.

`make test-browser` runs these; they need Debian's chromium and chromium-driver, or Chrome and its driver, and fail where there is none.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.known_run import write_cluster_run, write_run

from wrappers.cli import main

pytestmark = pytest.mark.browser

FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
SECONDS = 60
DRAWN = "return !!window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents.every(d => d.roots().length > 0 && d.is_idle)"
PLOTS = """
const found = [];
const visit = view => { if (view.model.type == 'Figure') found.push(view); for (const child of view.children()) visit(child) };
for (const root of Bokeh.index.roots) visit(root);
"""
"""Every plot on the page, in order."""
TITLES = PLOTS + "return found.map(view => view.model.title.text)"
FRAME = PLOTS + (
    "const view = found.find(view => view.model.title.text.startsWith(arguments[0])); view.el.scrollIntoView({block: 'center'});"
    "const box = view.canvas_view.el.getBoundingClientRect(), frame = view.frame.bbox;"
    "return [box.left + frame.left, box.top + frame.top, frame.width, frame.height]"
)
"""Left, top, width and height of the inner part of a plot, in pixels of the window."""
RANGE = PLOTS + "const x = found.find(view => view.model.title.text.startsWith(arguments[0])).model.x_range; return [x.start, x.end]"
TIPS = """
const texts = [];
const visit = node => { for (const each of node.querySelectorAll('*')) {
  if (each.classList.contains('bk-Tooltip') || each.tagName == 'BK-TOOLTIP') texts.push((each.shadowRoot || each).textContent);
  if (each.shadowRoot) visit(each.shadowRoot) } };
visit(document);
return texts.join(' ')
"""
"""What the tooltips say."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium with a window of 1280 x 900 pixels and a profile of its own."""
    from selenium import webdriver

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    assert program, "no Chromium on this machine; apt-get install chromium chromium-driver"
    assert driver, "no chromedriver on this machine; apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS.split(), "window-size=1280,900", f"user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def open_page(browser: Any, address: str) -> list[str]:
    """Open a page, wait until everything is drawn; the titles of its plots."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("browser")  # what was written before is forgotten
    browser.get(address)
    WebDriverWait(browser, SECONDS).until(lambda it: it.execute_script(DRAWN))
    titles: list[str] = browser.execute_script(TITLES)
    return titles


def point(browser: Any, title: str, x: float, y: float, to: tuple[float, float] | None = None) -> None:
    """Move the pointer over a plot, to shares of its width and height; with `to`, drag from there to another place."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    left, top, width, height = browser.execute_script(FRAME, title)
    actions = ActionBuilder(browser)
    mouse = actions.pointer_action
    mouse.move_to_location(round(left + x * width), round(top + y * height))
    if to is not None:
        mouse.pointer_down()
        for part in (0.3, 0.6, 1.0):
            mouse.move_to_location(round(left + (x + part * (to[0] - x)) * width), round(top + (y + part * (to[1] - y)) * height))
        mouse.pointer_up()
    actions.perform()


def errors(browser: Any) -> list[str]:
    """What the console calls an error."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def report(tmp_path: Path) -> str:
    """The address of the known run's report."""
    assert main(["report", str(write_run(tmp_path / "run"))]) == 0
    return (tmp_path / "run" / "report.html").as_uri()


def test_the_report_draws_without_errors(browser: Any, report: str, tmp_path: Path) -> None:
    """Every plot, no error, nothing asked of a network, a width that fits 1280 pixels."""
    titles = open_page(browser, report)
    begins = ("loss", "gradient norm", "learning rate", "throughput", "ram:", "disk:", "bytes over", "how the workers", "who ran", "memory in use")
    assert len(titles) == 12
    assert all(title.startswith(begin) for title, begin in zip(titles, begins, strict=False))
    assert browser.execute_script("return [...document.querySelectorAll('h2')].map(e => e.innerText)")[2:4] == [
        "Movement",
        "Kept, moved or recomputed",
    ]
    assert errors(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1280
    assert browser.save_screenshot(str(tmp_path / "page.png"))


def test_the_pointer_shows_values(browser: Any, report: str) -> None:
    """Over a curve, the value of its step; over a bar of the Gantt chart, codelet, step and duration."""
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, report)
    start, end = browser.execute_script(RANGE, "loss")
    point(browser, "loss", (2 - start) / (end - start), 0.5)
    WebDriverWait(browser, SECONDS).until(lambda it: "loss: 6" in " ".join(it.execute_script(TIPS).replace("loss:", "loss: ").split()))
    start, end = browser.execute_script(RANGE, "who ran")
    point(browser, "who ran", (70 - start) / (end - start), 1 / 6)  # cpu:0 is the first of three tracks
    WebDriverWait(browser, SECONDS).until(lambda it: all(word in it.execute_script(TIPS) for word in ("matmul", "40.000 ms", "50.000 ms", "4")))
    assert errors(browser) == []


def test_dragging_zooms_and_the_button_returns(browser: Any, report: str) -> None:
    """A box over the Gantt chart is what is shown then, there and in the memory below it; reset shows all again."""
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, report)
    before = browser.execute_script(RANGE, "who ran")
    span = before[1] - before[0]
    point(browser, "who ran", 0.25, 0.1, (0.5, 0.9))
    WebDriverWait(browser, SECONDS).until(lambda it: it.execute_script(RANGE, "who ran") != before)
    after = browser.execute_script(RANGE, "who ran")
    assert after == [pytest.approx(before[0] + share * span, abs=0.02 * span) for share in (0.25, 0.5)]
    assert browser.execute_script(RANGE, "memory in use") == after
    browser.execute_script(PLOTS + "found.find(view => view.model.title.text.startsWith('who ran')).reset()")
    WebDriverWait(browser, SECONDS).until(lambda it: it.execute_script(RANGE, "who ran") == before)
    assert errors(browser) == []


def test_a_clusters_report_draws(browser: Any, tmp_path: Path) -> None:
    """All nodes on one page."""
    assert main(["report", str(write_cluster_run(tmp_path / "run"))]) == 0
    titles = open_page(browser, (tmp_path / "run" / "report.html").as_uri())
    assert {title.partition(":")[0] for title in titles} >= {"left ram", "left disk", "right ram", "right disk"}
    assert errors(browser) == []


def test_the_dashboards_page_is_live(browser: Any) -> None:
    """It draws what was published before it was opened, and by itself what is published later."""
    from distributed import Client, LocalCluster
    from selenium.webdriver.support.ui import WebDriverWait

    from wrappers.dask.dashboard.plugin import install, publish

    with LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        address = install(client).page
        assert address is not None
        publish(client, {"job": "run", "node": "left", "step": 1, "loss": 5.0, "tokens_per_second": 100.0, "resident_bytes": {"ram": 1 << 29}})
        assert open_page(browser, address) == ["throughput by node", "loss", "memory by node, within its budget"]
        publish(client, {"job": "run", "node": "left", "step": 2, "loss": 4.5, "tokens_per_second": 200.0, "resident_bytes": {"ram": 1 << 29}})
        heading = "return Bokeh.documents[0].roots()[0].children[0].text"
        WebDriverWait(browser, SECONDS).until(lambda it: "step 2, 1 node, 200 tokens/s, loss 4.5000" in it.execute_script(heading))
        assert errors(browser) == []
        browser.get("about:blank")  # its connection ends before the server does


def said(browser: Any) -> list[str]:
    """What stands in the log of the chat page, message by message."""
    found: list[str] = browser.execute_script("return [...document.querySelectorAll('.said')].map(each => each.textContent)")
    return found


def say(browser: Any, text: str, **fields: str) -> None:
    """Fill fields of the chat page, and send a text with Enter."""
    for name, value in {**fields, "text": text}.items():
        field = browser.find_element("id", name)
        field.clear()
        field.send_keys(value)
    browser.find_element("id", "text").send_keys("\n")


def button(browser: Any) -> str:
    """What the button of the chat page says."""
    return str(browser.find_element("id", "send").text)


def test_the_chat_page_talks(browser: Any, tmp_path: Path) -> None:
    """An answer grows in the log and is that of the interface; the next question has the conversation before it; a wrong key is told; New forgets."""
    from selenium.webdriver.support.ui import WebDriverWait
    from support.served import KEY, served, write_served_model

    script = f"import os\nos.environ['NNTASK_API_KEY'] = {KEY!r}"
    with served(write_served_model(tmp_path / "small"), script=script) as server, server.client() as client:
        browser.get_log("browser")
        browser.get(server.url)
        browser.set_window_size(360, 640)
        assert browser.find_element("tag name", "h1").size["height"] < 40  # one line on a telephone, too
        browser.set_window_size(1280, 900)
        say(browser, "hello", key="wrong", temperature="0", tokens="20")
        WebDriverWait(browser, SECONDS).until(lambda it: any("the key is missing or wrong" in text for text in said(it)))
        assert all("401" in each for each in errors(browser))  # what the browser itself notes of a refusal
        browser.find_element("id", "fresh").click()
        assert said(browser) == []
        talk: list[Any] = []
        for text in ("hello", "and <b>then</b>?"):
            say(browser, text, key=KEY)
            WebDriverWait(browser, SECONDS).until(lambda it: button(it) == "Send" and len(said(it)) == len(talk) + 2)
            talk.append({"role": "user", "content": text})
            answer = client.chat.completions.create(model="small", messages=talk, temperature=0, max_tokens=20).choices[0].message.content
            talk.append({"role": "assistant", "content": answer})
            assert said(browser) == [each["content"] for each in talk]
        assert errors(browser) == []
        asked = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name).filter(e => !e.startsWith('data:'))")
        assert all(each.startswith(f"{server.url}/v1/") for each in asked)
        browser.get("about:blank")


def test_the_chat_page_stops(browser: Any, tmp_path: Path) -> None:
    """Where there is no template texts are continued; the button stops one, and the server lets go of it."""
    from selenium.webdriver.support.ui import WebDriverWait
    from support.served import CONFIG, served, write_served_model

    long = write_served_model(tmp_path / "small", replace(CONFIG, n_positions=16384), has_template=False)
    with served(long, "--slots", "1") as server:
        browser.get(server.url)
        say(browser, "once", tokens="16000")
        WebDriverWait(browser, SECONDS).until(lambda it: said(it)[-1:] and len(said(it)[-1]) > 20)
        assert button(browser) == "Stop"
        browser.find_element("id", "send").click()
        WebDriverWait(browser, SECONDS).until(lambda it: button(it) == "Send")
        server.until("nntask_serve_texts_running", 0)
        assert said(browser)[1].startswith("once")
        assert errors(browser) == []
        browser.get("about:blank")


def test_new_forgets_the_answer_that_grows(browser: Any, tmp_path: Path) -> None:
    """New while an answer comes: it ends, and the next conversation begins with what is said next."""
    from selenium.webdriver.support.ui import WebDriverWait
    from support.served import CONFIG, served, write_served_model

    long = write_served_model(tmp_path / "small", replace(CONFIG, n_positions=16384))
    with served(long, "--slots", "1") as server:
        browser.get(server.url)
        say(browser, "once", tokens="16000")
        WebDriverWait(browser, SECONDS).until(lambda it: len(said(it)) == 2 and len(said(it)[1]) > 20)
        browser.find_element("id", "fresh").click()
        WebDriverWait(browser, SECONDS).until(lambda it: button(it) == "Send")
        assert said(browser) == []
        assert browser.execute_script("return messages") == []
        browser.get("about:blank")
