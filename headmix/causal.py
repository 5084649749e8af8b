"""causal: interventions on all layers, pass after pass, resumable and in sums that add up."""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path

from headmix import checkpoints
from headmix.ablation import Ablation
from headmix.capture import Batch
from headmix.checkpoints import Parts, bytes_of, chained, identity_of, interruptible
from headmix.effects import Effects, Interactions, units
from headmix.excerpt import RULE, Excerpt, Pass, Pool, excerpt
from headmix.heads import Heads, NotApplicable
from headmix.interaction import Interaction
from headmix.interventions import Found, Interventions
from headmix.model import AttentionModel
from headmix.outcomes import Outcomes
from headmix.packing import Batches
from headmix.stage import Stage

#: What there is to sum, by need.
KINDS = {"effects": Effects, "interactions": Interactions}


class Runs:
    """All forward passes of one call: on what, with what replaced, and the sums so far.

    Args:
        model: a model that can be run.
        heads: the weights of the layers, by name.
        batches: the text.
        options: what to replace.
        folds: of documents.
        kinds: what is wanted: "effects", "interactions" or both.
        tokens_per_batch: size of a forward pass.
        seed: of all that is drawn: windows, donors, hidden tokens, pairs.

    Raises:
        ValueError: a pair of an unknown layer or head; too little text.
        NotApplicable: the model cannot be run.
    """

    def __init__(
        self,
        model: AttentionModel,
        heads: Mapping[str, Heads],
        batches: Batches,
        options: Interventions,
        *,
        folds: int,
        kinds: Collection[str] = tuple(KINDS),
        tokens_per_batch: int = 1024,
        seed: int = 0,
    ) -> None:
        if model.module is None:
            raise NotApplicable(f"{model.name} was read for its weights alone and cannot be run")
        self.heads, self.options, self.batches = heads, options, batches
        pairs: dict[str, list[tuple[int, int]]] = {}
        for layer, chosen in options.pairs.items():  # one layer may be named in two ways
            pairs.setdefault(model.layer_name(layer), []).extend(chosen)
        if left_out := [name for name in pairs if name not in heads]:
            raise ValueError(
                f"pairs of {', '.join(left_out)}, which is not among the layers measured: "
                f"{', '.join(heads)}"
            )
        members = {name: units(h, pairs.get(name, ())) for name, h in heads.items()}
        pool = Pool.of(batches, options.tokens, seed)

        def part(tokens: int) -> Excerpt:
            return excerpt(
                model, pool, tokens=tokens, folds=folds, tokens_per_batch=tokens_per_batch,
                seed=seed,
            )  # fmt: skip

        whole = part(options.tokens)
        self.text: dict[str, Excerpt] = {}
        self.work: dict[str, Ablation | Interaction] = {}
        read = Outcomes(model, options.objective, masked_share=options.masked_share, seed=seed)
        self.stage = Stage(model, heads, read)
        self.resamples = whole.can_resample
        if "effects" in kinds:
            replacements = [r for r in options.replacements if r != "resample" or self.resamples]
            self.text["effects"] = whole
            self.work["effects"] = Ablation(self.stage, members, replacements, folds)
        if "interactions" in kinds and options.interactions and self.resamples:
            self.text["interactions"] = part(min(options.interactions, options.tokens))
            blind = Stage(model, heads, Outcomes(model, "none"))
            self.work["interactions"] = Interaction(blind, folds, options.most_pairs, seed)
        self.folds = folds
        self.found = Found()
        for kind, work in self.work.items():
            getattr(self.found, kind).update({name: work.nothing(name) for name in heads})
        if not self.resamples:
            reason = "nothing was resampled: the text has no two documents of some length"
            self.found.unseen["interactions"] = dict.fromkeys(heads, reason)
        self.forwards = 0

    def __str__(self) -> str:
        share = f"{self.options.masked_share:.0%}"
        looked_at = {
            "causal": "change of output and of loss on the next token",
            "masked": f"change of output and of loss on {share} of the tokens, which are hidden",
            "none": "change of output",
        }[self.stage.read.objective]
        n_heads, said = sum(h.n_heads for h in self.heads.values()), []
        if isinstance(ablation := self.work.get("effects"), Ablation):
            how = ", ".join(ablation.replacements) or "nothing"
            said.append(f"{how} of {n_heads} heads on {self.text['effects']}, {looked_at}")
        if "interactions" in self.work:
            said.append(f"pairs of {n_heads} heads resampled on {self.text['interactions']}")
        return "; ".join([*said, f"{self.total} forward passes, each from a layer on"])

    @property
    def total(self) -> int:
        """Forward passes with something replaced, from wherever each begins."""
        return sum(
            len(self.text[kind]) * sum(len(work.work(name)) for name in self.heads)
            for kind, work in self.work.items()
        )

    @property
    def about(self) -> str:
        """What a result must say about its interventions."""
        refused = self.stage.replay.refused
        parts = [f"{self}.", RULE]
        if not self.resamples:
            parts.append("Nothing was resampled.")
        if refused:
            whole = ", ".join(f"{name} ({why})" for name, why in refused.items())
            parts.append(f"Run from the beginning: {whole}.")
        return " ".join(parts)

    def identity(self) -> str:
        """A hash of all that the sums depend on."""
        model, folds = self.stage.model, self.folds
        about = repr((self.options, self.stage.read.seed, sorted(self.work)))
        digest = hashlib.sha256(
            identity_of(model, self.heads, folds, 0, [about], self.batches).encode()
        )
        for kind, text in self.text.items():
            chain = kind
            for run in text:
                chain = chained(chain, Batch((run.inputs, run.donor)))
                digest.update(bytes_of(run.fold))
            digest.update(chain.encode())
        return digest.hexdigest()

    def go(self, done: Callable[[int, int], None], after: Callable[[], bool]) -> None:
        """Run what has not been run, one (kind, pass, layer) after the other.

        Args:
            done: called with the forward passes that were run and how many there are.
            after: called after each; ends the run if true.
        """
        stages = {"effects": self.stage}
        if (pairs := self.work.get("interactions")) is not None:
            stages["interactions"] = pairs.stage
        number, total = 0, self.total

        def ran() -> None:
            self.forwards += 1
            done(self.forwards, total)

        for kind, work in self.work.items():
            for run in self.text[kind]:
                entered = False
                for layer in self.heads:
                    number += 1
                    if self.found.steps >= number:
                        self.forwards += len(work.work(layer))
                        continue
                    if not entered and getattr(self.found, kind):
                        self._enter(kind, stages[kind], run)
                        entered = True
                    self._step(kind, work, layer, ran)
                    self.found.steps = number
                    if after():
                        return

    def _enter(self, kind: str, stage: Stage, run: Pass) -> None:
        """Begin a pass; where that is not possible, no layer can be measured, and why is noted."""
        try:
            replacements = getattr(self.work[kind], "replacements", ())
            if "mean" in replacements and not stage.means:
                stage.find_means(self.text[kind])
            stage.enter(run)
        except NotApplicable as reason:
            self.found.unseen[kind] = dict.fromkeys(self.heads, str(reason))
            getattr(self.found, kind).clear()

    def _step(
        self, kind: str, work: Ablation | Interaction, layer: str, ran: Callable[[], None]
    ) -> None:
        sums = getattr(self.found, kind)
        if layer not in sums:
            return
        try:
            new = work.run(layer, ran)
            old = sums[layer]
            sums[layer] = new if not old.n else old + new
        except NotApplicable as reason:
            self.found.unseen[kind][layer] = str(reason)
            del sums[layer]


def intervene(
    runs: Runs,
    *,
    checkpoint: Path | None = None,
    seconds: int | float = 30.0,
    done: Callable[[int, int], None] | None = None,
) -> tuple[Found, bool]:
    """Run all interventions; what was found, and whether a SIGINT ended it.

    With a checkpoint, the sums are kept there every so often; a later call with the same model,
    text and options goes on from it and ends with the same sums. SIGINT (in the main thread) ends
    the run after the layer in hand, a second one at once.

    Raises:
        ValueError: a checkpoint that is none or is of another run.
        OSError: it cannot be written.
    """
    identity = runs.identity() if checkpoint else ""
    if checkpoint is not None:
        _read(checkpoint, identity, runs.found)
    saved = time.monotonic()
    with interruptible() as interrupted:

        def after() -> bool:
            nonlocal saved
            if checkpoint is not None and time.monotonic() - saved > seconds:
                _write(checkpoint, identity, runs.found)
                saved = time.monotonic()
            return interrupted()

        runs.go(done or (lambda number, total: None), after)
        if checkpoint is not None:
            _write(checkpoint, identity, runs.found)
        return runs.found, interrupted()


def _write(path: Path, identity: str, found: Found) -> None:
    parts: Parts = {
        kind: {
            layer: {f.name: getattr(sums, f.name) for f in fields(sums)}
            for layer, sums in getattr(found, kind).items()
        }
        for kind in KINDS
    }
    about = {"steps": str(found.steps), "unseen": json.dumps(found.unseen)}
    checkpoints.write(path, identity, parts, about)


def _read(path: Path, identity: str, found: Found) -> None:
    """Fill in what a file holds, where there is one."""
    kept = checkpoints.read(path, identity)
    if kept is None:
        return
    parts, about = kept
    for kind, make in KINDS.items():
        sums = {layer: make(**given) for layer, given in parts.get(kind, {}).items()}
        setattr(found, kind, sums)
    found.unseen = json.loads(about["unseen"])
    found.steps = int(about["steps"])
