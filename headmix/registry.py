"""@metric: one definition per metric, and the catalogue that everything else reads."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import log, pi
from typing import Any

from headmix.heads import Heads
from headmix.heads import NotApplicable as NotApplicable  # a metric raises it: found here too

#: What a metric may ask for, by parameter name. ``measure`` fills these in.
NEEDS = {
    "heads": "the weights of one layer",
    "layers": "the weights of all chosen layers",
    "vocabulary": "token embeddings and unembedding",
    "reads": "the read weights of the same block's feed-forward neurons",
    "moments": "what the layer's heads did on text, as sums over tokens",
    "joint": "what the heads of all layers did together, as sums over the same tokens",
    "attention": "where the layer's heads looked on text, as sums over query rows",
    "effects": "what replacing the layer's heads does to the output, as sums over tokens",
    "interactions": "how the effects of two heads add up, as sums over tokens",
    "read_outs": "what labels can be read at each place of the layer's block, as sums over tokens",
}

#: Those that take forward passes in which something is replaced.
CAUSAL = ("effects", "interactions")

#: Those that come from text, as sums with a ``replicates`` each.
FROM_TEXT = ("moments", "attention", "joint", "read_outs", *CAUSAL)

#: Transformations of the weights that a metric may declare itself invariant to.
TRANSFORMATIONS = {
    "gauge": "W_V → W_V A, W_O → A⁻¹ W_O, any invertible A for each KV head: the same model",
    "rotation": "every write and read of the residual stream rotated by one orthogonal matrix",
    "scale": "W_O multiplied by one positive number",
    "head_scale": "each head's W_O multiplied by a positive number of its own",
}


#: Names of the places along axes that are not counted.
LABELS = {"side": ("read", "write"), "sign": ("+", "−")}

#: A bound of a metric's range: a number, or a symbol that ``Metric.bounds`` fills in.
Bound = int | float | str


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric: a plain function that knows its name, null, range and invariances.

    Calling it calls the function. ``null(...)`` takes the same arguments and returns the mean and
    standard deviation expected where heads are unrelated, each broadcastable to the value (the
    standard deviation may be None where no closed form is known).
    """

    function: Callable[..., Any]
    title: str
    formula: str
    dims: tuple[str, ...]
    range: tuple[Bound, Bound]
    null: Callable[..., tuple[Any, Any]] | None
    null_text: str
    invariant: frozenset[str]
    reference: str
    unit: str = ""
    default: bool = True
    within_position: bool = False
    needs: tuple[str, ...] = field(init=False)
    options: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        unknown = self.invariant - TRANSFORMATIONS.keys()
        parameters = inspect.signature(self.function).parameters
        needs = tuple(n for n, p in parameters.items() if p.default is p.empty)
        if unknown or not set(needs) <= NEEDS.keys() or not needs:
            raise TypeError(
                f"metric {self.function.__name__}: parameters without a default must be among "
                f"{sorted(NEEDS)}, got {needs}; invariances among {sorted(TRANSFORMATIONS)}, "
                f"got {sorted(self.invariant)}"
            )
        object.__setattr__(self, "needs", needs)
        options = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        object.__setattr__(self, "options", options)
        # what inspect, help and doctest look for on a function
        copied = {n: getattr(self.function, n) for n in ("__doc__", "__module__", "__name__")}
        self.__dict__.update(copied, __wrapped__=self.function)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def family(self) -> str:
        """The file the metric lives in: geometry, composition, …"""
        return self.function.__module__.rsplit(".", 1)[-1]

    @property
    def range_text(self) -> str:
        low, high = ("∞" if b == float("inf") else f"{b}" for b in self.range)
        return f"[{low.replace('-inf', '−∞')}, {high}]"

    def bounds(self, heads: Heads | None) -> tuple[float, float]:
        """The range as numbers, its symbols filled in for one layer; open where that is unknown."""
        symbols: dict[str, float] = {"π/2": pi / 2, "ln 2": log(2)}
        if heads is None:
            symbols |= dict.fromkeys(("d", "D", "H", "Dc", "min(Dc, D)"), float("inf"))
        else:
            H, d, D = heads.n_heads, heads.d_head, heads.d_model
            symbols |= {"d": d, "D": D, "H": H, "Dc": H * d, "min(Dc, D)": min(H * d, D)}
        low, high = (float(symbols[b] if isinstance(b, str) else b) for b in self.range)
        return low, high

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<metric {self.name}({', '.join(self.needs)}) → [{', '.join(self.dims)}]>"


_CATALOGUE: dict[str, Metric] = {}


def metric(
    *,
    title: str,
    formula: str,
    dims: Sequence[str],
    range: tuple[Bound, Bound],
    null: Callable[..., tuple[Any, Any]] | None = None,
    null_text: str = "none known",
    invariant: Sequence[str] = (),
    reference: str = "",
    unit: str = "",
    default: bool = True,
    within_position: bool = False,
) -> Callable[[Callable[..., Any]], Metric]:
    """Register the decorated function as a metric, under its own name.

    The function's parameters say what it needs (see ``NEEDS``); those with a default are options.
    It returns a tensor or array whose axes are ``dims``; layer metrics leave the layer axis out.

    Args:
        title: what a plot's axis says.
        formula: in the notation of the documentation.
        dims: names of the result's axes: "head", "head_b", "kv_head", "singular", …
        range: smallest and largest possible value; numbers, or "d", "D", "H", "Dc",
            "min(Dc, D)", "π/2", "ln 2".
        null: same arguments as the function → (mean, sd) for unrelated heads.
        null_text: the null in words.
        invariant: the transformations (``TRANSFORMATIONS``) that leave the value unchanged.
        reference: paper or source of the formula.
        unit: empty for pure numbers.
        default: whether ``measure`` computes it unasked.
        within_position: whether it follows from Σ alone, so that it keeps its meaning on
            ``moments.within_positions``, where position explains nothing any more.

    Raises:
        TypeError: a parameter or an invariance is not known.
        ValueError: another metric has this name.
    """

    def register(function: Callable[..., Any]) -> Metric:
        made = Metric(
            function, title, formula, tuple(dims), range, null, null_text,
            frozenset(invariant), reference, unit, default, within_position,
        )  # fmt: skip
        known = _CATALOGUE.get(made.name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"a metric named {made.name!r} exists in {known.function.__module__}")
        _CATALOGUE[made.name] = made
        return made

    return register


def unknown_metric(name: str, known: Iterable[str]) -> ValueError:
    """The error for a metric that nobody registered, with what may have been meant."""
    known = list(known)
    close = get_close_matches(name, known, n=1)
    meant = f"; did you mean {close[0]}?" if close else ";"
    return ValueError(f"unknown metric {name}{meant} known: {', '.join(known)}")


def catalogue() -> dict[str, Metric]:
    """Every metric by name, headmix's own and the user's, in order of definition."""
    import headmix.metrics  # noqa: F401  registers headmix's own

    return dict(_CATALOGUE)
