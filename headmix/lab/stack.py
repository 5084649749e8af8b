"""Stack: several models of one config as one, and an Adam that steps them all.

Small models spend their time in calling, not in computing. The weights of R models are one [R, P]
matrix and ``torch.vmap`` runs them, so that a step of all of them is a few large operations, and
Adam with a learning rate of its own for each is a few operations on one matrix.
"""

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from headmix.lab.outputs import FROZEN
from headmix.lab.transformer import Attention, Config, Transformer


def build(config: Config, seed: int) -> Transformer:
    """A model as it is before training; the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Transformer(config)


class Stack:
    """R models of one config, run side by side on inputs of their own.

    Attributes:
        flat: their trainable weights, [R, P]; where Adam works.
    """

    def __init__(self, models: Sequence[Transformer]) -> None:
        self.template = deepcopy(models[0])
        _use_fused(self.template, False)
        named = [dict(model.named_parameters()) for model in models]
        self.shapes = {name: p.shape for name, p in named[0].items()}
        rows = [torch.cat([p.detach().flatten() for p in each.values()]) for each in named]
        self.flat = nn.Parameter(torch.stack(rows))
        self.frozen: dict[str, Tensor] = {}
        if self.template.config.output in FROZEN:
            buffers = [dict(model.named_buffers()) for model in models]
            self.frozen = {name: torch.stack([b[name] for b in buffers]) for name in buffers[0]}

    def weights(self) -> dict[str, Tensor]:
        """Each weight of all models, [R, …]."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = self.flat.split(sizes, 1)
        return {
            name: part.unflatten(1, shape) if len(shape) > 1 else part
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def __call__(
        self, inputs: Int[Tensor, "run example token"]
    ) -> Float[Tensor, "run example token output"]:
        def one(weights: dict[str, Tensor], frozen: dict[str, Tensor], tokens: Tensor) -> Tensor:
            out: Tensor = functional_call(self.template, (weights, frozen), (tokens,))
            return out

        result: Tensor = torch.vmap(one)(self.weights(), self.frozen, inputs)
        return result

    def model(self, run: int) -> Transformer:
        """One of the models, on its own."""
        model = deepcopy(self.template)
        _use_fused(model, True)
        weights = {n: w[run].detach() for n, w in self.weights().items()}
        frozen = {n: w[run] for n, w in self.frozen.items()}
        with torch.no_grad():
            for name, weight in [*model.named_parameters(), *model.named_buffers()]:
                if name in weights or name in frozen:
                    weight.copy_(weights[name] if name in weights else frozen[name])
        return model


class Adam:
    """Adam (Kingma & Ba 2015) with a learning rate and a gradient norm of its own for each run.

    Learning rates rise over the first tenth of the steps and fall to nothing by a cosine.
    """

    def __init__(self, flat: nn.Parameter, rates: Float[Tensor, "run"], steps: int) -> None:
        self.flat, self.rates, self.steps, self.done = flat, rates[:, None], steps, 0
        self.mean, self.square = torch.zeros_like(flat), torch.zeros_like(flat)

    @torch.no_grad()
    def step(self) -> None:
        gradient, self.flat.grad = self.flat.grad, None
        assert gradient is not None
        gradient *= (1 / gradient.norm(dim=1, keepdim=True)).clamp(max=1)
        self.done += 1
        self.mean.lerp_(gradient, 0.1)
        self.square.mul_(0.98).addcmul_(gradient, gradient, value=0.02)
        mean = self.mean / (1 - 0.9**self.done)
        square = self.square / (1 - 0.98**self.done)
        self.flat.sub_(self.schedule() * self.rates * mean / (square.sqrt() + 1e-8))

    def schedule(self) -> float:
        part = self.done / self.steps
        return min(1.0, 10 * part) * 0.5 * (1 + math.cos(math.pi * part))


def _use_fused(model: Transformer, fused: bool) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused = fused
