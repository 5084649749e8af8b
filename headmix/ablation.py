"""ablation: what the output loses when a layer's heads are replaced, one unit after the other."""

from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from headmix import outcomes
from headmix.effects import MEMBERS, REPLACEMENTS, Effects
from headmix.outcomes import Outcome
from headmix.stage import Stage


class Ablation:
    """Replaces units of heads and sums what changes at the output.

    Args:
        stage: the pass in hand.
        members: by layer, which heads each unit replaces at once.
        replacements: of ``REPLACEMENTS``.
        folds: of documents.
    """

    def __init__(
        self,
        stage: Stage,
        members: Mapping[str, Bool[Tensor, "unit head"]],
        replacements: Sequence[str],
        folds: int,
    ) -> None:
        self.stage, self.members, self.folds = stage, members, folds
        self.replacements = [r for r in REPLACEMENTS if r in replacements]

    def nothing(self, layer: str) -> Effects:
        """Empty sums."""
        members = self.members[layer]
        return Effects.zeros(members, folds=self.folds, replacements=self.replacements)

    def work(self, layer: str) -> list[tuple[str, int]]:
        """(replacement, unit) of every pass over the layer."""
        sizes = self.members[layer].sum(1).tolist()
        return [(r, u) for r in self.replacements for u, n in enumerate(sizes) if n <= MEMBERS[r]]

    def run(self, layer: str, ran: Callable[[], None]) -> Effects:
        """One layer on the pass in hand; ``ran`` is called after each forward pass.

        Raises:
            NotApplicable: the layer's z cannot be replaced.
        """
        stage = self.stage
        stage.prove(layer)
        at = None if stage.task.at is None else stage.run.folds_of(stage.task.at)
        sums = self.nothing(layer)
        sums.clean(stage.fold, stage.run.documents, stage.losses, at)
        for replacement, unit in self.work(layer):
            with stage.replaced(layer, self.members[layer][unit], replacement):
                outcome = stage.read.run(stage.task)
            moved = outcomes.distance(outcome.output, stage.clean.output)
            sums.add("distance", replacement, unit, stage.fold, moved)
            if at is not None:
                for what, values in self._predictions(outcome).items():
                    sums.add(what, replacement, unit, at, values)
            ran()
        return sums

    def _predictions(self, outcome: Outcome) -> dict[str, Float[Tensor, "prediction"]]:
        stage, clean = self.stage, self.stage.clean.logits
        answers, before = stage.task.answers, stage.losses
        if outcome.logits is None or clean is None or answers is None or before is None:
            return {}
        return {
            "loss": outcomes.losses(outcome.logits, answers) - before,
            "divergence": outcomes.divergence(clean, outcome.logits),
        }
