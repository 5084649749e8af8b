"""Training side by side is training; it repeats itself; it finds what there is to find."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import headmix as hm
from headmix import lab
from headmix.lab.stack import Stack

TASK = lab.TASKS["threshold"]()


@pytest.mark.parametrize("variant", lab.VARIANTS)
def test_a_stack_runs_each_model_as_it_is(variant) -> None:
    shape = TASK.config(**lab.VARIANTS[variant], n_layers=2)
    models = [lab.build(shape, seed) for seed in range(3)]
    inputs = torch.randint(17, (3, 6, 5), generator=torch.Generator().manual_seed(0))
    stack = Stack(models)
    for run, (model, tokens, out) in enumerate(zip(models, inputs, stack(inputs), strict=True)):
        torch.testing.assert_close(out, model(tokens), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stack.model(run)(tokens), model(tokens))


def one_by_one(config: lab.Config, seed: int, rate: float, steps: int) -> lab.Transformer:
    """The same training written the usual way, with torch's own Adam, schedule and clipping."""
    model = lab.build(config, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min(1, 10 * (n + 1) / steps) * (1 + math.cos(math.pi * (n + 1) / steps)) / 2,
    )
    stream = torch.Generator().manual_seed(1_000_003 + seed)
    for _ in range(steps):
        inputs, labels = TASK.draw(stream, 16, "train")
        cross_entropy(model(inputs)[:, -1], labels[:, 0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("output", ["full", "random_orthogonal", "low_rank"])
def test_side_by_side_is_one_by_one(output) -> None:
    config = TASK.config(output=output)
    trained = lab.train(config, TASK, seeds=[3, 4], learning_rates=[1e-3, 1e-2], steps=12, batch=16)
    tokens = torch.randint(17, (6, 5), generator=torch.Generator().manual_seed(0))
    for seed, rate, column in ((3, 1e-3, 0), (4, 1e-2, 1)):
        alone = one_by_one(config, seed, rate, 12)
        together = trained.model(seed, column)
        torch.testing.assert_close(together(tokens), alone(tokens), atol=1e-3, rtol=1e-3)
        moved = (together(tokens) - lab.build(config, seed)(tokens)).abs().max()
        assert moved > 1e-2  # so that there was something to compare


def test_the_same_call_gives_the_same_numbers() -> None:
    def run(seeds: list[int]) -> lab.Trained:
        return lab.train(TASK.config(), TASK, seeds=seeds, steps=10, batch=8)

    first, again, other = run([0]), run([0]), run([1])
    assert torch.equal(first.stack.flat, again.stack.flat)
    assert torch.equal(first.value, again.value)
    assert not torch.equal(first.stack.flat, other.stack.flat)


def test_training_leaves_the_threads_and_the_generator_alone() -> None:
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    lab.train(TASK.config(), TASK, seeds=[0], steps=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def trained_on(name: str, **switches) -> lab.Trained:
    task = lab.TASKS[name]()
    bare = {"skip": False, "norm": False, "mlp": False}
    config = task.config(**bare | switches)
    return lab.train(config, task, seeds=range(2), learning_rates=[1e-2], steps=120, batch=32)


def test_attention_alone_guesses_at_xor_and_a_feed_forward_solves_it() -> None:
    alone = trained_on("xor", output="full")
    assert alone.loss.min() > math.log(2) - 0.02  # the exact bound is for even cells
    solved = trained_on("xor", output="identity", mlp=True)
    assert (solved.value == 1).all()
    assert solved.loss.max() < 0.05


def test_a_threshold_needs_neither_output_nor_feed_forward() -> None:
    assert trained_on("threshold", output="identity").value.min() > 0.98


def test_the_learning_rate_is_chosen_on_validation() -> None:
    trained = lab.train(
        TASK.config(), TASK, seeds=[0, 1], learning_rates=[1e-5, 1e-2, 1e4], steps=60
    )
    assert trained.learning_rates[trained.chosen] == 1e-2
    assert trained.validation.shape == trained.loss.shape == trained.value.shape == (2, 3)
    tokens = torch.zeros(1, 5, dtype=torch.long)
    assert torch.equal(trained.model()(tokens), trained.model(0, 1)(tokens))


def test_checkpoints_follow_one_training(tmp_path) -> None:
    seen = []
    trained = lab.train(
        TASK.config(output="shared"), TASK, seeds=[5], learning_rates=[3e-3], steps=6, batch=8,
        checkpoints=tmp_path / "run", every=4, progress=lambda *what: seen.append(what),
    )  # fmt: skip
    files = sorted((tmp_path / "run").iterdir())
    steps = ["seed5-rate0.003-step00000", "seed5-rate0.003-step00004", "seed5-rate0.003-step00006"]
    assert [f.stem for f in files] == steps
    assert seen[-1] == ("training threshold", 6, 6)
    tokens = torch.randint(17, (4, 5), generator=torch.Generator().manual_seed(0))
    first, _, last = (lab.open_model(f) for f in files)
    torch.testing.assert_close(first(tokens), lab.build(trained.config, 5)(tokens))
    torch.testing.assert_close(last(tokens), trained.model()(tokens))
    assert hm.verify(last).ok
    W_O = [hm.load(f).heads(0).W_O for f in files]
    assert (W_O[0] - W_O[1]).abs().max() > 1e-4
    assert (W_O[1] - W_O[2]).abs().max() > 1e-4


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing to train: seeds=\(\)"):
        lab.train(TASK.config(), TASK, seeds=[])
    with pytest.raises(ValueError, match="steps=0"):
        lab.train(TASK.config(), TASK, steps=0)


def test_a_model_measured_under_inference_can_be_trained_after() -> None:
    """Masks are kept: one made without gradients must not be in the way of them."""
    model = lab.build(TASK.config(), 0)
    hm.verify(model)
    model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    assert model.embed_tokens.weight.grad is not None
