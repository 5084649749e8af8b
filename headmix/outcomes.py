"""outcomes: what a model gives at its end, so that what an intervention changes there can be told.

The *output* is the last hidden state, or what a module returns that has no base model within it;
models that predict tokens have a *loss* as well: causal ones on the next token, masked ones on
tokens that are hidden from them.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headmix.excerpt import Pass
from headmix.heads import NotApplicable
from headmix.model import AttentionModel

OBJECTIVES = ("causal", "masked", "none")

#: Predictions whose logarithms are taken together: few enough for a large vocabulary.
ROWS = 256


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one pass gave for the tokens that count.

    Attributes:
        output: ``[token, feature]``.
        keep: ``[row, token]``, the tokens that count.
        logits: ``[prediction, vocabulary]``; None where no tokens are predicted.
    """

    output: Float[Tensor, "token feature"]
    keep: Bool[Tensor, "row position"]
    logits: Float[Tensor, "prediction vocabulary"] | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """One pass as the objective has it: its inputs, and what is to be predicted where.

    Attributes:
        run: the pass; for masked models with tokens hidden.
        at: ``[row, token]``, positions whose logits predict; None where nothing is predicted.
        answers: ``[prediction]``, the right tokens.
    """

    run: Pass
    at: Bool[Tensor, "row token"] | None = None
    answers: Int[Tensor, "prediction"] | None = None


class Outcomes:
    """How one model's outcome is read.

    Args:
        model: a model that can be run.
        objective: "causal", "masked" or "none"; by what the model is when None.
        masked_share: of the tokens that count, how many are hidden from a masked model.
        seed: which.

    Raises:
        ValueError: an unknown objective, or a masked one without a mask token.
    """

    def __init__(
        self,
        model: AttentionModel,
        objective: str | None = None,
        *,
        masked_share: int | float = 0.15,
        seed: int = 0,
    ) -> None:
        assert model.module is not None
        if objective not in (None, *OBJECTIVES):
            raise ValueError(f"objective {objective!r}: expected one of {', '.join(OBJECTIVES)}")
        self.model, self.seed, self.share = model, seed, masked_share
        self.objective = objective or objective_of(model)
        self.mask = getattr(model.tokenizer, "mask_token_id", None)
        if self.objective == "masked" and self.mask is None:
            if objective is not None:
                raise ValueError(f"{model.name}: its tokenizer has no mask token")
            self.objective = "none"
        self.stream = _last_stream(model)
        self.end = _end(model.module)

    def task(self, run: Pass) -> Task:
        """What a pass asks of the model.

        Raises:
            NotApplicable: the model predicts tokens, but its input names none.
        """
        if self.objective == "none":
            return Task(run)
        _, ids = self._ids(run.inputs)
        keep = run.kept(self.stream, (*ids.shape, 1))
        if self.objective == "causal":
            at = torch.zeros_like(keep)
            at[:, :-1] = keep[:, 1:]
            answers = ids.roll(-1, 1)[at.to(ids.device)]
            return Task(run, at, answers)
        at = self._hidden(ids, keep)
        where = at.to(ids.device)
        donor = run.donor
        if donor is not None and self._ids(donor)[1].shape == ids.shape:
            donor = self._hiding(donor, where)
        hidden = replace(run, inputs=self._hiding(run.inputs, where), donor=donor)
        return Task(hidden, at, ids[where])

    def _ids(self, inputs: Any) -> tuple[str, Tensor]:
        """The token ids that are predicted from, and under which name they are given."""
        named = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
        for name in ("decoder_input_ids", "input_ids", "input", *named):
            ids = named.get(name)
            if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.ndim == 2:
                return name, ids
        raise NotApplicable("the model predicts tokens, but its input names no token ids")

    def _hidden(
        self, ids: Int[Tensor, "row token"], keep: Bool[Tensor, "row token"]
    ) -> Bool[Tensor, "row token"]:
        """A seeded choice of the tokens that count: of a row the same, whatever its batch."""
        at = keep.cpu().clone()
        for row, own in zip(at, ids.cpu().long(), strict=True):
            text = own[row].numpy().tobytes()
            generator = torch.Generator().manual_seed(zlib.crc32(text, self.seed % 2**32))
            row[row.clone()] = torch.rand(int(row.sum()), generator=generator) < self.share
        return at

    def _hiding(self, inputs: Any, at: Bool[Tensor, "row token"]) -> Any:
        name, ids = self._ids(inputs)
        hidden = ids.masked_fill(at, int(self.mask or 0))
        return {**inputs, name: hidden} if isinstance(inputs, Mapping) else hidden

    def run(self, task: Task) -> Outcome:
        """One forward pass, and what it gave.

        Raises:
            NotApplicable: the model returned nothing that can be read.
        """
        with self._watching() as seen:
            returned = self.model.forward(task.run.inputs)
        output = seen[-1] if seen else _first(returned)
        if output is None:
            raise NotApplicable(f"{self.model.name} returns no tensor of floats")
        if output.ndim == 2:
            output = output[:, None]
        keep = task.run.kept(self.stream, tuple(output.shape))
        kept = output[keep.to(output.device)]
        if task.at is None:
            return Outcome(kept, keep)
        logits = getattr(returned, "logits", None)
        logits = _first(returned) if logits is None else logits
        if logits is None or logits.shape[:2] != task.at.shape:
            raise NotApplicable(f"{self.model.name} returns no logits for each token")
        return Outcome(kept, keep, logits[task.at.to(logits.device)])

    @contextmanager
    def _watching(self) -> Iterator[list[Tensor]]:
        seen: list[Tensor] = []

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if (found := _first(output)) is not None:
                seen.append(found)

        if self.end is None:
            yield seen
            return
        handle = self.end.register_forward_hook(hook)
        try:
            yield seen
        finally:
            handle.remove()


def objective_of(model: AttentionModel) -> str:
    """What a model was made to predict, by its class: "causal", "masked" or "none"."""
    module: Any = getattr(model.module, "original_model", model.module)
    stated = getattr(module, "objective", None)
    if stated in OBJECTIVES:
        return str(stated)
    try:
        if module.get_output_embeddings() is None:
            return "none"
    except (AttributeError, NotImplementedError):
        return "none"
    if "MaskedLM" in type(module).__name__:
        return "masked"
    can = getattr(module, "can_generate", None)
    return "causal" if callable(can) and can() else "none"


def distance(
    output: Float[Tensor, "token feature"], clean: Float[Tensor, "token feature"]
) -> Float[Tensor, "token"]:
    """‖y′ − y‖ / ‖y‖ of each token; 0 where both are zero."""
    moved = (output - clean).double().norm(dim=-1)
    length = clean.double().norm(dim=-1)
    return torch.where(moved > 0, moved / length, moved)


def losses(
    logits: Float[Tensor, "prediction vocabulary"], answers: Int[Tensor, "prediction"]
) -> Float[Tensor, "prediction"]:
    """−ln p of the right token, in nats."""
    parts = zip(logits.split(ROWS), answers.split(ROWS), strict=True)
    found = [nn.functional.cross_entropy(p.float(), a, reduction="none") for p, a in parts]
    return torch.cat([f.double() for f in found]) if found else logits.new_zeros(0).double()


def divergence(
    clean: Float[Tensor, "prediction vocabulary"], logits: Float[Tensor, "prediction vocabulary"]
) -> Float[Tensor, "prediction"]:
    """KL(p ‖ p′) of each prediction, in nats, p the clean one."""
    found = []
    for p, q in zip(clean.split(ROWS), logits.split(ROWS), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1).double().clamp(min=0))
    return torch.cat(found) if found else clean.new_zeros(0).double()


def _last_stream(model: AttentionModel) -> str:
    """The residual stream that the output belongs to."""
    streams = [name.rpartition(".L")[0] or "residual" for name in model.layers]
    return next((s for s in streams if s.startswith("decoder")), streams[-1])


def _end(module: nn.Module) -> nn.Module | None:
    """The module that returns the last hidden state; None where that is the model itself."""
    if "blocks" in dict(module.named_children()) and hasattr(module, "original_model"):
        end = dict(module.named_children()).get("ln_final")
        return end if isinstance(end, nn.Module) else None
    base = getattr(module, "base_model", None)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) and base is module:
        base = module.get_decoder()  # T5 has its head beside encoder and decoder
    return base if isinstance(base, nn.Module) and base is not module else None


def _first(values: Any) -> Tensor | None:
    """The first tensor of floats in what a module returned."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() and values.ndim >= 2 else None
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, tuple | list):
        return next((t for v in values if (t := _first(v)) is not None), None)
    return None
