"""Unit tests of Tokenizer and Detokenizer, over the demo model's real tokenizer."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from baton.api.errors import ConfigError, InvalidRequestError, ModelLoadError
from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import Tokenizer
from tests.fakes.checkpoints.demo_model import DEMO_MODEL

TOKENIZER = Tokenizer(DEMO_MODEL)
SPECIAL = [4093, 4094, 4095]


def metaspace_tokenizer() -> Tokenizer:
    """Make a tokenizer as of Llama 2: no decoded text begins with a space."""
    model = tokenizers.models.WordLevel({"▁ab": 0, "▁c": 1, "d": 2}, unk_token="d")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        return Tokenizer(Path(folder))


METASPACE = metaspace_tokenizer()
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

token_ids = st.lists(st.integers(0, 4095), max_size=40)
# Emoji with modifiers and joiners, and scripts of two, three and four bytes a character.
texts = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("é漢👍🏽👩‍🚀🇨🇭न\n\t "),
    ),
    max_size=40,
)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """``ids`` in pieces of the given sizes, in turn; empty ones too."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(ids[start : start + size])
        start += size
    return [*pieces, ids[start:]]


def push_all(pieces: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    shown = [detokenizer.push(piece) for piece in pieces[:-1]]
    return [*shown, detokenizer.push(pieces[-1], last=True)]


sizes = st.lists(st.integers(0, 4), max_size=30)

# ---------------------------------------------------------------- text and back


@given(texts)
def test_encoding_and_decoding_gives_the_text_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(0 <= i < 4096 for i in ids)
    assert TOKENIZER.decode(ids) == text


def test_decoding_leaves_special_tokens_out() -> None:
    ids = TOKENIZER.encode("ab")
    assert TOKENIZER.decode([*SPECIAL, *ids, *SPECIAL]) == "ab"


def test_special_tokens_are_shown_where_they_are_wanted() -> None:
    ids = [*TOKENIZER.encode("ab"), *SPECIAL]
    names = "<|endoftext|><|im_start|><|im_end|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == f"ab{names}"
    one = TOKENIZER.special_token_id("<|im_start|>")
    assert one == SPECIAL[1]
    assert TOKENIZER.special_token_id("ab") is None
    for tokenizer in (TOKENIZER, CountingTokenizer()):
        detokenizer = Detokenizer(tokenizer, shown_token_ids=frozenset([one]))
        assert "".join(detokenizer.push([i]) for i in ids) == "ab<|im_start|>"


# ---------------------------------------------------------------- piece by piece


@given(token_ids, sizes)
def test_pieces_of_any_tokens_joined_are_the_decoded_output(
    ids: list[int], sizes: list[int]
) -> None:
    assert "".join(push_all(cut(ids, sizes))) == TOKENIZER.decode(ids)


@given(texts, sizes)
def test_pieces_of_a_text_are_whole_characters_in_order(text: str, sizes: list[int]) -> None:
    shown = push_all(cut(TOKENIZER.encode(text), sizes))
    assert "".join(shown) == text
    assert all(REPLACEMENT not in piece for piece in shown if REPLACEMENT not in text)


@given(token_ids, sizes)
def test_what_is_shown_is_the_beginning_of_what_any_more_tokens_make_of_it(
    ids: list[int], sizes: list[int]
) -> None:
    shown = ""
    for piece, more in zip(push_all(cut(ids, sizes))[:-1], cut(ids, sizes), strict=False):
        shown += piece
        assert TOKENIZER.decode([*ids, *more]).startswith(shown)


def test_an_emoji_is_held_back_until_its_last_byte() -> None:
    ids = TOKENIZER.encode("👩")
    assert len(ids) > 1  # the demo vocabulary has no such character: bytes
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["👩"]


def test_an_output_that_ends_inside_a_character_shows_what_there_is() -> None:
    ids = TOKENIZER.encode("a👩")[:-1]
    shown = push_all([[i] for i in ids])
    assert shown[0] == "a"
    assert "".join(shown) == TOKENIZER.decode(ids)
    assert shown[-1].endswith(REPLACEMENT)


def test_an_output_of_special_tokens_alone_is_no_text() -> None:
    assert push_all([[4094], [4093], [4095]]) == ["", "", ""]


class CountingTokenizer:
    """A tokenizer without look-ups of single tokens, which counts decoded tokens."""

    special_token_ids = TOKENIZER.special_token_ids
    num_decoded = 0

    def pieces(self, skipped: frozenset[int]) -> None:
        return None

    def decode_at_once(self, ids: Sequence[int], skipped: frozenset[int]) -> str:
        self.num_decoded += len(ids)
        return TOKENIZER.decode_at_once(ids, skipped)


@pytest.mark.parametrize("kind", ["bytes", "special", "text", "mixed", "bytes and text"])
@pytest.mark.parametrize("step", [1, 3, 500])
def test_what_is_decoded_grows_with_the_output_only(kind: str, step: int) -> None:
    """Regression: each new byte without a character decoded all bytes before it again."""
    a_byte, text = TOKENIZER.encode("👩")[1], TOKENIZER.encode("some text, größer ")
    ids = {
        "bytes": [a_byte] * 4000,
        "special": [4094] * 4000,
        "text": text * 500,
        "mixed": [a_byte, 4094] * 2000,
        "bytes and text": ([a_byte] * 300 + text) * 13,
    }[kind]
    counting = CountingTokenizer()
    detokenizer = Detokenizer(counting)
    shown = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join([*shown, detokenizer.push([], last=True)]) == TOKENIZER.decode(ids)
    assert counting.num_decoded < 30 * len(ids)


@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=8))
def test_a_space_that_depends_on_the_token_before_is_not_lost(pieces: list[list[int]]) -> None:
    ids = [i for piece in pieces for i in piece]
    detokenizer = Detokenizer(METASPACE)
    shown = [detokenizer.push(piece) for piece in pieces[:-1]]
    shown.append(detokenizer.push(pieces[-1], last=True))
    assert "".join(shown) == METASPACE.decode(ids)


# ---------------------------------------------------------------- chat


def test_the_demo_template_renders_turns_and_ends_where_the_answer_begins() -> None:
    ids = TOKENIZER.encode_chat(
        [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    )
    turns = [TOKENIZER.decode([i]) for i in ids]
    assert ids.count(4094) == 3  # three turns begin
    assert ids.count(4095) == 2  # two have ended
    assert "".join(turns) == "system\nbe short\nuser\nhi\nassistant\n"


def copy_demo(folder: Path, **config: Any) -> Path:
    """The demo tokenizer with other fields in its tokenizer_config.json; None removes one."""
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    values = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text(encoding="utf-8")) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def render(folder: Path, content: str = "hi") -> str:
    tokenizer = Tokenizer(folder)
    return tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": content}]))


def test_a_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    copy_demo(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own: {{ messages[0].content }}", "utf-8")
    assert render(tmp_path) == "own: hi"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert render(copy_demo(tmp_path, chat_template=named)) == "yes"


def test_with_tools_the_template_of_that_name_is_used_wherever_it_is_written(
    tmp_path: Path,
) -> None:
    named = {"default": "plain", "tool_use": "tools: {{ tools[0].name }}"}
    as_list = [{"name": name, "template": template} for name, template in named.items()]
    messages, tools = [{"role": "user", "content": "hi"}], [{"name": "f"}]
    for form in (named, as_list):
        tokenizer = Tokenizer(copy_demo(tmp_path, chat_template=form))
        assert tokenizer.takes_tools
        assert tokenizer.render_chat(messages) == "plain"
        assert tokenizer.render_chat(messages, tools=tools) == "tools: f"
    copy_demo(tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").write_text("own", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    more = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    more.write_text("more: {{ tools[0].name }}", encoding="utf-8")
    assert Tokenizer(tmp_path).render_chat(messages) == "own"
    assert Tokenizer(tmp_path).render_chat(messages, tools=tools) == "more: f"


def test_a_template_that_is_named_comes_before_the_checkpoints(tmp_path: Path) -> None:
    given = tmp_path / "mine.jinja"
    given.write_text("mine: {{ messages[0].content }}", encoding="utf-8")
    tokenizer = Tokenizer(DEMO_MODEL, chat_template=given)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "mine: hi"
    with pytest.raises(ConfigError, match=r"chat_template: .*nowhere.* cannot be read"):
        Tokenizer(DEMO_MODEL, chat_template=tmp_path / "nowhere")
    given.write_text("{% for %}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chat_template: .*mine\.jinja is broken"):
        Tokenizer(DEMO_MODEL, chat_template=given)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "é!"),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}", '"\\u00e9"'),
        ("{{ messages | tojson(ensure_ascii=False, indent=1) }}",
         '[\n {\n  "role": "user",\n  "content": "é"\n }\n]'),
        ("{% for m in messages %}{{ 1 }}{% break %}{{ 2 }}{% endfor %}", "1"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)  # fmt: skip
def test_what_templates_of_hugging_face_may_use(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = Tokenizer(copy_demo(tmp_path, chat_template=template))
    assert tokenizer.render_chat([{"role": "user", "content": "é"}]) == text


def test_special_tokens_are_given_as_text_however_the_file_writes_them(tmp_path: Path) -> None:
    copy_demo(
        tmp_path,
        bos_token={"content": "<b>"},
        eos_token="<e>",
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    assert render(tmp_path) == "<b>hi<e>"


def test_tojson_keeps_characters_as_they_are(tmp_path: Path) -> None:
    copy_demo(tmp_path, chat_template="{{ messages[0] | tojson }}")
    assert json.loads(render(tmp_path, "é👍")) == {"role": "user", "content": "é👍"}
    assert "é👍" in render(tmp_path, "é👍")


def test_tools_and_options_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools[0].name }} {% endif %}{{ thinking }}{{ messages[0].content }}"
    )
    tokenizer = Tokenizer(copy_demo(tmp_path, chat_template=template))
    assert tokenizer.takes_tools
    messages = [{"role": "user", "content": "hi"}]

    def rendered(**options: Any) -> str:
        return tokenizer.decode(tokenizer.encode_chat(messages, **options))

    assert rendered() == "hi"
    options = {"thinking": "yes ", "messages": []}
    assert rendered(tools=[{"name": "f"}], template_options=options) == "f yes hi"


def test_a_template_that_does_not_look_at_tools_takes_none(tmp_path: Path) -> None:
    assert not TOKENIZER.takes_tools
    assert not Tokenizer(copy_demo(tmp_path, chat_template=None)).takes_tools


TOOL = {"type": "function", "function": {"name": "f", "description": "größer"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def test_a_template_that_takes_no_tools_is_told_them_in_the_system_message() -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be short"}
    text = TOKENIZER.render_chat([system, user], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nbe short\n\n# Tools")
    assert '<tools>\n{"type": "function", "function": {"name": "f", "description": "größer"' in text
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.render_chat([user], tools=[TOOL]).startswith("<|im_start|>system\n# Tools")
    called: list[dict[str, Any]] = [
        user,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        {"role": "tool", "tool_call_id": "2", "content": "b"},
    ]
    one = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert TOKENIZER.render_chat(called, tools=[TOOL]).endswith(
        f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n<|im_start|>user\n<tool_response>\na\n"
        "</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_without_system_messages_is_told_the_tools_in_the_first_one(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(copy_demo(tmp_path, chat_template=template))
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}], tools=[TOOL])
    assert text.startswith("# Tools")
    assert text.endswith("</tool_call>\n\nhi")
    with pytest.raises(InvalidRequestError, match="no system"):
        tokenizer.render_chat([{"role": "system", "content": "hi"}], tools=[TOOL])


def test_what_a_template_refuses_is_an_invalid_request(tmp_path: Path) -> None:
    copy_demo(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render(tmp_path)
    assert caught.value.field == "chat"


@pytest.mark.parametrize(
    "attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages.__init__ }}"]
)
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, attack: str) -> None:
    copy_demo(tmp_path, chat_template=attack)
    try:
        shown = render(tmp_path)
    except InvalidRequestError:
        return
    assert shown == ""  # an unsafe attribute is undefined: it renders as nothing


def test_a_checkpoint_without_a_template_refuses_chat_and_serves_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(copy_demo(tmp_path, chat_template=None))
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


# ---------------------------------------------------------------- files


def test_a_folder_without_a_tokenizer_is_told_apart_from_a_broken_one(tmp_path: Path) -> None:
    assert not Tokenizer.exists_in(tmp_path)
    with pytest.raises(ModelLoadError, match="No such file"):
        Tokenizer(tmp_path)
    assert Tokenizer.exists_in(DEMO_MODEL)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": 1}'])
def test_a_broken_tokenizer_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is broken"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(("text", "problem"), [("{", "not valid JSON"), ("[1]", "expected a JSON")])
def test_a_broken_tokenizer_config_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    copy_demo(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=rf"tokenizer_config\.json: {problem}"):
        Tokenizer(tmp_path)


def test_a_template_that_does_not_parse_is_refused_when_the_tokenizer_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelLoadError, match=r"chat template in .* is broken"):
        Tokenizer(copy_demo(tmp_path, chat_template="{% for %}"))


def test_a_tokenizer_without_a_config_file_is_fine(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    assert Tokenizer(tmp_path).encode("hi") == TOKENIZER.encode("hi")


@pytest.mark.parametrize("call_id", ["", "call_4f1c", "toolu_01ABC", "nine_char", "a1B2c3D4e"])
def test_ids_of_any_server_fit_a_template_that_takes_nine_characters(call_id: str) -> None:
    """Regression: Mistral's template refused other servers' ids, and those of forced calls."""
    template = (
        DEMO_MODEL.parents[1] / "tests" / "fakes" / "answers" / "chat_templates" / "mistral.jinja"
    )
    tokenizer = Tokenizer(DEMO_MODEL, chat_template=template)
    function = {"name": "f", "arguments": {}}
    text = tokenizer.render_chat(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]},
            {"role": "tool", "tool_call_id": call_id, "content": "1"},
        ]
    )
    (called,) = re.findall(r'"id": "(\w*)"', text)
    (answered,) = re.findall(r'"call_id": "(\w*)"', text)
    assert called == answered
    assert len(called) == 9
    assert called.isalnum()
    assert (called == call_id) is (call_id == "a1B2c3D4e")


def test_a_template_that_takes_one_system_message_gets_one(tmp_path: Path) -> None:
    """Regression: a second system message, which agents send, was refused."""
    source = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
        "[{{ m.role }}:{{ m.content }}]{%- endfor %}"
    )
    (tmp_path / "one.jinja").write_text(source, encoding="utf-8")
    tokenizer = Tokenizer(DEMO_MODEL, chat_template=tmp_path / "one.jinja")
    system = [{"role": "system", "content": text} for text in ("a", "b", "c")]
    user = {"role": "user", "content": "x"}
    assert tokenizer.render_chat([*system[:2], user]) == "[system:a\n\nb][user:x]"
    text = tokenizer.render_chat([system[0], user, system[1], user])
    assert text == "[system:a][user:x][user:b][user:x]"
    assert tokenizer.render_chat([system[0], user]) == "[system:a][user:x]"
    # A template that takes several gets them as they are.
    assert TOKENIZER.render_chat([*system, user]).count("<|im_start|>system") == 3
