"""Training several lab models at once: all seeds and learning rates of one variant side by side.

Small models spend their time in calling, not in computing. ``Stack`` holds the weights of R models
as one [R, P] matrix and runs them with ``torch.vmap``, so that a step of all of them costs little
more than a step of one, and Adam with a learning rate of its own for each is a few operations on
one matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from headmix.lab.outputs import FROZEN
from headmix.lab.storage import save
from headmix.lab.tasks import Examples, Task
from headmix.lab.transformer import Attention, Config, Transformer

#: Called with (what, done, total).
Progress = Callable[[str, int, int], None]

#: Examples of a held-out split that are tested.
HELD_OUT = 512


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


@dataclass(frozen=True, eq=False)
class Trained:
    """What came of one variant: every seed at every learning rate.

    Attributes:
        config, task: what was trained, on what.
        seeds: of each row; learning_rates: of each column.
        validation: loss (nats) on the validation split, [seed, rate]; what the rate is chosen by.
        loss: the same on the test split; value: the task's value on it (accuracy, or the loss).
        stack: the models themselves; see ``model``.
    """

    config: Config
    task: Task
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    validation: Float[Tensor, "seed rate"]
    loss: Float[Tensor, "seed rate"]
    value: Float[Tensor, "seed rate"]
    stack: Stack

    @property
    def chosen(self) -> int:
        """The learning rate with the least mean validation loss over seeds, by position."""
        return int(self.validation.mean(0).nan_to_num(math.inf).argmin())

    def model(self, seed: int | None = None, rate: int | None = None) -> Transformer:
        """A trained model: of the first seed and the chosen learning rate unless others are named.

        Args:
            seed: one of ``seeds``.
            rate: a position in ``learning_rates``.
        """
        row = 0 if seed is None else self.seeds.index(seed)
        column = self.chosen if rate is None else rate
        return self.stack.model(row * len(self.learning_rates) + column)


def train(
    config: Config,
    task: Task,
    *,
    seeds: Iterable[int] = range(5),
    learning_rates: Iterable[float] = (1e-3, 3e-3, 1e-2),
    steps: int = 500,
    batch: int = 64,
    progress: Progress | None = None,
    checkpoints: str | Path | None = None,
    every: int = 100,
) -> Trained:
    """Train one variant from every seed at every learning rate.

    A seed decides the first weights and the order of examples, for all learning rates alike. The
    same call gives the same numbers on the same machine and number of threads.

    Args:
        config: the model; ``task.config(...)`` makes one that fits.
        task: what it is to learn.
        seeds, learning_rates: trained all at once.
        steps: of Adam.
        batch: examples a step.
        progress: called with ("training …", step, steps).
        checkpoints: a folder for safetensors files ``seed0-rate0.003-step00100.safetensors``, of
            every run at step 0, after every ``every`` steps and at the end; what ``open_model`` and
            ``headmix.load`` read.
        every: steps between them.

    Raises:
        ValueError: no seeds, learning rates or steps.
        OSError: checkpoints cannot be written.

    >>> from headmix.lab.tasks import threshold
    >>> task = threshold()
    >>> trained = train(task.config(mlp=False), task, seeds=[0], learning_rates=[3e-3], steps=20)
    >>> trained.value.shape
    torch.Size([1, 1])
    """
    seeds, rates = tuple(seeds), tuple(float(r) for r in learning_rates)
    if not seeds or not rates or steps < 1:
        raise ValueError(f"nothing to train: seeds={seeds}, learning_rates={rates}, steps={steps}")
    stack = Stack([build(config, seed) for seed in seeds for _ in rates])
    optimizer = Adam(stack.flat, torch.tensor(rates).repeat(len(seeds)), steps)
    streams = [torch.Generator().manual_seed(1_000_003 + seed) for seed in seeds]
    with one_thread():
        for step in range(steps):
            if checkpoints is not None and step % every == 0:
                _write(stack, seeds, rates, Path(checkpoints), step)
            inputs, labels = _each([task.draw(s, batch, "train") for s in streams], len(rates))
            losses(task, stack(inputs), labels).sum().backward()
            optimizer.step()
            if progress:
                progress(f"training {task.name}", step + 1, steps)
        if checkpoints is not None:
            _write(stack, seeds, rates, Path(checkpoints), steps)
        validation, _ = held_out(stack, task, "validation")
        loss, value = held_out(stack, task, "test")
    shape = (len(seeds), len(rates))
    return Trained(
        config, task, seeds, rates,
        validation.reshape(shape), loss.reshape(shape), value.reshape(shape), stack,
    )  # fmt: skip


@torch.no_grad()
def held_out(
    stack: Stack, task: Task, split: str
) -> tuple[Float[Tensor, "run"], Float[Tensor, "run"]]:
    """Loss (nats) and value of every model, on the same examples of a held-out split."""
    inputs, labels = task.draw(torch.Generator().manual_seed(7), HELD_OUT, split)
    loss, value = [], []
    for x, y in zip(inputs.split(64), labels.split(64), strict=True):
        runs = len(stack.flat)
        logits = stack(x.expand(runs, -1, -1))
        y = y.expand(runs, -1, -1)
        loss.append(losses(task, logits, y))
        value.append((task.read(logits).argmax(-1) == y).float().mean((1, 2)))
    mean = torch.stack(loss).mean(0)
    return mean, torch.stack(value).mean(0) if task.unit == "accuracy" else mean


def losses(
    task: Task,
    logits: Float[Tensor, "run example token output"],
    labels: Int[Tensor, "run example answer"],
) -> Float[Tensor, "run"]:
    """Mean cross-entropy of every model, in nats an answer."""
    answers = task.read(logits)
    each = cross_entropy(answers.flatten(0, -2), labels.flatten(), reduction="none")
    return each.view(labels.shape).mean((1, 2))


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, which wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _use_fused(model: Transformer, fused: bool) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused = fused


def _each(
    drawn: Sequence[Examples], rates: int
) -> tuple[Int[Tensor, "run example token"], Int[Tensor, "run example answer"]]:
    """Every seed's examples, for every one of its learning rates: [seed × rate, example, …]."""
    inputs, labels = (
        torch.stack(part).repeat_interleave(rates, 0) for part in zip(*drawn, strict=True)
    )
    return inputs, labels


def _write(
    stack: Stack, seeds: Sequence[int], rates: Sequence[float], folder: Path, step: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[tuple[int, float]] = [(seed, rate) for seed in seeds for rate in rates]
    for run, (seed, rate) in enumerate(runs):
        save(stack.model(run), folder / f"seed{seed}-rate{rate:g}-step{step:05d}.safetensors")
