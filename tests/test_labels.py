"""Labels: read from CoNLL-U and plain text, given by the user, and carried to the right tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import headmix as hm
from headmix.activations import accumulate
from headmix.labelling import CONTROL, OTHER, LabelSet
from headmix.labels import Reading, into_words, named, parse
from headmix.model import AttentionModel
from headmix.packing import Batches, batches
from headmix.readouts import LADDER
from headmix.registry import catalogue
from headmix.text import Document
from headmix.tokens import Tokens

#: Two sentences in two documents: "The dogs didn't bark ." and "Dogs sleep ."
CONLLU = """# newdoc id = one
1\tThe\tthe\tDET\tDT\t_\t2\tdet\t_\t_
2\tdogs\tdog\tNOUN\tNNS\t_\t5\tnsubj\t_\t_
3-4\tdidn't\t_\t_\t_\t_\t_\t_\t_\t_
3\tdid\tdo\tAUX\tVBD\t_\t5\taux\t_\t_
4\tn't\tnot\tPART\tRB\t_\t5\tadvmod\t_\t_
5\tbark\tbark\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No
6\t.\t.\tPUNCT\t.\t_\t5\tpunct\t_\t_

# newdoc id = two
1\tDogs\tdog\tNOUN\tNNS\t_\t2\tnsubj\t_\t_
2\tsleep\tsleep\tVERB\tVBP\t_\t0\troot\t_\tSpaceAfter=No
3\t.\t.\tPUNCT\t.\t_\t2\tpunct\t_\t_

"""
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "dog", "##s", "didn", "'", "t", "bark", ".",
          "sleep", "it", "'s", "s", "well", ",", "3"]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    """A tiny BERT with a word-piece tokenizer of nineteen pieces."""
    tokenizer = Tokenizer(WordPiece({p: n for n, p in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    torch.manual_seed(0)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    return hm.load(tiny_model("bert"), tokenizer=fast)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.conllu"
    path.write_text(CONLLU)
    return path


def label_of(feed: Batches, name: str) -> list[str | float | None]:
    """A label of every token that counts, in the order of the text; None where it has none."""
    assert feed.labelling is not None
    number, s = next((n, s) for n, s in enumerate(feed.labelling.sets) if s.name == name)
    found: list[str | float | None] = []
    for codes in feed.labelling.codes:
        for c in codes[:, number].tolist():
            found.append(None if np.isnan(c) else s.classes[int(c)] if s.classes else c)
    return found


def labelled(model: AttentionModel, text: object, *names: str, **own: object) -> Batches:
    asked, text = parse({n: n for n in names} | own, text)
    return batches(model, text, folds=2, labels=asked)


def test_words_give_their_last_piece_a_label(model: AttentionModel, corpus: Path) -> None:
    feed = labelled(model, corpus, "upos")
    # the, dog ##s, didn ' t (did + n't), bark, . | dog ##s, sleep, .
    assert label_of(feed, "upos") == [
        "DET", None, "NOUN", "AUX", None, "PART", "VERB", "PUNCT", None, "NOUN", "VERB", "PUNCT",
    ]  # fmt: skip
    assert feed.labelling.n_tokens == 9
    assert "9 tokens have all of them" in feed.labelling.description


def test_syntax(model: AttentionModel, corpus: Path) -> None:
    feed = labelled(model, corpus, "deprel", "depth", "head_distance", "previous_upos", "word_form")
    has = [n for n, v in enumerate(label_of(feed, "depth")) if v is not None]
    found = {n: [label_of(feed, n)[i] for i in has] for n in ("depth", "head_distance", "deprel")}
    # the first word of each document has no word before it
    assert found["deprel"] == ["nsubj", "aux", "advmod", "root", "punct", "root", "punct"]
    assert found["depth"] == [1, 1, 1, 0, 1, 0, 1]
    assert found["head_distance"] == [3, 2, 1, 0, -1, 0, -1]
    before = [label_of(feed, "previous_upos")[i] for i in has]
    assert before == ["DET", "NOUN", "AUX", "PART", "VERB", "NOUN", "VERB"]
    forms = [label_of(feed, "word_form")[i] for i in has]
    assert forms == ["lower", "lower", "mixed", "lower", "punctuation", "lower", "punctuation"]


def test_any_text_has_labels(model: AttentionModel) -> None:
    feed = labelled(model, ["The dogs sleep", "Well, it's 3."], "word_initial")
    # the dog ##s sleep | well , it ' s 3 .
    assert label_of(feed, "word_initial") == ["yes", "yes", "no", *["yes"] * 8]
    feed = labelled(model, ["The dogs sleep", "The bark."], "capitalised", "frequency")
    assert label_of(feed, "capitalised") == ["yes", None, "no", "no", "yes", "no", "no"]
    assert label_of(feed, "frequency") == ["2–3", None, "1", "1", "2–3", "1", "1"]


def test_position_is_that_in_the_window(model: AttentionModel) -> None:
    asked, text = parse("position", ["the dog " * 6])
    feed = batches(model, text, folds=2, labels=asked, max_length=6)  # 4 tokens and two special
    # one document for two folds: two blocks of six tokens, each in windows of four and two
    assert label_of(feed, "position") == ["0", "1", "2–3", "2–3", "0", "1"] * 2


def test_labels_of_ones_own(model: AttentionModel) -> None:
    ids = [[4, 5, 12], [10, 11, 5, 12]]
    feed = labelled(
        model,
        ids,
        mine=np.array([0, 1, 0, 1, 1, 0, 0]),
        score=np.array([0.5, 1, 2, np.nan, 4, 5, 6]),
        long=lambda reading: [len(p) > 3 for p in reading.pieces],
    )
    assert label_of(feed, "mine") == ["0", "1", "0", None, "1", "0", "0"]
    assert label_of(feed, "score") == [0.5, 1, 2, None, 4, 5, 6]
    assert label_of(feed, "long") == ["False", "False", "True", None, "False", "False", "True"]
    with pytest.raises(ValueError, match=r"'mine': an array of shape \[3\] for the 7 tokens"):
        labelled(model, ids, mine=np.zeros(3))
    with pytest.raises(
        ValueError, match=r"'bad': values of shape \[1\] for document 0, which has 3"
    ):
        labelled(model, ids, bad=lambda reading: np.array([1.0]))
    with pytest.raises(ValueError, match="'flat' is '1' for every token"):
        labelled(model, ids, flat=np.ones(7, int))
    with pytest.raises(ValueError, match=r"'flat' is 1\.0 for every token"):
        labelled(model, ids, flat=np.ones(7))


def test_what_has_no_label_says_so(model: AttentionModel) -> None:
    with pytest.raises(ValueError, match=r"no token has all of the labels upos; upos: 0.*CoNLL-U"):
        labelled(model, ["the dog", "it barks"], "upos")
    with pytest.raises(ValueError, match=r"unknown label 'foo'; known: upos, .* previous_NAME"):
        parse("foo")
    with pytest.raises(ValueError, match=r"labels of 'a\.conllu' for the text 'b.txt'"):
        parse("pos=a.conllu", "b.txt")
    with pytest.raises(ValueError, match="for the text that is given"):
        parse("pos=a.conllu", ["a whole document"])
    with pytest.raises(ValueError, match="no label was named"):
        parse("")
    with pytest.raises(ValueError, match="labels belong to the tokens of text"):
        batches(model, [torch.zeros(1, 3, dtype=torch.long)], labels=parse("position")[0], folds=1)


def test_a_tree_that_is_not_there_is_no_label(model: AttentionModel, tmp_path: Path) -> None:
    path = tmp_path / "heads.conllu"
    path.write_text(CONLLU.replace("VBP\t_\t0", "VBP\t_\t_"))  # "sleep" has no HEAD
    assert label_of(labelled(model, path, "depth"), "depth")[-4:] == [None, None, None, None]
    away = label_of(labelled(model, path, "head_distance"), "head_distance")
    assert away[-4:] == [None, 1, None, -1]
    path.write_text(CONLLU.replace("VB\t_\t0", "VB\t_\t2"))  # dogs and bark head each other
    with pytest.raises(ValueError, match="depth in one: from the word 'The' heads lead round"):
        labelled(model, path, "depth")


def test_none_in_an_array_of_words_is_no_class(model: AttentionModel) -> None:
    ids = [[4, 5, 12], [10, 11, 5, 12]]
    given = np.array(["a", None, "b", "a", float("nan"), "b", "a"], object)
    found = labelled(model, ids, mine=given)
    assert found.labelling.sets[0].classes == ("a", "b")
    assert label_of(found, "mine") == ["a", None, "b", "a", None, "b", "a"]
    scores = np.array([0.5, None, 2.0, 1.0, 1.0, 1.0, 3.0], object)
    assert label_of(labelled(model, ids, score=scores), "score") == [0.5, None, 2, 1, 1, 1, 3]
    # a document none of whose tokens has the label
    half = labelled(
        model, ids, half=lambda r: ["a", "b", "a", "b"] if len(r.pieces) > 3 else [None] * 3
    )
    assert label_of(half, "half") == [None] * 3 + ["a", "b", "a", "b"]
    with pytest.raises(ValueError, match="'far' is infinite for 1 tokens"):
        labelled(model, ids, far=np.array([1, 2, np.inf, 1, 2, 3, 4]))


def test_a_document_without_words_has_no_labels_of_words(model: AttentionModel) -> None:
    no = np.zeros(2, bool)
    words = into_words(Document("blank", " \n ")).words
    blank = Tokens("blank", np.array([4, 5]), ~no, np.full(2, -1), no, no, True, words)
    reading = Reading(blank, ["Ġ", "Ċ"], np.array([1, 1]), np.arange(2))
    for name in ("upos", "word_form", "capitalised", "word_initial", "previous_upos"):
        assert named(name)(reading).tolist() == ["", ""]
    for name in ("depth", "head_distance"):
        assert np.isnan(named(name)(reading)).all()


@pytest.mark.parametrize(("origin", "unit"), [(1e6, 1.0), (0.0, 1e-6), (0.0, 1e30)])
def test_the_origin_and_unit_of_a_number_do_not_matter(
    model: AttentionModel, origin: float, unit: float
) -> None:
    ids = np.random.default_rng(0).integers(4, 19, (12, 40))
    score = ids.ravel() % 3 + np.random.default_rng(1).standard_normal(480) / 4
    found = []
    for given in (score, origin + unit * score):
        labels = {"score": given, "mine": ids.ravel() % 2}
        outs = hm.read_outs(model, labels, ids, folds=3, layers=[0])["L0"]
        heads = model.heads(0)
        found.append((hm.metrics.probe_r2(heads, outs), hm.metrics.view_share_unique(heads, outs)))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_rare_classes_become_one(model: AttentionModel) -> None:
    ids = np.random.default_rng(0).integers(4, 19, (4, 50))
    mine = np.arange(200) % 90
    feed = labelled(model, ids, mine=mine)
    assert len(feed.labelling.sets[0].classes) == 64
    assert feed.labelling.sets[0].classes[-1] == OTHER
    assert sum(feed.labelling.sets[0].share) == pytest.approx(1)


def test_a_control_task_gives_each_word_one_class_as_often_as_the_label(model: AttentionModel):
    ids = np.random.default_rng(0).integers(4, 19, (20, 50))
    feed = labelled(model, ids, mine=np.random.default_rng(1).integers(0, 3, 1000))
    real, control = feed.labelling.sets
    assert control == LabelSet("mine" + CONTROL, real.classes, 3, real.share, control=True)
    dealt = np.array(label_of(feed, "mine" + CONTROL))
    for token in range(4, 19):
        assert len(set(dealt[ids.ravel() == token])) == 1
    other = labelled(model, ids, mine=np.random.default_rng(1).integers(0, 3, 1000))
    assert label_of(other, "mine" + CONTROL) == dealt.tolist()  # the seed decides


def test_a_sample_takes_as_many_from_each_fold(model: AttentionModel) -> None:
    ids = np.random.default_rng(0).integers(4, 19, (20, 50))
    asked, text = parse({"mine": np.random.default_rng(1).integers(0, 3, 1000)}, ids)
    feed = batches(model, text, folds=4, labels=asked, sample=100)
    rows = [r for row in feed.labelling.row for r in row[row >= 0].tolist()]
    assert sorted(rows) == sorted(list(range(25)) * 4)


def test_read_outs_see_the_labels_of_their_own_tokens(model: AttentionModel, corpus: Path) -> None:
    """Sums of read-outs over labelled tokens, against the model run by hand."""
    feed = labelled(model, corpus, "upos")
    heads = {"L1": model.heads("L1")}
    seen, _ = accumulate(model, heads, feed, folds=2, kinds=("read_outs",))
    outs = seen.read_outs["L1"]
    assert list(outs.sums) == [n for n in LADDER if n != "attn_out"]
    ids = torch.tensor([[2, 4, 5, 6, 7, 8, 9, 10, 11, 3]])
    with torch.no_grad():
        states = model.module(ids, output_hidden_states=True).hidden_states
    sums = outs.sums["resid_pre"]
    fold = int(sums.count.argmax())
    assert sums.count.sum() == 9
    mine = states[1][0, [1, 3, 4, 6, 7, 8]].double()
    u = sums.first[fold]
    width, s = sums.width, outs.labels[0]
    assert torch.allclose(u[:width] + 6 * sums.pivot, mine.sum(0), atol=1e-5)
    verb = width + s.start + s.classes.index("VERB")
    across = sums.second[fold].triu()[:width, verb]
    assert torch.allclose(across + sums.pivot, mine[4], atol=1e-5)
    assert sums.filled.sum() == 9


def test_a_pass_that_was_stopped_goes_on_with_the_same_sums(
    model: AttentionModel, tmp_path: Path, monkeypatch
) -> None:
    ids = np.random.default_rng(0).integers(4, 19, (12, 20))
    asked, text = parse({"mine": np.random.default_rng(1).integers(0, 3, 240)}, ids)
    feed = batches(model, text, folds=3, labels=asked, tokens_per_batch=40)
    heads = {n: model.heads(n) for n in model.layers}
    kinds = ("moments", "read_outs")
    whole, _ = accumulate(model, heads, feed, folds=3, kinds=kinds)
    path = tmp_path / "sums"

    def stop(done: int, total: int) -> None:
        if done > 100:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        accumulate(
            model, heads, feed, folds=3, kinds=kinds, checkpoint=path, seconds=0.0, done=stop
        )
    assert path.exists()
    again, _ = accumulate(model, heads, feed, folds=3, kinds=kinds, checkpoint=path)
    for layer in model.layers:
        for name, sums in whole.read_outs[layer].sums.items():
            other = again.read_outs[layer].sums[name]
            for field in ("count", "documents", "pivot", "first", "second", "sample", "filled"):
                assert torch.equal(getattr(sums, field), getattr(other, field))
    other_labels, _ = parse({"mine": np.random.default_rng(2).integers(0, 3, 240)}, ids)
    other_feed = batches(model, text, folds=3, labels=other_labels, tokens_per_batch=40)
    with pytest.raises(ValueError, match="checkpoint of another run"):
        accumulate(model, heads, other_feed, folds=3, kinds=kinds, checkpoint=path)


def test_the_size_of_batches_does_not_matter(model: AttentionModel) -> None:
    """Sums are rounded otherwise, and no more: not a direction is found in rounding."""
    ids = np.random.default_rng(0).integers(4, 19, (30, 37))
    noise = np.random.default_rng(1).standard_normal(ids.size)
    asked, text = parse({"mine": ids.ravel() % 3, "noise": noise}, ids)
    heads, found = model.heads("L0"), []
    for size in (40, 4000):
        feed = batches(model, text, folds=3, labels=asked, tokens_per_batch=size)
        seen, _ = accumulate(model, {"L0": heads}, feed, folds=3, kinds=("read_outs",))
        found.append(seen.read_outs["L0"])
    for name, metric in catalogue().items():
        if "read_outs" in metric.needs:
            a, b = (metric(heads, outs) for outs in found)
            assert torch.allclose(a, b, atol=1e-4, equal_nan=True), name


def test_measure_puts_probes_beside_everything_else(model: AttentionModel) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(4, 19, (12, 100))
    mine = ids.ravel() % 3
    ds = hm.measure(
        model, ids, labels={"mine": mine, "noise": random.standard_normal(1200)}, folds=3
    )
    assert ds.label.values.tolist() == ["mine", "noise"]
    assert ds.read_out.values.tolist() == list(LADDER)
    assert int(ds.n_labelled) == 1200
    assert ds.attrs["labels"].startswith("mine (3 classes), noise (a number); 1200 tokens")
    found = ds.probe_r2.sel(layer="L0", read_out="resid_pre")
    assert float(found.sel(label="mine")) > 0.5  # the embedding of a token knows its number
    z = (ds.probe_r2 - ds.probe_r2_null_mean) / ds.probe_r2_null_sd
    assert float(abs(z.sel(label="noise")).max()) < 4
    assert (ds.probe_r2_low <= ds.probe_r2_high).all()
    assert (ds.probe_selectivity.sel(label="mine") > -0.3).all()
    assert ds.probe_accuracy.sel(label="noise").isnull().all()
    with pytest.raises(ValueError, match="labels of which text"):
        hm.measure(model, labels={"mine": mine})
    with pytest.raises(ValueError, match="need labels of the text: pass labels="):
        hm.measure(model, ids, metrics="probe_r2")
    plain = hm.measure(model, ids, folds=3)
    assert "probe_r2" not in plain


def test_read_outs_that_a_block_has_not_are_empty() -> None:
    model = hm.load(tiny_model("gptj"))
    ids = np.random.default_rng(0).integers(4, 99, (6, 60))
    outs = hm.read_outs(model, {"mine": ids.ravel() % 2}, ids, layers=[0], folds=3)
    found = hm.metrics.probe_r2(model.heads(0), outs["L0"])[0]
    assert found.isnan().tolist() == [n in ("resid_mid", "mlp_in") for n in LADDER]
    assert "in parallel" in outs["L0"].absent["resid_mid"]


def test_an_untrained_copy_has_other_weights_and_leaves_the_model_alone(model: AttentionModel):
    before = model.heads(0).W_O.clone()
    fresh = hm.untrained(model, seed=1)
    assert torch.equal(model.heads(0).W_O, before)
    assert fresh.heads(0).W_O.shape == before.shape
    assert not (fresh.heads(0).W_O == before).any()
    assert torch.equal(hm.untrained(model, seed=1).heads(0).W_O, fresh.heads(0).W_O)
    assert fresh.tokenizer is model.tokenizer
    encoder = hm.load(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
    assert not (hm.untrained(encoder).heads(0).W_O == encoder.heads(0).W_O).any()


def test_on_a_random_model_two_hundred_labels_of_noise_are_found_as_often_as_the_null_says(
    model: AttentionModel,
) -> None:
    """Tokens of one document depend on each other; labels dealt to each of them do not."""
    random = np.random.default_rng(0)
    ids = random.integers(4, 19, (20, 60))
    noise = {f"noise {n}": random.standard_normal(ids.size) for n in range(200)}
    outs = hm.read_outs(model, noise, ids)
    for name in ("probe_r2", "head_probe_r2", "view_share"):
        metric = getattr(hm.metrics, name)
        z = []
        for layer, found in outs.items():
            heads = model.heads(layer)
            mean, sd = metric.null(heads, found)
            z.append(((metric(heads, found) - mean) / sd).flatten())
        distances = torch.cat(z)
        rate = float((distances > 2).double().mean())
        print(f"{name}: mean {distances.mean():+.3f}, sd {distances.std():.3f}, {rate:.2%} > 2")
        assert rate < 0.06
        assert abs(float(distances.mean())) < 0.3
