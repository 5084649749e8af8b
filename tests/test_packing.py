"""Documents to batches: every token once, folds by document, nothing that padding could change."""

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from architectures import NAMED, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from small import small_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

import headmix as hm
from headmix.capture import Batch
from headmix.feed import Feed
from headmix.packing import Batches, batches, blocks, deal
from headmix.registry import NotApplicable
from headmix.sources import huggingface
from headmix.text import Document
from headmix.tokens import Tokeniser

#: Decoder, encoder and encoder-decoder, small.
KINDS = {t: huggingface.from_model(tiny_model(t)) for t in ("gpt2", "bert", "t5", "bart")}


@pytest.fixture(scope="module")
def demo() -> hm.AttentionModel:
    return hm.load("demo")


def id_documents(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 99, n) for n in lengths]


def counted(packed: Batches, argument: str, stream: str) -> dict[int, list[int]]:
    """The counted ids of each document, put together again from what the model is given."""
    parts: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for batch in packed:
        for row, window in enumerate(batch.windows):
            keep = batch.keep[stream][row]
            ids = batch.inputs[argument][row][keep].tolist()
            parts[window.document][window.start] = ids
    return {n: [*chain(*(p[start] for start in sorted(p)))] for n, p in sorted(parts.items())}


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda n: sum(n) >= 5)


@settings(max_examples=60, deadline=None)
@given(
    lengths,
    st.sampled_from(sorted(KINDS)),
    st.integers(1, 5),
    st.integers(2, 20),
    st.integers(1, 200),
)
def test_every_token_is_run_once_whatever_the_batches(
    lengths: list[int], kind: str, folds: int, max_length: int, budget: int
):
    """Put together again, documents or blocks are the text's tokens in order, each once."""
    documents = id_documents(lengths)
    packed = batches(
        KINDS[kind], documents, folds=folds, tokens_per_batch=budget, max_length=max_length
    )
    expected = np.concatenate(documents).tolist()
    two = kind in ("t5", "bart")
    for argument in ["input_ids"] + ["decoder_input_ids"] * two:
        stream = argument.partition("_")[0].replace("input", "encoder") if two else "residual"
        found = counted(packed, argument, stream)
        assert [*chain(*found.values())] == expected
        if sum(n > 0 for n in lengths) >= folds:
            assert list(found.values()) == [d.tolist() for d in documents if len(d)]
    _check_plan(packed, len(expected), folds, max_length, budget)


def _check_plan(packed: Batches, n_tokens: int, folds: int, max_length: int, budget: int) -> None:
    """What is said beforehand is what comes, and no limit is passed."""
    made = list(packed)
    fold_of = {w.document: b.fold for b in made for w in b.windows}
    assert {*fold_of.values()} == {*range(folds)}
    for batch in made:
        shape = batch.inputs["input_ids"].shape
        assert shape[1] <= max_length
        assert max(batch.length, shape[1]) * shape[0] <= budget or shape[0] == 1
        assert {fold_of[w.document] for w in batch.windows} == {batch.fold}
        assert batch.documents == sum(w.begins for w in batch.windows)
    assert packed.n_batches == len(made)
    assert packed.n_tokens == sum(b.tokens for b in made) == n_tokens
    assert packed.n_documents == sum(b.documents for b in made) == len(fold_of)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_folds_are_as_even_as_whole_documents_allow(sizes: list[int], folds: int):
    dealt = deal(sizes, folds)
    sums = np.bincount(dealt, sizes, minlength=folds)
    assert sums.max() - sums.min() <= max(sizes)
    assert len({*dealt}) == min(folds, len(sizes))
    assert dealt == deal(sizes, folds)


@given(st.lists(st.integers(3, 50), min_size=1, max_size=4), st.integers(5, 9))
def test_blocks_are_contiguous_and_alike(sizes: list[int], wanted: int):
    tokenise = Tokeniser(None)
    documents = [tokenise(Document(str(n), ids=np.arange(s))) for n, s in enumerate(sizes)]
    cut = blocks(documents, wanted)
    assert len(cut) == min(wanted, sum(sizes))
    assert np.array_equal(
        np.concatenate([b.ids for b in cut]), np.concatenate([d.ids for d in documents])
    )
    for n in range(len(sizes)):
        mine = [len(b) for b in cut if b.name == str(n)]
        assert max(mine) - min(mine) <= 1


def test_fewer_documents_than_folds_are_said_to_be_cut(demo: hm.AttentionModel):
    packed = batches(demo, ["one two three four five six seven eight nine ten"], folds=5)
    assert packed.n_documents == 5
    assert packed.attrs["text"].endswith("cut into 5 contiguous blocks that stand in for documents")
    assert "blocks" not in batches(demo, ["one two"] * 5, folds=5).attrs["text"]


def test_padding_share_is_that_of_the_batches(demo: hm.AttentionModel):
    text = ["a " * n for n in (3, 50, 9, 400, 7, 31)]
    packed = batches(demo, text, folds=2, max_length=100)
    run = real = 0
    for batch in packed:
        ids = batch.inputs["input_ids"]
        run += ids.numel()
        real += int(batch.inputs.get("attention_mask", torch.ones_like(ids)).sum())
    assert packed.padding == pytest.approx(1 - real / run)
    assert packed.padding > 0


# ---- what the model is given -----------------------------------------------------------------


def test_windows_of_a_real_tokenizer(demo: hm.AttentionModel):
    """Special tokens surround every window and never count; nothing else is left out."""
    text = "Many heads see the same thing. " * 20
    packed = batches(demo, [text, "Short."], folds=1, max_length=32, tokens_per_batch=128)
    tokenizer = demo.tokenizer
    encoded = tokenizer([text, "Short."], add_special_tokens=False)["input_ids"]
    expected = dict(enumerate(encoded))
    assert counted(packed, "input_ids", "residual") == expected
    for batch in packed:
        ids, keep = batch.inputs["input_ids"], batch.keep["residual"]
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids)).bool()
        assert (ids[:, 0] == tokenizer.cls_token_id).all()
        assert ((ids == tokenizer.sep_token_id).sum(1) == 1).all()
        assert torch.equal(keep, mask & ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids)))
        assert batch.inputs["use_cache"] is False
    assert any("attention_mask" in b.inputs for b in packed)


def test_a_decoder_reads_the_encoders_window_after_its_start():
    packed = batches(KINDS["bart"], id_documents([3, 5]), folds=1)
    (batch,) = packed
    ids, decoder = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
    assert decoder.shape[1] == ids.shape[1] + 1
    assert (decoder[:, 0] == KINDS["bart"].module.config.decoder_start_token_id).all()
    assert torch.equal(decoder[:, 1:], ids)
    assert not batch.keep["decoder"][:, 0].any()
    assert torch.equal(batch.keep["decoder"][:, 1:], batch.keep["encoder"])
    assert packed.attrs["text_rule"].endswith("the decoder the same after its start token.")


def watched(model: hm.AttentionModel, packed: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    """z of the counted tokens: by layer, document and where the window starts."""
    found = {}
    for batch in packed:
        seen: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            for name, site in model.sites.items():
                stack.enter_context(site.watch(partial(_note, seen, name)))
            model.forward(batch.inputs)
        for name, z in seen.items():
            keep = batch.keep[name.rpartition(".L")[0] or "residual"]
            for row, window in enumerate(batch.windows):
                found[name, window.document, window.start] = z[row][keep[row]]
    return found


def _note(seen: dict[str, torch.Tensor], name: str, z: torch.Tensor, out: torch.Tensor) -> None:
    seen[name] = z


#: Text models whose attention sees exactly the tokens they are given.
WHOLE = sorted(
    set(NAMED)
    - {"longformer", "prophetnet"}  # pad or split their input inside
    - {"whisper", "speech_to_text", "moonshine", "clip"}  # no text by itself
    - {"vit", "deit", "beit", "dinov2", "dinov2_with_registers", "clip_vision_model"}
    - {"siglip_vision_model", "vit_mae", "hubert", "wav2vec2", "wav2vec2-conformer"}
    - {"audio-spectrogram-transformer"}
)


@pytest.mark.parametrize("model_type", WHOLE)
@pytest.mark.filterwarnings("ignore")  # transformers' own, about tiny sizes
def test_padding_changes_nothing(model_type: str):
    """Windows run one by one, without any padding, and padded in one batch: the same z."""
    model = huggingface.from_model(tiny_model(model_type, **NAMED[model_type]))
    documents = id_documents([3, 9, 14, 5, 1, 8])
    options = {"folds": 1, "max_length": 10}
    alone = watched(model, batches(model, documents, tokens_per_batch=1, **options))
    padded = batches(model, documents, tokens_per_batch=1000, **options)
    together = watched(model, padded)
    assert (padded.n_batches, padded.padding > 0.1) == (1, True)
    assert alone.keys() == together.keys()
    assert {layer for layer, _, _ in alone} == {*model.layers}
    for key, z in alone.items():
        assert len(z)
        torch.testing.assert_close(together[key], z, rtol=1e-5, atol=1e-5 * float(z.abs().max()))


def test_padding_changes_nothing_in_the_demo_and_in_a_bridge(demo: hm.AttentionModel):
    model = tiny_model("gpt2", GPT2LMHeadModel)
    model.set_attn_implementation("eager")
    bridge = hm.load(build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config))
    for source, documents in ((bridge, id_documents([3, 9, 5])), (demo, ["a", "b c d", "e f"])):
        alone = watched(source, batches(source, documents, folds=1, tokens_per_batch=1))
        together = watched(source, batches(source, documents, folds=1))
        assert len(alone) == 3 * len(source.layers)
        for key, z in alone.items():
            torch.testing.assert_close(together[key], z, rtol=1e-5, atol=1e-5)


class Bare(nn.Module):
    """Written by hand: it takes ids and knows no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(ids))


def test_a_forward_without_a_mask_gets_rows_of_one_length_only():
    model = hm.load(Bare())
    documents = id_documents([3, 5, 3, 5, 8])
    packed = batches(model, documents, folds=1)
    made = list(packed)
    assert sorted(tuple(b.inputs.shape) for b in made) == [(1, 8), (2, 3), (2, 5)]
    assert packed.padding == 0
    assert len(watched(model, packed)) == 5


# ---- how much, in which order ----------------------------------------------------------------


def test_max_tokens_counts_exactly_and_stops_reading():
    read = []

    def documents():
        for n, ids in enumerate(id_documents([4, 4, 4, 4])):
            read.append(n)
            yield ids

    packed = batches(KINDS["gpt2"], documents(), folds=2, max_tokens=10)
    assert read == [0, 1, 2]
    assert (packed.n_tokens, packed.n_documents) == (10, 3)
    found = counted(packed, "input_ids", "residual")
    assert [len(ids) for ids in found.values()] == [4, 4, 2]


def test_the_same_text_makes_the_same_batches_and_another_text_another_hash():
    documents = id_documents([30, 4, 17, 9, 2, 25])
    first, again = (batches(KINDS["bert"], documents, max_length=8) for _ in range(2))
    assert first.attrs == again.attrs
    for a, b, c in zip(first, again, first, strict=True):
        assert a.fold == b.fold == c.fold
        assert torch.equal(a.inputs["input_ids"], b.inputs["input_ids"])
        assert torch.equal(a.inputs["input_ids"], c.inputs["input_ids"])
    hashes = {
        batches(KINDS["bert"], d, folds=1).attrs["text_sha256"]
        for d in (documents, documents[::-1], [np.concatenate(documents)])
    }
    assert len(hashes) == 3


def test_a_run_that_is_stopped_has_seen_every_fold_and_length():
    packed = batches(KINDS["bert"], id_documents([8] * 40 + [3] * 40), tokens_per_batch=8)
    half = list(packed)[: packed.n_batches // 2]
    per_fold = np.bincount([b.fold for b in half], minlength=5)
    assert per_fold.max() - per_fold.min() <= 1
    assert {b.length for b in half} == {8, 3}


# ---- what users bring themselves -------------------------------------------------------------


def test_batches_pass_and_inputs_are_dealt_in_turn():
    own = Batch({"input_ids": torch.tensor([[5, 6]])}, fold=1)
    pixels = np.zeros((2, 3), np.float32)
    packed = batches(KINDS["bert"], [own, {"input_ids": torch.tensor([[7]])}, pixels], folds=2)
    first, second, third = packed
    assert first is own
    assert (second.fold, third.fold, packed.n_batches) == (1, 0, 3)
    assert second.keep == {}
    assert torch.equal(third.inputs, torch.zeros(2, 3))
    assert len(list(batches(KINDS["bert"], own, folds=2))) == 1
    assert batches(KINDS["bert"], (b for b in [own]), folds=2).n_batches is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_users_own_input_never_counts(demo: hm.AttentionModel, side: str):
    tokenizer = demo.tokenizer
    inputs = tokenizer(["a b c", "d"], padding=True, padding_side=side, return_tensors="pt")
    (batch,) = batches(demo, [dict(inputs)], folds=1)
    assert torch.equal(batch.keep["residual"], inputs["attention_mask"].bool())
    assert batch.tokens == 8


# ---- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([], {}, "the text is empty: no document has a token that counts"),
        ([[]], {}, "the text is empty"),
        ([[5]], {"folds": 1}, "the text has 1 token in 1 document: too short for 1 folds"),
        ([[5, 6], [7, 8]], {}, "the text has 4 tokens in 2 documents: too short for 5 folds"),
        ([[5, 99]], {}, "document 1 holds token id 99; the model's vocabulary has 99 tokens"),
        ([[5, -1]], {}, "document 1 holds token id -1; the model's vocabulary has 99 tokens"),
        (["text"], {}, r"came without a tokenizer, .* load it with tokenizer=\.\.\."),
        ([[5]], {"folds": 0}, "folds=0: at least one"),
        ([[5]], {"max_tokens": 0}, "max_tokens=0: at least one"),
        ([[5]], {"max_length": 65}, "max_length=65: GPT2Model takes at most 64 tokens"),
        ([[5]], {"max_length": 0}, "max_length=0 leaves no room for text"),
        ([Batch({}, fold=5)], {}, "batch 0 is of fold 5; there are 5, from 0"),
        ([Batch({})], {"max_tokens": 9}, "max_tokens counts the tokens of text"),
    ],
)
def test_what_cannot_be_run_is_said(documents: Any, options: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        list(batches(KINDS["gpt2"], documents, **options))


def test_weights_alone_run_no_text():
    with pytest.raises(NotApplicable, match="small was read for its weights alone"):
        batches(small_model(), ["text"])


def test_room_is_what_the_model_has_positions_for(demo: hm.AttentionModel):
    assert (Feed(demo).max_length, Feed(demo).room) == (256, 254)
    roberta = tiny_model("roberta", pad_token_id=1)
    feed = Feed(huggingface.from_model(roberta))
    assert feed.max_length == 64 - 2  # it counts positions from pad_token_id + 1
    roberta(input_ids=torch.full((1, feed.max_length), 5))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        roberta(input_ids=torch.full((1, feed.max_length + 1), 5))


def test_unknown_tokens_are_counted(demo: hm.AttentionModel):
    packed = batches(demo, ["a ᚠ b", "c d"], folds=2)
    assert packed.attrs["text_unknown_tokens"] == "1"


def test_the_first_token_of_a_window_is_a_sink_where_nothing_stands_before_it():
    """Causal attention settles on the first position: input, but nothing to measure."""
    words = {word: n for n, word in enumerate(["[UNK]", "a", "b", "c", "d", "e", "f", "g"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), unk_token="[UNK]"
    )
    tokenizer._tokenizer.pre_tokenizer = Whitespace()
    model = huggingface.from_model(tiny_model("gpt2"), tokenizer=tokenizer)
    packed = batches(model, ["a b c d e f g", "g f e"], folds=2, max_length=3)
    assert counted(packed, "input_ids", "residual") == {0: [2, 3, 5, 6], 1: [6, 5]}
    assert packed.n_tokens == 6
    assert "where causal attention has its sink" in packed.attrs["text_rule"]
    assert "sink" not in batches(KINDS["bert"], id_documents([9, 9]), folds=2).attrs["text_rule"]


def nothing_in_front() -> hm.AttentionModel:
    words = {word: n for n, word in enumerate(["[UNK]", "a", "b", "c"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), unk_token="[UNK]"
    )
    tokenizer._tokenizer.pre_tokenizer = Whitespace()
    return huggingface.from_model(tiny_model("gpt2"), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("text", "folds", "message"),
    [
        (["a"] * 20, 5, "the text is empty: .* puts nothing in front of a window"),
        (["a b"], 1, "the text has 1 token in 1 document: too short for 1 folds"),
        (["a b c a b c"], 5, "the text has 1 token in 1 document: too short for 5 folds"),
    ],
)
def test_folds_need_tokens_that_count_once_the_first_are_left_out(
    text: list[str], folds: int, message: str
):
    with pytest.raises(ValueError, match=message):
        batches(nothing_in_front(), text, folds=folds)


def test_no_fold_is_given_to_documents_of_a_first_token_alone():
    model = nothing_in_front()
    packed = batches(model, ["a"] * 9 + ["a b c"] * 3 + ["b"], folds=3)
    _check_plan(packed, 6, 3, 64, 1024)
    assert packed.n_documents == 3
    limited = batches(model, ["a"] * 9 + ["a b c"] * 3, folds=2, max_tokens=6)
    assert limited.n_documents == 2
    long = batches(model, ["a", "a b c " * 10, "b"], folds=3)  # the long one is cut for all folds
    assert {batch.fold for batch in long} == {0, 1, 2}


@pytest.mark.filterwarnings("ignore")  # transformers' own, about tiny sizes
@pytest.mark.parametrize("of", [torch.as_tensor, np.asarray])
def test_a_bare_array_of_images_is_a_batch_of_inputs(of: Any):
    vit = huggingface.from_model(tiny_model("vit", **NAMED["vit"]))
    size = vit.module.config.image_size
    images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    packed = batches(vit, of(images), folds=2)
    made = list(packed)
    assert [b.fold for b in made] == [0, 1, 0, 1]
    assert {tuple(b.inputs.shape) for b in made} == {(1, 3, size, size)}
    assert torch.equal(torch.cat([b.inputs for b in made]), images)
    assert packed.n_batches == 4
    for batch in made:
        assert vit.forward(batch.inputs).last_hidden_state.shape[0] == 1
    audio = batches(vit, of(images[0, 0]), folds=1)
    assert [tuple(b.inputs.shape) for b in audio] == [(1, size)] * size
    ids = batches(KINDS["gpt2"], of(torch.arange(5, 25).reshape(5, 4)))
    assert (ids.n_documents, ids.n_tokens) == (5, 20)
