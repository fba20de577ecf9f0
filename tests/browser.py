"""A real browser for tests of pages: headless Chromium, driven by selenium; and what tests ask of a page."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--force-color-profile=srgb", "--hide-scrollbars", "--window-size=1400,900"),
)
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def _found(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def missing() -> str | None:
    """What of a browser isn't installed, and how it is to be had; None if all is there."""
    if _found(*_CHROMIUM) is None:
        return "chromium isn't installed (Debian: apt-get install chromium)"
    if _found("chromedriver") is None:
        return "chromedriver isn't installed (Debian: apt-get install chromium-driver)"
    return None


@contextlib.contextmanager
def running() -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile of its own; ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = _found(*_CHROMIUM) or ""
        for option in (*_OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # Names the driver, so that selenium looks for none in the network.
        service = webdriver.ChromeService(executable_path=_found("chromedriver") or "")
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.set_page_load_timeout(60)
            driver.set_script_timeout(60)
            yield driver
        finally:
            driver.quit()


class Page:
    """A page that is open in a browser.

    Args:
        driver: the browser.
        address: where the page is.
        hash: what is to follow the # of its address.
    """

    def __init__(self, driver: webdriver.Chrome, address: str, hash: str = "") -> None:
        self.driver = driver
        driver.get("about:blank")  # Else a page that differs by its hash only wouldn't load again.
        driver.get_log("browser")
        driver.get(address + (f"#{hash}" if hash else ""))
        # On a busy machine get() has been seen to return while the page before was still there, or half of this one.
        loaded = "return location.href !== 'about:blank' && document.readyState === 'complete'"
        WebDriverWait(driver, 60, poll_frequency=0.02).until(lambda driver: driver.execute_script(loaded))

    @classmethod
    def of(cls, driver: webdriver.Chrome, text: str, folder: pathlib.Path, hash: str = "") -> Page:
        """Opens an HTML text from a file in a folder."""
        path = folder / "page.html"
        path.write_text(text, encoding="utf-8")
        return cls(driver, path.absolute().as_uri(), hash)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def ask(self, expression: str) -> Any:
        """The value of an expression on ``window.dapple``: ``ask("lanes()")``."""
        return self.run(f"return dapple.{expression}")

    def settle(self) -> None:
        """Waits until what was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )

    def find(self, selector: str) -> WebElement:
        """The first element that a CSS selector matches."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def click(self, selector: str) -> None:
        """Clicks an element."""
        self.find(selector).click()

    def click_link(self, text: str) -> None:
        """Clicks the first link beside the drawing that has this text."""
        links = [link for link in self.driver.find_elements(By.CSS_SELECTOR, "aside button.link") if link.text == text]
        links[0].click()

    def press(self, *keys: str) -> None:
        """Presses keys, one after another."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def click_at(self, place: dict[str, float]) -> None:
        """Clicks at a place in the window."""
        self._at(place, lambda action: action.click())

    def hover_at(self, place: dict[str, float]) -> None:
        """Moves the pointer to a place in the window."""
        self._at(place, lambda action: None)

    def _at(self, place: dict[str, float], act: Callable[[Any], object]) -> None:
        pointer = ActionChains(self.driver, duration=0)
        act(pointer.w3c_actions.pointer_action.move_to_location(round(place["x"]), round(place["y"])))
        pointer.perform()

    def drag(self, place: dict[str, float], dx: int) -> None:
        """Drags what is at a place in the window by so many pixels to the right."""
        x, y = round(place["x"]), round(place["y"])
        self._at(place, lambda action: action.pointer_down().move_to_location(x + dx, y).pointer_up())

    def wheel(self, place: dict[str, float], dy: int) -> None:
        """Turns the mouse wheel at a place in the window; down is positive."""
        pointer = ActionChains(self.driver, duration=0)
        pointer.w3c_actions.wheel_action.scroll(round(place["x"]), round(place["y"]), 0, dy, 0)
        pointer.perform()

    def errors(self) -> list[str]:
        """What the browser has complained of since the page was opened or this was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def prefer(self, scheme: str) -> None:
        """Has the page drawn for a ``dark`` or ``light`` background."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.settle()

    def screenshot(self, path: pathlib.Path, width: int = 1400, height: int = 860) -> None:
        """Saves the page as PNG, as it is in a window of this size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.settle()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.settle()
