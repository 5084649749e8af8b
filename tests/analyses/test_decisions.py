"""Each analysis' rule, on numbers made up to fall on either side of it."""

import importlib
import inspect

import pytest
from verdicts import CLAIMS, Decision

listing = importlib.import_module("02_listing")
emphasis = importlib.import_module("03_emphasis")
dimension = importlib.import_module("05_dimension")


def test_every_claim_is_stated_in_both_languages_and_explained():
    assert list(CLAIMS) == [f"C{n}" for n in range(1, 8)]
    for claim, about in CLAIMS.items():
        assert about.keys() == {"english", "korean", "experiment", "null", "caveats"}, claim
        assert about["caveats"], claim
        assert any("가" <= letter <= "힣" for letter in about["korean"]), claim


@pytest.mark.parametrize("script", [listing, emphasis, dimension])
def test_every_rule_says_what_confirms_and_what_refutes(script):
    words = inspect.getdoc(script.decide).lower()
    assert "confirmed" in words
    assert "refuted" in words


def test_a_decision_that_depends_says_on_what():
    assert Decision("depends", "Because.", on="the layer").text == "depends on the layer"
    with pytest.raises(ValueError, match="says on what"):
        Decision("depends", "Because.")
    with pytest.raises(ValueError, match="says on what"):
        Decision("confirmed", "Because.", on="the layer")


@pytest.mark.parametrize(
    ("separate", "related", "word"),
    [(6, 0, "confirmed"), (5, 0, "refuted"), (5, 6, "refuted"), (6, 1, "depends")],
)
def test_listing(separate, related, word):
    untouched = listing.Listing("other", 2, 2, 0)
    found = [listing.Listing("model", 6, separate, related), untouched]
    decision = listing.decide(found)
    assert decision.word == word
    assert ("1 of 6 layers of model" in decision.because) == (separate < 6)


@pytest.mark.parametrize(
    ("cancel", "add", "word"),
    [(9, 0, "confirmed"), (5, 0, "depends"), (9, 1, "depends"), (0, 1, "refuted"),
     (0, 0, "depends")],
)  # fmt: skip
def test_emphasis(cancel, add, word):
    assert emphasis.decide([emphasis.Attenuation("model", 10, cancel, add)]).word == word


@pytest.mark.parametrize(
    ("fits", "wider", "word"),
    [(1.0, None, "confirmed"), (0.9, None, "refuted"), (1.0, 0.5, "depends"),
     (1.0, 1.0, "confirmed"), (0.9, 0.5, "refuted")],
)  # fmt: skip
def test_dimension(fits, wider, word):
    found = [dimension.Keeping("model", False, 6, 5, fits)]
    if wider is not None:
        found.append(dimension.Keeping("wide", True, 2, 2, wider))
    decision = dimension.decide(found)
    assert decision.word == word
    assert "1 of 6 layers of model" in decision.because
