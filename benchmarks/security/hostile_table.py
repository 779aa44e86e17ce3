"""A table of hostile requests: grammars, texts, conversations, bodies, fields and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
M = 7_900_000  # bytes, close to the maximum size of a body or a message
USER = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class Shape:
    """One hostile request; ``method`` is the gRPC method; empty: the request uses HTTP."""

    name: str
    body: bytes
    path: str = COMPLETIONS
    method: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def all_shapes() -> list[Shape]:
    """Return all shapes of the table, with unique names."""
    found = [*_grammars(), *_texts(), *_chats(), *_bodies(), *_fields(), *_headers(), *_messages()]
    assert len({shape.name for shape in found}) == len(found) >= 300
    return found


def completion(name: str, **fields: Any) -> Shape:
    body = {"model": "demo", "prompt": "x", "max_tokens": 64, **fields}
    return Shape(f"completion, {name}", json.dumps(body).encode())


def chat(name: str, **fields: Any) -> Shape:
    body = {"model": "demo", "messages": [USER], "max_tokens": 64, **fields}
    return Shape(f"chat, {name}", json.dumps(body).encode(), CHAT)


def times(count: int, template: str) -> str:
    return ",".join(template.replace("#", str(i)) for i in range(count))


SCHEMAS: dict[str, str] = {
    **{f"multipleOf {n}": f'{{"type":"integer","multipleOf":{n}}}'
       for n in (9973, 100_003, 1_000_003, 99_999_989, 2**31 - 1, 10**18 + 9)},
    **{f"number multipleOf {n}": f'{{"type":"number","multipleOf":{n}}}'
       for n in ("0.0000001", "1e-300", "3.14159265358979")},
    **{f"{key} {n}": f'{{"type":"string","{key}":{n}}}'
       for key in ("minLength", "maxLength") for n in (10**4, 10**7, 2**31)},
    **{f"{key} {n}": f'{{"type":"array","items":{{"type":"integer"}},"{key}":{n}}}'
       for key in ("minItems", "maxItems") for n in (10**4, 10**7)},
    **{f"range to {n}": f'{{"type":"integer","minimum":-{n},"maximum":{n}}}'
       for n in (10**9, 10**18, 10**40)},
    "float range": '{"type":"number","minimum":1e-15,"maximum":1e300}',
    "many divisors": '{"type":"object","properties":{'
    + times(900, '"p#":{"type":"integer","multipleOf":9973}') + "}}",
    "divisors of one": '{"allOf":[' + times(40, '{"type":"integer","multipleOf":99#}') + "]}",
    "enum of 6,000": '{"enum":[' + times(6000, '"value#"') + "]}",
    "anyOf of 600": '{"anyOf":[' + times(600, '{"type":"string","pattern":".*a{#}b"}') + "]}",
    "allOf of anyOf": '{"allOf":[' + times(16, '{"anyOf":[{"properties":{"a#":{}}},'
                                               '{"properties":{"b#":{}}}]}') + "]}",
    "oneOf of 300": '{"oneOf":[' + times(300, '{"properties":{"a#":{"type":"integer"}}}') + "]}",
    "600 optional properties": '{"type":"object","properties":{'
    + times(600, '"p#":{"type":"string"}') + "}}",
    "refs in a circle": '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}',
    "refs that double": '{"$ref":"#/$defs/a0","$defs":{'
    + ",".join(f'"a{i}":{{"type":"array","prefixItems":[{{"$ref":"#/$defs/a{i + 1}"}},'
               f'{{"$ref":"#/$defs/a{i + 1}"}}]}}' for i in range(40)) + ',"a40":{}}}',
    "refs of all": '{"$ref":"#/$defs/a0","$defs":{'
    + ",".join(f'"a{i}":{{"allOf":[{{"$ref":"#/$defs/a{i + 1}"}},{{"$ref":"#/$defs/a{i + 1}"}}]}}'
               for i in range(40)) + ',"a40":{"type":"integer"}}}',
    "nested 100": '{"items":' * 100 + "{}" + "}" * 100,
    "nested 5000": '{"items":' * 5000 + "{}" + "}" * 5000,
    "pattern properties": '{"type":"object","patternProperties":{'
    + times(300, '"^(a|b)*a(a|b){#}$":{"type":"integer"}') + "}}",
    "unique items": '{"uniqueItems":true,"items":{"enum":[' + times(900, "#") + "]}}",
    "key of 60,000": '{"type":"object","properties":{"' + "k" * 60_000 + '":{}}}',
    "not": '{"not":{"type":"string"}}',
}  # fmt: skip
REGEXES: dict[str, str] = {
    **{f"a{{{n}}} squared": f"(a{{{n}}}){{{n}}}" for n in (100, 1000, 9999)},
    "repeats five deep": "((((a{99}){99}){99}){99}){99}",
    **{f"[ab]*a[ab]{{{n}}}": f"[ab]*a[ab]{{{n}}}" for n in (10, 20, 200, 5000)},
    "dots apart": "(.*a.{100}|.*b.{101}|.*c.{102})x",
    "counters": "((a{0,50}b{0,50}){0,50}c?){0,50}",
    "words": "(([a-z]{0,99} ?){0,99}[0-9]{0,99}){0,99}",
    "1,000 alternatives": "(" + "|".join(f"a{{{i}}}b" for i in range(1000)) + ")*",
    "letters of all scripts": r"(\p{L}{0,100}\p{N}{0,100}){0,100}",
    "deep groups": "(" * 20_000 + "a" + ")" * 20_000,
    "60,000 stars": "a*" * 30_000,
    "evil for backtracking": "(a+)+$",
    "(a|a)*": "(a|a)*b",
    "large class": "[" + "".join(chr(i) for i in range(0x4E00, 0x9000, 2)) + "]{1,900}",
}
GRAMMARS: dict[str, str] = {
    **{
        f"64 KiB of {filler!r}": filler * (65_000 // len(filler))
        for filler in ("\n", " ", "\t\n", "a", "a\n", "start \n", "#", "// \n", "%", '"', "(")
    },
    "ambiguous": 'start: start start | "a" | "b" | start start start',
    "ambiguous letters": "start: x\nx: x x | A\nA: /[a-z ]/",
    "empty rules": 'start: a a a a a a a a\na: b*\nb: c*\nc: "x"?',
    "of itself": "start: start",
    "left recursion of 900": "start: r0\n"
    + "".join(f"r{i}: r{i + 1}\n" for i in range(900))
    + 'r900: "x"',
    "rules that double": "start: r0\n"
    + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60))
    + 'r60: "x"',
    "repeats of repeats": 'start: (((("a"{0,100}){0,100}){0,100}){0,100}){0,100}',
    "400 tokens alike": "start: "
    + " | ".join(f"T{i}" for i in range(400))
    + "\n"
    + "\n".join(f"T{i}: /[a-z]*x{{{i}}}.{{{i}}}/" for i in range(400)),
    "and, not": "start: A\nA: /[ab]*a[ab]{30}c/ & /[ab]*b[ab]{31}c/ & ~/.*(aab|bba){20}.*/",
    "a schema inside": 'start: %json {"type":"integer","multipleOf":99999989}',
    "substrings": 'start: %regex {"substring_chars": "' + "ab" * 20_000 + '"}',
    "deep GBNF": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000,
    "wide GBNF": "root ::= " + " | ".join(f'"{i}" root' for i in range(7000)),
    "GBNF repeats": 'root ::= (("a"{0,9999}){0,9999}){0,9999}',
}


def _grammars() -> Iterator[Shape]:
    for name, schema in SCHEMAS.items():
        yield completion(f"schema {name}", structured_outputs={"json": schema})
    for name, regex in REGEXES.items():
        yield completion(f"regex {name}", structured_outputs={"regex": regex})
    for name, grammar in GRAMMARS.items():
        yield completion(f"grammar {name}", structured_outputs={"grammar": grammar})
    for name in ("ambiguous", "ambiguous letters"):
        fields = {"structured_outputs": {"grammar": GRAMMARS[name]}, "max_tokens": 1500, "n": 16}
        yield completion(f"16 outputs of grammar {name}", **fields)
    for count, size in ((1000, 60), (1001, 1), (1, 60_000), (1000, 1)):
        texts = [str(i).ljust(size, "x") for i in range(count)]
        yield completion(f"{count} choices of {size}", structured_outputs={"choice": texts})
    for name in ("multipleOf 99999989", "many divisors"):
        schema = json.loads(SCHEMAS[name])
        yield chat(
            f"response_format {name}",
            response_format={"type": "json_schema", "json_schema": {"schema": schema}},
        )
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield chat(f"tool {name}", tools=[tool], tool_choice="required")


UNITS = {
    "letters": "a", "words": "hello world ", "spaces": " ", "newlines": "\n", "emoji": "\U0001f600",
    "accents": "e\u0301", "digits": "0", "mixed": "aB1!", "specials": "<|im_start|>", "nul": "\0",
}  # fmt: skip


def _texts() -> Iterator[Shape]:
    for name, unit in UNITS.items():
        for num_chars in (4_000, 81_000, 1_300_000, M):
            text = unit * (num_chars // len(unit))
            body = json.dumps(
                {"model": "demo", "prompt": text, "max_tokens": 8}, ensure_ascii=False
            )
            if len(body.encode()) < 2**23:
                yield Shape(f"completion, {num_chars} of {name}", body.encode())
    for count, size in ((1024, 4000), (1024, 7000), (1025, 1), (200, 40_000)):
        yield completion(f"{count} prompts of {size}", prompt=["a" * size] * count, max_tokens=1)
    for count in (2047, 2048, 100_000, 1_900_000):
        yield completion(f"{count} token ids", prompt=[1] * count)
    yield completion("token ids that are none", prompt=[-1, 2**70, 5])
    yield completion("two million lists", prompt=[[]] * 2_000_000)


def _chats() -> Iterator[Shape]:
    for count in (1_000, 8_192, 8_193, 100_000, 300_000):
        yield chat(f"{count} messages", messages=[{"role": "user"}] * count)
    for size in (4_000, 81_000, M):
        yield chat(f"a message of {size}", messages=[{"role": "user", "content": "a" * size}])
    for count in (1_000, 300_000):
        yield chat(
            f"{count} parts",
            messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * count}],
        )
        yield chat(
            f"{count} calls",
            messages=[USER, {"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": "{}"}}] * count}],
        )  # fmt: skip
    for name, arguments in {
        "half a surrogate": '{"x": "\\ud800"}', "deep": '{"x":' * 50_000,
        "two million lists": '{"x":[' + ",".join(["[]"] * 2_000_000) + "]}",
        "a long number": '{"x":' + "9" * 500_000 + "}", "no object": "[]",
    }.items():  # fmt: skip
        call = {"function": {"name": "f", "arguments": arguments}}
        yield chat(
            f"arguments {name}", messages=[USER, {"role": "assistant", "tool_calls": [call]}]
        )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for count in (1_000, 60_000):
        yield chat(f"{count} tools", tools=[tool] * count)
        yield chat(f"{count} tools, one of which must be called", tools=[tool] * count,
                   tool_choice="required")  # fmt: skip
    for name, options in {
        "deep": json.loads('{"a":' * 300 + "{}" + "}" * 300),
        "many": {f"k{i}": i for i in range(80_000)},
        "long": {"x": "y" * M}, "named self": {"self": 1, "loop": 2, "range": 3, "namespace": 4},
    }.items():  # fmt: skip
        yield chat(f"template options {name}", chat_template_kwargs=options)
    yield chat("unknown tool " + "long", tool_choice={"function": {"name": "x" * M}}, tools=[tool])


def _bodies() -> Iterator[Shape]:
    bodies = {
        "brackets": b"[" * M, "objects": b'{"a":' * (M // 5), "blanks": b" " * M, "nothing": b"",
        "nul": b"\0" * 1000, "open string": b'"' + b"a" * M,
        "backslashes": b'"' + b"\\\\" * 3_000_000,
        "no UTF-8": b'{"model":"demo","prompt":"a\xff"}', "bytes": bytes(range(256)) * 100,
        "half a surrogate": b'{"model":"demo","prompt":"\\ud800"}',
        "long model": b'{"prompt":"x","model":"' + b"m" * M + b'"}',
        "long key": b'{"model":"demo","' + b"k" * M + b'":1}', "a number": b"1" * M,
        "same key": b'{"model":"demo","prompt":"x",' + b'"n":1,' * (M // 6) + b'"n":1}',
        "unknown lists": b'{"model":"demo","metadata":{"a":[' + b"[]," * (M // 3) + b"1]}}",
        "too large": b'{"prompt":"' + b"a" * 9_000_000 + b'"}',
    }  # fmt: skip
    for name, body in bodies.items():
        for path in (COMPLETIONS, CHAT):
            yield Shape(f"body {name} to {path}", body, path)


def _fields() -> Iterator[Shape]:
    values: dict[str, list[Any]] = {
        "n": [128, 129, 10**30], "max_tokens": [2**31 - 1, 2**70, -1], "temperature": [1e308, -1],
        "top_k": [2**31 - 1, -5], "logprobs": [20, 10**9], "seed": [2**63, -(2**70)],
        "stop": [["a" * 999 + "b"] * 16, ["x"] * 100_000, "y" * M, [""], ["\n"] * 16],
        "logit_bias": [{str(i): 100 for i in range(300)}, {str(i): 1 for i in range(200_000)}],
        "allowed_token_ids": [[200], list(range(4096)), [5] * 500_000],
        "banned_token_ids": [list(range(4000)), list(range(4096))],
        "stop_token_ids": [list(range(256)), [1] * 500_000], "priority": [2**31 - 1, -(2**40)],
        "session_id": ["s" * M, "\n"], "user": ["u" * M], "repetition_penalty": [1e-300, 1e300],
        "min_tokens": [2**31 - 1], "best_of": [10**9], "suffix": ["x" * M],
    }  # fmt: skip
    for name, tries in values.items():
        for index, value in enumerate(tries):
            yield completion(f"{name} no. {index}", **{name: value})
    yield completion("echo, logprobs of a long prompt", prompt=[7] * 2000, echo=True, logprobs=20)
    yield completion("bytes of no character", allowed_token_ids=[200], max_tokens=1900)
    yield completion("ends only", allowed_token_ids=[4095], max_tokens=1900, ignore_eos=True)
    yield completion("128 outputs, long stops", n=128, stop=["a" * 999 + str(i) for i in range(16)])


def _headers() -> Iterator[Shape]:
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}).encode()
    for name, headers in {
        "many": {f"X-{i}": "y" * 100 for i in range(60)}, "long id": {"X-Request-Id": "r" * 7000},
        "long session": {"X-Session-Id": "s" * 7000}, "gzip": {"Content-Encoding": "gzip"},
        "no type": {"Content-Type": "text/plain"}, "long key": {"Authorization": "k" * 7000},
        "of a megabyte": {f"X-{i}": "y" * 8000 for i in range(120)},
        "of 14,000": {f"X-{i}": "y" for i in range(14_000)},
        "one of 4 MB": {"X-Long": "y" * 4_000_000}, "many types": {"Accept": "a/b;q=0.1," * 700},
        "cookies": {"Cookie": "; ".join(f"c{i}=d" for i in range(900))},
        "expect": {"Expect": "100-continue"}, "expect more": {"Expect": "200-maybe"},
        "trace": {"traceparent": "00-" + "a" * 7000}, "trace state": {"tracestate": "a=b," * 1900},
        "upgrade": {"Connection": "Upgrade", "Upgrade": "websocket" * 800},
        "forwarded": {"X-Forwarded-For": "1.2.3.4, " * 800}, "range": {"Range": "bytes=0-," * 800},
    }.items():  # fmt: skip
        yield Shape(f"headers {name}", body, headers=headers)
    for name, headers in {
        "of 4 KB": {"x-a": "y" * 4000}, "of 12 KB": {"x-a": "y" * 12_000},
        "of 20 KB": {"x-a": "y" * 20_000}, "of 4 MB": {"x-a": "y" * 4_000_000},
        "of 400": {f"x-{i}": "y" for i in range(400)},
        "of 14,000": {f"x-{i}": "y" for i in range(14_000)},
        "long name": {"x" * 12_000: "y"}, "long key": {"authorization": "k" * 12_000},
        "no key": {"authorization": "Bearer"}, "trace": {"traceparent": "00-" + "a" * 7000},
        "trace state": {"tracestate": "a=b," * 1900}, "deadline": {"x-deadline": "9" * 7000},
        "coding": {"x-encoding": "gzip," * 1000},
    }.items():  # fmt: skip
        yield Shape(f"metadata {name}", b"", method="ListModels", headers=headers)


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def part(tag: int, content: bytes) -> bytes:
    """Encode a length-delimited field of a protobuf message."""
    return _varint(tag << 3 | 2) + _varint(len(content)) + content


def _messages() -> Iterator[Shape]:
    from baton.v1 import inference_pb2  # field numbers of the message

    prompt = {f.name: f.number for f in inference_pb2.Prompt.DESCRIPTOR.fields}
    generate = {f.name: f.number for f in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    for method, numbers in (("Tokenize", prompt), ("Generate", generate), ("CountTokens", prompt)):
        for name, content in {
            "4,000,000 messages": part(numbers["chat"], b"\x0a\x00" * (M // 2)),
            "100,000 messages": part(numbers["chat"], b"\x0a\x00" * 100_000),
            "a long text": part(numbers["text"], b"hello " * (M // 6)),
            "a text that may fit": part(numbers["text"], b"a" * 81_000),
            "no UTF-8": part(numbers["text"], b"\xff\xfe"),
            "token ids": part(numbers["token_ids"], part(1, b"\x01" * M)),
            "unpacked token ids": part(numbers["token_ids"], b"\x08\x01" * (M // 2)),
            "unknown fields": b"\xf8\x07\x01" * (M // 3),
        }.items():
            body = content if method == "Generate" else part(1, content)
            yield Shape(f"{method}, {name}", body, method=method)
        yield Shape(f"{method}, no message", b"\xff" * 1000, method=method)
        yield Shape(f"{method}, half a message", b"\x0a\xff\xff\x03", method=method)
    yield Shape("GenerateBatch, empty prompts", b"\x0a\x00" * (M // 2), method="GenerateBatch")
    yield Shape("GenerateBatch, 1,000 chats", part(1, part(prompt["chat"], b"\x0a\x00")) * 1000,
                method="GenerateBatch")  # fmt: skip
