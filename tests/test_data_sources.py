"""Sources: the standard library, files, chats, the hub; and one line for each mistake."""

import json
import re
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from recipes.data import IGNORE, build_data, documents, files, stdlib
from recipes.data.tokens import chat_encoder, encode, text_encoder

TOKENIZER = ByT5Tokenizer()


def build(source="text", **kw):
    return build_data(source, **{"tokenizer": TOKENIZER, "seq_len": 16, "batch_size": 1, "eval_fraction": 0.0, **kw})


def texts(made):
    return sorted(made.documents.store[i] for i in range(len(made.documents.store)))


def read_all(made, epoch=0):
    return [document for document, _ in made.documents.read(epoch, None, False)]


# ---------------------------------------------------------------- the standard library


def test_the_standard_library_is_sorted_source_without_tests_and_packages():
    rows = stdlib.load()
    paths = list(rows["path"])
    assert paths == sorted(paths) and "argparse.py" in paths and "pydoc_data/topics.py" in paths
    assert not [p for p in paths if re.search(r"(^|/)(site-packages|tests?|idle_test|__pycache__)/", p)]
    assert sum(map(len, rows["text"])) > 5e6


def test_the_standard_library_has_one_fingerprint_and_a_known_entropy():
    made, again = (build("stdlib", seq_len=512, eval_fraction=0.02) for _ in range(2))
    assert made.fingerprint == again.fingerprint and len(made.fingerprint["sha256"]) == 64
    assert made.fingerprint["source"] == "stdlib" and made.fingerprint["files"] == len(made.documents.store)
    assert 2.5 < made.unigram_entropy < 4.0  # nats a byte of Python source


# ---------------------------------------------------------------- files


def test_files_folders_and_globs_of_every_kind_are_read(tmp_path):
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "sub" / "b.py").write_text("source = 1")
    (tmp_path / "sub" / ".git" / "c.py").write_text("hidden")
    (tmp_path / "sub" / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    pq.write_table(pa.table({"text": ["three", "four", "five"]}), tmp_path / "d.parquet", row_group_size=2)
    wanted = sorted(["plain text", "source = 1", "one", "two", "three", "four", "five"])
    assert texts(build(path=str(tmp_path))) == wanted
    assert texts(build(path=[str(tmp_path / "a.txt"), str(tmp_path / "*.parquet")])) == sorted(
        ["plain text", *wanted[0:0], "three", "four", "five"]
    )
    assert sorted(read_all(build(path=str(tmp_path), streaming=True))) == wanted


def test_another_column_is_read_where_it_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes, this one"}\n')
    assert texts(build(path=str(tmp_path), column="body", seq_len=8)) == ["yes, this one"]


def test_a_large_text_file_comes_in_pieces_that_end_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE_BYTES", 1000)
    text = "".join(f"Zeile {i} mit Umlaut ä\n" for i in range(500))
    (tmp_path / "a.txt").write_text(text)
    reader = files.PlainText(tmp_path / "a.txt")
    pieces = [reader[i] for i in range(len(reader))]
    assert "".join(pieces) == text and len(pieces) > 10 and all(p.endswith("\n") for p in pieces)
    assert [d for d, _ in reader.read_from(3)] == pieces[3:]


def test_row_groups_stay_together_when_shuffled(tmp_path):
    """A shuffled epoch decodes each row group of a parquet file once."""
    pq.write_table(
        pa.table({"text": [f"document {i:03d}" for i in range(60)]}), tmp_path / "d.parquet", row_group_size=10
    )
    groups = [int(text.split()[1]) // 10 for text in read_all(build(path=str(tmp_path)))]
    assert len(groups) == 60 and sum(a != b for a, b in zip(groups, groups[1:], strict=False)) == 5


def test_a_stream_shuffles_in_blocks_and_reads_each_document_once(tmp_path):
    lines = "".join(json.dumps({"text": f"document {i:04d}"}) + "\n" for i in range(1500))
    (tmp_path / "a.jsonl").write_text(lines)
    made = build(path=str(tmp_path), streaming=True)
    first, second = read_all(made, 0), read_all(made, 1)
    assert sorted(first) == sorted(second) == [f"document {i:04d}" for i in range(1500)]
    assert first != second and first != sorted(first)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_stream_holds_one_block_however_large_the_data(tmp_path, monkeypatch, kind):
    """12 MB in documents of 40 KB under blocks of 400 KB, read in batches: 2 MB at most are alive, in every order."""
    monkeypatch.setattr(documents, "BLOCK_CHARACTERS", 400_000)
    monkeypatch.setattr(files, "PIECE_BYTES", 40_000)
    texts = [f"document {number} ".ljust(39_999, "x") + "\n" for number in range(300)]
    if kind == "txt":
        (tmp_path / "a.txt").write_text("".join(texts))
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10, compression="none")
    made, seen = build(path=str(tmp_path), streaming=True), set()
    tracemalloc.start()
    try:
        for document, _ in made.documents.read(0, None, False):
            seen.add(document.split()[1])
        alive = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(seen) > 280 and alive < 2_000_000


def test_the_fingerprint_follows_names_and_contents_but_not_the_folder(tmp_path):
    def of(folder, name="a.txt", text="some text of a document"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
        return build(path=str(tmp_path / folder)).fingerprint["sha256"]

    same = of("one")
    assert of("two") == same
    assert of("three", name="b.txt") != same and of("four", text="some text of a Document") != same


def test_max_documents_uses_the_first_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(9)))
    for streaming in (False, True):
        made = build(path=str(tmp_path), max_documents=3, streaming=streaming)
        assert sorted(read_all(made)) == ["document 0", "document 1", "document 2"]


# ---------------------------------------------------------------- mistakes


def error(tmp_path, match, *, name="a.txt", content=b"", source="text", **kw):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        build(source, **{"path": str(tmp_path / name), **kw})
    assert "\n" not in str(caught.value)


def test_mistakes_in_paths_are_named(tmp_path):
    with pytest.raises(ValueError, match="matches no file.*Check the path"):
        build(path=str(tmp_path / "nowhere.txt"))
    with pytest.raises(ValueError, match="folder without text"):
        build(path=str(tmp_path))
    with pytest.raises(ValueError, match="needs data.path"):
        build()
    with pytest.raises(ValueError, match="needs data.path"):
        build("chat")
    with pytest.raises(ValueError, match="Use stdlib, text, hub or chat"):
        build("nonsense")


def test_mistakes_in_text_are_named(tmp_path):
    error(tmp_path, "is empty: 1 file.*0 bytes")
    error(tmp_path, r"hold 6 tokens, fewer than one row of seq_len=16\. Lower seq_len", content=b"short")
    error(tmp_path, r"a\.txt is not UTF-8: byte 0xe9 at offset 3.*iconv", content=b"caf\xe9 au lait" * 9)
    error(tmp_path, r"\.gz files are not read. Convert", name="a.gz", content=b"\x1f\x8b")


@pytest.mark.parametrize("streaming", [False, True])
def test_the_mark_that_a_file_begins_with_is_no_text(tmp_path, streaming):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"text " * 9)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "line"}\n' * 9)
    made = build(path=str(tmp_path), streaming=streaming, shuffle=False)
    assert read_all(made) == ["text " * 9, *["line"] * 9]
    (tmp_path / "a.txt").write_text("text", encoding="utf-16")
    with pytest.raises(ValueError, match="not UTF-8: byte 0xff at offset 0.*iconv -f utf-16"):
        build(path=str(tmp_path), streaming=streaming)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8: byte 0xe9 at offset 6.*iconv -f latin1"):
        build(path=str(tmp_path), streaming=streaming)


def test_mistakes_in_jsonl_are_named_with_their_line(tmp_path):
    good = b'{"text": "a good line of text"}\n'
    error(tmp_path, r"a\.jsonl, line 3: not JSON \(.*column 10", name="a.jsonl", content=good * 2 + b'{"text": nope}\n')
    error(
        tmp_path,
        r"line 2: no 'text'; the object has body, id. Set data.column",
        name="a.jsonl",
        content=good + b'{"body": "x", "id": 1}\n',
    )
    error(tmp_path, r"line 2: 'text' is int, expected text", name="a.jsonl", content=good + b'{"text": 3}\n')
    error(tmp_path, r"line 2: expected an object", name="a.jsonl", content=good + b'"text"\n')
    error(tmp_path, r"a\.jsonl is not UTF-8: byte 0xff at offset 33", name="a.jsonl", content=good + b'"\xff"\n')
    error(tmp_path, "blank lines", name="a.jsonl", content=b"\n\n")
    error(
        tmp_path, r"document 2: expected text, got a list. For chats", name="a.jsonl", content=good + b'{"text": []}\n'
    )


def test_mistakes_in_parquet_are_named(tmp_path):
    error(tmp_path, "is not a parquet file", name="a.parquet", content=b"nothing of the kind")
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="no column 'text'; it has body, id. Set data.column"):
        build(path=str(tmp_path / "b.parquet"))


def test_a_malformed_line_of_a_stream_is_named_when_its_turn_comes(tmp_path):
    good = json.dumps({"text": "a good line of text"}) + "\n"
    (tmp_path / "a.jsonl").write_text(good * 600 + "{\n")
    made = build(path=str(tmp_path), streaming=True, shuffle=False)
    with pytest.raises(ValueError, match="line 601: not JSON"):
        read_all(made)


# ---------------------------------------------------------------- the hub


def test_a_hub_data_set_is_read_by_column(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": [f"document number {i}" for i in range(20)]})
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **kw: rows.to_iterable_dataset() if kw["streaming"] else rows
    )
    for streaming in (False, True):
        made = build("hub", name="some/set", streaming=streaming)
        assert sorted(read_all(made)) == sorted(rows["text"])
        stream, other = made.train, build("hub", name="some/set", streaming=streaming).train
        for _ in range(9):
            next(stream)
        other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert next(stream)["input_ids"].tolist() == next(other)["input_ids"].tolist()
    with pytest.raises(ValueError, match="no column 'body'; it has text"):
        build("hub", name="some/set", column="body")


@pytest.mark.parametrize(
    "raised",
    [
        ConnectionError("Couldn't reach 'some/set' on the Hub\nlong trace"),
        ValueError("Unknown split"),
        FileNotFoundError("x"),
    ],
)
def test_an_unreachable_hub_is_one_line_that_says_what_to_do(monkeypatch, raised):
    def fail(*_args, **_kw):
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        ValueError, match="data.name=some/set .* cannot be loaded: .*data=text data.path=FILES"
    ) as caught:
        build("hub", name="some/set")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="needs data.name"):
        build("hub")


# ---------------------------------------------------------------- chats

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven, then."},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fast_tokenizer():
    """A tokenizer with offsets: one token a character, ChatML's marks as special tokens."""
    letters = sorted(set(map(chr, range(32, 127))) | {"\n"})
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHATML
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return made


def learned(tokenizer, tokens):
    return tokenizer.decode(tokens.ids[tokens.labels != IGNORE].tolist())


def test_only_the_assistants_turns_are_learned():
    tokenizer = fast_tokenizer()
    tokens = chat_encoder(tokenizer)(CHAT)
    assert tokenizer.decode(tokens.ids.tolist()).replace(" ", "") == tokenizer.apply_chat_template(
        CHAT, tokenize=False
    ).replace(" ", "")
    assert learned(tokenizer, tokens).replace(" ", "") == "Four.<|im_end|>Seven,then.<|im_end|>"
    assert (tokens.labels[tokens.labels != IGNORE] == tokens.ids[tokens.labels != IGNORE]).all()


def test_chats_in_bytes_have_a_template_of_their_own():
    tokens = chat_encoder(TOKENIZER)(CHAT)
    assert learned(TOKENIZER, tokens) == "Four.</s>Seven, then.</s>"
    assert (tokens.ids == TOKENIZER.eos_token_id).sum() == 5


@pytest.mark.parametrize("answer", ["Four.", "assistant", "assistant:\nx"])
def test_an_answer_that_a_chat_begins_with_is_learned_and_its_header_is_not(answer):
    chat = [{"role": "assistant", "content": answer}, *CHAT[3:]]
    assert learned(TOKENIZER, chat_encoder(TOKENIZER)(chat)) == answer + "</s>Seven, then.</s>"
    tokenizer = fast_tokenizer()
    text = learned(tokenizer, chat_encoder(tokenizer)(chat)).replace(" ", "")
    assert text == answer.replace(" ", "") + "<|im_end|>Seven,then.<|im_end|>"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["isolate", "concat", "none"])
def test_chats_whose_answers_all_lie_beyond_the_row_are_refused(tmp_path, streaming, packing):
    write_chats(tmp_path / "a.jsonl", [CHAT[1:3], [{"role": "user", "content": "x" * 40}, CHAT[2]]])
    chosen = {"path": str(tmp_path), "streaming": streaming, "packing": packing}
    with pytest.raises(ValueError, match=r"none of the first 2 chats .*seq_len=16.* shortest has 38 tokens"):
        build("chat", seq_len=16, **chosen)
    assert next(build("chat", seq_len=38, **chosen).train)["num_labels"]


def test_a_tokenizer_without_a_chat_template_is_refused():
    tokenizer = fast_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="needs a chat template"):
        chat_encoder(tokenizer)


def test_a_template_that_rewrites_the_past_is_refused():
    tokenizer = fast_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + CHATML
    with pytest.raises(ValueError, match="rewrites earlier turns when message 3"):
        chat_encoder(tokenizer)(CHAT)


def write_chats(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_are_packed_whole(tmp_path, streaming):
    """A chat that does not fit into what is left of a row goes to the next; none is cut but those longer than a row."""
    write_chats(tmp_path / "a.jsonl", [CHAT[1:3] for _ in range(30)])
    made = build("chat", path=str(tmp_path), seq_len=128, streaming=streaming)
    size = len(chat_encoder(TOKENIZER)(CHAT[1:3]).ids)
    for _ in range(20):
        batch = next(made.train)
        assert batch["num_tokens"] == 128 // size * size
        starts = [s for s in batch["cu_seq_lens_q"].unique().tolist() if s < batch["num_tokens"]]
        assert starts == list(range(0, batch["num_tokens"], size))
        assert batch["num_labels"] == 128 // size * len("Four.!")
    cut = build("chat", path=str(tmp_path), seq_len=size - 3, streaming=streaming)
    assert next(cut.train)["input_ids"].tolist() == next(cut.train)["input_ids"].tolist()


@pytest.mark.parametrize("streaming", [False, True])
def test_mistakes_in_chats_are_named(tmp_path, streaming):
    def broken(*chats, match, name="a.jsonl"):
        write_chats(tmp_path / name, chats)
        with pytest.raises(ValueError, match=match):
            build("chat", path=str(tmp_path / name), seq_len=512, packing="none", streaming=streaming)

    broken(CHAT[:2], match="no assistant turn, so nothing to learn .roles: system, user")
    broken(CHAT, [{"role": "user"}], match="(document|line) 2: expected a list of messages") if not streaming else None
    broken([], match="(document|line) 1: expected a list of messages")
    broken(CHAT, match="data=chat reads .jsonl and .parquet", name="a.txt")


def test_text_before_the_end_token_is_encoded_as_the_tokenizer_does():
    tokens = text_encoder(TOKENIZER)("Größe </s>")
    assert tokens.ids[-1] == TOKENIZER.eos_token_id and (tokens.ids[:-1] == encode(TOKENIZER, "Größe </s>")).all()
    assert (tokens.ids[:-1] > 2).all()  # an end token that is spelled out in the text is text
    assert TOKENIZER("Größe", add_special_tokens=False)["input_ids"] == encode(TOKENIZER, "Größe").tolist()
    assert np.array_equal(tokens.ids, tokens.labels)
