"""Training: all seeds and learning rates of one variant side by side, then tested."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from headmix.lab.stack import Adam, Stack, build
from headmix.lab.storage import save
from headmix.lab.tasks import Examples, Task
from headmix.lab.transformer import Config, Transformer

#: Called with (what, done, total).
Progress = Callable[[str, int, int], None]

#: Examples of a held-out split that are tested.
HELD_OUT = 512


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
