"""The README says of every metric how to read it, and leads nowhere that is not there."""

import re
from pathlib import Path

import pytest

import headmix as hm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reports/README.md")


def test_it_names_every_metric_and_no_other():
    table = README.split("## What is measured")[1].split("\n### ")[0]
    own = {n for n, m in hm.catalogue().items() if m.function.__module__.startswith("headmix.")}
    assert set(re.findall(r"`([a-z][a-z0-9_]+)`", table)) == own  # other tests add metrics


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_pictures_are_there(document):
    path = ROOT / document
    found = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    local = [link for link in found if not link.startswith("https://")]
    assert [link for link in local if not (path.parent / link).exists()] == []
