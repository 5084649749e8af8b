"""measure: run metrics over the layers of a model and collect one Dataset."""

import importlib.metadata
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import xarray as xr

from headmix import __version__
from headmix.activations import Seen, accumulate, plan
from headmix.attention import RULE
from headmix.causal import Runs, intervene
from headmix.collector import Collector
from headmix.heads import ALL_LAYERS, Heads
from headmix.interventions import Interventions
from headmix.labels import parse
from headmix.model import AttentionModel
from headmix.moments import Moments
from headmix.packing import Batches, batches
from headmix.registry import CAUSAL, FROM_TEXT, Metric, NotApplicable, catalogue, unknown_metric
from headmix.sources import load

#: Results of this layout; raised when older readers could misread them.
FORMAT = 1

#: Bytes of weights that metrics which compare all layers may hold unless they were asked for.
HELD = 4 * 2**30

Progress = Callable[[str, int, int], None]


def measure(
    model: AttentionModel | Any,
    text: Any = None,
    *,
    labels: Any = None,
    causal: bool | Interventions = False,
    metrics: Iterable[str] | str | None = None,
    layers: Iterable[str | int] | str | int | None = None,
    folds: int = 5,
    max_tokens: int | None = None,
    tokens_per_batch: int = 1024,
    max_length: int | None = None,
    within_position: bool = False,
    memory: float | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **load_options: Any,
) -> xr.Dataset:
    """Measure the heads of a model, from its weights and, given text, from what they do on it.

    Args:
        model: an AttentionModel, or anything that ``load`` accepts.
        text: what ``headmix.text.read_text`` takes ("default" needs no download), or an iterable
            of batches; weights only when None.
        labels: what probes look for in the text: names with commas, "pos=corpus.conllu" (where the
            file is the text too), a list of names, or a mapping of names to arrays or functions;
            see ``headmix.labels``. No probes when None.
        causal: whether heads are also replaced, one after the other, on a small part of the text,
            to see what changes: many forward passes, said in the plan. How, and on how much text:
            an ``Interventions``. Metrics of that kind that are named are reason enough.
        metrics: names from the catalogue; by default all those marked so that can be computed.
            Metrics of attention patterns are not: they switch the model to eager attention while
            the text runs, the same pass for all metrics, whose memory grows with the square of
            the window.
        layers: names or positions, in any order; by default all.
        folds: into how many folds documents are dealt, for held-out tests and intervals.
        max_tokens: stop after so many tokens; all by default.
        tokens_per_batch: size of a forward pass.
        max_length: the longest window of text, special tokens included.
        within_position: also give each statistic with the mean at each position taken away.
        memory: bytes that the sums over tokens may take while the text runs; layers go in groups,
            each with a pass over the text of its own, where all do not fit. Metrics then take one
            layer at a time, and up to twelve times its sums, for the jackknife.
        checkpoint: a file to keep the sums in while the text runs. A later call that finds it goes
            on from there.
        seed: for nulls that are simulated.
        progress: called with (what, done, total) as the work goes on; a total of 0 is unknown.
            What the pass over text will take is said before it, as "plan: …".
        **load_options: passed to ``load``.

    Returns:
        A Dataset with dims by name (layer, head, head_b, …), a variable a metric,
        ``<metric>_null_mean`` and ``<metric>_null_sd`` beside it, for metrics of activations also
        the ends ``<metric>_low`` and ``<metric>_high`` of a 95 % jackknife interval over documents,
        and provenance in its attributes. Layers with NaN or infinite weights are marked in
        ``valid`` and left NaN. What could not be computed is listed with the reason in
        ``attrs["skipped"]``, as JSON. A run that was interrupted (SIGINT) measures what it saw and
        says so in ``attrs["interrupted"]``.

    Raises:
        ValueError: an unknown metric or layer (the message lists the known ones), a metric of
            activations without text, text that cannot be used, or labels or interventions that no
            metric asked for makes use of.
        NotApplicable: text for a model that was read for its weights alone.
    """
    if not isinstance(model, AttentionModel):
        model = load(model, **load_options)
    asked = None
    if labels is not None:
        asked, text = parse(labels, text)
        if text is None:
            raise ValueError(
                "labels of which text? pass text= ('default' is one), or the file that has them: "
                "labels='pos=corpus.conllu'"
            )
    chosen = _chosen_metrics(metrics, text is not None, asked is not None, bool(causal))
    names = _chosen_layers(model, layers)
    report = progress or (lambda what, done, total: None)
    run = _Run(model, chosen, report, held=HELD if metrics is None else math.inf)
    if asked is not None and "read_outs" not in run.kinds:
        raise ValueError(
            "none of the metrics asked for reads labels: add probe_r2, or leave them out"
        )
    if causal and not run.causal:
        raise ValueError(
            "none of the metrics asked for replaces heads: add head_ablation, or leave causal out"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if not run.kinds and not run.causal:
            run.measure_layers(names, {}, Seen())
        else:
            feed = batches(
                model, text, folds=folds, max_tokens=max_tokens,
                tokens_per_batch=tokens_per_batch, max_length=max_length,
                labels=asked if "read_outs" in run.kinds else None, seed=seed,
            )  # fmt: skip
            if run.kinds:
                run.measure_text(names, feed, folds, within_position, memory, checkpoint)
            else:
                run.measure_layers(names, {}, Seen())
            if run.causal:
                options = causal if isinstance(causal, Interventions) else Interventions()
                shared = {"folds": folds, "tokens_per_batch": tokens_per_batch, "seed": seed}
                run.intervene(feed, options, shared, checkpoint)
        run.measure_model()
    dataset = run.collector.dataset()
    dataset.attrs |= _provenance(model, seed) | run.attrs
    return dataset


class _Run:
    """One call of ``measure``: the layers that were met, and what has been collected of them."""

    def __init__(
        self, model: AttentionModel, metrics: list[Metric], progress: Progress, held: int | float
    ) -> None:
        self.model = model
        self.collector = Collector(metrics)
        self.progress = progress
        self.whole_model = [m for m in metrics if "layers" in m.needs]
        self.causal = [m for m in metrics if {*CAUSAL} & {*m.needs}]
        self.by_layer = [m for m in metrics if "layers" not in m.needs and m not in self.causal]
        seen = [k for k in FROM_TEXT if k not in CAUSAL]
        self.kinds = [k for k in seen if any(k in m.needs for m in metrics)]
        self.kept: list[Heads] = []
        self.joint: Moments | None = None
        self.room = held
        self.attrs: dict[str, str] = {}
        self.vocabulary = cache(model.vocabulary)
        self.reads = lru_cache(maxsize=1)(model.reads)

    def read(self, name: str) -> Heads | None:
        """A layer's weights; None, and the reason collected, where they cannot be used."""
        if name in self.model.refused:
            self.collector.refuse(name, self.model.refused[name])
            return None
        heads = self.model.heads(name)
        self.collector.begin(heads, self.model.sites[name].notes)
        if (bad := heads.nonfinite()) is not None:
            self.collector.invalid[name] = f"NaN or infinity in {bad}"
            return None
        return heads

    def measure_layers(self, names: Sequence[str], heads: Mapping[str, Heads], seen: Seen) -> None:
        """Every metric of one layer, on each of these layers."""
        for done, name in enumerate(names):
            self.progress(name, done, len(names))
            weights = heads.get(name) or self.read(name)
            if weights is None:
                continue
            fetch = partial(self.fetch, name, weights, seen)
            for metric in self.by_layer:
                self.collector.run(metric, name, fetch)
            seen.forget(name)
            if self.whole_model:
                self.keep(weights)

    def keep(self, heads: Heads) -> None:
        """Hold a layer for the metrics that compare all of them, while there is room."""
        self.room -= heads.nbytes
        if self.room >= 0:
            self.kept.append(heads)
            return
        self.kept = []
        for metric in self.whole_model:
            self.collector.skipped[metric.name] = {
                "": f"would hold more than {HELD / 2**30:.0f} GiB of weights, those of all layers: "
                "ask for it by name"
            }
        self.whole_model = []

    def fetch(self, layer: str, heads: Heads, seen: Seen, need: str) -> Any:
        """What a metric asks for by parameter name."""
        if need == "heads":
            return heads
        if need in FROM_TEXT:
            sums = getattr(seen, need)
            if layer not in sums:
                raise NotApplicable(
                    seen.unseen.get(layer, "the text ended before this layer's turn")
                )
            return sums[layer]
        return self.vocabulary() if need == "vocabulary" else self.reads(layer)

    def measure_text(
        self,
        names: Sequence[str],
        feed: Batches,
        folds: int,
        within_position: bool,
        memory: float | None,
        checkpoint: str | Path | None,
    ) -> None:
        """Run the text, a group of layers at a time, and every metric of one layer on each."""
        heads = {name: h for name in names if (h := self.read(name)) is not None}
        if not heads:
            return
        if within_position and not feed.max_length:
            raise ValueError("within_position needs text: batches of your own tell no positions")
        positions = feed.max_length if within_position else 0
        if feed.labelling is not None:
            self.collector.label(feed.labelling)
            self.attrs["labels"] = feed.labelling.description
        planned = plan(
            heads, feed, folds=folds, positions=positions, memory=memory, kinds=self.kinds
        )
        self.attrs |= dict(feed.attrs) | {"folds": str(folds), "plan": str(planned)}
        if "attention" in self.kinds:
            self.attrs["attention"] = (
                f"The text ran with eager attention, where the model has several kernels. {RULE}"
            )
        self.progress(f"plan: {planned}", 0, 0)
        counts: dict[str, tuple[float, float]] = {}
        for number, group in enumerate(planned.groups):
            seen, interrupted = accumulate(
                self.model,
                {name: heads[name] for name in group},
                feed,
                folds=folds,
                positions=positions,
                kinds=self.kinds,
                checkpoint=Path(f"{checkpoint}.{number}") if checkpoint else None,
                done=lambda done, total: self.progress("tokens", done, total),
            )
            counts |= {name: seen.counts(name) for name in group}
            self.measure_layers(group, heads, seen)
            self.joint = seen.moments.pop(ALL_LAYERS, None)
            left = [name for later in planned.groups[number + 1 :] for name in later]
            n_seen = int(counts[group[0]][0])
            if interrupted and (left or n_seen != feed.n_tokens):
                of_all = f" of {feed.n_tokens}" * bool(feed.n_tokens)
                not_run = f"; not run: {', '.join(left)}" * bool(left)
                self.attrs["interrupted"] = f"{n_seen}{of_all} tokens were seen{not_run}"
                self.measure_layers(left, heads, Seen())
                break
        self.collector.counts = counts

    def intervene(
        self,
        feed: Batches,
        options: Interventions,
        shared: Mapping[str, int],
        checkpoint: str | Path | None,
    ) -> None:
        """Replace heads one after the other, and every metric of what that does."""
        names = [n for n in self.collector.shapes if n not in self.collector.invalid]
        if not names:
            return
        if "interrupted" in self.attrs or (feed.once and self.kinds):
            why = "these batches can be read only once" if feed.once else "the run was interrupted"
            reason = f"{why}, before heads were replaced"
            self.collector.skipped |= {m.name: {"": reason} for m in self.causal}
            return
        heads = {name: self.model.heads(name) for name in names}
        kinds = [k for k in CAUSAL if any(k in m.needs for m in self.causal)]
        runs = Runs(self.model, heads, feed, options, kinds=kinds, **shared)
        self.progress(f"plan: {runs}", 0, 0)
        found, interrupted = intervene(
            runs,
            checkpoint=Path(f"{checkpoint}.causal") if checkpoint else None,
            done=lambda done, total: self.progress("heads replaced", done, total),
        )
        self.attrs |= dict(feed.attrs) | {"folds": str(shared["folds"]), "causal": runs.about}
        if interrupted and runs.forwards < runs.total:
            self.attrs["interrupted"] = (
                f"{runs.forwards} of {runs.total} forward passes with heads replaced were run"
            )
        if not self.kinds:
            sums = found.interactions | found.effects
            self.collector.counts = {n: (s.n, float(s.documents.sum())) for n, s in sums.items()}

        def fetch(name: str, need: str) -> Any:
            if need == "heads":
                return heads[name]
            if name in found.unseen[need] or name not in getattr(found, need):
                raise NotApplicable(found.unseen[need].get(name, "no such passes were asked for"))
            return getattr(found, need)[name]

        for name in names:
            for metric in self.causal:
                self.collector.run(metric, name, partial(fetch, name))

    def measure_model(self) -> None:
        """Every metric that compares all layers."""
        self.collector.compared = [h.layer for h in self.kept]
        for done, metric in enumerate(self.whole_model):
            self.progress(metric.name, done, len(self.whole_model))
            if self.kept:
                self.collector.run(metric, "", self.fetch_model)

    def fetch_model(self, need: str) -> Any:
        """What a metric that compares all layers asks for."""
        return self.joint if need == "joint" else self.kept


def _chosen_layers(
    model: AttentionModel, layers: Iterable[str | int] | str | int | None
) -> list[str]:
    """The layers in the model's own order, each once: depth is what composition goes by."""
    if layers is None:
        return model.layers
    wanted = {model.layer_name(n) for n in ([layers] if isinstance(layers, str | int) else layers)}
    if not wanted:
        raise ValueError(f"no layer was chosen; {model.name} has {', '.join(model.layers)}")
    return [name for name in model.layers if name in wanted]


def _chosen_metrics(
    names: Iterable[str] | str | None, with_text: bool, with_labels: bool, with_causal: bool
) -> list[Metric]:
    known = catalogue()
    causal = {n for n, m in known.items() if {*CAUSAL} & {*m.needs}}
    probes = {n for n, m in known.items() if "read_outs" in m.needs}
    activations = {n for n, m in known.items() if {*FROM_TEXT} & {*m.needs}}
    if with_causal and not with_text:
        raise ValueError("heads are replaced while text runs: pass text=, 'default' say")
    if names is None:
        left_out = (set() if with_text else activations) | (set() if with_labels else probes)
        left_out |= set() if with_causal else causal
        return [m for n, m in known.items() if m.default and n not in left_out]
    names = [names] if isinstance(names, str) else list(names)
    if unknown := [n for n in names if n not in known]:
        raise unknown_metric(unknown[0], known)
    if not with_text and (needy := [n for n in names if n in activations]):
        raise ValueError(f"{', '.join(needy)} cannot be computed from weights alone: pass text=")
    if not with_labels and (needy := [n for n in names if n in probes]):
        raise ValueError(f"{', '.join(needy)} need labels of the text: pass labels=")
    return [known[n] for n in names]


def _provenance(model: AttentionModel, seed: int) -> dict[str, str]:
    packages = ("torch", "transformers", "transformer-lens", "numpy")
    versions = {p: importlib.metadata.version(p) for p in packages} | {"headmix": __version__}
    return {
        "headmix_format": str(FORMAT),
        "model": model.name,
        "processing": model.processing,
        "seed": str(seed),
        "versions": json.dumps(versions),
        "provenance": json.dumps(dict(model.provenance)),
    }
