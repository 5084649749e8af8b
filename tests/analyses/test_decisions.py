"""Each analysis' rule, on numbers made up to fall on either side of it."""

import importlib
import inspect

import pytest
from verdicts import CLAIMS, Decision

views = importlib.import_module("01_views")
listing = importlib.import_module("02_listing")
emphasis = importlib.import_module("03_emphasis")
mixed = importlib.import_module("04_mixed")
dimension = importlib.import_module("05_dimension")
linear = importlib.import_module("06_linear")
without = importlib.import_module("07_without_w_o")


def test_every_claim_is_stated_in_both_languages_and_explained():
    assert list(CLAIMS) == [f"C{n}" for n in range(1, 8)]
    for claim, about in CLAIMS.items():
        assert about.keys() == {"english", "korean", "experiment", "null", "caveats"}, claim
        assert about["caveats"], claim
        assert any("가" <= letter <= "힣" for letter in about["korean"]), claim


@pytest.mark.parametrize("script", [views, listing, emphasis, mixed, dimension, linear, without])
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
    untouched = listing.Listing("other", 2, 2, 2, 0)
    found = [listing.Listing("model", 6, separate, 6, related), untouched]
    decision = listing.decide(found)
    assert decision.word == word
    assert ("1 of 6 layers of model" in decision.because) == (separate < 6)


@pytest.mark.parametrize(
    ("more", "less", "cancel", "add", "word", "on"),
    [
        (4, 0, 9, 0, "confirmed", ""),
        (4, 0, 0, 1, "refuted", ""),
        (4, 0, 9, 1, "depends", "the layer"),
        (0, 0, 9, 0, "depends", "the half of the claim"),
        (4, 1, 9, 0, "depends", "the half of the claim"),
        (4, 0, 0, 0, "depends", "more text than was read"),
    ],
)
def test_emphasis(more, less, cancel, add, word, on):
    decision = emphasis.decide(
        [emphasis.Emphasis("model", 6, more, less)],
        [emphasis.Attenuation("model", 10, cancel, add)],
    )
    assert (decision.word, decision.on) == (word, on)


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


@pytest.mark.parametrize(
    ("kappa", "untrained", "selectivity", "word"),
    [(0.5, 0.1, 0.2, "confirmed"), (0.1, 0.0, 0.2, "depends"), (0.5, 0.6, 0.2, "depends"),
     (0.5, 0.1, -0.1, "depends"), (0.5, 0.0, float("inf"), "confirmed")],
)  # fmt: skip
def test_views(kappa, untrained, selectivity, word):
    found = [
        views.View("model", "syntax", 0.4, 0.14, 0.2, 0.1),
        views.View("model", "position", kappa, 0.14, untrained, selectivity),
    ]
    decision = views.decide(found, dedicated=0.25)
    assert decision.word == word
    assert "25%" in decision.because
    assert ("position" in decision.because) == (word == "depends")
    nothing = [views.View("model", "syntax", 0.1, 0.14, 0.0, 0.1)]
    assert views.decide(nothing, dedicated=0.0).word == "refuted"


@pytest.mark.parametrize(
    ("mixes", "gains", "word"),
    [(20, 20, "confirmed"), (20, 1, "depends"), (1, 20, "depends"), (1, 1, "refuted")],
)
def test_mixed(mixes, gains, word):
    once = [mixed.Mixing("model", 30, mixes, gains, 0)]
    assert mixed.decide(once).word == ("refuted" if min(mixes, gains) < 3 else "confirmed")
    both = [*once, mixed.Mixing("other", 30, 25, 25, 0)]
    assert mixed.decide(both).word == ("confirmed" if word == "confirmed" else "depends")


@pytest.mark.parametrize(
    ("at_W_O", "later", "without_ffn", "word"),
    [
        (1e-7, {"mlp_in": 1e-6, "mlp_out": 0.1, "next_logits": 0.1}, [], "confirmed"),
        (1e-7, {"mlp_in": 0.02, "mlp_out": 0.1}, [], "depends"),
        (1e-7, {"mlp_out": 0.1}, ["XOR"], "depends"),
        (1e-7, {"next_logits": 0.1}, [], "depends"),
        (0.1, {"mlp_out": 0.1}, [], "refuted"),
    ],
)
def test_linear(at_W_O, later, without_ffn, word):
    assert linear.decide([linear.Interaction("model", at_W_O, later)], without_ffn).word == word


@pytest.mark.parametrize(
    ("nothing", "fixed", "word"),
    [
        ([(-0.3, -0.1), (-0.2, -0.1)], [(-0.3, -0.1), (-0.2, -0.1)], "confirmed"),
        ([(-0.3, -0.1), (-0.1, 0.1)], [(-0.3, -0.1), (-0.1, 0.1)], "depends"),
        ([(-0.3, -0.1), (-0.2, -0.1)], [(-0.1, 0.1), (0.0, 0.0)], "refuted"),
        ([(-0.1, 0.1), (0.0, 0.0)], [(-0.3, -0.1), (-0.2, -0.1)], "refuted"),
    ],
)
def test_without_W_O(nothing, fixed, word):
    found = [
        without.Comparison(f"task {n}", True, a, b)
        for n, (a, b) in enumerate(zip(nothing, fixed, strict=True))
    ]
    assert without.decide(found).word == word
    # what the full W_O does not learn either has no say
    idle = without.Comparison("idle", False, (-0.5, -0.4), (-0.5, -0.4))
    assert without.decide([*found, idle]).because == without.decide(found).because
