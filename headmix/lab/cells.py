"""Which cells of variants × tasks × architectures are worth running.

Not every cell of the full cross decides something; ``CELLS`` are those that do:

- ``xor`` without norm and feed-forward, where no W_O can help; with a norm, with a feed-forward,
  and with a feed-forward alone: what does help. ``xor_free``: whether attention itself can.
- ``threshold`` bare: whether mixing is needed where a sum is all.
- ``induction`` of attention alone, with and without a skip: whether two heads of one layer must be
  mixed before the next can use both.
- ``crowd`` without norms and feed-forward: what forced overlap costs each W_O.
- ``characters``: text, with the parameters that a variant lacks given to its feed-forward
  (``matched``), and as they are.
"""

from dataclasses import dataclass, replace

from headmix.lab.stack import build
from headmix.lab.tasks import TASKS
from headmix.lab.transformer import VARIANTS, Config

#: One head as wide as all of them, to which the benefit of several is compared.
ONE_HEAD = "one_head"


@dataclass(frozen=True)
class Cell:
    """A task and an architecture on which variants are compared.

    Attributes:
        task: a key of ``TASKS``.
        skip, norm, mlp: as in ``Config``.
        matched: whether a variant with fewer parameters than ``full`` gets a wider feed-forward,
            to within half a neuron a layer.
        steps, batch: as in ``train``.
        learning_rates: those among which each variant's is chosen.
        variants: those compared here; all where None.

    Raises:
        ValueError: an unknown task, or no learning rate.
    """

    task: str
    skip: bool = False
    norm: bool = False
    mlp: bool = False
    matched: bool = False
    steps: int = 200
    batch: int = 32
    learning_rates: tuple[float, ...] = (4e-3, 1e-2, 2.5e-2)
    variants: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}; known: {', '.join(TASKS)}")
        if not self.learning_rates:
            raise ValueError(f"{self.task}: no learning rate to train at")

    @property
    def architecture(self) -> str:
        """ "skip+norm+mlp, matched", "bare" …"""
        on = [name for name in ("skip", "norm", "mlp") if getattr(self, name)]
        return ("+".join(on) or "bare") + ", matched" * self.matched

    def config(self, variant: str) -> Config:
        """The model of a variant."""
        switches = {"skip": self.skip, "norm": self.norm, "mlp": self.mlp}
        task = TASKS[self.task]()
        full = task.config(**switches)
        if variant == ONE_HEAD:
            config = replace(full, n_heads=1, d_head=full.n_heads * full.d_head)
        else:
            config = replace(full, **VARIANTS[variant])  # type: ignore[arg-type]
        return match(config, full) if self.matched else config

    def includes(self, variant: str) -> bool:
        """Whether a variant is compared here: one head cannot have the views of several."""
        if variant == ONE_HEAD and TASKS[self.task]().shape.get("offsets"):
            return False
        return self.variants is None or variant in self.variants


def match(config: Config, target: Config) -> Config:
    """A config whose feed-forward is so wide that it has the parameters of another, nearly.

    Raises:
        ValueError: it has no feed-forward to widen, or would need less than one neuron.

    >>> full, identity = Config(vocabulary=5), Config(vocabulary=5, output="identity")
    >>> matched = match(identity, full)
    >>> [build(c, 0).n_parameters for c in (full, identity, matched)], matched.width
    ([15141, 14117, 15157], 144)
    """
    if not config.mlp:
        raise ValueError("there is no feed-forward to widen: the parameters cannot be matched")
    missing = build(target, 0).n_parameters - build(config, 0).n_parameters
    neuron = config.n_layers * (2 * config.d_model + 1)
    width = config.width + round(missing / neuron)
    if width < 1:
        raise ValueError(f"the parameters cannot be matched: {missing} of them are too many")
    return replace(config, d_ff=width)


#: Of the variants, those that are tried on text, which takes longest.
_ON_TEXT = (
    "identity", "random_orthogonal", "full", "shared", "talking", ONE_HEAD
)  # fmt: skip

#: The default suite.
CELLS = (
    Cell("xor", skip=True),
    Cell("xor", skip=True, norm=True),
    Cell("xor", skip=True, mlp=True, matched=True),
    Cell("xor", mlp=True, matched=True),
    Cell("xor_free", skip=True),
    Cell("threshold"),
    Cell("induction", skip=True, steps=500, learning_rates=(2.5e-3, 5e-3, 1e-2)),
    Cell("induction", steps=500, learning_rates=(2.5e-3, 5e-3, 1e-2)),
    Cell("crowd", skip=True, steps=400),
    Cell(
        "characters", skip=True, norm=True, mlp=True, matched=True, steps=500, batch=16,
        variants=_ON_TEXT,
    ),
    Cell(
        "characters", skip=True, norm=True, mlp=True, steps=500, batch=16,
        variants=("identity", "random_orthogonal", "full"),
    ),
)  # fmt: skip

#: A first look: the same questions, fewer variants, seeds and steps.
QUICK = tuple(
    replace(
        cell,
        steps=cell.steps // 2 if cell.task in ("induction", "characters") else cell.steps,
        learning_rates=(1e-2,),
        variants=("identity", "random_orthogonal", "full", "shared", ONE_HEAD),
    )
    for n, cell in enumerate(CELLS)
    if n not in (3, 7, 10)
)
