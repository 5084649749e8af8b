"""The page as a file: what it says, what it escapes, what it refuses."""

import json
import re

import numpy as np
import pytest
import unpacked
from small import any_layer, describe, every_shape, hostile, on_text

from headmix.page import findings, findings_text, layers, payload, render, report
from headmix.page.summary import left_out, link, provenance, quantised, rows, tables
from headmix.shapes import aligned

INTERVAL = ("_null_mean", "_null_sd", "_low", "_high")


@pytest.fixture(scope="module")
def ds():
    return every_shape()


def test_the_page_is_written_whole_and_is_small(ds, tmp_path):
    path = report(ds, tmp_path / "page.html")
    assert path.stat().st_size < 2.5e6
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text(encoding="utf-8") == render(ds)


def test_missing_folder_and_foreign_dataset(ds, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*away"):
        report(ds, tmp_path / "away" / "page.html")
    with pytest.raises(ValueError, match=r"takes a Dataset from headmix\.measure"):
        report(ds.drop_attrs(), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_the_policy_allows_no_address_and_no_other_script(ds):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', render(ds))[1]
    rules = dict(rule.split(" ", 1) for rule in policy.replace("&#39;", "'").split("; "))
    assert rules["default-src"] == "'none'"
    assert set(rules) == {
        "default-src", "script-src", "style-src-elem", "style-src-attr",
        "img-src", "base-uri", "form-action",
    }  # fmt: skip
    assert all(source.startswith("'sha256-") for source in rules["script-src"].split())
    assert "http" not in policy


def test_nothing_is_fetched_from_an_address(ds):
    page = render(ds)
    assert not re.search(r"(?:src|href)=[\"'](?!#)", page)
    assert "@import" not in page


def test_text_from_the_data_cannot_become_markup():
    page = render(hostile())
    assert "<img" not in page
    assert len(re.findall("<script", page)) == 4  # data, its numbers, the packed library, the own
    assert "49" not in re.search(r"<h1>.*?</h1>", page, re.S)[0]  # {{ 7*7 }} is not computed
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert data["layers"] == hostile().layer.values.tolist()


def test_a_users_metric_is_on_the_page_by_itself(ds):
    ds = ds.assign(mine=(("layer", "head"), np.ones((3, 4)), describe("My own number")))
    page = render(ds)
    assert page.count("My own number") >= 3  # the data, the table and the glossary
    assert "What it says." in page


def test_a_row_gives_the_place_furthest_from_the_null(ds):
    row = next(r for r in rows(ds) if r.name == "projection_kernel")
    value = ds.projection_kernel.values
    i, j = np.triu_indices(4, 1)
    assert row.n == 3 * 6
    assert row.mean == pytest.approx(value[:, i, j].mean())
    assert row.null_mean == pytest.approx(0.25)
    assert re.fullmatch("L[012]H0 – L[012]H1", row.place)  # the planted copy
    assert row.z_null == pytest.approx((row.value - row.null_mean) / row.null_sd, rel=1e-4)
    layer = row.place[:2]
    assert row.link == f"#layer={layer}&head=0&with={layer}H1&metric=projection_kernel"


def test_findings_speak_of_what_was_measured_only(ds):
    assert [f.place[2:4] for f in findings.find(ds)] == ["H0"]
    assert findings.find(ds.drop_vars("projection_kernel")) == []


def test_what_was_measured_on_text_has_its_own_tables_and_intervals():
    ds = on_text()
    parts = {heading: [row.name for row in lines] for heading, lines in tables(ds)}
    assert parts["On text"] == ["layer_on_text", "head_on_text", "pair_on_text"]
    assert parts["On text, what position explains taken out"] == [
        "head_on_text_within_position",
        "pair_on_text_within_position",
    ]
    assert "per_head" in parts["From the weights"]
    row = next(r for r in rows(ds) if r.name == "head_on_text")
    assert (row.low, row.high) == pytest.approx((row.value - 0.02, row.value + 0.03))
    assert f">{row.low:.3f} – {row.high:.3f}<" in render(ds)
    assert ">its interval<" not in render(every_shape())


def test_findings_on_text_give_number_null_interval_and_count():
    ds = on_text()
    for name, known in (("layer", "interference_ratio"), ("head", "loo_r2"), ("pair", "cka")):
        here = {f"{name}_on_text{s}": known + s for s in ("", *INTERVAL)}
        ds = ds.rename(here)
    told = {f.text.split(":")[0].split(";")[0]: f for f in findings.find(ds)[1:]}
    predicted, cancel, alike = told.values()
    best = float(ds.loo_r2.max())
    assert f"held-out R² {best:.2f} (95 % interval {best - 0.02:.3f} – {best + 0.03:.3f})" in (
        predicted.text
    )
    assert "pure noise give 0.50" in predicted.text
    lowest = int(ds.interference_ratio.values.argmin())
    assert cancel.place == f"L{lowest}"
    below = int((ds.interference_ratio < 0.5).sum())
    assert f"{below} of 3 layers lie below that null" in cancel.text
    off = ds.cka.where(~np.eye(4, dtype=bool)[None])
    assert f"CKA {float(off.max()):.2f} (95 %" in alike.text
    assert "Their write subspaces overlap by" in alike.text
    assert alike.text.count(" – ") == 3 + 2  # three intervals, two further pairs
    for finding in (predicted, cancel, alike):
        assert "On 1,200 tokens of 9 documents." in finding.text
        assert "significan" not in finding.text


def test_heads_that_do_not_cancel_are_not_said_to():
    ds = on_text().rename({f"layer_on_text{s}": f"interference_ratio{s}" for s in ("", *INTERVAL)})
    ds["interference_ratio"] = ds.interference_ratio + 1
    assert "In no layer do the heads cancel" in findings.find(ds)[-1].text
    ds["interference_ratio"] = ds.interference_ratio * 0 + 0.49
    ds["interference_ratio_high"] = ds.interference_ratio + 0.02  # the null is 0.5
    assert "In no layer are the heads seen to cancel" in findings.find(ds)[-1].text
    ds["interference_ratio_high"] = ds.interference_ratio
    assert findings.find(ds)[-1].text.startswith("The heads of this layer cancel most")


def test_provenance_says_which_text():
    told = provenance(on_text())
    assert told["text"] == "a text made up"
    assert told["SHA-256 of the text"] == "ab" * 32
    assert told["which tokens count"] == "Every token counts."
    page = render(on_text().assign_attrs(interrupted="7 of 9 tokens were seen"))
    assert "The pass over the text was interrupted: 7 of 9 tokens were seen." in page


def test_a_variant_travels_with_its_metric():
    metrics = {m["name"]: m for m in payload.plain(on_text())["metrics"]}
    assert "pair_on_text_within_position" not in metrics
    assert metrics["pair_on_text"]["within"]["name"] == "pair_on_text"
    assert metrics["pair_on_text"]["group"] == "text"
    assert metrics["per_head"]["within"] is None
    assert metrics["per_head"]["group"] == "weights"


def test_invalid_layers_and_skipped_metrics_are_named(ds):
    ds = ds.assign(
        valid=("layer", [True, False, True]),
        invalid_reason=("layer", ["", "NaN or infinity in W_O", ""]),
    ).assign_attrs(skipped=json.dumps({"ov_x": {n: f"none in {n}" for n in ("L0", "L1", "L2")}}))
    assert left_out(ds)[:2] == [
        ("the whole layer", "L1", "NaN or infinity in W_O"),
        ("ov_x", "all layers", "none in the layer"),
    ]
    assert "NaN or infinity in W_O" in render(ds)


def test_layers_without_any_number_do_not_break_the_page(ds):
    numeric = [n for n, v in ds.items() if v.dtype.kind == "f" and not n.endswith(("_mean", "_sd"))]
    render(ds.assign({n: ds[n] * np.nan for n in numeric}))


@pytest.mark.parametrize(
    ("provenance", "found"),
    [
        ({"dtype": "float32"}, None),
        ({"source": "acme-8B-it", "sha256": "4b17e8f0c4bd"}, None),
        ({"quantisation": "Q4_1"}, "Q4_1"),
        ({"source": "a.gguf", "tensors": "IQ2_XS and F32"}, "IQ2_XS"),
        ({"quantization_config": "bitsandbytes, nf4"}, "nf4"),
        ({"note": "stored in 4-bit"}, "4-bit"),
    ],
)
def test_quantised_weights_are_said_to_be(ds, provenance, found):
    ds = ds.assign_attrs(provenance=json.dumps(provenance))
    assert quantised(ds) == found
    assert ("stored quantised" in render(ds)) == (found is not None)


def test_the_page_says_neither_significant_nor_p_value(ds):
    page = render(ds).split('<script type="text/plain"')[0].lower()
    assert "significan" not in page
    assert "p-value" not in page


def test_a_pair_without_direction_counts_once_and_has_no_arrow():
    ds = any_layer()
    row = next(r for r in rows(ds) if r.name == "alike")
    assert row.n == 12 * 11 // 2
    assert re.fullmatch(r"L\dH\d – L\dH\d", row.place)
    assert len(set(row.place.split(" – "))) == 2
    assert "→" in next(r for r in rows(ds) if r.name == "cross").place
    directed = {m["name"]: m["directed"] for m in payload.plain(ds)["metrics"]}
    assert directed["cross"]
    assert not directed["alike"]


def test_a_choice_of_layers_has_a_page_of_its_own(ds):
    one = ds.sel(layer=["L0"])
    assert {row.place[:2] for row in rows(aligned(one))} == {"L0"}
    data = json.loads(re.search(r'id="data">(.*?)</script>', render(one), re.S)[1])
    assert data["layers"] == data["labels"]["layer_b"] == ["L0"]
    page = render(ds.sel(layer=["L2", "L1"]))
    parts = (
        re.search(rf'id="{part}">(.*?)</script>', page, re.S)[1] for part in ("data", "planes")
    )
    upper = json.loads(next(parts)) | {"planes": next(parts)}
    cross = next(m for m in upper["metrics"] if m["name"] == "cross")
    numbers = unpacked.array(upper, cross)
    np.testing.assert_array_equal(numbers[1, :, 0], ds.cross.values[1, :, 2].astype("f4"))


@pytest.mark.parametrize("heads", [0, [1, 2], [2, 0]])
def test_a_choice_of_heads_is_refused(ds, heads, tmp_path):
    with pytest.raises(ValueError, match=r"cut to head .*only layers can be chosen"):
        report(ds.isel(head=heads), tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"cut along layer_b"):
        report(ds.isel(layer_b=[0]), tmp_path / "page.html")


def test_blocks_are_not_called_documents():
    ds = on_text().rename({f"pair_on_text{s}": f"cka{s}" for s in ("", *INTERVAL)})
    assert "of 9 documents." in findings.find(ds)[-1].text
    cut = ds.assign_attrs(text="a text, cut into 9 contiguous blocks that stand in for documents")
    assert "On 1,200 tokens of 9 blocks." in findings.find(cut)[-1].text
    assert "<dt>blocks</dt>" in render(cut)


def test_each_layer_says_which_pair_overlaps_most_and_against_which_null(ds):
    headings, lines = layers.by_layer(ds)
    assert headings == ["Overlap most in weights"]
    assert [name for name, _ in lines] == ["L0", "L1", "L2"]
    for name, (cell,) in lines:
        pairs = ds.projection_kernel.sel(layer=name).values * (1 - np.eye(4))
        i, j = sorted(np.unravel_index(pairs.argmax(), (4, 4)))
        assert cell.place == f"{name}H{i} – {name}H{j}"
        assert cell.link == f"#layer={name}&head={i}&with={name}H{j}&metric=projection_kernel"
        assert cell.value == pytest.approx(pairs.max())
        assert cell.null_mean == pytest.approx(0.25)
        assert cell.z_null == pytest.approx((cell.value - cell.null_mean) / cell.null_sd)
        assert f"<bdi>{cell.place}</bdi>" in render(ds)
    assert layers.by_layer(ds.drop_vars("projection_kernel")) == ([], [])


def test_labels_and_replaced_heads_have_sentences():
    ds = on_text()
    suffixes = ("", *INTERVAL)
    ds = ds.rename({f"head_on_text{s}": f"head_ablation{s}" for s in suffixes})
    for name, made_up in (("probe_r2", "read"), ("head_probe_r2", "seen")):
        ds = ds.rename({f"{made_up}{s}": name + s for s in ("", "_null_mean", "_null_sd")})
        ds[name + "_low"], ds[name + "_high"] = ds[name] - 0.02, ds[name] + 0.03
    replaced, pos, place = findings.find(ds)[1:]
    best = float(ds.head_ablation.max())
    assert f"by {best:.2f} (95 % interval {best - 0.02:.3f} – {best + 0.03:.3f})" in replaced.text
    assert "null 0.50 (sd 0.01)" in replaced.text
    assert "the median of 12 heads is" in replaced.text
    for told, label in ((pos, "pos"), (place, "place")):
        read, seen = ds.probe_r2.sel(label=label), ds.head_probe_r2.sel(label=label)
        i, j = np.unravel_index(read.values.argmax(), read.shape)
        assert f"“{label}” is read best at {ds.read_out.values[j]} of L{i}" in told.text
        assert f"held-out R² {float(read.max()):.2f} (95 % interval" in told.text
        i, j = np.unravel_index(seen.values.argmax(), seen.shape)
        assert told.place == f"L{i}H{j}"
        assert f"Of 12 single heads {told.place} says most of it: {float(seen.max()):.2f}" in (
            told.text
        )
        assert f"&label={int(label == 'place')}&metric=head_probe_r2" in told.link


def test_a_probe_that_beats_what_it_is_computed_from_is_marked():
    ds = every_shape().rename(read="probe_r2")
    ds["probe_r2"] = ds.probe_r2 * 0 + [0.5, 0.4, 0.6]
    assert findings_text.beaten(ds) == ""
    assert "does better than one of the heads side by side" not in render(ds)
    ds["probe_r2"][1, 0, 1] = 0.7
    told = findings_text.beaten(ds)
    assert told.startswith("In 1 of 6 cases (L1 · pos) a probe of the attention output")
    assert told in render(ds)


def test_the_link_to_a_kv_head_selects_the_first_head_of_its_group(ds):
    assert link(ds, {"layer": 1, "kv_head": 1}, "per_group") == (
        "#layer=L1&head=2&metric=per_group"
    )
    assert link(ds, {"layer": 1, "kv_head": 1, "kv_head_b": 0}) == "#layer=L1&head=2&with=L1H0"
    across = {"layer": 0, "head": 3, "layer_b": 2, "head_b": 1}
    assert link(ds, across, "cross") == "#layer=L0&head=3&with=L2H1&metric=cross"
    assert link(ds, {"layer": 2}, "layer_within_position") == (
        "#layer=L2&metric=layer&position=out"
    )
