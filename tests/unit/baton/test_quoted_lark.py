"""Unit tests of quoted Lark: it accepts a JSON string of every text that the grammar accepts."""

from __future__ import annotations

import json
import random

import pytest

from baton.api.errors import InvalidRequestError
from baton.text.quoted_lark import quoted_lark
from tests.fakes.answers.family_grammars import FamilyTokens

PATCH = """\
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add+
filename: /(.+)/
add: "+" /(.*)/ LF -> line
%import common.LF
"""
SUM = """\
start: sum  // an expression
sum: sum ("+" | "-") product | product
product: product "*" atom | atom
atom: INT | "(" sum ")" | STRING
STRING: "\\"" /[^"\\n]*/ "\\""
%import common (INT, WS)
%ignore WS
"""
SQL = r"""
start: SELECT WS columns WS "FROM"i WS CNAME (WS where)? ";"
SELECT: "select"i
columns: CNAME ("," CNAME)*
where: "WHERE"i WS CNAME "=" (INT | QUOTED)
QUOTED: /'[^'\\]{0,5}'/ | /"([^"\\]|\\["\\]){0,5}"/
%import common.WS_INLINE -> WS
%import common.CNAME
%import common.INT
"""
# Each grammar with texts that it takes, and texts that it does not.
CASES = {
    PATCH: (
        ["*** Begin Patch\n*** Add File: a.py\n+print(\"x\\n\")\n+é\t\x01\n*** End Patch\n"],
        ["*** Begin Patch\n", "*** Begin Patch\n*** Add File: \n+\n*** End Patch"],
    ),
    SUM: (["1 +\n(2*3)", '"a b"+ 1', '1 + "\\"'], ["1+", "1 2", '"a\nb"']),
    SQL: (
        ["select a,b FROM t;", "Select  a from t where b=12;", 'SELECT a FROM t WHERE b="\\"";'],
        ["select a", "select a from t where b='123456';"],
    ),
    "start: /@@ .* @@\\n/": (
        ["@@ a @@\n", '@@ "@@" @@ @@\n', "@@ \\ @@\n"],
        ["@@ a", "@@ \n @@\n"],
    ),
    'start: "a".."c" /[\\]\\/]/ /\\S+/ "\\n\\n"': (
        ["b/\"x\\\n\n", "a]é\n\n"],
        ["d/x\n\n", "a/\n\n"],
    ),
    "start: /(?i:say) (\\x22|\\n)?x{2,3}/ A?\nA: /(?s:.)/": (['SAY "xx', "say \nxxx\t"], ["say x"]),
    "start: (WORD | ignored)+\nignored: /#[^\\n]*\\n/\n%import common.WORD\n%ignore / +/": (
        ['ab # "c"\nd', "#\n"],
        ["#"],
    ),
    "start: A A\nA: /[a-z]+/ NL\nNL: /\\r?\\n/": (["ab\nc\r\n"], ["ab\n"]),
    "start: A\nA: /[a-z ]*/ & ~/[a-z ]*  [a-z ]*/": (["a b"], ["a  b"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> FamilyTokens:
    return FamilyTokens(tmp_path_factory.mktemp("model"), "hermes", [])


def quoted(grammar: str) -> str:
    return f'start: "\\"" text "\\""\ntext: %lark {{\n{quoted_lark(grammar)}\n}}'


@pytest.mark.parametrize("grammar", CASES)
def test_a_text_in_quotes_fits_where_the_text_does(tokens: FamilyTokens, grammar: str) -> None:
    right, wrong = CASES[grammar]
    for text in (*right, *wrong):
        assert tokens.fits(grammar, text) is (text in right), text
        written = json.dumps(text, ensure_ascii=False)
        assert tokens.fits(quoted(grammar), written) is (text in right), text


def test_what_is_drawn_is_a_json_string_of_a_fitting_text(tokens: FamilyTokens) -> None:
    rng, num_ended = random.Random(3), 0
    for grammar in [*CASES] * 6:
        drawn = tokens.draw(quoted(grammar), rng, max_tokens=100, likely='"\\n@a;')
        if drawn is not None:  # else a text that may be long
            num_ended += 1
            assert tokens.fits(grammar, json.loads(drawn)), drawn
    assert num_ended > 10


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ("start: /a(?=b)/", "/a(?=b)/: look-around cannot be enforced"),
        ("start: <|end|>", "<|end|>: a text's grammar cannot name tokens or other grammars"),
        ("start: @other", "@other: a text's grammar cannot name tokens or other grammars"),
        ("start: %json {}", "%json cannot be in a text's grammar"),
        ("%llguidance {}\nstart: A", "%llguidance cannot be in a text's grammar"),
        ("start: /[[:alpha:]]/", "[[:alpha:]] cannot be enforced: list its characters"),
        ("start: /\\p{P}/", "\\p{P} cannot be enforced: list its characters"),
        ("%import python.NAME\nstart: NAME", "%import python.NAME: only terminals of common"),
        ("%import common.X\nstart: X", "%import: common.X is not known"),
        ("start: A\nA: /.*/ & ~/a/", "A: & and ~ cannot stand on texts that JSON escapes"),
        ("start: /(a/", "/(a/: a parenthesis is not closed"),
        ("start: /a/x", "the flags 'x' of a regex cannot be enforced"),
    ],
)
def test_what_cannot_be_quoted_is_refused_by_name(grammar: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        quoted_lark(grammar)
    assert problem in str(refused.value)
