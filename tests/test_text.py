"""Text to documents: files, standard input, data sets, CoNLL-U; and words to tokens."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import headmix as hm
from headmix import conllu
from headmix.text import Document, Text, read_text
from headmix.tokens import Tokeniser


def texts(source: object) -> list[str]:
    return [document.text for document in read_text(source)]


# ---- plain text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one\n\ntwo\n", ["one\n\ntwo\n"]),
        ("one\n\n\ntwo\n \n\t\nthree", ["one", "two", "three"]),
        ("one\ftwo\n\n\nstill two\f\n", ["one", "two\n\n\nstill two"]),
        ("one<|endoftext|>two<|endoftext|>", ["one", "two"]),
        ("\ufeffone\r\n\r\n\r\ntwo", ["one", "two"]),
        (" \n\n\n \n", []),
    ],
)
def test_where_documents_of_a_single_file_end(tmp_path: Path, content: str, expected: list[str]):
    file = tmp_path / "a.txt"
    file.write_bytes(content.encode())
    assert texts(file) == texts(str(file)) == expected


def test_a_file_of_a_directory_is_a_document_unless_it_is_marked(tmp_path: Path):
    (tmp_path / "b.txt").write_text("one\n\n\nstill one")
    (tmp_path / "a.md").write_text("two\fthree")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.txt").write_text("four")
    text = read_text(tmp_path)
    for _ in range(2):  # it can be read again
        assert [d.text for d in text] == ["two", "three", "one\n\n\nstill one", "four"]
    assert text.description == f"3 files of the directory {tmp_path.name}"
    assert [Path(d.name).name for d in text] == ["a.md#1", "a.md#2", "b.txt", "d.txt"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_standard_input_is_text_or_conllu(monkeypatch: pytest.MonkeyPatch, newline: str):
    def pipe(content: str) -> list[Document]:
        data = content.replace("\n", newline).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return list(read_text("-"))

    assert [d.text for d in pipe("eins\n\n\nzwei ü")] == ["eins", "zwei ü"]
    (document,) = pipe("# newdoc id = x\n" + line("1", "Hi"))
    assert (document.name, document.text, len(document.words)) == ("x", "Hi", 1)


def test_the_default_text_is_large_and_in_many_documents():
    documents = list(read_text("default"))
    assert len(documents) > 50
    assert sum(len(d.text.split()) for d in documents) > 40_000


def test_documents_in_memory():
    ids = [[3, 4], np.array([5], np.int32), torch.tensor([6, 7])]
    assert [list(d.ids) for d in read_text(ids)] == [[3, 4], [5], [6, 7]]
    assert [list(d.ids) for d in read_text(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert [list(d.ids) for d in read_text(torch.tensor([1, 2]))] == [[1, 2]]
    own = Document("mine", "text")
    assert next(iter(read_text([own, "more"]))) is own
    assert list(read_text(text := read_text(["a"]))) == list(text)
    assert texts(n for n in ("a", "b")) == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere/at/all.txt", "there is no text file or directory nowhere/at/all.txt; a data set"),
        ([1.5], r"document 1: expected a string or a list of token ids, got float of shape \[\]"),
        (["a", [[1]]], r"document 2: expected .* got list of shape \[1, 1\] and type int64"),
        ([[0.5]], "document 1: expected .* type float64"),
        (3, "expected text, got int"),
        ("datasets:", r"expected datasets:NAME\[,CONFIG\]\[:SPLIT\[:COLUMN\]\], got datasets:"),
        ("datasets:a:b:c:d", "expected datasets:NAME"),
        ("datasets:./nowhere", "nowhere is no directory in which datasets saved a data set"),
    ],
)
def test_what_is_no_text_is_named(source: object, message: str):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        list(read_text(source))


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 text: byte 3 is 0xe9"):
        read_text(tmp_path / "latin.txt")


def test_an_empty_directory_says_what_was_looked_for(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no \.txt, \.md, \.rst, \.conllu files"):
        read_text(tmp_path)


# ---- data sets -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_data_sets_saved_or_in_memory(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["one", "two"], "other": ["x", "y"]})
    data.save_to_disk(str(tmp_path / "one"))
    both = datasets.DatasetDict({"first": data, "second": data.select([1])})
    both.save_to_disk(str(tmp_path / "both"))
    assert texts(data) == texts(tmp_path / "one") == texts(tmp_path / "both") == ["one", "two"]
    assert texts(f"datasets:{tmp_path / 'both'}:second") == ["two"]
    assert texts(f"datasets:{tmp_path / 'both'}:first:other") == ["x", "y"]
    assert texts(both) == ["one", "two"]
    with pytest.raises(ValueError, match="no split 'third'; it has first, second"):
        read_text(f"datasets:{tmp_path / 'both'}:third")
    with pytest.raises(ValueError, match="'no' is not one of text, other; name one"):
        read_text(f"datasets:{tmp_path / 'one'}::no")
    with pytest.raises(ValueError, match="which column holds the text"):
        read_text(data.rename_column("text", "body"))


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        read_text("datasets:some/name")


# ---- CoNLL-U ---------------------------------------------------------------------------------


def line(
    ID: str, form: str, upos: str = "X", head: str = "0", deprel: str = "root", misc: str = "_"
) -> str:
    return "\t".join([ID, form, "_", upos, upos.lower(), "_", head, deprel, "_", misc]) + "\n"


SMALL = (
    "# newdoc id = first\n"
    "# sent_id = 1\n"
    + line("1", "She", "PRON", "4", "nsubj")
    + line("2-3", "didn't", "_", "_", "_", "SpaceAfter=No")
    + line("2", "did", "AUX", "4", "aux")
    + line("3", "n't", "PART", "4", "advmod")
    + line("3.1", "really", "ADV", "_", "_")
    + line("4", "?!", "PUNCT", "0", "root", "Gloss=x|SpaceAfter=No")
    + "\n# newpar\n"
    + line("1-2", "Du", "_", "_", "_")
    + line("1", "De", "ADP", "3", "case")
    + line("2", "le", "DET", "3", "det")
    + line("3", "pain", "NOUN", "0", "root")
    + "\n"
    + line("1", "Oui", "INTJ")
    + "\n# newdoc\n"
    + line("1", "New York", "PROPN")
)


@pytest.fixture
def small(tmp_path: Path) -> list[Document]:
    (tmp_path / "small.conllu").write_text(SMALL)
    return list(read_text(tmp_path / "small.conllu"))


def test_documents_words_and_labels(small: list[Document], tmp_path: Path):
    first, second = small
    words = first.words
    assert (first.name, second.name) == ("first", f"{tmp_path / 'small.conllu'}:18")
    assert (first.text, second.text) == ("She didn't?!\n\nDu pain Oui", "New York")
    assert list(words.form) == ["She", "did", "n't", "?!", "De", "le", "pain", "Oui"]
    assert list(words.upos) == ["PRON", "AUX", "PART", "PUNCT", "ADP", "DET", "NOUN", "INTJ"]
    assert list(words.xpos) == ["pron", "aux", "part", "punct", "adp", "det", "noun", "intj"]
    assert list(words.deprel) == ["nsubj", "aux", "advmod", "root", "case", "det", "root", "root"]
    assert list(words.head) == [3, 3, 3, -1, 6, 6, -1, -1]
    assert list(words.sentence) == [0, 0, 0, 0, 1, 1, 1, 2]
    spans = [first.text[a:b] for a, b in zip(words.start, words.end, strict=True)]
    assert spans == ["She", "did", "n't", "?!", "Du", "", "pain", "Oui"]
    assert repr(words) == "Words(8 words in 3 sentences)"


def test_without_newdoc_the_file_is_one_document(tmp_path: Path):
    (tmp_path / "a.conllu").write_text(line("1", "a") + "\n" + line("1", "b"))
    (tmp_path / "README.txt").write_text("about the treebank")
    (document,) = read_text(tmp_path)
    assert document.text == "a b"
    assert list(document.words.sentence) == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1\tword\n", "1: expected 10 columns parted by tabs (ID FORM LEMMA UPOS XPOS FEATS HEAD"),
        ("# x\n" + line("2", "a"), "2: expected ID 1, 1-N or N.M, found ID '2'"),
        (line("1", "a") + line("1", "b"), "2: expected ID 2, 2-N or N.M, found ID '1'"),
        (line("1", "a", head="2"), "1: expected a HEAD from 0 to 1, found '2'"),
        (line("1", "a", head="x"), "1: expected a HEAD from 0 to 1, found 'x'"),
        (line("1", ""), "1: expected a FORM, found nothing"),
        (line("2-3", "ab"), "1: expected a multiword token that begins with word 1, found ID 2-3"),
        (line("1-1", "ab"), "1: expected a multiword token that begins with word 1, found ID 1-1"),
        (line("1-2", "ab") + line("1", "a") + "\n", "2: expected the words up to 2 of a multiword"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, content: str, message: str):
    file = tmp_path / "bad.conllu"
    file.write_text(content)
    with pytest.raises(ValueError, match="^" + re.escape(f"{file}:{message}")):
        read_text(file)


# ---- words and tokens ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> hm.AttentionModel:
    return hm.load("demo")


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer like GPT-2's: spaces belong to the token behind them, and it adds nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['She did ?!." ?!." pain pain'] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>")


def test_pieces_of_words_in_a_real_tokenizer(small: list[Document], demo: hm.AttentionModel):
    tokens = Tokeniser(demo.tokenizer)(small[0])
    pieces = demo.tokenizer.convert_ids_to_tokens(tokens.ids)
    assert pieces == ["she", "didn", "'", "t", "?", "!", "du", "pain", "ou", "##i"]
    assert list(tokens.word) == [0, 1, 2, 2, 3, 3, 4, 6, 7, 7]
    assert list(tokens.is_first) == [True, True, True, False, True, False, True, True, True, False]
    assert list(tokens.is_last) == [True, True, False, True, False, True, True, True, False, True]
    assert list(tokens.labels("upos")[:5]) == ["PRON", "AUX", "PART", "PART", "PUNCT"]
    assert list(tokens.labels("head")[:5]) == [3, 3, 3, 3, -1]


@pytest.mark.parametrize("which", ["demo", "byte_level"])
def test_every_piece_lies_in_its_word(which: str, request: pytest.FixtureRequest):
    """A word's pieces follow one another and end where the text up to the word ends by itself."""
    tokenizer = request.getfixturevalue(which)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    forms = ["Pain", "über", "alles", "🙂🙂", "naïve", "x" * 30, "3.14"]
    lines = "".join(line(str(n), form, head="0") for n, form in enumerate(forms, 1))
    ((_, text, words),) = conllu.read(lines, "test")
    tokens = Tokeniser(tokenizer)(Document("test", text, words=words))
    assert {*tokens.word} - {-1} == {*range(len(forms))}
    spaces = tokenizer.convert_ids_to_tokens(tokens.ids[tokens.word < 0])
    assert {*spaces} <= {"Ġ"}  # a space by itself is of no word
    for n, form in enumerate(forms):
        mine = np.flatnonzero(tokens.word == n)
        assert list(mine) == list(range(mine[0], mine[-1] + 1))
        assert list(np.flatnonzero(tokens.is_first & (tokens.word == n))) == [mine[0]]
        assert list(np.flatnonzero(tokens.is_last & (tokens.word == n))) == [mine[-1]]
        alone = tokenizer(text[: words.end[n]], add_special_tokens=False)["input_ids"]
        assert len(alone) == mine[-1] + 1, form


def test_a_token_over_several_words_is_that_of_the_first(byte_level: PreTrainedTokenizerFast):
    lines = (
        line("1", "pain")
        + line("2", "?", misc="SpaceAfter=No")
        + line("3", "!", misc="SpaceAfter=No")
        + line("4", ".")
        + line("5", "pain")
    )
    ((_, text, words),) = conllu.read(lines, "test")
    tokens = Tokeniser(byte_level)(Document("test", text, words=words))
    pieces = byte_level.convert_ids_to_tokens(tokens.ids)
    shared = pieces.index("Ġ?!.")
    assert tokens.word[shared] == 1
    assert tokens.is_first[shared]
    assert tokens.is_last[shared]
    assert tokens.word[-1] == 4
    assert not {2, 3} & {*tokens.word}


def test_marks_inside_a_text_are_text(demo: hm.AttentionModel):
    tokeniser = Tokeniser(demo.tokenizer)
    tokens = tokeniser(Document("x", "a [SEP] b"))
    assert demo.tokenizer.sep_token_id not in tokens.ids
    assert tokens.keep.all()


def test_what_is_put_around_a_window(demo: hm.AttentionModel, byte_level: PreTrainedTokenizerFast):
    tokeniser = Tokeniser(demo.tokenizer)
    assert (tokeniser.prefix, tokeniser.suffix) == ([101], [102])
    assert tokeniser.special == {0, 101, 102, 103}
    tokeniser = Tokeniser(byte_level)
    assert (tokeniser.prefix, tokeniser.suffix) == ([], [])
    given = tokeniser(Document("x", ids=np.array([5, 0, 6])))
    assert list(given.keep) == [True, False, True]


def test_no_tokenizer_and_one_that_knows_nothing():
    empty = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        unk_token="[UNK]",
    )
    for tokenizer in (None, empty):
        with pytest.raises(ValueError, match="this model came without a tokenizer"):
            Tokeniser(tokenizer)(Document("x", "some text"))


def test_labels_of_a_document_without_words(demo: hm.AttentionModel):
    with pytest.raises(ValueError, match="document x has no words with upos"):
        Tokeniser(demo.tokenizer)(Document("x", "some text")).labels("upos")


def test_a_real_treebank(demo: hm.AttentionModel):
    folder = Path(__file__).parents[2] / "shared" / "data" / "ud-english-ewt"
    if not folder.is_dir():
        pytest.skip("the treebank is not at hand")
    text: Text = read_text(folder)
    documents = list(text)
    assert sum(int(d.words.sentence[-1]) + 1 for d in documents) == 4078
    assert sum(len(d.words) for d in documents) > 50_000
    tokeniser = Tokeniser(demo.tokenizer)
    for document in documents[:40]:
        tokens = tokeniser(document)
        assert (tokens.word >= 0).all()  # its spaces make no tokens
        seen = {*tokens.word}
        lost = [n for n in range(len(document.words)) if n not in seen]
        assert len(lost) <= 0.01 * len(document.words), document.words.form[lost]
