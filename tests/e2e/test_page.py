"""Goal: a person chats on the page and sees the memory as it is. Method: Debian's Chromium without a window, driven by Selenium;
what the page shows is compared with what the API says. Pictures go to build/pictures."""
import concurrent.futures
import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.request

import pytest

import conftest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no Chromium with its driver")
PICTURES = conftest.ROOT / "build" / "pictures"


@contextlib.contextmanager
def serving(model, *args):
    command = [conftest.program("paged"), "serve", "--model", str(model), "--port", "0", "--threads", "1", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                break
        yield found[0].rstrip("/")
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="module")
def url(model):
    with serving(model, "--max-running", 8, "--ctx", 2048) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for arg in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,900"):
        options.add_argument(arg)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


class Page:
    """What a person does and sees."""

    def __init__(self, browser, url):
        self.browser, self.url = browser, url
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get(url)
        self.until(lambda: self.one("#link").text.startswith("event"))
        self.set("temperature", 0)

    def one(self, css):
        return self.browser.find_element(By.CSS_SELECTOR, css)

    def all(self, css):
        return self.browser.find_elements(By.CSS_SELECTOR, css)

    def until(self, holds, seconds=30):
        """What holds() gives as soon as it is true; an element that the page has just made anew is looked for again."""
        deadline = time.monotonic() + seconds

        def value_now():
            with contextlib.suppress(StaleElementReferenceException):
                return holds()

        while not (value := value_now()):
            assert time.monotonic() < deadline, f"did not happen in {seconds} s; the page says:\n{self.one('body').text}"
            time.sleep(0.05)
        return value

    def set(self, name, value):
        self.browser.execute_script("document.getElementById('settings').elements[arguments[0]].value = arguments[1]", name, value)

    def ask(self, text):
        self.one("#question").send_keys(text, Keys.ENTER)

    def texts(self):
        return self.browser.execute_script("return JSON.parse(localStorage.getItem('paged-chats')).at(-1).messages")

    def answered(self, n):
        """Waits for n messages, the last of them complete."""
        self.until(lambda: len(self.all(".message")) == n and not self.one("#stop").is_displayed())
        return self.all(".message")[-1]

    def press(self, label):
        self.one(f"button[aria-label='{label}']").click()

    def picture(self, name):
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.browser.save_screenshot(str(PICTURES / f"{name}.png"))

    def module(self, script):
        """The value of an async script that sees the page's modules map and api."""
        return self.browser.execute_async_script(
            "const done = arguments[0]; (async () => { const map = await import('/map.js'), api = await import('/api.js');"
            + script + "})().then(done, e => done({failed: String(e)}))")


@pytest.fixture
def page(browser, url):
    yield Page(browser, url)
    problems = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not problems, problems


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def test_a_chat(page, url):
    page.set("max_tokens", 40)
    page.ask("What is a KV cache?")
    page.answered(2)
    said = page.texts()
    alone = post(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is a KV cache?"}], "temperature": 0,
                                               "max_tokens": 40})
    assert said[1]["content"] == alone["choices"][0]["message"]["content"]
    page.ask("Say it in other words.")
    figures = page.answered(4).find_element(By.CSS_SELECTOR, ".figures").text
    read, cached = map(int, re.search(r"(\d+) tokens read \((\d+) from the cache\)", figures).groups())
    assert cached >= 32 and read > cached
    page.until(lambda: re.fullmatch(r"\d+ %", page.one("#f-hits").text))
    page.picture("chat")


def test_stop_gives_the_blocks_back(page, url):
    page.set("max_tokens", "")
    page.ask("Tell me a very long story about a city.")
    page.until(lambda: page.all(".message.assistant p"))
    page.one("#stop").click()
    figures = page.answered(2).find_element(By.CSS_SELECTOR, ".tools").text
    assert "you" in figures or page.texts()[-1]["finish"] == "you"
    page.until(lambda: get(url, "/paged/blocks")["running"] == 0)
    assert page.texts()[-1]["content"]


def test_edit_regenerate_and_fork(page):
    page.set("max_tokens", 12)
    page.ask("Name a colour.")
    page.answered(2)
    first = page.texts()
    page.press("Fork after message 2")
    assert len(page.all("[role=tab]")) == 2
    page.ask("Another one.")
    page.answered(4)
    assert page.texts()[:2] == first
    page.press("Regenerate message 4")
    page.answered(4)
    page.press("Edit message 3")
    assert page.one("#question").get_attribute("value") == "Another one."
    assert len(page.all(".message")) == 2
    page.one("#question").send_keys(Keys.CONTROL, "a")
    page.ask("A third one.")
    page.answered(4)
    assert page.texts()[2]["content"] == "A third one."
    page.all("[role=tab]")[0].click()
    assert len(page.all(".message")) == 2


def test_kept_conversations(page, browser, url):
    """The server keeps one: it is listed, renamed, pinned, found by a browser that knows nothing of it, and deleted."""
    def listed():
        return get(url, "/v1/conversations")["data"]

    page.set("max_tokens", 12)
    page.ask("Name a colour.")
    page.answered(2)
    page.one("#keep").click()
    page.until(lambda: page.one("#keep").get_attribute("aria-pressed") == "true")
    page.ask("Another one.")
    page.answered(4)
    path = "/v1/conversations/" + listed()[0]["id"]
    assert [m["content"] for m in get(url, path)["messages"]] == [m["content"] for m in page.texts()]
    page.press("Regenerate message 4")
    page.answered(4)
    page.until(lambda: len(listed()) == 1 and listed()[0]["n_messages"] == 4)
    path = "/v1/conversations/" + listed()[0]["id"]
    said = [m["content"] for m in get(url, path)["messages"]]
    assert said == [m["content"] for m in page.texts()]
    page.one("#kept-open").click()
    page.until(lambda: len(page.all("#kept-list li")) == 1)
    page.press("Rename Chat 1")
    page.one("#kept-list input").send_keys(Keys.CONTROL, "a")
    page.one("#kept-list input").send_keys("Colours", Keys.ENTER)
    page.until(lambda: listed()[0]["title"] == "Colours" and page.all("button[aria-label='Pin Colours']"))
    page.press("Pin Colours")
    page.until(lambda: listed()[0]["pinned"] and page.one("button[aria-label='Pin Colours']").get_attribute("aria-pressed") == "true")
    page.picture("kept")

    other = Page(browser, url)
    assert not other.all(".message")
    other.one("#kept-open").click()
    other.until(lambda: other.all("button[aria-label='Open Colours']"))
    other.press("Open Colours")
    other.until(lambda: len(other.all(".message")) == 4)
    assert [m["content"] for m in other.texts()] == said
    other.set("max_tokens", 12)
    other.ask("And a third.")
    figures = other.answered(6).find_element(By.CSS_SELECTOR, ".figures").text
    read, cached = map(int, re.search(r"(\d+) tokens read \((\d+) from the cache\)", figures).groups())
    assert get(url, path)["n_messages"] == 6 and cached >= read / 2
    other.press("Delete Colours")
    other.until(lambda: not listed() and other.one("#keep").get_attribute("aria-pressed") == "false")
    assert len(other.all(".message")) == 6  # here it goes on


def same_number(page):
    """The page's cells and those of /paged/blocks at the same event number."""
    return page.module("""
        for (let i = 0; i < 200; i++) {
            const whole = await api.getJson("/paged/blocks");
            for (let j = 0; j < 10 && map.state.number < whole.event; j++) await new Promise(r => setTimeout(r, 20));
            if (map.state.number === whole.event)
                return {page: map.state.cells.map(c => c.state).join(""), server: whole.states, refs: map.state.cells.map(c => c.refs),
                        server_refs: whole.refs, number: whole.event};
        }
        return null;""")


def test_the_map_under_load(page, url):
    """Eight requests with a common beginning: shared blocks, and cells that are what the server says."""
    page.set("max_tokens", 80)
    page.ask("What is a KV cache?")
    page.answered(2)
    system = {"role": "system", "content": "You are a patient teacher of arithmetic and answer at length. " * 8}

    def one(i):
        return post(url, "/v1/chat/completions", {"messages": [system, {"role": "user", "content": f"Count from {i}."}],
                                                  "max_tokens": 150, "ignore_eos": True, "temperature": 0})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(one, i) for i in range(8)]
        page.until(lambda: get(url, "/paged/blocks")["running"] >= 2)
        seen = set()
        while not all(r.done() for r in running):
            same = same_number(page)
            assert same["page"] == same["server"] and same["refs"] == same["server_refs"]
            seen |= set(same["page"])
            if "s" in same["page"]:
                page.picture("page")
        assert {"u", "s"} <= seen
        assert all(r.result()["usage"]["completion_tokens"] == 150 for r in running)
    page.until(lambda: get(url, "/paged/blocks")["running"] == 0)
    same = same_number(page)
    assert same["page"] == same["server"] and "u" not in same["page"].lower() and "c" in same["page"]
    page.until(lambda: page.one("body").get_attribute("data-event") == str(same["number"]))
    counts = {li.get_attribute("data-kind"): int(li.get_attribute("data-count")) for li in page.all("#legend li")}
    assert counts["cached"] == same["page"].count("c") and sum(counts.values()) == len(same["page"])


def test_a_token_shows_its_block_and_a_block_its_tokens(page, url):
    page.set("max_tokens", 60)
    page.ask("Explain block tables.")
    page.answered(2)
    page.one("#tokens").click()
    page.until(lambda: len(page.all("#messages .token")) > 30)
    token = next(t for t in page.all("#messages .token") if "block" in t.get_attribute("title") and
                 t.get_attribute("title").split()[-1].isdigit() and "Explain" in t.text)
    block, position = int(token.get_attribute("title").split()[-1]), int(token.get_attribute("title").split()[1].rstrip(","))
    token.click()
    page.until(lambda: page.one("#block").text.startswith(f"Block {block}:"))
    facts = get(url, f"/paged/blocks/{block}")
    assert facts["pieces"][position % 16].strip() == "Explain"
    assert "Explain" in page.one("#block .pieces").text
    page.picture("page-tokens")


def test_markdown_is_text(page):
    """Nothing that a model says becomes HTML."""
    out = page.browser.execute_async_script("""
        const done = arguments[0];
        import('/markdown.js').then(({markdown}) => {
            const e = document.createElement('div');
            e.append(...markdown(arguments[1] ?? '<img src=x onerror=alert(1)> **bold** `a<b` [x](javascript:alert(1)) '
                + '[y](https://example.org/a)\\n\\n```py\\nprint("<b>")\\n```\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n1. one\\n2. two\\n\\n# Head'));
            done(e.innerHTML);
        });""")
    assert "<img" not in out and "javascript:" not in re.sub(r"\[x\]\(javascript:alert\(1\)\)", "", out)
    assert "<strong>bold</strong>" in out and "<code>a&lt;b</code>" in out and 'href="https://example.org/a"' in out
    assert "print(\"&lt;b&gt;\")" in out and "<td>2</td>" in out and "<li>two</li>" in out and "<h3>Head</h3>" in out


def test_keys_and_readers(page):
    """No finding of axe-core in light and dark, and the map answers to keys."""
    axe = pytest.importorskip("axe_core_python")
    script = pathlib.Path(axe.__file__).parent / "axe.min.js"
    page.one("#settings-open").click()
    page.ask("Name a fruit.")
    page.answered(2)
    page.one("#keep").click()
    page.one("#kept-open").click()
    page.until(lambda: page.all("#kept-list li"))
    for theme in ("light", "dark"):
        page.one("#theme").click()
        assert page.browser.execute_script("return document.documentElement.dataset.theme") == theme
        page.browser.execute_script(script.read_text())
        result = page.browser.execute_async_script("const done = arguments[0]; axe.run().then(done)")
        assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in result["violations"]] == []
        page.picture(theme)
    page.one("#keep").click()
    page.until(lambda: not page.all("#kept-list li"))
    page.one("#map").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    page.until(lambda: page.one("#block").text.startswith("Block 1:"))


def test_ten_thousand_blocks(browser, model):
    """They are drawn, change where something happens, and the page goes on painting meanwhile."""
    with serving(model, "--max-running", 8, "--ctx", 2048, "--pool-bytes", 10_000 * 16 * 23040) as url:
        page = Page(browser, url)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(post, url, "/v1/completions", {"prompt": f"{i} " * 50, "max_tokens": 200, "ignore_eos": True})
                       for i in range(4)]
            frames = page.module("""
                const times = [];
                await new Promise(done => {
                    const tick = now => times.push(now) < 60 ? requestAnimationFrame(tick) : done();
                    requestAnimationFrame(tick);
                });
                return {cells: map.state.cells.length, steps: times.slice(1).map((t, i) => t - times[i])};""")
            for r in running:
                r.result()
        assert frames["cells"] == 10_000
        steps = sorted(frames["steps"])
        print(f"frames: median {steps[len(steps) // 2]:.0f} ms, slowest {steps[-1]:.0f} ms")
        page.picture("ten-thousand")


def test_the_page_asks_for_a_key(browser, model):
    with serving(model, "--ctx", 256, "--api-key", "secret") as url:
        browser.get(url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get(url)
        deadline = time.monotonic() + 20
        key = browser.find_element(By.ID, "key")
        while not key.is_displayed():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        key.send_keys("secret", Keys.TAB)
        while "Smollm2" not in browser.find_element(By.ID, "model").text:
            assert time.monotonic() < deadline, browser.find_element(By.ID, "model").text
            time.sleep(0.05)
        browser.get_log("browser")
