"""What all tests share: seeds, golden files and ``--bless``."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import logging
import os
import pathlib
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browser import Page
    from selenium.webdriver import Chrome

    from dapple_tf.tools.hosts import LocalWorkers

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # Shells let background programs ignore it: tests press Ctrl-C.

pytest_plugins = ("pytester",)


GOLDEN_FOLDER = pathlib.Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bless", action="store_true", help="rewrite the golden files instead of comparing with them")
    parser.addoption("--screenshots", metavar="DIR", help="save the pictures of pages for the docs in this folder")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: tests that wait for workers, or for time-outs, leave theirs idle."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that need workers first, so that they are in one process, which starts workers once.

    xdist gives each process the same number of consecutive tests, and the last ones of another when it is done.
    """
    needing = {item.path for item in items if "_running_workers" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in needing)


def pytest_collection_finish() -> None:
    """All that has been imported stays: no search for garbage looks through it again, and fewer look at all.

    Graphs are many objects that stay for a while: searches as often as Python's own default took one second in thirty.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What hasn't been tested here, and what to install: one line for each reason, which names the remedy."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section(f"{sum(reasons.values())} tests skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5d} {reason}")


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Fixes all seeds before a test; restores what programs set for their process after it: log level, float type."""
    if keras := sys.modules.get("keras"):
        keras.utils.set_random_seed(0)
    yield
    logging.getLogger("dapple_tf").setLevel(logging.NOTSET)
    if keras := sys.modules.get("keras"):
        keras.config.set_floatx("float32")
        # The global policy remembers the float type that it was first asked for.
        keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session", autouse=True)
def _shared_references(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What plain Keras gives is trained once for all processes of a test run; see references.py."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    os.environ["DAPPLE_TEST_REFERENCES"] = str(folder)


@pytest.fixture(scope="session", autouse=True)
def _light_data() -> Iterator[None]:
    """No iterator tunes its dataset, and text is short.

    Each would wait for its tuning thread, see `models.sources.untuned`; the whole standard library takes seconds to
    read and to shuffle.
    """
    if (tensorflow := sys.modules.get("tensorflow")) is None:
        yield
        return
    from dapple_tf.models import text
    from dapple_tf.models.sources import untuned

    dataset = tensorflow.data.Dataset
    tuned = dataset.__iter__
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"], "asyncio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "__iter__", lambda self: tuned(untuned(self)))
        patch.setattr(text, "standard_library", functools.partial(text.standard_library, root=folder))
        yield


@pytest.fixture
def _cache_of_readers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What readers keep of files is kept for the tests of this process."""
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path_factory.getbasetemp() / "cache_of_readers"))


@pytest.fixture
def _own_garbage() -> Iterator[None]:
    """What other tests have left in memory isn't looked through time and again: that can take more than a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _quick_workers() -> Iterator[None]:
    """Workers that tests start don't ask TensorFlow about this machine; test_install.py has some that do."""
    from workers import quick_command

    from dapple_tf.tools import hosts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "worker_command", quick_command)
        yield


@pytest.fixture(scope="session")
def _running_workers() -> Iterator[LocalWorkers]:
    from workers import running_workers

    with running_workers() as running:
        yield running


@pytest.fixture
def workers(_running_workers: LocalWorkers) -> Iterator[LocalWorkers]:
    """Four workers on this machine, one device each, started once for all tests of this process; all of them serve."""
    from workers import mend

    mend(_running_workers)
    yield _running_workers
    mend(_running_workers)


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """A headless Chromium, started once for all tests of this process; they are skipped where there is none."""
    pytest.importorskip("selenium", reason="needs a browser: selenium isn't installed (make venv)")
    from browser import missing, running

    if reason := missing():
        pytest.skip(f"needs a browser: {reason}")
    with running() as started:
        yield started


@pytest.fixture
def show(browser: Chrome, tmp_path: pathlib.Path) -> Iterator[Callable[..., Page]]:
    """``show(html, hash="")`` opens a page from a file; the browser must have had nothing to complain of in the end."""
    from browser import Page

    opened: list[Page] = []

    def check() -> None:
        for page in opened[-1:]:
            page.prefer("light")
            assert page.errors() == []

    def open_page(text: str, hash: str = "") -> Page:
        check()
        opened.append(Page.of(browser, text, tmp_path, hash))
        return opened[-1]

    yield open_page
    check()


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """``picture(page, name)`` saves what the docs show of a page, with ``--screenshots=DIR``; else it does nothing."""
    folder: str | None = request.config.getoption("--screenshots")

    def save(page: Page, name: str) -> None:
        if folder:
            page.screenshot(pathlib.Path(folder) / name)

    return save


def _common(first: str, second: str) -> int:
    """Number of characters that two texts have in common at their start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def first_difference(expected: str, actual: str) -> str:
    """The first line in which two texts differ, with the differing part underlined; empty when they are equal.

    >>> print(first_difference("a\\nbcd\\n", "a\\nbXd\\n"))
    line 2
      expected: bcd
      actual:   bXd
                 ^
    """
    lines = itertools.zip_longest(expected.split("\n"), actual.split("\n"))
    for number, (wanted, got) in enumerate(lines, start=1):
        if wanted == got:
            continue
        if wanted is None or got is None:
            present, text = ("actual", got) if wanted is None else ("expected", wanted)
            return f"line {number} is only in the {present} text\n  {text}\n  {'^' * max(1, len(text))}"
        start = _common(wanted, got)
        end = _common(wanted[start:][::-1], got[start:][::-1])
        width = max(1, len(got) - start - end)
        return f"line {number}\n  expected: {wanted}\n  actual:   {got}\n            {' ' * start}{'^' * width}"
    return ""


@functools.cache
def _without_namespaces() -> str | None:
    from dapple_tf.tools.hosts import unavailable  # Few tests need it.

    return unavailable()


def require_namespaces() -> None:
    """Skips the test where network namespaces can't be had; says why."""
    if reason := _without_namespaces():
        pytest.skip(f"needs network namespaces: {reason}")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares a text with ``tests/golden/<name>``; ``--bless`` writes the file instead."""
    bless: bool = request.config.getoption("--bless")

    def compare(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if bless:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"tests/golden/{name} doesn't exist; run `make bless` and read what it wrote", pytrace=False)
        if difference := first_difference(path.read_text(encoding="utf-8"), text):
            message = f"tests/golden/{name}, {difference}\nIf the new text is right, run `make bless`."
            pytest.fail(message, pytrace=False)

    return compare
