"""interventions: what is to be replaced, how much of it, and what was found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headmix.effects import REPLACEMENTS, Effects, Interactions


@dataclass(frozen=True)
class Interventions:
    """What is replaced, on how much of the text, and what is looked at.

    Attributes:
        tokens: of the text that count, from as many documents as there are.
        replacements: of ``headmix.effects.REPLACEMENTS``.
        pairs: pairs of heads to resample together, by layer: ``{"L3": [(0, 5)]}``.
        interactions: tokens on which pairs of heads are read for interactions; 0 for none.
        most_pairs: how many pairs of a layer, drawn at random where there are more.
        objective: "causal", "masked" or "none"; by what the model is when None.
        masked_share: of the tokens that count, how many are hidden from a masked model.

    Raises:
        ValueError: an unknown replacement, less than one token or pair, or a share that is none.
    """

    tokens: int = 2000
    replacements: Sequence[str] = tuple(REPLACEMENTS)
    pairs: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    interactions: int = 500
    most_pairs: int = 100
    objective: str | None = None
    masked_share: int | float = 0.15

    def __post_init__(self) -> None:
        if unknown := [r for r in self.replacements if r not in REPLACEMENTS]:
            raise ValueError(
                f"unknown replacement {', '.join(unknown)}; known: {', '.join(REPLACEMENTS)}"
            )
        if self.tokens < 1 or not 0 < self.masked_share <= 1:
            raise ValueError(
                f"interventions need at least one token, and masked_share in (0, 1]; got "
                f"tokens={self.tokens}, masked_share={self.masked_share}"
            )
        if self.interactions < 0 or self.most_pairs < 1:
            raise ValueError(
                f"interactions={self.interactions}, most_pairs={self.most_pairs}: expected "
                "no tokens or more, and one pair or more"
            )


@dataclass
class Found:
    """What interventions found, and what they could not do.

    Attributes:
        effects: by layer.
        interactions: by layer.
        unseen: by "effects" or "interactions" and layer, why there is nothing.
        steps: how many (pass, layer) are in the sums.
    """

    effects: dict[str, Effects] = field(default_factory=dict)
    interactions: dict[str, Interactions] = field(default_factory=dict)
    unseen: dict[str, dict[str, str]] = field(
        default_factory=lambda: {"effects": {}, "interactions": {}}
    )
    steps: int = 0
