"""Tasks: answers by other means, no example in two splits, nulls that are what they say."""

import math

import pytest
import torch

from headmix.lab.tasks import SPLITS, TASKS

N = 400


def examples(name: str, split: str = "train", seed: int = 0):
    return TASKS[name]().draw(torch.Generator().manual_seed(seed), N, split)


@pytest.mark.parametrize("name", TASKS)
def test_examples_fit_and_come_again_with_their_seed(name) -> None:
    task = TASKS[name]()
    inputs, labels = examples(name)
    assert inputs.shape == (N, task.length)
    assert labels.shape == (N, task.answers or task.length)
    assert inputs.min() >= 0
    assert inputs.max() < task.vocabulary
    assert labels.min() >= 0
    assert labels.max() < task.classes
    again = examples(name)
    assert torch.equal(inputs, again[0])
    assert torch.equal(labels, again[1])
    assert not torch.equal(inputs, examples(name, seed=1)[0])


@pytest.mark.parametrize("name", TASKS)
def test_no_example_is_in_two_splits(name) -> None:
    seen = [{tuple(row) for row in examples(name, split)[0].tolist()} for split in SPLITS]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]


@pytest.mark.parametrize("name", ["xor", "threshold"])
def test_classes_are_even(name) -> None:
    _, labels = examples(name, "test")
    assert float(labels.float().mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(N))


def test_answers_of_sums() -> None:
    for row, (label,) in zip(*(t.tolist() for t in examples("xor")), strict=True):
        assert label == (row[-2] + row[-3]) % 2
    for row, (label,) in zip(*(t.tolist() for t in examples("threshold")), strict=True):
        assert label == (row[-2] + row[-3] > 15)
    inputs, labels = examples("crowd")
    assert torch.equal(inputs[:, :8], labels)


def test_induction_has_one_answer_and_two_of_each_half() -> None:
    inputs, labels = examples("induction")
    for row, (label,) in zip(inputs.tolist(), labels.tolist(), strict=True):
        items = [tuple(row[n : n + 3]) for n in range(0, 18, 3)]
        a, b = row[18:]
        assert [y - 8 for i, j, y in items if (i, j) == (a, b)] == [label]
        assert sum(i == a for i, _, _ in items) == 2
        assert sum(j == b for _, j, _ in items) == 2
        assert len({y for _, _, y in items}) == 6
        assert len({(i, j) for i, j, _ in items}) == 6


def test_the_null_of_text_is_the_loss_of_a_reader_of_frequencies() -> None:
    task = TASKS["characters"]()
    _, train = task.draw(torch.Generator().manual_seed(0), 20_000, "train")
    _, test = task.draw(torch.Generator().manual_seed(1), 2_000, "test")
    counts = torch.bincount(train.flatten(), minlength=task.classes) + 1.0
    loss = -(counts / counts.sum()).log()[test].mean()
    assert float(loss) == pytest.approx(task.chance, abs=0.02)
    inputs, labels = examples("characters")
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
