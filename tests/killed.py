"""Run ``measure`` with a checkpoint, killed at random moments and begun again until it is done.

``python killed.py FOLDER KILLS SEED`` writes whole.nc, from a run left alone, and killed-0.nc, … ,
each from as many killed runs as it took, until KILLS were killed in all; runs.json tells of every
run. Each is a process of its own, forked once all modules are imported.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from architectures import tiny_model

import headmix as hm
from headmix import activations, capture, measurement

METRICS = ("variance_share", "cka", "loo_r2", "head_norm", "attention_entropy", "attention_js")


def documents(count: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 99, (20 + 2 * n,), generator=generator) for n in range(count)]


def measured(path: Path, checkpoint: Path | None, log: int) -> None:
    """Measure into a file, a checkpoint after each batch, a line logged for each as it begins."""
    plain = capture.capture

    def logged(model, batches, heads, moments, *more):
        os.write(log, f"{int(next(iter(moments.values())).n)}\n".encode())
        return plain(model, batches, heads, moments, *more)

    activations.capture = logged  # this process ends with the run
    measurement.accumulate = partial(activations.accumulate, seconds=0)
    model = hm.load(tiny_model("gpt2"))
    text = documents()
    ds = hm.measure(
        model, text, metrics=METRICS, tokens_per_batch=64, folds=4, checkpoint=checkpoint
    )
    hm.save(ds, path)


def forked(function: Callable[..., None], *args: Path | int | None) -> int:
    """The id of a process that calls the function and ends."""
    child = os.fork()
    if child:
        return child
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    moments = random.Random(seed)
    null = os.open(os.devnull, os.O_WRONLY)
    measured(folder / "whole.nc", None, null)  # brings in every module
    start = time.monotonic()
    measured(folder / "whole.nc", None, null)
    took, runs, done = time.monotonic() - start, [], 0
    while kills or runs[-1]["killed"]:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        out, checkpoint = folder / f"killed-{done}.nc", folder / f"checkpoint-{done}"
        child = forked(measured, out, checkpoint, log)
        if kills:
            time.sleep(moments.uniform(0, took))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        killed = os.WIFSIGNALED(status)
        kills, done = kills - killed, done + (not killed)
        began = [int(line) for line in (folder / "log").read_text().split()]
        runs.append({"out": out.name, "killed": killed, "tokens_before_each_batch": began})
    (folder / "runs.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
