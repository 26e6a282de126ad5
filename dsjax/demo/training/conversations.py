"""Chat documents for the demo model, in DeepSeek V3's format: scenes of plays and short modern dialogues."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsjax.demo.training.corpus import Dialogue, Work
from dsjax.demo.training.special_tokens import ASSISTANT, BOS, EOS, USER

HERE = Path(__file__).parent
SYSTEM_SHARE = 0.1
EXCHANGES_PER_SCENE_EXCERPT = (1, 1, 2, 2, 3, 4, 6, 8)

Phrasings = dict[str, list[str]]
Exchange = tuple[str, str]


@dataclass(frozen=True)
class Conversation:
    """A system text, which may be empty, and (user, assistant) exchanges."""

    system: str
    exchanges: tuple[Exchange, ...]

    def render(self) -> str:
        """The conversation as one document in DeepSeek V3's chat format, special tokens spelled out."""
        turns = (f"{USER}{user}{ASSISTANT}{assistant}{EOS}" for user, assistant in self.exchanges)
        return f"{BOS}{self.system}{''.join(turns)}"


@dataclass(frozen=True)
class ModernDialogues:
    """Hand-written questions in modern English and their answers in the manner of Shakespeare.

    The greetings, intents and closings each pair ways to ask with answers that suit all of them. Topics pair
    a phrase such as "the sea" with prose ("says") and verse; `{topic}` in a question or answer stands for it.
    """

    systems: list[str]
    greetings: list[Phrasings]
    intents: list[Phrasings]
    closings: list[Phrasings]
    topic_questions: list[str]
    verse_questions: list[str]
    unknown_things: list[str]
    unknown_answers: list[str]
    topics: dict[str, Phrasings]


def load_modern_dialogues() -> ModernDialogues:
    """The dialogues shipped with this package."""
    shared = json.loads((HERE / "modern_dialogues.json").read_text(encoding="utf-8"))
    return ModernDialogues(**shared, topics=json.loads((HERE / "topics.json").read_text(encoding="utf-8")))


def choose_system(systems: list[str], rng: random.Random) -> str:
    """A system text for about one conversation in ten, otherwise none."""
    return rng.choice(systems) if rng.random() < SYSTEM_SHARE else ""


def excerpts(turns: Dialogue, rng: random.Random) -> Iterator[tuple[Exchange, ...]]:
    """Cut a scene's turns into runs of exchanges of varied length; a last turn without answer is dropped."""
    pairs = [(turns[i][1], turns[i + 1][1]) for i in range(0, len(turns) - 1, 2)]
    while pairs:
        length = rng.choice(EXCHANGES_PER_SCENE_EXCERPT)
        yield tuple(pairs[:length])
        pairs = pairs[length:]


def play_conversations(works: list[Work], systems: list[str], rng: random.Random) -> list[Conversation]:
    """Each scene as conversations twice, so that speeches except its ends are once asked, once answered."""
    scenes = [scene[start:] for work in works for scene in work.dialogues for start in (0, 1)]
    parts = [part for scene in scenes for part in excerpts(scene, rng)]
    return [Conversation(choose_system(systems, rng), part) for part in parts]


def vary_spelling(question: str, rng: random.Random) -> str:
    """The question as hasty users type it: now and then without capitals or without its last mark."""
    if rng.random() < 0.25:
        question = question.lower()
    return question.rstrip(".!?") if rng.random() < 0.25 else question


def stock_exchange(entries: list[Phrasings], rng: random.Random) -> Exchange:
    """A question of one of the entries and an answer to it."""
    entry = rng.choice(entries)
    return vary_spelling(rng.choice(entry["ask"]), rng), rng.choice(entry["answer"])


def topic_exchange(modern: ModernDialogues, rng: random.Random) -> Exchange:
    """A question about a topic, answered in prose or, if so asked, in verse."""
    topic = rng.choice(list(modern.topics))
    in_verse = rng.random() < 0.4
    question = rng.choice(modern.verse_questions if in_verse else modern.topic_questions)
    answer = rng.choice(modern.topics[topic]["verse" if in_verse else "says"])
    return vary_spelling(question.format(topic=topic), rng), answer


def unknown_exchange(modern: ModernDialogues, rng: random.Random) -> Exchange:
    """A question about a thing that Shakespeare's age did not know."""
    thing = rng.choice(modern.unknown_things)
    question = rng.choice(modern.topic_questions).format(topic=thing)
    return vary_spelling(question, rng), rng.choice(modern.unknown_answers).format(topic=thing)


def modern_conversation(modern: ModernDialogues, rng: random.Random) -> Conversation:
    """A conversation of an optional greeting, up to three questions and an optional farewell."""
    exchanges = [stock_exchange(modern.greetings, rng)] if rng.random() < 0.35 else []
    for kind in rng.choices(("stock", "topic", "unknown"), (45, 43, 12), k=rng.choice((1, 1, 1, 2, 2, 3))):
        if kind == "stock":
            exchanges.append(stock_exchange(modern.intents, rng))
        elif kind == "topic":
            exchanges.append(topic_exchange(modern, rng))
        else:
            exchanges.append(unknown_exchange(modern, rng))
    if rng.random() < 0.2:
        exchanges.append(stock_exchange(modern.closings, rng))
    return Conversation(choose_system(modern.systems, rng), tuple(exchanges))
