"""``headmix inspect``: the cards of a layer and of a head, as they look in a terminal."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import fails, headmix
from rich.console import Console
from small import any_layer, small_model

import headmix as hm
from headmix import cards, terminal


@pytest.fixture(autouse=True, scope="module")
def _libraries_draw_nothing() -> None:
    """A process that starts with the command sees to this itself; here they are imported."""
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo.nc"
    assert headmix("measure", "demo", "--out", out).stdout == f"Results: {out}\n"
    return out


@pytest.fixture(scope="module")
def ds(run_file: Path):
    return hm.open_results(run_file)


class TestInspect:
    def test_head_card_says_what_the_dataset_says(self, run_file: Path, ds) -> None:
        told = headmix("inspect", run_file, "--layer", "3", "--head", "5").stdout
        here = ds.sel(layer="L3", head=5)
        assert "(demo)  L3 head 5" in told
        z = float(
            (here.ov_stable_rank - here.ov_stable_rank_null_mean) / here.ov_stable_rank_null_sd
        )
        (row,) = [line for line in told.splitlines() if line.endswith("ov_stable_rank  ")
                  or line.rstrip().endswith("ov_stable_rank")]  # fmt: skip
        assert terminal.number(float(here.ov_stable_rank)) in row
        assert terminal.number(float(here.ov_stable_rank_null_mean)) in row
        assert f"{z:+.1f}" in row
        assert "A null is not a p-value" in told

    def test_nearest_heads_are_those_of_largest_overlap(self, run_file: Path, ds) -> None:
        card = json.loads(
            headmix("inspect", run_file, "--layer", "L3", "--head", "5", "--json").stdout
        )
        (ranking,) = [r for r in card["nearest"] if r["metric"] == "projection_kernel"]
        overlap = ds.projection_kernel.sel(layer="L3", head=5).values.copy()
        overlap[5] = -1
        want = np.argsort(-overlap)[: cards.NEAREST].tolist()
        assert [p["head"] for p in ranking["partners"]] == want
        assert ranking["partners"][0]["value"] == pytest.approx(overlap.max())

    def test_partners_come_from_earlier_and_later_layers(self, run_file: Path) -> None:
        card = json.loads(
            headmix("inspect", run_file, "--layer", "3", "--head", "5", "--json").stdout
        )
        for key, layers in (("reads_from", {"L0", "L1", "L2"}), ("writes_to", {"L4", "L5"})):
            ranked = {r["metric"]: r["partners"] for r in card[key]}
            assert set(ranked) >= {"composition_q", "composition_k", "composition_v"}
            assert {p["layer"] for partners in ranked.values() for p in partners} <= layers

    def test_a_composition_is_seen_from_both_ends(self, ds) -> None:
        writer = cards.head_card(ds, "L3", 5)["writes_to"]
        best = next(r for r in writer if r["metric"] == "composition_v")["partners"][0]
        value = ds.composition_v.sel(layer="L3", head=5, layer_b=best["layer"], head_b=best["head"])
        assert best["value"] == pytest.approx(float(value))
        assert best["value"] == pytest.approx(
            float(ds.composition_v.sel(layer="L3", head=5).max(skipna=True))
        )

    def test_layer_table_has_a_row_a_head(self, run_file: Path, ds) -> None:
        told = headmix("inspect", run_file, "--layer", "3").stdout
        assert "Mean overlap between heads" in told
        rows = [line.split() for line in told.splitlines()]
        assert {str(h) for h in range(12)} <= {row[0] for row in rows if row}
        assert terminal.number(float(ds.mean_overlap.sel(layer="L3"))) in told

    def test_of_a_model_measures_it(self) -> None:
        told = headmix(
            "inspect", "demo", "--layer", "1", "--layers", "0-1", "--metrics", "projection_kernel"
        ).stdout
        assert "(demo)  L1" in told
        assert "projection kernel" in told

    def test_eighty_columns_are_enough(self, ds) -> None:
        for card in (
            terminal.head_card(cards.head_card(ds, 3, 5)),
            terminal.layer_card(cards.layer_card(ds, 3), width=80),
        ):
            assert "…" not in drawn(card, width=80)

    def test_names_from_strangers_cannot_steer_the_terminal(self, ds) -> None:
        hostile = ds.assign_attrs(model="\x1b[2J[bold]x[/nope]")
        card = drawn(terminal.head_card(cards.head_card(hostile, 3, 5)), width=120)
        assert "\x1b" not in card
        assert "[bold]x[/nope]" in card

    def test_says_what_is_missing_and_what_to_know(self, ds) -> None:
        told = drawn(terminal.head_card(cards.head_card(ds, 3, 5)), width=200)
        for metric, by_layer in json.loads(ds.attrs["skipped"]).items():
            assert f"No {metric}: {by_layer['L3']}." in told
        noted = ds.assign_attrs(notes=json.dumps({"L3": ["post-norm"], "L4": ["another"]}))
        told = drawn(terminal.head_card(cards.head_card(noted, 3, 5)), width=200)
        assert "Note: post-norm" in told
        assert "another" not in told

    def test_an_invalid_layer_is_marked(self) -> None:
        module = torch.nn.MultiheadAttention(8, 2)
        with torch.no_grad():
            module.out_proj.weight[0, 0] = torch.nan
        marked = hm.measure(hm.load(module), metrics=["projection_kernel"])
        assert "invalid: NaN or infinity in W_O" in drawn(
            terminal.layer_card(cards.layer_card(marked, 0)), width=80
        )

    def test_a_refused_layer_gives_its_reason_and_no_head_card(self, tmp_path: Path) -> None:
        model = replace(small_model(), refused={"L1": "head 1 moved"})
        out = tmp_path / "run.nc"
        hm.save(hm.measure(model, metrics=["projection_kernel"]), out)
        assert "This layer is invalid: " in (told := headmix("inspect", out, "--layer", 1).stdout)
        assert "head 1 moved" in told
        assert "0 heads" not in told
        line = fails("inspect", out, "--layer", 1, "--head", 0)
        assert "layer L1 is invalid, it has no head cards: " in line
        assert "head 1 moved" in line

    def test_a_metric_of_any_two_heads_is_neither_written_nor_read(self) -> None:
        ds = any_layer()
        card = cards.head_card(ds, "L1", 2)
        (ranking,) = card["nearest_in_any_layer"]
        want = ds.alike.sel(layer="L1", head=2).values.copy()
        want[1, 2] = -1
        best = ranking["partners"][0]
        assert (best["layer"], best["head"]) != ("L1", 2)
        assert best["value"] == pytest.approx(want.max())
        assert {r["metric"] for r in card["reads_from"] + card["writes_to"]} == {"cross"}
        assert "Nearest heads in any layer" in drawn(terminal.head_card(card), width=120)

    def test_a_choice_of_layers_has_cards(self, ds) -> None:
        card = cards.head_card(ds.sel(layer=["L3", "L4"]), 3, 5)
        (ranking,) = [r for r in card["writes_to"] if r["metric"] == "composition_v"]
        assert {p["layer"] for p in ranking["partners"]} == {"L4"}
        with pytest.raises(ValueError, match="only layers can be chosen"):
            cards.head_card(ds.isel(head=[3]), 3, 0)

    def test_blocks_are_not_called_documents(self) -> None:
        one = hm.measure("demo", text=["the sea at night " * 40], metrics=["cka"], layers=[0],
                         folds=3)  # fmt: skip
        told = drawn(terminal.layer_card(cards.layer_card(one, 0)), width=120)
        assert "tokens of 3 blocks in 3 folds" in told


def drawn(renderable: object, width: int) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(renderable, markup=False, highlight=False)
    console.file.close()
    return console.export_text()
