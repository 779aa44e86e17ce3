"""Train the small demo checkpoint of ``examples/demo_model`` on a CPU.

The text is the source code of this machine's Python standard library, and chats made from it: a
request for a function (its name, its arguments and the first line of its docstring), answered with
the function's source. The result is a plain Hugging Face folder: a byte-level BPE tokenizer with
4096 entries, and a Qwen3 model with about five million parameters in bfloat16.

The schedule of the learning rate follows the wall clock: a run takes ``--minutes``, and the
learning rate has decayed fully at its end::

    python examples/train_demo_model.py --output examples/demo_model --minutes 60
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import random
import re
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
# Sequences are MAX_POSITIONS long after this fraction of the training time, and shorter before
LONG_PHASE = 0.85
CHAT_FRACTION = 0.15
MAX_FUNCTION_LINES = 40
CUT_CHARACTERS = 250  # mean distance in characters between random cuts of a training text

# How text is split before BPE: words with one leading symbol, single digits, runs of symbols, line
# ends, runs of spaces. GPT-4's pattern also has contractions, which would split string literals
# such as 'self'.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

REQUESTS = (
    "Write the function `{signature}`: {summary}",
    "Write a Python function `{signature}`. {summary}",
    "Write a Python function named {name}. {summary}",
)

SAMPLE_PROMPTS = (
    "def read_config(path):",
    "import os\n\ndef ",
    'class Stack:\n    """A simple stack.',
)
SAMPLE_CHAT = "Write the function `read_lines(path)`: Return the lines of a file as a list."

EXCLUDED_PARTS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "encodings", "turtledemo", "__pycache__"}
)
EXCLUDED_FILES = frozenset({"pydoc_data/topics.py", "html/entities.py", "this.py"})
DATA_LINE = re.compile(r"""^\s*(?:[brfu]?["']|[-\d([{]).*,\s*(?:#.*)?$""")


# --------------------------------------------------------------------------------------- text


def normalise(text: str) -> str:
    """Unify line ends; remove tabs, form feeds, blanks at line ends, and most empty lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "").expandtabs(8)
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def is_mostly_data(text: str) -> bool:
    """Return whether more than half of a module's lines look like rows of a table of data."""
    lines = [line for line in text.split("\n") if line.strip()]
    return sum(DATA_LINE.match(line) is not None for line in lines) > 0.5 * len(lines)


def collect_sources(root: Path) -> list[str]:
    """Return the normalised text of the library's modules below ``root``, sorted by name."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS.intersection(relative.parts) or relative.as_posix() in EXCLUDED_FILES:
            continue
        if relative.name.startswith("_sysconfigdata") or relative.parts[0].startswith("config-"):
            continue
        try:
            text = normalise(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if len(text) >= 200 and not is_mostly_data(text):
            sources.append(text)
    return sources


def split_sources(sources: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Shuffle the files, and divide them: (training, about two percent for validation)."""
    shuffled = list(sources)
    random.Random(seed).shuffle(shuffled)
    held_out = max(1, round(0.02 * len(shuffled)))
    return shuffled[held_out:], shuffled[:held_out]


@dataclass(frozen=True)
class Function:
    """A short function with a docstring, cut out of a module."""

    name: str
    signature: str
    summary: str
    source: str

    def messages(self, request: str) -> list[dict[str, str]]:
        """Return a chat: ``request`` asks for the function, whose source is the answer."""
        question = request.format(name=self.name, signature=self.signature, summary=self.summary)
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": self.source},
        ]


def find_functions(text: str) -> Iterator[Function]:
    """Yield the short documented functions and methods of one module."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not docstring:
            continue
        if not source.startswith(("def ", "async def ")):
            continue
        if 3 <= source.count("\n") + 1 <= MAX_FUNCTION_LINES:
            signature = f"{node.name}({ast.unparse(node.args)})"
            yield Function(node.name, signature, docstring.split("\n")[0], source)


# ---------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train a lossless byte-level BPE tokenizer, in which special tokens have the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the contents of ``tokenizer_config.json``."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": MAX_POSITIONS,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its chat template, as an object of ``transformers``."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


# --------------------------------------------------------------------------------------- data


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Return each text's token ids, with the end-of-text token at the end."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([*encoding.ids, end], dtype=np.int64) for encoding in encodings]


def cut_text(text: str, rng: random.Random) -> list[str]:
    """Cut a text at random places, half of them right after a blank.

    The pieces are encoded one by one. So the model also learns token boundaries as at the end of a
    prompt, such as half a name, or the single blank at the end of ``"def "``.
    """
    pieces = []
    start = 0
    while start < len(text):
        end = start + rng.randint(1, 2 * CUT_CHARACTERS)
        if rng.random() < 0.5:
            blank = text.find(" ", end)
            end = blank + 1 if blank >= 0 else len(text)
        pieces.append(text[start:end])
        start = end
    return pieces


def encode_in_pieces(tokenizer: Tokenizer, texts: Sequence[str], seed: int) -> list[np.ndarray]:
    """Cut every text at random places, then encode the pieces as :func:`encode_documents` does."""
    rng = random.Random(seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    documents = []
    for text in texts:
        pieces = tokenizer.encode_batch(cut_text(text, rng), add_special_tokens=False)
        ids = [token for piece in pieces for token in piece.ids]
        documents.append(np.array([*ids, end], dtype=np.int64))
    return documents


def encode_chats(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[np.ndarray]]:
    """Encode chats about all functions in the modules ``texts``; return a list per way to ask."""
    wrapped = wrap_tokenizer(tokenizer)
    functions = list(dict.fromkeys(fn for text in texts for fn in find_functions(text)))
    variants = []
    for request in REQUESTS:
        chats = [
            str(wrapped.apply_chat_template(fn.messages(request), tokenize=False))
            for fn in functions
        ]
        variants.append(encode_documents(tokenizer, chats))
    return variants


@dataclass
class Corpus:
    """The encoded training documents, the chats by way of asking, and the validation stream."""

    documents: list[np.ndarray]
    chats: list[list[np.ndarray]]
    validation: np.ndarray

    def epoch_stream(self, rng: np.random.Generator) -> np.ndarray:
        """Return all documents and randomly chosen chats as one stream of tokens, shuffled."""
        size = sum(len(document) for document in self.documents)
        wanted = size * CHAT_FRACTION / (1 - CHAT_FRACTION)
        chosen: list[np.ndarray] = []
        for index in rng.permutation(len(self.chats[0])):
            if wanted <= 0:
                break
            chosen.append(self.chats[rng.integers(len(self.chats))][index])
            wanted -= len(chosen[-1])
        parts = self.documents + chosen
        return np.concatenate([parts[index] for index in rng.permutation(len(parts))])


class Batches:
    """Makes batches of random windows of the training stream, which each epoch shuffles anew."""

    def __init__(self, corpus: Corpus, tokens: int, seed: int) -> None:
        self._corpus = corpus
        self._tokens = tokens
        self._rng = np.random.default_rng(seed)
        self._length = 0
        self._windows: list[np.ndarray] = []
        self.epochs = 0

    def _refill(self, length: int) -> None:
        stream = self._corpus.epoch_stream(self._rng)[self._rng.integers(length) :]
        count = (len(stream) - 1) // length
        order = self._rng.permutation(count)
        self._windows = [stream[i * length : (i + 1) * length + 1] for i in order]
        self._length = length
        self.epochs += 1

    def next(self, length: int) -> torch.Tensor:
        """Return a batch of windows, each with ``length`` input tokens and the token after them."""
        rows = max(1, self._tokens // length)
        if self._length != length or len(self._windows) < rows:
            self._refill(length)
        batch, self._windows = self._windows[:rows], self._windows[rows:]
        return torch.from_numpy(np.stack(batch))


def load_corpus(seed: int) -> tuple[Tokenizer, Corpus]:
    """Collect the text, train the tokenizer on the training part, and encode both parts."""
    sources = collect_sources(Path(sysconfig.get_paths()["stdlib"]))
    training, validation = split_sources(sources, seed)
    tokenizer = train_tokenizer(training)
    corpus = Corpus(
        documents=encode_in_pieces(tokenizer, training, seed),
        chats=encode_chats(tokenizer, training),
        validation=np.concatenate(encode_documents(tokenizer, validation)),
    )
    code = sum(len(document) for document in corpus.documents)
    chat = sum(len(chat) for chat in corpus.chats[0])
    print(
        f"files {len(training)}+{len(validation)}, characters {sum(map(len, training))}, "
        f"code tokens {code}, functions {len(corpus.chats[0])} ({chat} tokens), "
        f"validation tokens {len(corpus.validation)}",
        flush=True,
    )
    return tokenizer, corpus


# -------------------------------------------------------------------------------------- model


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Build a Qwen3 model of five million parameters; layers' output weights start at zero."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model = Qwen3ForCausalLM(config).float()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    stop = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)]
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=stop, pad_token_id=stop[0]
    )
    return model


def build_optimizers(
    model: Qwen3ForCausalLM, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Return two optimizers: Muon for matrices in layers, AdamW for the embedding and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    embedding = [model.get_input_embeddings().weight]
    muon = torch.optim.Muon(
        matrices, lr=args.muon_lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [
            {"params": embedding, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=args.adamw_lr,
        betas=(0.9, 0.95),
    )
    return [muon, adamw]


def learning_rate_factor(progress: float, warmup: float = 0.02, hold: float = 0.3) -> float:
    """Return the factor of the learning rate at ``progress`` (0 to 1) of the training time.

    The factor rises, stays at 1, and then falls along a cosine to nearly 0.
    """
    if progress < warmup:
        return max(progress / warmup, 0.01)
    if progress < hold:
        return 1.0
    decayed = min(1.0, (progress - hold) / (1.0 - hold))
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * decayed))


def batch_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of next tokens, in nats per token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.view(-1, VOCAB_SIZE), batch[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate(model: torch.nn.Module, stream: np.ndarray, length: int) -> float:
    """Return the mean loss over ``stream``, computed in windows of at most ``length`` tokens."""
    total = 0.0
    predicted = len(stream) - 1
    for start in range(0, predicted, length):
        window = torch.from_numpy(stream[start : start + length + 1])[None]
        total += batch_loss(model, window).item() * (window.shape[1] - 1)
    return total / predicted


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Return a copy of the model with weights rounded to bfloat16, as they are stored."""
    return copy.deepcopy(model).to(torch.bfloat16).eval()


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write all files to a folder beside ``output``, then move them there one by one."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".demo_model-") as name:
        folder = Path(name)
        rounded(model).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = json.dumps(tokenizer_settings(tokenizer), indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
        for path in sorted(folder.iterdir()):
            path.chmod(0o644)
            path.replace(output / path.name)


# ----------------------------------------------------------------------------------- training


class Trainer:
    """A training run, whose schedule follows the wall clock."""

    def __init__(
        self, tokenizer: Tokenizer, corpus: Corpus, args: argparse.Namespace, started: float
    ) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.corpus = corpus
        self.started = started
        self.model = build_model(tokenizer)
        self.optimizers = build_optimizers(self.model, args)
        self.batches = Batches(corpus, args.batch_tokens, args.seed)
        self.tokens_seen = 0
        self.losses: list[float] = []
        self._forward: torch.nn.Module = (
            torch.compile(self.model, dynamic=False) if args.compile else self.model
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["peak_lr"] = group["lr"]

    def elapsed(self) -> float:
        """Seconds since the program was started."""
        return time.monotonic() - self.started

    def step(self, progress: float) -> float:
        """Make one optimizer step; return the loss of its batch."""
        factor = learning_rate_factor(progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        batch = self.batches.next(512 if progress < LONG_PHASE else MAX_POSITIONS)
        loss = batch_loss(self._forward, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens_seen += batch[:, 1:].numel()
        return float(loss.item())

    def report(self) -> None:
        """Print a line about the progress, with the loss on the validation files."""
        recent = self.losses[-100:]
        validation = evaluate(self.model, self.corpus.validation, 512)
        print(
            f"{self.elapsed() / 60:6.2f} min  step {len(self.losses)}  epoch {self.batches.epochs}"
            f"  tokens {self.tokens_seen}  train {sum(recent) / len(recent):.4f}"
            f"  validation {validation:.4f}",
            flush=True,
        )

    def run(self) -> None:
        """Train until the time is up; save the model and report the loss at regular intervals."""
        begin = self.elapsed()
        limit = self.args.minutes * 60 - self.args.reserve_seconds
        next_save = begin + self.args.save_minutes * 60
        while (now := self.elapsed()) < limit:
            self.losses.append(self.step((now - begin) / (limit - begin)))
            if len(self.losses) % 50 == 0:
                recent = sum(self.losses[-50:]) / 50
                print(
                    f"{self.elapsed() / 60:6.2f} min  step {len(self.losses)}  "
                    f"tokens {self.tokens_seen}  loss {recent:.4f}",
                    flush=True,
                )
            if self.elapsed() >= next_save:
                self.report()
                save_checkpoint(self.model, self.tokenizer, self.args.output)
                next_save = self.elapsed() + self.args.save_minutes * 60
        save_checkpoint(self.model, self.tokenizer, self.args.output)


def complete(model: Qwen3ForCausalLM, wrapped: PreTrainedTokenizerFast, prompt: str) -> str:
    """Return the greedy completion of ``prompt``, including special tokens."""
    inputs = wrapped(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=160)
    return str(wrapped.decode(output[0, inputs["input_ids"].shape[1] :]))


def final_report(trainer: Trainer) -> None:
    """Print the losses with the stored weights, and some completions."""
    stored = rounded(trainer.model).float()
    rng = np.random.default_rng(trainer.args.seed + 1)
    sample = trainer.corpus.epoch_stream(rng)[: len(trainer.corpus.validation)]
    parameters = sum(p.numel() for p in stored.parameters())
    print(
        f"parameters {parameters}, tokens seen {trainer.tokens_seen}, "
        f"steps {len(trainer.losses)}, epochs begun {trainer.batches.epochs}"
    )
    for length in (512, MAX_POSITIONS):
        train = evaluate(stored, sample, length)
        validation = evaluate(stored, trainer.corpus.validation, length)
        print(f"final, windows of {length}: train {train:.4f}, validation {validation:.4f}")
    wrapped = wrap_tokenizer(trainer.tokenizer)
    chat = wrapped.apply_chat_template(
        [{"role": "user", "content": SAMPLE_CHAT}], tokenize=False, add_generation_prompt=True
    )
    for prompt in (*SAMPLE_PROMPTS, str(chat)):
        print(f"----- prompt\n{prompt}\n----- completion\n{complete(stored, wrapped, prompt)}")
    print(f"minutes in all {trainer.elapsed() / 60:.1f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock limit in all")
    parser.add_argument("--reserve-seconds", type=float, default=45.0, help="kept for the report")
    parser.add_argument("--save-minutes", type=float, default=4.0, help="between checkpoints")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of one step")
    parser.add_argument("--muon-lr", type=float, default=6e-3, help="peak, layer matrices")
    parser.add_argument("--adamw-lr", type=float, default=3e-3, help="peak, embedding and norms")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    return parser.parse_args()


def main() -> None:
    """Make the tokenizer, train the model, and print a report."""
    started = time.monotonic()
    args = parse_arguments()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer, corpus = load_corpus(args.seed)
    trainer = Trainer(tokenizer, corpus, args, started)
    trainer.run()
    final_report(trainer)


if __name__ == "__main__":
    main()
