"""The browser, for the tests of the page."""

from chromium import browser, visit  # noqa: F401  fixtures
