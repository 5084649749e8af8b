"""How results look in a terminal: cards and tables, drawn with rich."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

NULL_CAVEAT = (
    "z_null = (value - null mean) / null sd. A null is not a p-value: trained heads are not "
    "independent draws."
)
INTERVAL_CAVEAT = (
    "Under a value measured on text: its 95 % interval over documents. Nulls that count tokens "
    "take them to be independent, which tokens of one document are not: read the interval."
)
_BARS = "▁▂▃▄▅▆▇█"
_LONGEST, _SHOWN = 24, 4
_COLUMN = 14


def printable(text: object) -> str:
    """Text from a model or file without what could steer a terminal.

    >>> printable("Ġthe\\x1b[2J")
    'Ġthe\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def head_card(card: Mapping[str, Any]) -> RenderableType:
    """The card of one head, as ``headmix.cards.head_card`` makes it."""
    parts: list[RenderableType] = [
        _heading(card, f"{card['layer']} head {card['head']}"),
        _facts(card, f"uses KV head {card['kv_head']} of {card['n_kv_heads']}"),
    ]
    parts += _measured(card)
    for key, title in (
        ("nearest", "Nearest heads in this layer (value, z_null)"),
        ("nearest_in_any_layer", "Nearest heads in any layer (value, z_null)"),
        ("reads_from", "Composes with earlier heads (their output, this head's input)"),
        ("writes_to", "Composes with later heads (this head's output, their input)"),
    ):
        if card[key]:
            parts += [_section(title), _rankings(card[key])]
    if card["spectra"]:
        parts += [_section("Spectra"), _spectra(card["spectra"])]
    for words in card["words"]:
        parts += [_section(words["title"]), _words(words["rows"])]
    return Group(*parts, _footer(card))


def layer_card(card: Mapping[str, Any], width: int = 80) -> RenderableType:
    """The table of one layer, as ``headmix.cards.layer_card`` makes it."""
    parts: list[RenderableType] = [_heading(card, card["layer"]), _facts(card)]
    parts += _measured(card)
    if card["spectra"]:
        parts += [_section("Spectra"), _spectra(card["spectra"])]
    for table in card["labels"]:
        parts += [_section(f"{table['title']} (value, z_null)"), _label_table(table)]
    rows = card["heads"]
    names = list(dict.fromkeys(reading["metric"] for row in rows for reading in row["metrics"]))
    pairs = list(dict.fromkeys(name for row in rows for name in row["nearest"]))
    if names:
        parts.append(_section("Its heads (value, z_null)"))
    parts += [_head_table(rows, columns) for columns in _pages(names, width)]
    if pairs:
        parts.append(_section("Nearest in this layer (head, value, z_null)"))
    parts += [_nearest_table(rows, columns) for columns in _pages(pairs, width)]
    return Group(*parts, _footer(card))


def laws_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What ``verify`` found, a row a layer."""
    table = _table("layer", ("sum error", "right"), "independent", "values reach z", "reason")
    for row in rows:
        error, ran = row["sum_error"], row["sum_error"] is not None
        held = "yes" if row["independent"] else Text("no", style="bold red")
        table.add_row(
            printable(row["layer"]),
            f"{error:.1e}" if ran else "–",
            held if ran else "–",
            printable(row["values"]),
            printable(row["reason"]),
        )
    return table


def architectures_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """What is known of each architecture: a line for each kind of layer, then the notes."""
    table = _table("model type", "tested with", "projections", "values reach z")
    for row in rows:
        names = [printable(row["model_type"]), printable(row["heads"])]
        for layout, values in row["layouts"].items():
            table.add_row(*names, printable(layout), printable(values))
            names = ["", ""]
        for note in row["notes"]:
            table.add_row("", "", Text(printable(note), style="dim"))
    return table


def _heading(card: Mapping[str, Any], what: str) -> Rule:
    return Rule(Text(f"{printable(card['model'])}  {printable(what)}", style="bold"), align="left")


def _facts(card: Mapping[str, Any], more: str = "") -> Text:
    facts = [
        f"{card['n_heads']} heads on {card['n_kv_heads']} KV heads",
        f"d_head {card['d_head']}, d_model {card['d_model']}",
        f"{card['processing']} weights",
    ]
    if not card["n_heads"]:  # refused: nothing is known of its heads
        facts = [f"{card['processing']} weights"]
    text = Text(", ".join([*facts, more] if more else facts))
    if card["text"]:
        text.append(f"\n{_text(card['text'])}")
    if card.get("causal"):
        text.append(f"\nReplaced: {printable(card['causal'])}")
    for note in card["notes"]:
        text.append(f"\nNote: {printable(note)}")
    if "invalid" in card:
        text.append(f"\nThis layer is invalid: {printable(card['invalid'])}", style="bold red")
    return text


def _footer(card: Mapping[str, Any]) -> Text:
    lines = [f"No {metric}: {reason}." for metric, reason in card["skipped"].items()]
    caveats = [NULL_CAVEAT, INTERVAL_CAVEAT] if card["text"] else [NULL_CAVEAT]
    return Text("\n" + "\n".join([*map(printable, lines), *caveats]), style="dim")


def _text(text: Mapping[str, Any]) -> str:
    """Which text was read, in a line."""
    read = (
        f"On text: {text['n_tokens']:,} tokens of {text['n_documents']:,} "
        f"{text['counted_in']} in {text['folds']} folds, {text['source']}"
    )
    return printable(f"{read}; interrupted: {text['interrupted']}" if text["interrupted"] else read)


def _measured(card: Mapping[str, Any]) -> list[RenderableType]:
    """The numbers of a layer or head, those from its weights apart from those on text."""
    parts: list[RenderableType] = []
    for title, readings in (
        ("From the weights", [r for r in card["metrics"] if r["on"] == "weights"]),
        ("On text", [r for r in card["metrics"] if r["on"] == "text"]),
        ("On text, what position explains taken out", card["within_position"]),
    ):
        if readings:
            parts += [_section(title), _readings(readings)]
    return parts


def _section(title: str) -> Text:
    return Text(f"\n{printable(title)}", style="bold")


def _table(*columns: str | tuple[str, JustifyMethod]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if isinstance(column, str):
            table.add_column(column)
        else:
            table.add_column(column[0], justify=column[1])
    return table


def _readings(readings: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "", ("value", "right"), ("null mean ± sd", "right"), ("z_null", "right"), "metric"
    )
    table.columns[-1].overflow = "fold"  # a name is of no use cut short
    for reading in readings:
        table.add_row(
            printable(reading["title"]),
            _value(reading, number(reading["value"])),
            _null(reading),
            _z(reading),
            Text(reading["metric"], style="dim"),
        )
    return table


def _value(reading: Mapping[str, Any], value: str) -> Text:
    """The number, and its interval under it."""
    return Text(value).append(f"\n{span}" if (span := interval(reading)) else "", style="dim")


def interval(reading: Mapping[str, Any]) -> str:
    """Both ends to the second significant digit of their distance; empty where there are none.

    >>> interval({"low": 0.41234, "high": 0.43999})
    '0.412 – 0.440'
    """
    low, high = reading["low"], reading["high"]
    if low is None or high is None:
        return ""
    width = high - low
    decimals = min(12, max(0, 1 - math.floor(math.log10(width)))) if width > 0 else 3
    return f"{low:.{decimals}f} – {high:.{decimals}f}"


def _null(reading: Mapping[str, Any]) -> str:
    if reading["null_mean"] is None:
        return "–"
    sd = "" if reading["null_sd"] is None else f" ± {reading['null_sd']:.2g}"
    return number(reading["null_mean"]) + sd


def _z(reading: Mapping[str, Any]) -> str:
    return "" if reading["z_null"] is None else f"{reading['z_null']:+.1f}"


def _cell(reading: Mapping[str, Any]) -> Text:
    """Value and z_null, short enough for eleven columns."""
    value = "–" if reading["value"] is None else f"{reading['value']:.3g}"
    text = Text(value).append(f" {_z(reading)}" if _z(reading) else "", style="dim")
    return text.append(f"\n{span}" if (span := interval(reading)) else "", style="dim")


def _rankings(rankings: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(min_width=16)
    for _ in range(_SHOWN):
        table.add_column(min_width=11)
    for ranking in rankings:
        cells = [Text(f"{_who(p)}\n").append_text(_cell(p)) for p in ranking["partners"][:_SHOWN]]
        table.add_row(printable(ranking["title"]), *cells)
    return table


def _who(partner: Mapping[str, Any]) -> str:
    """H3 in the same layer, L2H3 in another one, KV1 for a key-value head."""
    unit = f"H{partner['head']}" if "head" in partner else f"KV{partner['kv_head']}"
    return f"{printable(partner.get('layer', ''))}{unit}"


def _spectra(spectra: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("", ("largest", "right"), "", ("smallest", "right"))
    for spectrum in spectra:
        values = spectrum["values"]
        table.add_row(
            printable(spectrum["title"]), number(max(values)), _bars(values), number(min(values))
        )
    return table


def _bars(values: Sequence[float]) -> str:
    """A spectrum as a row of bars, thinned evenly where it is long.

    >>> _bars([4.0, 3.0, 2.0, 1.0])
    '█▆▅▃'
    """
    n = min(len(values), _LONGEST)
    thinned = [values[round(i * (len(values) - 1) / max(n - 1, 1))] for i in range(n)]
    top = max(max(thinned), 0) or 1.0
    return "".join(_BARS[round(max(v, 0) / top * (len(_BARS) - 1))] for v in thinned)


def _words(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        where = ", ".join(f"{printable(k)} {printable(v)}" for k, v in row["where"].items())
        table.add_row(Text(where, style="dim"), Text("  ".join(map(printable, row["words"]))))
    return table


def _pages(names: Sequence[str], width: int) -> list[list[str]]:
    """As many columns a table as the terminal is wide."""
    fit = max(1, (width - 6) // _COLUMN)
    return [list(names[i : i + fit]) for i in range(0, len(names), fit)]


def _head_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = _table(("head", "right"), *((name.replace("_", " "), "right") for name in names))
    for row in rows:
        found = {reading["metric"]: reading for reading in row["metrics"]}
        table.add_row(str(row["head"]), *(_cell(found[name]) for name in names))
    return table


def _label_table(table: Mapping[str, Any]) -> Table:
    """A row a label, a column a read-out or another label."""
    columns = [name.replace("_", " ") for name in table["columns"]] or [""]
    drawn = _table("label", *((printable(name), "right") for name in columns))
    for row in table["rows"]:
        drawn.add_row(printable(row["label"]), *map(_cell, row["readings"]))
    return drawn


def _nearest_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = _table(("head", "right"), *(name.replace("_", " ") for name in names))
    for row in rows:
        found = [row["nearest"].get(name) for name in names]
        cells = (Text(f"{_who(r)} ").append_text(_cell(r)) if r else "–" for r in found)
        table.add_row(str(row["head"]), *cells)
    return table


def catalogue(entries: Sequence[Mapping[str, Any]]) -> Table:
    """All metrics, a line each, by family; names whole, since they are there to be typed."""
    table = _table("name", "what")
    table.columns[0].no_wrap = True
    table.columns[0].min_width = max(len(entry["name"]) for entry in entries)
    family = entries[0]["family"]
    for entry in entries:
        if entry["family"] != family:
            table.add_section()
            family = entry["family"]
        name = Text(entry["name"], style="" if entry["default"] else "dim")
        table.add_row(name, entry["title"])
    return table


def catalogue_entry(entry: Mapping[str, Any]) -> RenderableType:
    """One metric in full."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    for key in ("formula", "dims", "range", "unit", "null", "invariant", "needs", "reference"):
        value = entry[key] if isinstance(entry[key], str) else ", ".join(entry[key])
        if value:
            facts.add_row(Text(key, style="dim"), Text(value))
    for option, default in entry["options"].items():
        facts.add_row(Text("option", style="dim"), Text(f"{option} (default {default})"))
    heading = Rule(Text(f"{entry['name']}  {entry['title']}", style="bold"), align="left")
    return Group(heading, facts, Text(f"\n{_prose(entry['doc'])}"))


def _prose(doc: str) -> str:
    """A docstring as running text: its examples left out, its lines joined."""
    paragraphs = [p for p in doc.split("\n\n") if not p.lstrip().startswith(">>>")]
    return "\n\n".join(p if "\n " in p else p.replace("\n", " ") for p in paragraphs)
