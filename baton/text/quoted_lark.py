"""Quoted Lark: converts a Lark grammar to one that matches the texts written as JSON strings.

    start: /.+/    matches  say "a"    and converted  say \\"a\\"

Each character is spelled in one way in the string: by a short escape if JSON has one, by
``\\u00..`` for other control characters, or else by itself. All escapes begin with a backslash, but
the grammar library's lexer looks only one byte ahead. So each escape becomes a lexeme of its own,
and terminals that may contain escapes become rules.

    /[^x]+y/  ->  (/[^x"\\]/ | ESCAPE) (/[^x"\\]+/ | ESCAPE)* /[^x"\\]*y/
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.api.errors import InvalidRequestError
from baton.text.schemas.repairs import end_of_class

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<comment>(?://|\#)[^\n]*)
    |(?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    |(?P<import>%import\b[^\n]*)
    |(?P<directive>%[a-z]+)
    |(?P<special><[^<>\s]+>|@[\w-]+)
    |(?P<name>[!?]?[A-Za-z_][\w-]*)
    |(?P<other>\d+|->|\.\.|.)""",
    re.VERBOSE,
)
_IMPORT = re.compile(
    r"%import\s+common\s*\.\s*(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?\s*(?:(?://|\#).*)?"
    r"|%import\s+common\s*\((?P<names>[\w\s,]+)\)\s*(?:(?://|\#).*)?"
)
_EXPONENT = r"([eE][+-]?[0-9]+)"
_FLOAT = rf"(([0-9]+\.[0-9]*|\.[0-9]+){_EXPONENT}?|[0-9]+{_EXPONENT})"
# Definitions of the terminals that a grammar may import from Lark's library.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"([0-9]+|{_FLOAT})",
    "SIGNED_NUMBER": f"[+-]?([0-9]+|{_FLOAT})",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}
# All characters that JSON strings must escape.
_ESCAPED = '"\\' + "".join(map(chr, range(0x20)))
_PLAIN = r'[^"\\\x00-\x1F]'
_CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CODE = re.compile(r"\\(?:x\{(\w+)\}|u\{(\w+)\}|x(\w{2})|u(\w{4})|U(\w{8}))")
_PROPERTY = re.compile(r"\\([pP])(?:\{(\^?)(\w+)\}|(\w))")
# Unicode categories without characters that JSON escapes.
_SAFE_CATEGORY = re.compile(r"[LNMSZ][a-z]?|(?:Letter|Number|Mark|Symbol|Separator)")
_GROUP = re.compile(r"\((?:\?(?:P?<[A-Za-z]\w*>|(?P<flags>[a-z]*(?:-[a-z]+)?)(?P<end>[:)])))?")
MAX_CHARS = 16_384  # maximum length of a grammar; converting it takes hundredths of a second
_KINDS = ("string", "regex", "range")  # kinds of grammar tokens that match texts
_SKIP = "quoted-skip"  # rule for the texts that %ignore lets occur between lexemes
_MAX_HEAD_TOKENS = 64  # maximum number of tokens before the colon of a definition
_IGNORE, _COLON = ("directive", "%ignore"), ("other", ":")
_STRINGS = re.compile(r'"((?:\\.|[^"\\])*)"')


def quoted_lark(text: str) -> str:
    """Convert a Lark grammar so that it matches its texts as they are written in a JSON string.

    Raises:
        InvalidRequestError: the grammar is longer than `MAX_CHARS`, or has a construct that cannot
            be part of a string, such as a special token.
    """
    if len(text) > MAX_CHARS:
        raise _refused(f"must have at most {MAX_CHARS} characters, got {len(text)}")
    return "\n".join(_Grammar(text).statements())


class _Grammar:
    """Converter of one grammar, statement by statement.

    Args:
        text: the grammar in the library's Lark dialect.
    """

    def __init__(self, text: str) -> None:
        self._statements = list(_statements(text))
        self._parts: dict[tuple[str, str], _Part | None] = {}
        # Tokens of each terminal's definition, by name.
        self._terminals: dict[str, list[tuple[str, str]]] = {}
        for tokens in self._statements:
            if (name := _terminal_of(tokens)) is not None:
                self._terminals[name] = tokens
        self._mixed = self._mixed_terminals()

    def statements(self) -> Iterator[str]:
        """Yield the converted statements."""
        ignored = [tokens[1:] for tokens in self._statements if tokens[:1] == [_IGNORE]]
        if ignored:
            ways = (" ".join(self._written(*one) for one in tokens) for tokens in ignored)
            yield f"{_SKIP}: ({' | '.join(ways)})*"
        for tokens in self._statements:
            if tokens[:1] == [_IGNORE]:
                continue
            self._check_operators(tokens)
            is_rule = _terminal_of(tokens) is None
            colon = tokens.index(_COLON) if is_rule and _COLON in tokens else len(tokens)
            yield " ".join(
                self._spaced(*one) if ignored and place > colon else self._written(*one)
                for place, one in enumerate(tokens)
            )

    def _check_operators(self, tokens: list[tuple[str, str]]) -> None:
        """Refuse the operators & and ~ in the definition of a terminal that becomes a rule."""
        if _terminal_of(tokens) not in self._mixed:
            return
        for (_, text), (_, after) in itertools.pairwise(tokens):
            if text == "&" or (text == "~" and not after.isdigit()):
                raise _refused(f"{tokens[0][1]}: & and ~ cannot stand on texts that JSON escapes")

    def _spaced(self, kind: str, text: str) -> str:
        """Write a token of a rule; after a lexeme, allow texts that the grammar ignores."""
        is_lexeme = kind in _KINDS or (kind == "name" and text.isupper())
        written = self._written(kind, text)
        # Ignored texts follow the whole terminal, because they may not occur between the lexemes
        # that the terminal may have become.
        return f"({written} {_SKIP})" if is_lexeme else written

    def _written(self, kind: str, text: str) -> str:
        if kind == "name":
            return f"quoted-{text.lower()}" if text in self._mixed else text
        part = self._part(kind, text)
        return text if part is None else part.as_lark()

    def _part(self, kind: str, text: str) -> _Part | None:
        if (kind, text) not in self._parts:
            self._parts[kind, text] = _part_of(kind, text)
        return self._parts[kind, text]

    def _mixed_terminals(self) -> frozenset[str]:
        """Return the terminals that may match an escape, directly or through other terminals."""
        users: dict[str, list[str]] = {}
        found: list[str] = []
        for name, tokens in self._terminals.items():
            parts = [self._part(*one) for one in tokens]
            if any(part is not None and not part.is_plain for part in parts):
                found.append(name)
            for _, text in tokens[1:]:
                users.setdefault(text, []).append(name)
        mixed = set(found)
        while found:
            for name in users.get(found.pop(), ()):
                if name not in mixed:
                    mixed.add(name)
                    found.append(name)
        return frozenset(mixed)


def _statements(text: str) -> Iterator[list[tuple[str, str]]]:
    """Split a grammar into statements, each a list of (kind, token)."""
    tokens: list[tuple[str, str]] = []
    is_first = True  # whether the next token is the first of a line
    found: list[tuple[str, str]] = []
    for one in _TOKEN.finditer(text):
        # The text is not closed. Stop here: a search from each later quote would take long.
        if one[0] in ('"', "/"):
            shown = text[one.start() : one.start() + 80]
            raise _refused(f"{shown!r}: a text or a regex is not closed")
        found.append((str(one.lastgroup), one[0]))
    for index, (kind, token) in enumerate(found):
        if kind in ("space", "comment"):
            is_first = is_first or "\n" in token
            continue
        if is_first and (kind in ("import", "directive") or _is_defined(found, index + 1)):
            yield tokens
            tokens = []
        is_first = False
        if kind == "import":
            yield from _imported(token)
            continue
        if kind == "directive" and token != "%ignore":
            raise _refused(f"{token} cannot be in a text's grammar")
        if kind == "special":
            raise _refused(f"{token}: a text's grammar cannot name tokens or other grammars")
        tokens.append((kind, token))
    yield tokens


def _is_defined(tokens: list[tuple[str, str]], start: int) -> bool:
    """Return whether a definition begins at ``start``, judged by the tokens after the name."""
    depth = 0
    for kind, token in tokens[start : start + _MAX_HEAD_TOKENS]:
        if depth:
            depth -= token in "]}"
        elif token in "[{.":
            depth += token != "."
        elif token == ":":
            return True
        elif kind not in ("space", "comment") and not token.isdigit():
            return False
    return False


def _terminal_of(tokens: list[tuple[str, str]]) -> str | None:
    """Return the name of the terminal that a statement defines, or None."""
    is_terminal = len(tokens) > 2 and tokens[0][0] == "name" and tokens[0][1].isupper()
    return tokens[0][1] if is_terminal and tokens[1][1] == ":" else None


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError("structured_output.grammar", problem)


def _imported(token: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the definition of each terminal that an import token names."""
    found = _IMPORT.fullmatch(token.strip())
    if found is None:
        raise _refused(f"{token.strip()[:80]}: only terminals of common can be imported")
    for name in re.findall(r"\w+", found["names"] or "") or [found["name"]]:
        if name not in _COMMON:
            raise _refused(f"%import: common.{name[:80]} is not known")
        pattern = _COMMON[name].replace("/", "\\/")
        yield [("name", found["alias"] or name), ("other", ":"), ("regex", f"/{pattern}/")]


def _divided(kind: str, token: str) -> tuple[str, str]:
    """Return a regex, and its flags, for a token that is a text, range or regex."""
    if kind == "regex":
        pattern, _, flags = token[1:].rpartition("/")
        return pattern, flags
    if kind == "range":
        low, high = (_string_value(f'"{part}"') for part in _STRINGS.findall(token))
        if len(low) != 1 or len(high) != 1:
            raise _refused(f"{token[:80]}: a range is between two single characters")
        return f"[{_class_char(low)}-{_class_char(high)}]", ""
    flags = "i" if token.endswith("i") else ""
    return re.escape(_string_value(token.removesuffix("i"))).replace("/", "\\/"), flags


def _part_of(kind: str, token: str) -> _Part | None:
    """Parse a token that matches texts; return None for other tokens."""
    if kind not in _KINDS:
        return None
    return _Regex(*_divided(kind, token)).part()


def _string_value(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        raise _refused(f"{token[:80]} is not a JSON string") from None


def _class_char(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x80 else char


@dataclass(frozen=True, slots=True)
class _Part:
    """A converted part of a regex: a plain regex, a class of characters, or a Lark expression.

    Attributes:
        plain: regex that matches only characters without escapes; a single character if the part is
            a class.
        escapes: characters of the class that JSON escapes.
        rule: Lark expression, used instead of the other attributes; empty: none.
    """

    plain: str = ""
    escapes: str = ""
    rule: str = ""

    @property
    def is_plain(self) -> bool:
        return not (self.escapes or self.rule)

    def as_lark(self) -> str:
        """Return the part as a Lark expression; a plain part may also stand in a terminal."""
        if self.rule:
            return f"({self.rule})"
        if self.is_plain:
            return f"/{self.plain}/" if self.plain else '""'
        plain = f"/{self.plain}/ | " if self.plain else ""
        return f"({plain}/{_escapes(self.escapes)}/)"


@dataclass(frozen=True, slots=True)
class _Flags:
    dot_all: bool = False
    ignore_case: bool = False


class _Regex:
    """Parser of a regex, which converts the regex to a `_Part`."""

    def __init__(self, pattern: str, flags: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._flags = _flagged(_Flags(), flags)

    def part(self) -> _Part:
        """Parse alternatives up to the end of the group or of the regex."""
        ways = [self._sequence()]
        while self._pattern[self._position : self._position + 1] == "|":
            self._position += 1
            ways.append(self._sequence())
        if len(ways) == 1:
            return ways[0]
        if all(way.is_plain for way in ways):
            return _Part(f"(?:{'|'.join(way.plain for way in ways)})")
        return _Part(rule=" | ".join(way.as_lark() for way in ways))

    def _sequence(self) -> _Part:
        items = []
        while self._position < len(self._pattern) and self._pattern[self._position] not in "|)":
            if (item := self._item()) is not None:
                items.append((item, self._quantifier()))
        if all(part.is_plain for part, _ in items):
            return _Part("".join(part.plain + often for part, often in items))
        if len(items) == 1 and not items[0][1]:
            return items[0][0]
        return _Part(rule=_joined(items))

    def _item(self) -> _Part | None:
        """Parse a character, class or group; return None for flags, which apply to what follows."""
        pattern, start = self._pattern, self._position
        if pattern[start] == "(":
            return self._group()
        end = start + 1
        if pattern[start] == "[":
            end = end_of_class(pattern, start)
        elif pattern[start] == "\\":
            code = _CODE.match(pattern, start) or _PROPERTY.match(pattern, start)
            end = code.end() if code else start + 2
        self._position = end
        plain, escapes = _atom(pattern[start:end], self._flags)
        if plain and self._flags.ignore_case:
            plain = f"(?i:{plain})"
        return _Part(plain, escapes)

    def _group(self) -> _Part | None:
        found = _GROUP.match(self._pattern, self._position)
        assert found is not None  # the pattern matches at every parenthesis
        if self._pattern[found.end() - 1 : found.end() + 1] == "(?":
            raise _refused(f"/{self._pattern[:80]}/: look-around cannot be enforced")
        self._position = found.end()
        before = self._flags
        self._flags = _flagged(before, found["flags"] or "")
        if found["end"] == ")":
            return None
        part = self.part()
        if self._pattern[self._position : self._position + 1] != ")":
            raise _refused(f"/{self._pattern[:80]}/: a parenthesis is not closed")
        self._position += 1
        self._flags = before
        return _Part(f"(?:{part.plain})") if part.is_plain else part

    def _quantifier(self) -> str:
        pattern, start = self._pattern, self._position
        found = _QUANTIFIER.match(pattern, start)
        self._position = found.end() if found else start
        return found[1] if found else ""


_QUANTIFIER = re.compile(r"([*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")


def _joined(items: list[tuple[_Part, str]]) -> str:
    """Write a sequence of parts, each with its quantifier, as a Lark expression."""
    written: list[str] = []
    run = before = ""  # run: consecutive plain parts; before: characters that may precede them
    for index, (part, often) in enumerate([*items, (_Part(rule='""'), "")]):
        if part.is_plain:
            run += part.plain + often
            continue
        if run:
            written.append(f"/{before}{run}/")
        run = before = ""
        if often in ("*", "+") and part.plain and part.escapes:
            is_followed = index + 1 < len(items) and items[index + 1][0].is_plain
            if is_followed and often == "+":
                written.append(part.as_lark())
            each = f"(/{part.plain}+/ | /{_escapes(part.escapes)}/)"
            written.append(each + ("*" if is_followed else often))
            # The lexer is greedy, so plain characters that precede a plain part must be in its
            # lexeme.
            before = f"{part.plain}*" if is_followed else ""
        elif index < len(items):
            written.append(part.as_lark() + often)
    return " ".join(written)


def _flagged(state: _Flags, flags: str) -> _Flags:
    on, _, off = flags.partition("-")
    if set(on + off) - set("ismu"):
        raise _refused(f"the flags {flags!r} of a regex cannot be enforced")
    changes = {"s": "dot_all", "i": "ignore_case"}
    for value, given in ((True, on), (False, off)):
        state = replace(state, **{changes[one]: value for one in given if one in changes})
    return state


def _atom(atom: str, state: _Flags) -> tuple[str, str]:
    """Return a regex of the atom's characters that JSON does not escape, and its other characters.

    Args:
        atom: a character, an escape or a class of the regex.
    """
    if atom == ".":
        return _PLAIN, _ESCAPED if state.dot_all else _ESCAPED.replace("\n", "")
    if atom[0] == "[":
        return _class(atom, state)
    if atom[0] != "\\":
        return ("", atom) if atom in _ESCAPED else (atom, "")
    if found := _PROPERTY.fullmatch(atom):
        if not _SAFE_CATEGORY.fullmatch(found[3] or found[4]):
            raise _refused(f"{atom} cannot be enforced: list its characters")
        is_negated = (found[1] == "P") is not bool(found[2])
        return (f"[{atom}&&{_PLAIN}]", _ESCAPED) if is_negated else (atom, "")
    if atom[1:] in tuple("dDwWsS"):
        return _class(f"[{atom}]", state)
    char = _char_of(atom)
    return ("", char) if char and char in _ESCAPED else (atom, "")


def _class(one: str, state: _Flags) -> tuple[str, str]:
    problem = f"{one[:80]} cannot be enforced: list its characters"
    if _ANOTHER_CLASS.search(_ESCAPE.sub("", one[1:])) or _ANOTHER_ESCAPE.search(one):
        raise _refused(problem)
    try:
        matches = re.compile(one, re.IGNORECASE if state.ignore_case else 0).match
    except re.error:
        raise _refused(problem) from None
    escapes = "".join(filter(matches, _ESCAPED))
    if not escapes:
        return one, ""
    return f"[{one}&&{_PLAIN}]", escapes


# Syntax of character classes that Python's `re` and the grammar library read differently.
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ANOTHER_CLASS = re.compile(r"\[|&&|--|~~")
_ANOTHER_ESCAPE = re.compile(r"\\[pPhHQ]|\\[xu]\{")


def _char_of(atom: str) -> str:
    """Return the character that an escape of a regex stands for; empty for a character class."""
    if found := _CODE.fullmatch(atom):
        try:
            return chr(int(next(filter(None, found.groups())), 16))
        except (ValueError, OverflowError):
            return ""
    if atom[1:].isalnum():
        return _CONTROL_ESCAPES.get(atom[1:], "")
    return atom[1:]


def _escapes(escaped: str) -> str:
    """Return a regex that matches the JSON escapes of these characters."""
    written = [json.dumps(char)[2:-1] for char in escaped]
    short = "".join(one for one in written if len(one) == 1)
    codes = "|".join(one.removeprefix("u00") for one in written if len(one) > 1)
    ways = [rf"\\[{re.escape(short)}]"] if short else []
    if codes:
        ways.append(rf"\\u00(?:{codes})")
    return "|".join(ways)
