"""The pass over text: groups of layers, batches, checkpoints, kills and interrupts."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from architectures import tiny_model
from torch import Tensor

import headmix as hm
from headmix.activations import accumulate, plan
from headmix.capture import Batch
from headmix.model import AttentionModel
from headmix.moments import Moments
from headmix.packing import Batches, batches

METRICS = ["variance_share", "pair_interference", "cka", "cca", "loo_r2", "head_norm"]


def documents(count: int = 12, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 99, (40 + 5 * n,), generator=generator) for n in range(count)]


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    return hm.load(tiny_model("llama", num_hidden_layers=3))


def measured(model: AttentionModel, text: object = None, **options: object) -> xr.Dataset:
    text = documents() if text is None else text
    return hm.measure(model, text, metrics=METRICS, **options)


def summed(
    model: AttentionModel, feed: Batches, folds: int = 3, **options: object
) -> dict[str, Moments]:
    heads = {name: model.heads(name) for name in model.layers}
    return accumulate(model, heads, feed, folds=folds, **options)[0].moments


def one_layer(model: AttentionModel) -> float:
    """Bytes that the sums of one layer take in five folds."""
    feed = batches(model, documents(), folds=5)
    return float(plan({"L0": model.heads("L0")}, feed, folds=5).layer_bytes["L0"])


def assert_same(a: xr.Dataset, b: xr.Dataset, *besides: str) -> None:
    """Bit for bit, attributes too."""
    xr.testing.assert_identical(a.drop_attrs(deep=False), b.drop_attrs(deep=False))
    unlike = {k for k in a.attrs.keys() | b.attrs.keys() if a.attrs.get(k) != b.attrs.get(k)}
    assert unlike <= set(besides)


def assert_bits(a: dict[str, Moments], b: dict[str, Moments]) -> None:
    assert a.keys() == b.keys()
    for layer, mine in a.items():
        for f in fields(Moments):
            assert torch.equal(getattr(mine, f.name), getattr(b[layer], f.name)), f.name


def assert_near(a: dict[str, Moments], b: dict[str, Moments], tolerance: float) -> None:
    """Statistics that do not depend on the pivot, against the largest entry of each.

    Norms of single tokens are taken in the model's float32, about the first batch's mean.
    """
    for layer, mine in a.items():
        theirs = b[layer]
        assert torch.equal(mine.count, theirs.count)
        assert torch.equal(mine.documents, theirs.documents)
        for name in ("mean", "covariance", "norm", "joint_norm"):
            left, right = getattr(mine, name), getattr(theirs, name)
            least = 1e-6 if "norm" in name else 0.0
            apart = (left - right).abs().max() / right.abs().max()
            assert apart <= max(tolerance, least), (layer, name, apart)


# groups of layers


def test_layers_in_groups_give_what_all_together_give(model):
    one = one_layer(model)
    together = measured(model)
    for memory, passes in ((2.5 * one, 2), (1.5 * one, 3)):
        apart = measured(model, memory=memory)
        assert_same(apart, together, "plan")
        assert f"in {passes} passes over the text" in apart.attrs["plan"]


@pytest.mark.parametrize("positions", [0, 7])
def test_the_plan_counts_what_the_sums_take(model, positions):
    heads = {name: model.heads(name) for name in model.layers}
    feed = batches(model, documents(), folds=3)
    planned = plan(heads, feed, folds=3, positions=positions)
    for name, h in heads.items():
        sums = Moments.zeros(h.W_O, folds=3, positions=positions)
        real = sum(getattr(sums, f).nbytes for f in Moments.sums())
        assert planned.layer_bytes[name] == real
    assert planned.groups == (("L0", "L1", "L2"),)


def test_the_plan_in_words():
    W_O = torch.zeros(12, 64, 768)
    heads = {f"L{n}": hm.Heads(W_O, layer=f"L{n}") for n in range(4)}
    feed = Batches(lambda: iter(()), {}, n_batches=40, n_tokens=32_000)
    assert str(plan(heads, feed, folds=5)) == (
        "32000 tokens in 40 batches; the sums of 4 layers take 92 MiB"
    )
    assert str(plan(heads, feed, folds=5, memory=50.0 * 2**20)) == (
        "32000 tokens in 40 batches; the sums of 4 layers take 46 MiB in 2 passes over the text"
    )
    unknown = Batches(lambda: iter(()), {})
    assert str(plan(heads, unknown, folds=5)).startswith("? tokens in ? batches; ")


def test_what_the_machine_has_no_room_for_is_refused_unless_memory_is_named(monkeypatch):
    heads = {f"L{n}": hm.Heads(torch.zeros(12, 64, 768), layer=f"L{n}") for n in range(4)}
    feed = Batches(lambda: iter(()), {}, n_batches=40, n_tokens=32_000)
    joint = plan(heads, feed, folds=5, kinds=("joint",))
    alone = plan(heads, feed, folds=5)
    assert alone.most_bytes == alone.sums_bytes + 12 * max(alone.layer_bytes.values())
    assert joint.most_bytes > 2 * joint.joint_bytes > 2 * 8 * 5 * (4 * 768) ** 2
    for free, fits in ((alone.most_bytes, True), (alone.most_bytes - 1, False)):
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        if fits:
            plan(heads, feed, folds=5)
            with pytest.raises(ValueError, match=r"or leave out metrics across layers$"):
                plan(heads, feed, folds=5, kinds=("joint",))
        else:
            with pytest.raises(
                ValueError, match=r"may take 0\.\d GiB, and 0\.\d GiB of memory are"
            ):
                plan(heads, feed, folds=5)
            plan(heads, feed, folds=5, memory=50.0 * 2**20)


def test_a_layer_that_does_not_fit_is_an_error_before_the_work(model):
    ran = []
    with pytest.raises(ValueError, match=(
        r"^the sums of L0 alone take 0\.00 GiB, more than the 0\.00 GiB of memory allowed: allow "
        "more, or use fewer folds$"
    )):  # fmt: skip
        measured(model, memory=1e3, progress=lambda what, *_: ran.append(what))
    assert "tokens" not in ran


def test_batches_that_can_be_read_once_take_one_pass(model):
    items = [{"input_ids": ids[None]} for ids in documents()]
    whole = measured(model, items)
    assert_same(measured(model, iter(items)), whole, "plan")
    with pytest.raises(ValueError, match="can be read only once: pass them as a list, or allow"):
        measured(model, iter(items), memory=1.5 * one_layer(model))
    assert_same(measured(model, items, memory=1.5 * one_layer(model)), whole, "plan")


# batches


@pytest.mark.parametrize("tokens_per_batch", [1, 100, 10_000])
def test_batch_sizes_change_rounding_only(model, tokens_per_batch):
    text = documents()
    usual = summed(model, batches(model, text, folds=3))
    other = summed(model, batches(model, text, folds=3, tokens_per_batch=tokens_per_batch))
    assert_near(other, usual, 1e-5)


def test_the_order_of_batches_changes_nothing(model):
    feed = batches(model, documents(), folds=3, tokens_per_batch=100)
    backwards = replace(feed, begin=lambda: iter(list(feed)[::-1]))
    forwards = summed(model, feed)
    assert_near(summed(model, backwards), forwards, 1e-9)
    assert_bits(summed(model, feed), forwards)


def test_the_same_metrics_whatever_the_batches(model):
    usual = measured(model)
    other = measured(model, tokens_per_batch=128)
    for name in METRICS:
        np.testing.assert_allclose(other[name], usual[name], rtol=1e-3, atol=1e-5)


def test_a_first_batch_in_which_nothing_counts(model):
    ids = torch.arange(3, 11)[None]
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    empty = Batch({"input_ids": ids}, documents=0, keep={"residual": nothing})
    rest = [Batch({"input_ids": d[None]}, fold=n % 3) for n, d in enumerate(documents())]
    with_empty = Batches(lambda: iter([empty, *rest]), {})
    assert_near(summed(model, with_empty), summed(model, Batches(lambda: iter(rest), {})), 1e-9)


def test_no_batches_at_all(model):
    with pytest.raises(ValueError, match=r"^there is not one batch to run$"):
        summed(model, Batches(lambda: iter(()), {}))


def test_max_tokens_is_how_many_are_seen(model):
    ds = measured(model, max_tokens=333)
    assert ds.n_tokens.values.tolist() == [333.0] * 3
    assert ds.n_documents.values.tolist() == [7.0] * 3  # 40 + 45 + … + 65, and a part of the next
    assert "interrupted" not in ds.attrs


def test_images_one_tensor_each():
    vit = hm.load(tiny_model("vit"))
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(1, 3, 32, 32, generator=generator) for _ in range(8)]
    ds = measured(vit, iter(images), folds=4)
    assert ds.n_tokens.values.tolist() == [8 * 17.0] * 2  # 4 × 4 patches and the class token
    assert ds.n_documents.values.tolist() == [8.0] * 2
    assert np.isfinite(ds.cka_low).all()
    assert ds.attrs["text"] == "given as batches"


def test_one_fold_gives_values_without_intervals(model):
    ds = measured(model, folds=1)
    assert np.isfinite(ds.cka).all()
    assert not [name for name in ds if str(name).endswith(("_low", "_high"))]
    assert "at least two folds" in json.loads(ds.attrs["skipped"])["loo_r2"]["L0"]


def test_progress_counts_tokens(model):
    seen: list[tuple[int, int]] = []
    ds = measured(
        model, progress=lambda what, done, total: seen.append((done, total) * (what == "tokens"))
    )
    counted = [pair for pair in seen if pair]
    total = int(ds.n_tokens[0])
    assert counted == sorted(counted)
    assert counted[-1] == (total, total)


# checkpoints


def stopped(after: int) -> object:
    """A progress callback that interrupts after so many batches."""
    left = after

    def progress(what: str, done: int, total: int) -> None:
        nonlocal left
        left -= what == "tokens"
        if what == "tokens" and left == 0:
            signal.raise_signal(signal.SIGINT)

    return progress


def test_a_run_that_is_done_is_not_run_again(model, tmp_path):
    once = measured(model, checkpoint=tmp_path / "run")
    tokens = []

    def progress(what: str, done: int, total: int) -> None:
        tokens.extend([done] * (what == "tokens"))

    assert_same(measured(model, checkpoint=tmp_path / "run", progress=progress), once)
    assert not tokens


def retrained(model: AttentionModel) -> AttentionModel:
    """Of the same name and with the same W_O."""
    module = tiny_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        module.layers[1].self_attn.q_proj.weight *= 1.001
    return hm.load(module)


OTHER_RUNS = {
    "weights": {"model": retrained},
    "dtype": {"model": lambda model: hm.load(tiny_model("llama", num_hidden_layers=3).double())},
    "text": {"text": documents(seed=1)},
    "one token": {"text": [d.index_fill(0, torch.tensor(7), 50) for d in documents()]},
    "less text": {"max_tokens": 500},
    "a token less": {"max_tokens": 809},
    "more text": {"text": documents(13)},
    "folds": {"folds": 4},
    "windows": {"max_length": 30},
    "batches": {"tokens_per_batch": 128},
    "layers": {"layers": [0, 1]},
    "positions": {"within_position": True},
    "own batches": {"text": [{"input_ids": ids[None]} for ids in documents()]},
}


@pytest.mark.parametrize("other", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(model, tmp_path, other):
    assert sum(map(len, documents())) == 810
    path = tmp_path / "run"
    measured(model, checkpoint=path, tokens_per_batch=256, max_length=64)
    kept = Path(f"{path}.0").read_bytes()
    options = {"tokens_per_batch": 256, "max_length": 64} | OTHER_RUNS[other]
    changed = options.pop("model", lambda same: same)(model)
    with pytest.raises(ValueError, match=(
        r"run\.0 is the checkpoint of another run \(other model, layers, text or folds\): remove "
        "it, or name another one$"
    )):  # fmt: skip
        measured(changed, checkpoint=path, **options)
    assert Path(f"{path}.0").read_bytes() == kept


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused(model, tmp_path, share):
    path = tmp_path / "run"
    measured(model, checkpoint=path)
    file = Path(f"{path}.0")
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"run\.0 is not a checkpoint of headmix: "):
        measured(model, checkpoint=path)


def test_a_checkpoint_that_cannot_be_written_keeps_the_old_one(model, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        measured(model, checkpoint=tmp_path / "nowhere" / "run")
    partial = measured(model, checkpoint=path, progress=stopped(5), tokens_per_batch=64)
    file = Path(f"{path}.0")
    kept = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a full disk
    try:
        with pytest.raises(OSError, match=r"run\.0"):
            measured(model, checkpoint=path, tokens_per_batch=64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == kept
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert partial.n_tokens[0] < measured(model, checkpoint=path, tokens_per_batch=64).n_tokens[0]


# kills


def killed(folder: Path, kills: int) -> None:
    script = Path(__file__).with_name("killed.py")
    done = subprocess.run(
        [sys.executable, script, folder, str(kills), "0"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((folder / "runs.json").read_text())
    assert sum(run["killed"] for run in runs) == kills
    whole = xr.load_dataset(folder / "whole.nc", engine="h5netcdf")
    finished = [run["out"] for run in runs if not run["killed"]]
    for name in finished:
        assert_same(xr.load_dataset(folder / name, engine="h5netcdf"), whole)
    assert any(run["tokens_before_each_batch"][:1] > [0] for run in runs), "none went on midway"
    for run, after in pairwise(runs):
        before, then = run["tokens_before_each_batch"], after["tokens_before_each_batch"]
        if run["killed"] and before and then:  # what was being added, or the next
            assert then[0] >= before[-1]


def test_killed_and_resumed_is_bit_for_bit_the_run_left_alone(tmp_path):
    killed(tmp_path, kills=5)


@pytest.mark.slow
def test_thirty_random_kills(tmp_path):
    killed(tmp_path, kills=30)


# interrupts


def test_an_interrupt_leaves_a_result_of_what_was_seen(model, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    options = {"checkpoint": tmp_path / "run", "tokens_per_batch": 64}
    whole = measured(model, tokens_per_batch=64)
    partial = measured(model, progress=stopped(7), **options)
    assert signal.getsignal(signal.SIGINT) is handler
    seen = int(partial.n_tokens[0])
    assert 0 < seen < 810
    assert partial.attrs["interrupted"] == f"{seen} of 810 tokens were seen"
    assert set(partial.n_tokens.values) == {seen}
    assert np.isfinite(partial.cka_low).all()  # every fold was seen
    resumed = measured(model, **options)
    assert_same(resumed, whole)
    assert "interrupted" not in resumed.attrs


def test_an_interrupt_before_every_fold_was_seen(model):
    partial = measured(model, progress=stopped(1), tokens_per_batch=64)
    assert np.isfinite(partial.cka).all()
    assert "cka_low" not in partial
    two = measured(model, progress=stopped(2), tokens_per_batch=64)
    feed = list(batches(model, documents(), folds=5, tokens_per_batch=64))[:2]
    assert [batch.fold for batch in feed] == [0, 1]
    # as if there were two folds only
    assert_near_dataset(two, measured(model, feed, folds=2), "cka_low", "cka_high", "cka")


def assert_near_dataset(a: xr.Dataset, b: xr.Dataset, *names: str) -> None:
    for name in names:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-9, atol=1e-12)


def test_an_interrupt_between_groups_names_the_layers_that_were_not_run(model):
    ds = measured(model, memory=1.5 * one_layer(model), progress=stopped(7), tokens_per_batch=64)
    seen = int(ds.n_tokens[0])
    assert ds.attrs["interrupted"] == f"{seen} of 810 tokens were seen; not run: L1, L2"
    assert ds.n_tokens.values.tolist() == [seen, 0, 0]
    assert np.isfinite(ds.cka.sel(layer="L0")).all()
    assert np.isnan(ds.cka.sel(layer="L1")).all()


def test_an_interrupt_of_batches_that_nobody_counted(model):
    def endless() -> Iterator[dict[str, Tensor]]:
        while True:
            yield from ({"input_ids": ids[None]} for ids in documents())

    ds = measured(model, endless(), progress=stopped(20))
    assert ds.attrs["interrupted"] == f"{int(ds.n_tokens[0])} tokens were seen"


def test_an_interrupt_after_the_last_batch_changes_nothing(model):
    def late(what: str, done: int, total: int) -> None:
        if what == "tokens" and done == total:
            signal.raise_signal(signal.SIGINT)

    assert_same(measured(model, progress=late), measured(model))


def test_a_second_interrupt_ends_the_run_at_once(model):
    def impatient(what: str, done: int, total: int) -> None:
        if what == "tokens":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        measured(model, progress=impatient)
    assert signal.getsignal(signal.SIGINT) is handler
