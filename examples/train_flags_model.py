"""Train a tiny vision-language model on a CPU: it tells the colors of flags with three stripes.

The model is a SmolVLM of half a million parameters with random weights at first. The result is a
plain Hugging Face folder with tokenizer, image processor and chat template, so that images can be
tried without a download::

    python examples/train_flags_model.py flags_model
    baton up --model flags_model
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

SIDE = 64  # pixels of an image for the encoder; larger images are scaled down
PATCH, SCALE = 8, 2
NUM_EMBEDDINGS = (SIDE // PATCH // SCALE) ** 2
PAD, END = "<|pad|>", "<end_of_utterance>"
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
SPECIAL_TOKENS = (PAD, END, IMAGE, AROUND, WHOLE)
# The processor of SmolVLM writes this text for an image that is not divided into tiles.
EXPANDED = f"{AROUND}{WHOLE}{IMAGE * NUM_EMBEDDINGS}{AROUND}"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['role'] | capitalize + ':' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<image>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<end_of_utterance>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)
COLORS = {
    "red": (206, 32, 41),
    "orange": (255, 136, 62),
    "yellow": (252, 209, 22),
    "green": (0, 135, 81),
    "blue": (0, 70, 173),
    "white": (255, 255, 255),
    "black": (15, 15, 15),
}
PLACES = ("first", "second", "third")
WHICH = ("Which colors does this flag have?", "What do you see?", "Describe the flag.")
DIRECTION = "Are the stripes vertical or horizontal?"


@dataclass(frozen=True)
class Flag:
    """A flag with three stripes, from the left or from the top."""

    colors: tuple[str, ...]
    is_vertical: bool

    def paint(self, width: int, height: int) -> Image.Image:
        """Paint the flag in an image of this size, in pixels."""
        image = Image.new("RGB", (width, height))
        draw = ImageDraw.Draw(image)
        for index, color in enumerate(self.colors):
            begin, end = index / 3, (index + 1) / 3
            box = (begin, 0.0, end, 1.0) if self.is_vertical else (0.0, begin, 1.0, end)
            left, top, right, bottom = box
            place = (left * width, top * height, right * width - 1, bottom * height - 1)
            draw.rectangle(place, COLORS[color])
        return image


def draw_flag(rng: random.Random) -> Flag:
    """Choose three colors of which no two neighbors are equal, and a direction."""
    first, second = rng.sample(list(COLORS), 2)
    third = rng.choice([color for color in COLORS if color != second])
    return Flag((first, second, third), rng.random() < 0.5)


def ask(flag: Flag, rng: random.Random) -> tuple[str, str]:
    """Return a question about a flag, and its answer."""
    first, second, third = flag.colors
    what = rng.random()
    if what < 0.5:
        return rng.choice(WHICH), f"{first.capitalize()}, {second} and {third}."
    if what < 0.6:
        return DIRECTION, "Vertical." if flag.is_vertical else "Horizontal."
    place = rng.randrange(3)
    return f"What color is the {PLACES[place]} stripe?", f"{flag.colors[place].capitalize()}."


def chat(flag: Flag, rng: random.Random) -> tuple[str, str]:
    """Return a prompt about a flag, and the text that the model is to write."""
    question, answer = ask(flag, rng)
    return f"User:{EXPANDED}{question}{END}\nAssistant:", f"{answer}{END}"


def pixel_values(images: list[Image.Image]) -> torch.Tensor:
    """Return what SmolVLM's image processor makes of images, ``[images, 1, 3, SIDE, SIDE]``."""
    arrays = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return torch.from_numpy(arrays / 127.5 - 1).permute(0, 3, 1, 2).unsqueeze(1).contiguous()


def train_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE tokenizer on drawn chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384 - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["".join(ask(draw_flag(rng), rng)) for _ in range(2000)]
    tokenizer.train_from_iterator([*texts, "User:\nAssistant:"], trainer)
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> SmolVLMForConditionalGeneration:
    """Build a SmolVLM of half a million parameters."""
    text = {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": PATCH,
        "image_size": SIDE,
    }
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = SmolVLMForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train(
    model: SmolVLMForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, steps: int
) -> None:
    """Train on flags that are drawn anew for each step."""
    rng, warmup = random.Random(1), 100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    began_at = time.monotonic()
    for step in range(steps):
        ids, labels, pixels = make_batch(tokenizer, 32, rng)
        # Without an attention mask: padding comes last, and each token sees only earlier ones.
        hidden = model.model(input_ids=ids, pixel_values=pixels).last_hidden_state
        is_learned = labels[:, 1:] != -100
        logits = model.lm_head(hidden[:, :-1][is_learned])
        loss = F.cross_entropy(logits, labels[:, 1:][is_learned])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            seconds = time.monotonic() - began_at
            print(f"step {step} of {steps}, {seconds:.0f} s: loss {loss.item():.4f}", flush=True)


def make_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, ids to learn (-100: none), each ``[size, longest]``, and pixel values."""
    rows, images = [], []
    for _ in range(size):
        flag = draw_flag(rng)
        prompt, answer = (tokenizer(text).input_ids for text in chat(flag, rng))
        rows.append(([*prompt, *answer], [-100] * len(prompt) + answer))
        images.append(flag.paint(SIDE, SIDE))
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
    labels = [learned + [-100] * (width - len(learned)) for _, learned in rows]
    return torch.tensor(ids), torch.tensor(labels), pixel_values(images)


def save(
    model: SmolVLMForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the checkpoint in bfloat16, with tokenizer, image processor and chat template."""
    transformers.utils.logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}}
    processor = transformers.SmolVLMImageProcessorPil(do_image_splitting=False, **sizes)
    processor.save_pretrained(folder)
    fields = {"processor_class": "SmolVLMProcessor", "image_seq_len": NUM_EMBEDDINGS}
    (folder / "processor_config.json").write_text(json.dumps(fields, indent=2) + "\n")


@torch.inference_mode()
def count_right(
    model: SmolVLMForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, questions: int
) -> int:
    """Ask questions about new flags, and return the number of right answers."""
    rng, num_right = random.Random(2), 0
    for _ in range(questions):
        flag = draw_flag(rng)
        prompt, answer = chat(flag, rng)
        ids = tokenizer(prompt, return_tensors="pt")
        pixels = pixel_values([flag.paint(SIDE, SIDE)]).to(model.dtype)
        found = model.generate(**ids, pixel_values=pixels, max_new_tokens=40)
        text = tokenizer.decode(found[0, ids.input_ids.shape[1] :])
        num_right += text == answer
    return num_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the model")
    parser.add_argument("--steps", type=int, default=1500, help="of training, each with 32 flags")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = train_tokenizer(random.Random(0))
    model = build_model(tokenizer)
    train(model, tokenizer, args.steps)
    save(model.eval(), tokenizer, args.output)
    questions = 200
    num_right = count_right(model, tokenizer, questions)
    print(f"{num_right} of {questions} questions about new flags answered right")


if __name__ == "__main__":
    main()
