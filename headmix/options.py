"""What the commands have in common: groups of options, and how they fail."""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import wraps
from typing import Annotated, Any

import typer

from headmix.progress import Progress, progress
from headmix.terminal import printable

#: Exit codes: a law or a check failed; the input cannot be used; SIGINT, as shells have it.
FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130

#: Tokens of the default text that are read unless more or less is asked for.
ENOUGH = 20_000

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="'demo', a hub id, a folder, or a .safetensors or .gguf file.",
        show_default=False,
    ),
]
ModelOrRun = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN.nc",
        help="What 'measure' takes, or a .nc file that it wrote.",
        show_default=False,
    ),
]


def model_or_run(name: str) -> Any:
    """The argument of a command that takes two."""
    return typer.Argument(
        metavar=name, help="A model, as in 'measure', or a RUN.nc.", show_default=False
    )


def said(group: Any) -> list[str]:
    """The options of a group that are not at their default, as they are typed."""
    changed = [f.name for f in fields(group) if getattr(group, f.name) != f.default]
    return [f"--{name.replace('_', '-')}" for name in changed]


def _option(help: str, panel: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False
    )


@dataclass(frozen=True)
class Loading:
    """How the model is read: what ``load`` takes."""

    revision: Annotated[
        str | None, _option("Branch, tag or commit of a hub model.", "Loading", "REV")
    ] = None
    dtype: Annotated[
        str | None, _option("float32 or float64; default float32.", "Loading", "NAME")
    ] = None
    device: Annotated[str | None, _option("cpu, cuda, …; default cpu.", "Loading", "NAME")] = None
    processing: Annotated[
        str | None,
        _option("raw, or folded: norms folded, writers centred; default raw.", "Loading", "NAME"),
    ] = None
    weights_only: Annotated[
        bool,
        _option("Read the checkpoint a layer at a time; never build the model.", "Loading", None,
                "--weights-only"),
    ] = False  # fmt: skip
    gguf_file: Annotated[
        str | None,
        _option("Build the model from this GGUF file of the folder.", "Loading", "NAME"),
    ] = None
    trust_remote_code: Annotated[
        bool,
        _option("Run code that the model brings along. Off unless you say so.", "Loading", None,
                "--trust-remote-code"),
    ] = False  # fmt: skip
    allow_pickle: Annotated[
        bool,
        _option("Accept pickle checkpoints (tensors only).", "Loading", None, "--allow-pickle"),
    ] = False

    def load_options(self) -> dict[str, Any]:
        """Only what was said, so that a source can refuse what means nothing to it."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name))}


LayerList = Annotated[
    str | None,
    _option(
        "Names or positions, as in 0,3-5 or L2-L4 or encoder.L0; default all.", "Measuring", "LIST"
    ),
]


@dataclass(frozen=True)
class Measuring:
    """What is measured."""

    layers: LayerList = None
    metrics: Annotated[
        str | None,
        _option("Names as in 'headmix metrics', with commas; default all.", "Measuring", "LIST"),
    ] = None
    seed: Annotated[int, _option("For nulls that are simulated.", "Measuring", "N")] = 0

    def measure_options(self) -> dict[str, Any]:
        return {
            "layers": layer_list(self.layers),
            "metrics": None if self.metrics is None else _items(self.metrics),
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Reading:
    """The text that the model reads, and how much of it at a time."""

    text: Annotated[
        str | None,
        _option(
            "What the heads do on text: a file, a folder, - for standard input, 'default' "
            "(English, no download) or datasets:NAME.",
            "Text", "TEXT",
        ),
    ] = None  # fmt: skip
    labels: Annotated[
        str | None,
        _option(
            "What probes look for: names with commas, as in upos,position, or NAMES=FILE, where "
            "FILE is the text too: pos=corpus.conllu.",
            "Text", "NAMES[=FILE]",
        ),
    ] = None  # fmt: skip
    max_tokens: Annotated[
        int | None,
        _option(f"Stop after so many; default all, of the default text {ENOUGH}.", "Text", "N"),
    ] = None
    folds: Annotated[
        int | None,
        _option(
            "Parts that documents are dealt to, for intervals and held-out tests; default 5.",
            "Text", "N",
        ),
    ] = None  # fmt: skip
    within_position: Annotated[
        bool,
        _option("Also measure with what position explains taken out.", "Text", None,
                "--within-position"),
    ] = False  # fmt: skip
    causal: Annotated[
        bool,
        _option(
            "Also replace heads, one after the other, and see what changes: many forward passes.",
            "Text", None, "--causal",
        ),
    ] = False  # fmt: skip
    causal_tokens: Annotated[
        int | None, _option("Of the text, for --causal; default 2000.", "Text", "N")
    ] = None
    causal_pairs: Annotated[
        str | None,
        _option("Heads to replace together too, for --causal: L3H0-H5,L4H1-H2.", "Text", "LIST"),
    ] = None
    memory: Annotated[
        float | None,
        _option(
            "That the sums over tokens may take; layers go in groups where all do not fit.",
            "Text", "GIB",
        ),
    ] = None  # fmt: skip
    tokens_per_batch: Annotated[
        int | None, _option("Size of a forward pass; default 1024.", "Text", "N")
    ] = None

    def __post_init__(self) -> None:
        names, equals, file = (self.labels or "").partition("=")
        if equals and file and self.text in (None, file):
            object.__setattr__(self, "labels", names)
            object.__setattr__(self, "text", file)

    def or_text(self, text: str) -> "Reading":
        """This text where none was named."""
        return self if self.text is not None else replace(self, text=text)

    def measure_options(self) -> dict[str, Any]:
        """Only what was said, in ``measure``'s units.

        Raises:
            ValueError: it was said how to read a text, but not which.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        said = {name: v for name, v in given.items() if v is not None and v is not False}
        if said and self.text is None:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in said)
            raise ValueError(f"{names}: of which text? name one with --text; 'default' is one")
        how = {
            "tokens": said.pop("causal_tokens", None),
            "pairs": _pairs(said.pop("causal_pairs", None)),
        }
        if how := {name: value for name, value in how.items() if value is not None}:
            said["causal"] = _interventions(how, self.causal)
        if self.memory is not None:
            said["memory"] = self.memory * 2**30
        if self.text == "default":
            said.setdefault("max_tokens", ENOUGH)
        return said


def _interventions(how: dict[str, Any], causal: bool) -> Any:
    if not causal:
        options = " and ".join(f"--causal-{name}" for name in how)
        raise ValueError(f"{options} say how --causal replaces heads: add --causal")
    from headmix.interventions import Interventions  # it brings torch: only once it is needed

    return Interventions(**how)


def _pairs(text: str | None) -> dict[str, list[tuple[int, int]]] | None:
    """Pairs of heads by layer.

    >>> _pairs("L3H0-H5,L3H1-L3H2,encoder.L0H7-H1")
    {'L3': [(0, 5), (1, 2)], 'encoder.L0': [(7, 1)]}
    """
    if text is None:
        return None
    pairs: dict[str, list[tuple[int, int]]] = {}
    for item in _items(text):
        found = re.fullmatch(r"(\S+?) ?H(\d+)-(?:(\S+?) ?)?H(\d+)", item, re.IGNORECASE)
        if not found or found[3] not in (None, found[1]):
            raise ValueError(f"--causal-pairs {item}: expected two heads of a layer, as in L3H0-H5")
        pairs.setdefault(found[1], []).append((int(found[2]), int(found[4])))
    return pairs


@dataclass(frozen=True)
class Talk:
    """What the command says, and to whom."""

    json: Annotated[bool, _option("For machines: JSON on stdout.", "Output", None, "--json")] = (
        False
    )
    quiet: Annotated[bool, _option("No progress.", "Output", None, "--quiet", "-q")] = False
    debug: Annotated[
        bool, _option("Show where an error comes from.", "Output", None, "--debug")
    ] = False

    def progress(self) -> AbstractContextManager[Progress]:
        """Progress on stderr, headmix's own and that of the libraries below it, if wanted.

        The libraries read these variables when they are imported, which is later.
        """
        shown = not self.quiet and sys.stderr.isatty()
        if not shown:
            os.environ["TQDM_DISABLE"] = "1"
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # what fails is said once, at the end
        return progress(shown)


def command(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of ``app``.

    A parameter annotated with one of the groups above becomes that group's options. Input that
    cannot be used becomes one line on stderr and exit code 2.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        groups: dict[str, Any] = {
            n: p.annotation for n, p in signature.parameters.items() if is_dataclass(p.annotation)
        }

        @wraps(function)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
            with _one_line(given["talk"].debug):
                function(**given)

        parameters = _flat(signature.parameters.values())
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(help=_flowing(function))(run)
        return function

    return register


def _flat(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    """Groups replaced by their fields, last; all by keyword, so that defaults may come anywhere."""
    flat = []
    for p in sorted(parameters, key=lambda p: is_dataclass(p.annotation)):
        options = fields(p.annotation) if is_dataclass(p.annotation) else []
        flat += [p.replace(name=f.name, default=f.default, annotation=f.type) for f in options]
        flat += [] if options else [p]
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flat]


def _flowing(function: Callable[..., None]) -> str:
    """A docstring with its lines joined, so that a terminal of any width can break them."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


@contextmanager
def _one_line(debug: bool) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has gone: typer ends quietly
    except KeyboardInterrupt:
        print("headmix: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        from headmix.registry import NotApplicable  # it brings torch: only once something failed

        if not isinstance(error, ValueError | OSError | ImportError | NotApplicable):
            raise
        if debug:
            traceback.print_exc()
        message = printable(" ".join(str(error).split())) or type(error).__name__
        print(f"headmix: {message}", file=sys.stderr)
        raise typer.Exit(UNUSABLE) from None


def layer_list(text: str | None) -> list[str | int] | None:
    """The layers a user lists: names, positions and ranges of either; None for all.

    >>> layer_list("0,3-5,L7-L8,encoder.L0")
    [0, 3, 4, 5, 'L7', 'L8', 'encoder.L0']
    """
    if text is None:
        return None
    layers: list[str | int] = []
    for item in _items(text):
        if found := re.fullmatch(r"(L?)(\d+)-L?(\d+)", item):
            first, last = int(found[2]), int(found[3])
            if last < first:
                raise ValueError(f"--layers {item}: the range ends before it begins")
            layers += [f"L{i}" if found[1] else i for i in range(first, last + 1)]
        else:
            layers.append(int(item) if item.isdigit() else item)
    return layers


def _items(text: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError(f"expected names separated by commas, got {text!r}")
    return items
