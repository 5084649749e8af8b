"""What the benchmarks of the activation engine share: models, real tokens, and sums to add to."""

import contextlib
import io
import sys
from typing import Any

import torch
import transformers
from smollm2 import folder_and_file
from torch import Tensor

import headmix as hm
from headmix.capture import Batch
from headmix.model import AttentionModel
from headmix.moments import Moments
from headmix.text import read_text

ROWS, LENGTH, FOLDS = 4, 256, 5


def minilm() -> AttentionModel:
    quiet()
    return hm.load("demo")


def smollm2() -> AttentionModel:
    """The base model, without its language-model head, in float32."""
    quiet()
    folder, file = folder_and_file()
    with contextlib.redirect_stderr(io.StringIO()):
        module = transformers.AutoModel.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa"
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return hm.load(module.eval(), name="SmolLM2-135M", tokenizer=tokenizer)


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def token_batches(tokenizer: Any, count: int) -> list[Tensor]:
    """Real text, ``[4, 256]`` token ids each: the default text, cut without regard to documents."""
    ids: list[int] = []
    for document in read_text("default"):
        ids += tokenizer(document.text, add_special_tokens=False, truncation=False)["input_ids"]
        if len(ids) >= count * ROWS * LENGTH:
            break
    size = ROWS * LENGTH
    if len(ids) < count * size:
        sys.exit(f"the default text has {len(ids)} tokens, too few for {count} batches")
    return list(torch.tensor(ids[: count * size]).view(count, ROWS, LENGTH))


def as_batch(ids: Tensor, number: int) -> Batch:
    """As the engine itself makes them, its tokens named."""
    keep = {"residual": torch.ones(ids.shape, dtype=torch.bool)}
    return Batch({"input_ids": ids}, fold=number % FOLDS, keep=keep)


def empty_sums(model: AttentionModel) -> dict[str, Moments]:
    return {n: Moments.zeros(model.heads(n).W_O, folds=FOLDS) for n in model.layers}
