"""The command line. What is heavy is imported inside the commands, so that help is quick."""

import json as json_format
import math
import os
import re
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

import headmix as hm
from headmix import terminal
from headmix.files import one_writer
from headmix.options import (
    FAILED,
    INTERRUPTED,
    LayerList,
    Loading,
    Measuring,
    Model,
    ModelOrRun,
    Reading,
    Talk,
    command,
    layer_list,
    model_or_run,
    said,
)

_HELP = """
What does the attention output projection do with the heads?

headmix takes W_O apart into one block a head and measures redundancy, overlap and mixing \
for every head, pair and layer, each number beside its null.

\b
[bold]Examples[/bold]
  headmix report demo                        [dim]measure a small BERT[/dim]
  headmix report gpt2 --out gpt2.html        [dim]any model of the hub[/dim]
  headmix report gpt2 --text book.txt        [dim]and what its heads do on text[/dim]
  headmix measure ./my-model --out run.nc    [dim]keep the numbers[/dim]
  headmix inspect run.nc --layer 3           [dim]one layer, as a table[/dim]
  headmix inspect run.nc --layer 3 --head 5  [dim]one head, as a card[/dim]
  headmix compare demo ./my-fine-tune        [dim]what changed, and where[/dim]
  headmix verify gpt2                        [dim]is the split into heads right?[/dim]
  headmix metrics projection_kernel          [dim]formula, null, reference[/dim]
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a law or check failed, 2 the input cannot be used, "
    "130 interrupted (Ctrl-C; while text runs, what was seen by then is still measured and kept).",
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"headmix {hm.__version__}")
        raise typer.Exit
    return wanted


@app.callback(help=_HELP)
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@command(app)
def report(
    model: ModelOrRun,
    loading: Loading,
    measuring: Measuring,
    reading: Reading,
    talk: Talk,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Default: headmix-MODEL.html.")
    ] = None,
) -> None:
    """Measure a model, or take a finished run, and write one page that works offline.

    The model's weights are measured and, with --text, what its heads do on text. The demo model
    reads the default text unless you name another, or ask for --weights-only.
    """
    if model == "demo" and not loading.weights_only:
        reading = reading.or_text("default")
    out = out or Path(f"headmix-{_slug(model)}.html")
    with one_writer(out):
        ds = _run(model, loading, measuring, reading, talk)
        hm.report(ds, out)
    from headmix import cards

    summary = cards.summary(ds)
    data = {"report": str(out), "bytes": out.stat().st_size} | summary
    _say(talk, data, _written("Report", out, summary))
    _end(model, ds)


@command(app)
def measure(
    model: Model,
    loading: Loading,
    measuring: Measuring,
    reading: Reading,
    talk: Talk,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.nc",
            help="Default: headmix-MODEL.nc; with --json, no file unless you name one.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what an unfinished run has left.")
    ] = False,
) -> None:
    """Measure the heads of a model and keep the numbers.

    While text runs, what has been seen is kept beside the result in RUN.nc.partial.0, …, every
    half minute, and removed once all of it is in RUN.nc. After a crash or Ctrl-C the same command
    with --resume goes on from there; without it, it is refused, so that no work is lost.

    --json prints the whole dataset in the form of xarray's to_dict; NaN becomes null.
    """
    if out is None and not talk.json:
        out = Path(f"headmix-{_slug(model)}.nc")
    if resume and (out is None or reading.text is None):
        raise ValueError("--resume goes on with a pass over text: name its --text and its --out")
    if out is None:
        ds = _run(model, loading, measuring, reading, talk)
    else:
        with one_writer(out):
            _sweep(out)
            kept = _unfinished(out, resume) if reading.text else None
            ds = _run(model, loading, measuring, reading, talk, checkpoint=kept)
            hm.save(ds, out)
            if kept and "interrupted" not in ds.attrs:
                _remove(kept)
    from headmix import cards

    _say(
        talk, ds.to_dict() if talk.json else {}, _written("Results", out or "-", cards.summary(ds))
    )
    _end(model, ds)


@command(app)
def inspect(
    model: ModelOrRun,
    loading: Loading,
    measuring: Measuring,
    reading: Reading,
    talk: Talk,
    layer: Annotated[str, typer.Option(help="Name or position.", show_default=False)],
    head: Annotated[int | None, typer.Option(help="Position.", show_default=False)] = None,
) -> None:
    """One layer as a table, or one head as a card.

    A model is measured over all its layers (or --layers), because a head's partners are elsewhere.
    """
    from headmix import cards

    ds = _run(model, loading, measuring, reading, talk, layer)
    if head is None:
        card = cards.layer_card(ds, layer)
        _say(talk, card, terminal.layer_card(card, Console().width))
    else:
        card = cards.head_card(ds, layer, head)
        _say(talk, card, terminal.head_card(card))
    _end(model, ds)


@command(app)
def compare(
    a: Annotated[str, model_or_run("A")],
    b: Annotated[str, model_or_run("B")],
    loading: Loading,
    measuring: Measuring,
    reading: Reading,
    talk: Talk,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="C",
            help="Further ones in order, as the checkpoints of a training: B − A is then the last "
            "minus the first, and the page follows every metric through all of them.",
            show_default=False,
        ),
    ] = None,
    match: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Compare heads of the same 'index', or of models those whose write subspaces "
            "'overlap' most, or whose outputs on --text are most alike by 'cka'.",
        ),
    ] = "index",
    any_processing: Annotated[
        bool, typer.Option("--any-processing", help="Also where only one of the two was folded.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html|FILE.nc", help="The page, or the numbers; default headmix-A-B.html."
        ),
    ] = None,
) -> None:
    """What differs between two models or two runs: B minus A, metric by metric, head by head.

    Models are measured alike, with the options below; runs must have been. The page shows the
    differences beside their nulls; FILE.nc also holds each metric of both.
    """
    names = [a, b, *(more or [])]
    out = out or Path(f"headmix-{_slug(names[0])}-{_slug(names[-1])}.html")
    runs = [name.endswith(".nc") for name in names]
    if all(runs):
        which = f"each of {' and '.join(names)} is a finished run"
        _need_nothing_said(which, [loading, measuring, reading])
    with one_writer(out), talk.progress() as progress:
        options = measuring.measure_options() | reading.measure_options() | {"progress": progress}
        sides = []
        for name, is_run in zip(names, runs, strict=True):
            progress(f"loading {name}", 0, 0)
            sides.append(
                hm.open_results(name) if is_run else hm.load(name, **loading.load_options())
            )
        ds = hm.compare(*sides, match=match, any_processing=any_processing, **options)
        (hm.save if out.suffix == ".nc" else hm.report)(ds, out)
    from headmix import cards
    from headmix.page import changes

    told = [f"{place}: {text}" for text, _, place in changes.find(ds)]
    data = {"out": str(out), "changes": told} | cards.summary(ds)
    kind = "Differences" if out.suffix == ".nc" else "Report"
    _say(talk, data, "\n".join([*map(terminal.printable, told), f"{kind}: {out}"]))


@command(app)
def verify(
    loading: Loading,
    talk: Talk,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As in 'measure'.", show_default=False)
    ] = None,
    layers: LayerList = None,
    listed: Annotated[
        bool, typer.Option("--list", help="What is known of each architecture instead.")
    ] = False,
) -> None:
    """Does the split into heads hold? Two laws, checked on a tiny batch, layer by layer.

    Sum: the heads' outputs add up to what the output projection returned. Independence: disturbing
    the values of one KV head moves only the heads that use it. Exit code 1 where a law fails.
    """
    if listed:
        from headmix import architectures

        rows = [asdict(row) for row in architectures.table()]
        return _say(talk, rows, terminal.architectures_table(rows))
    if model is None:
        raise ValueError("verify needs a MODEL, or --list for the table of architectures")
    with talk.progress() as progress:
        progress(f"loading {model}", 0, 0)
        loaded = hm.load(model, **loading.load_options())
        check = hm.verify(loaded, layers=layer_list(layers), progress=progress)
    rows = [asdict(row) for row in check.rows]
    verdict = "Both laws hold." if check.ok else "A law failed."
    _say(talk, {"ok": check.ok, "rows": rows}, Group(terminal.laws_table(rows), Text(verdict)))
    if not check.ok:
        raise typer.Exit(FAILED)


@command(app)
def metrics(
    talk: Talk,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One metric in full.", show_default=False)
    ] = None,
) -> None:
    """The catalogue: every metric with its formula, null, range and reference."""
    known = hm.catalogue()
    if name is None:
        rows = [_entry(metric) for metric in known.values()]
        return _say(talk, rows, terminal.catalogue(rows))
    if name not in known:
        from headmix.registry import unknown_metric

        raise unknown_metric(name, known)
    entry = _entry(known[name])
    _say(talk, entry, terminal.catalogue_entry(entry))


def _run(
    model: str,
    loading: Loading,
    measuring: Measuring,
    reading: Reading,
    talk: Talk,
    layer: str | None = None,
    checkpoint: Path | None = None,
) -> Any:
    """The Dataset of a finished run, or of one made now; ``layer`` must exist before the work."""
    if model.endswith(".nc"):
        _need_nothing_said(f"{model} is a finished run", [loading, measuring, reading])
        return hm.open_results(model)
    text = reading.measure_options()
    with talk.progress() as progress:
        progress(f"loading {model}", 0, 0)
        loaded = hm.load(model, **loading.load_options())
        if layer is not None:
            loaded.layer_name(layer)
        options = measuring.measure_options() | text
        return hm.measure(loaded, progress=progress, checkpoint=checkpoint, **options)


def _need_nothing_said(why: str, groups: list[Any]) -> None:
    """Raises ValueError where options were given to what is measured already."""
    if meaningless := [option for group in groups for option in said(group)]:
        raise ValueError(
            f"{why}, and {', '.join(meaningless)} would change nothing in it: measure the model "
            "again, or leave that out"
        )


def _unfinished(out: Path, resume: bool) -> Path:
    """Where ``measure`` keeps what it has seen; a number for each group of layers is added.

    Raises:
        ValueError: an earlier run has left something there, and is not to be resumed.
    """
    kept = out.with_name(out.name + ".partial")
    if (left := _left(kept)) and not resume:
        raise ValueError(
            f"{left[0]} is left of a run that did not end: --resume goes on from there; remove it "
            "to begin anew"
        )
    return kept


def _left(kept: Path) -> list[Path]:
    return sorted(kept.parent.glob(f"{escape(kept.name)}.*"))


def _sweep(out: Path) -> None:
    """Remove what a kill in the middle of keeping sums left half written; ``out`` is locked."""
    torn = re.compile(rf"\.{re.escape(out.name)}\.partial\.(\d+|causal)\.[0-9a-f]+\.tmp")
    for file in out.parent.glob(f".{escape(out.name)}.partial.*.tmp"):
        if torn.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _remove(kept: Path) -> None:
    for file in _left(kept):
        file.unlink()


def _end(model: str, ds: Any) -> None:
    """A run that was interrupted just now has said so; its exit code does too."""
    if "interrupted" in ds.attrs and not model.endswith(".nc"):
        raise typer.Exit(INTERRUPTED)


def _entry(metric: Any) -> dict[str, Any]:
    import inspect as python

    return {
        "name": metric.name,
        "title": metric.title,
        "formula": metric.formula,
        "dims": list(metric.dims),
        "range": metric.range_text,
        "unit": metric.unit,
        "null": metric.null_text,
        "invariant": sorted(metric.invariant),
        "needs": list(metric.needs),
        "options": {name: str(value) for name, value in metric.options.items()},
        "default": metric.default,
        "family": metric.family,
        "reference": metric.reference,
        "doc": python.getdoc(metric.function) or "",
    }


def _written(what: str, out: Path | str, summary: dict[str, Any]) -> str:
    """Where it is, and which layers are not in it."""
    invalid = [f"Layer {n} is invalid: {reason}" for n, reason in summary["invalid"].items()]
    text = [f"Interrupted: {summary['interrupted']}."] if summary["interrupted"] else []
    lines = [f"{what}: {out}", *invalid, *text]
    return "\n".join(map(terminal.printable, lines))


def _slug(model: str) -> str:
    """A file name for a model: ``org/name`` → ``org-name``, a path → its last part."""
    path = Path(model)
    name = path.resolve().stem if path.exists() else model
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def _say(talk: Talk, data: Any, shown: Any) -> None:
    if talk.json:
        print(json_format.dumps(_plain(data), allow_nan=False, ensure_ascii=False, default=str))
    elif isinstance(shown, str):
        print(shown)  # rich would break a long path
    else:
        Console().print(shown, markup=False, highlight=False)


def _plain(data: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    if isinstance(data, dict):
        return {str(k): _plain(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def main() -> None:
    # Read when torch is imported, which is later: where cores are shared with other work, threads
    # that spin while they wait for one another were seen to take several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="headmix")
