"""The tokenizer: round trips, streams that never split a character, chat prompts, damaged files."""

import json
import shutil
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.demo import CHECKPOINT
from dsjax.errors import CheckpointError, RequestError
from dsjax.tokenizer import Tokenizer

BOS, USER, ASSISTANT, EOS = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"


def demo() -> Tokenizer:
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return tokenizer


TOKENIZER = demo()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_survives_a_round_trip(text: str):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if not any(0 <= token < 17 for token in ids):  # special tokens are left out of decoded text
        assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(17, 4095), max_size=30))
def test_a_stream_gives_the_decoded_text_and_never_half_a_character(ids: list[int]):
    stream = TOKENIZER.stream()
    pieces = [stream.push([token]) for token in ids] + [stream.push([], last=True)]
    assert "".join(pieces) == TOKENIZER.decode(ids)


def test_characters_of_several_tokens_come_whole():
    text = "🌶 上海 é"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    stream = TOKENIZER.stream()
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_flushed_at_the_end():
    ids = TOKENIZER.encode("🌶", add_special_tokens=False)[:-1]
    stream = TOKENIZER.stream()
    assert stream.push(ids) == ""
    assert set(stream.push([], last=True)) == {"\ufffd"}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_tokens_are_those_of_the_text(text: str):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


def test_bytes_of_special_tokens_and_of_ids_without_token():
    assert TOKENIZER.token_bytes(0) == BOS.encode()
    assert TOKENIZER.token_bytes(4095) != b""
    assert TOKENIZER.token_bytes(5000) == b""


def test_bytes_of_tokens_that_are_not_written_byte_by_byte(tmp_path):
    fields = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    fields["model"] = {"type": "WordLevel", "vocab": {"née": 0, "ado": 1}, "unk_token": "née"}
    fields |= {
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": None,
        "post_processor": None,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert [tokenizer.token_bytes(token) for token in (0, 1, 2)] == ["née".encode(), b"ado", b""]


def test_begin_of_text_only_when_asked_for():
    assert TOKENIZER.encode("Hello")[0] == 0
    assert 0 not in TOKENIZER.encode("Hello", add_special_tokens=False)
    assert TOKENIZER.decode(TOKENIZER.encode("Hello")) == "Hello"


def test_chat_prompts_have_the_form_of_v3():
    messages = [{"role": "system", "content": "SYS"}, {"role": "user", "content": "hi"}]
    assert TOKENIZER.render_chat(messages) == f"{BOS}SYS{USER}hi{ASSISTANT}"
    answered = [*messages, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "bye"}]
    assert TOKENIZER.render_chat(answered) == f"{BOS}SYS{USER}hi{ASSISTANT}yo{EOS}{USER}bye{ASSISTANT}"
    assert TOKENIZER.render_chat(messages[1:], add_generation_prompt=False) == f"{BOS}{USER}hi"


def test_special_tokens_of_a_prompt_are_single_ids():
    ids = TOKENIZER.encode(TOKENIZER.render_chat([{"role": "user", "content": "hi"}]), add_special_tokens=False)
    assert (ids[0], ids[1], ids[-1]) == (0, 3, 4)


def test_begin_of_text_that_only_the_config_asks_for(tmp_path):
    """Published tokenizer.json files do not add it themselves."""
    fields = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    fields["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    for wanted in (True, False):
        config = {"bos_token": BOS, "add_bos_token": wanted}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        assert tokenizer.encode("Hello") == [0] * wanted + TOKENIZER.encode("Hello", add_special_tokens=False)
        assert 0 not in tokenizer.encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_half_a_surrogate_pair_is_refused(text: str):
    with pytest.raises(RequestError, match="not valid Unicode"):
        TOKENIZER.encode(text)


@given(st.lists(st.text(max_size=20) | st.sampled_from([BOS, USER, EOS, " " * 50, "=" * 99, "上海", "🌶"]), max_size=20))
def test_no_text_that_fits_is_refused_for_its_size(parts: list[str]):
    text = "".join(parts).encode(errors="replace").decode()
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.encode(text, max_model_len=len(ids) + 1) == ids


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TOKENIZER, "_fast", None)
    with pytest.raises(
        RequestError, match=r"has 600000 bytes of text\. That is at least 20000 tokens, .* is 20000 tok"
    ):
        TOKENIZER.encode("é" * 300_000, max_model_len=20_000)


def with_added_token(fields: dict, **change) -> dict:
    return fields | {"added_tokens": [*fields["added_tokens"][:-1], fields["added_tokens"][-1] | change]}


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields | {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        lambda fields: with_added_token(fields, rstrip=True),
        lambda fields: fields | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ]}},
        lambda fields: fields | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "WhitespaceSplit"},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ]}},
    ],
    ids=["normalizer", "added token", "removed", "whitespace"],
)  # fmt: skip
def test_tokenizers_that_drop_text_have_no_limit_on_its_size(tmp_path, change):
    fields = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    last = fields["added_tokens"][-1]["content"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(change(fields)))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer.encode(last + " " * 10_000, max_model_len=5)) < 5


def test_limits_in_the_tokenizer_file_do_not_cut_prompts(tmp_path):
    fields = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    fields["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("To be, or not to be") == TOKENIZER.encode("To be, or not to be")


def test_other_threads_run_while_a_long_text_is_tokenised():
    worker = threading.Thread(target=TOKENIZER.encode, args=("thou art the king of all my lords " * 20_000,))
    worker.start()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10, "a tokenizer that keeps the GIL leaves two or three"


def copy_with_config(folder, config: dict) -> Tokenizer:
    shutil.copy(CHECKPOINT / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_template_runs_in_a_sandbox(tmp_path):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestError, match="chat template refused"):
        copy_with_config(tmp_path, {"chat_template": escape}).render_chat([])


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ messages[0].content + 1 }}"])
def test_messages_that_the_template_refuses(tmp_path, template: str):
    with pytest.raises(RequestError, match="chat template refused"):
        copy_with_config(tmp_path, {"chat_template": template}).render_chat([{"role": "user", "content": "hi"}])


def test_a_checkpoint_without_template(tmp_path):
    with pytest.raises(RequestError, match="has no chat template"):
        copy_with_config(tmp_path, {}).render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content | tojson }}", '"it\'s <b> é"'),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "it's <b> é"),
    ],
)
def test_templates_see_what_they_are_written_for(tmp_path, template: str, text: str):
    """No HTML escapes in JSON, and loop controls."""
    messages = [{"role": "user", "content": "it's <b> é"}] * 2
    assert copy_with_config(tmp_path, {"chat_template": template}).render_chat(messages) == text


def test_the_default_of_several_templates(tmp_path):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert copy_with_config(tmp_path, {"chat_template": named}).render_chat([]) == "yes"


def test_a_template_file_of_its_own_wins(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = copy_with_config(tmp_path, {"bos_token": "<b>", "chat_template": "other"})
    assert tokenizer.render_chat([{"content": "hi"}]) == "<b>hi"


def test_folders_without_a_tokenizer_and_with_a_damaged_one(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)
