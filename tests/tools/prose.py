"""Find what a reader stumbles over: in Markdown, docstrings, comments and messages.

    python tests/tools/prose.py [PATH ...]    all files of the repository, or these and below them
    python tests/tools/prose.py --count       numbers by rule and folder only

The rules, of which a program finds the plain cases:

* words: a thing is the subject, so "who", "whose" and "nobody" never stand for one; "is no" gives
  way to a positive sentence; one word of the field for each thing (`WORDS`). All text files.
* length: a sentence has at most 30 words. Markdown and docstrings.
* verb: the docstring of a function begins with an imperative verb (`VERBS`). Package, benchmarks,
  tutorials; properties may begin with a noun.
* noun: the docstring of a class or module begins with neither "What" nor "Whether", nor with a verb
  in the third person.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS = 30
TEXTS = (".py", ".md", ".cpp", ".h", ".cu", ".cuh", ".toml", ".yml", ".yaml", "Makefile")
# docstrings there begin as the rules say; those of tests are read by maintainers alone
REFERENCE = ("torch_dynemb", "benchmarks", "tutorials")

# what is found -> what to write instead
WORDS = {
    r"\b(who|whose|whom|whoever|whosoever|nobody|somebody|himself|herself)\b": "a thing",
    r"\b(is|are|was|were|be) no (?!longer\b|more\b|\w+er\b)": "a positive sentence",
    r"\b(there (is|are) not)\b(?! (enough|yet|only)\b)": "unknown, missing",
    r"\b(is|are|was|were|be|been) told\b|\btells\b": "reports, returns, raises",
    r"\bpreserved? rows?\b|\bpreserved?_rows?|\bPreservedRows\b|\bundo words?\b": "copy-on-write",
    r"(?-i:\bUndo\b|\bkUndo)": "copy-on-write",
    r"\bchange[_ ]bytes?\b": "dirty bits",
    r"\bheld rows?\b|\brows? (is|are) held\b": "pin",
    r"promise_room|PromiseRoom|room_told": "reserve_space",
    r"\btraining waits\b": "backpressure",
    r"\bsummed[_ ]files?\b|\bSummedFile": "checksummed file",
    r"held_back|\bHeldBack": "defer_signals",
    r"\bthe words of (a|the) handles?\b": "fields",
    r"\blate handles?\b|\bhandles? that (is|are) late\b": "stale handles",
    r"\bby hand\b": "reference, or manually",
    r"\bthought of\b|\bcomes? (or|and) goes?\b": "plain words",
}
# path, or the folder that it lies in -> lines that pass: texts that need a word; at most 20
ALLOWED = {
    "tests/tools/prose.py": r".",
    "tests/project/test_prose.py": r".",
    "tutorials/dlrm/report.py": r"held-out samples is",
    "tutorials/serving/server.py": r"POST /run",
}
# a line break may divide the words
_BROKEN = {word.replace(" ", " +"): instead for word, instead in WORDS.items()}
PERSONS = re.compile("|".join(f"(?:{word})" for word in _BROKEN), re.IGNORECASE)
INSTEAD = [(re.compile(word, re.IGNORECASE), instead) for word, instead in _BROKEN.items()]
QUESTIONS = {"what", "whether", "which", "how", "where", "when", "who", "why", "whose"}
_VERBS = """
abort accept accumulate acquire act add adjust admit advance advise allocate allow answer append
apply arrange ask assemble assert assign attach average await backpropagate balance begin bind
book borrow bound break bring broadcast build bump bytes cache calculate call cancel cap capture
carry cast change check choose claim clamp clean clear click clip clone close collect combine
commit compact compare compile complete compress compute concatenate configure confirm connect
construct consume continue convert copy count cover create cross cut damage deal decay decide
declare decode decompress decrease deduplicate defer define delete deliver demangle derive
describe deserialize destroy detach determine disable discard dispatch divide do download drain
draw drop dump encode end enforce enlarge enqueue ensure enter enumerate erase escape estimate
evaluate evict examine exchange exclude execute exit expand expect explain export expose extend
extract fail fall feed fetch fill filter find finish fit fix flatten flush fold follow forbid
forget fork format forward free freeze fuse gather generate get give go group grow guard guess
halve handle hash have hold identify ignore import include increase increment index infer
initialize inject insert inspect install integrate interleave interpret interrupt intersect
invalidate inverse invert issue iterate join judge keep kill label launch lay lead learn leave let
limit link list load localize locate lock log look lower make map mark mask match materialize
measure merge migrate mirror mix model modify mount move multiply name narrow negate normalize
note notice notify number observe obtain offer open order overlap overwrite own pack pad pair
parse partition pass patch pause peek perform permute pick pin place plan plot point poll pool pop
populate prefetch prefix prepare prepend preserve print process produce project promote propagate
protect prove provide prune publish pull push put quantize query queue quote raise randomize rank
reach read rebuild receive recognize record recover reduce refer refuse register rehash reject
relabel release reload remember remove rename render renumber reopen reorder repair repeat replace
replay report represent request require rescale reserve reset reshape resize resolve restore
restrict resume retain retire retry return reuse reverse revert rewrite roll rotate round route
run sample save say scale scan scatter schedule score search see select send separate serialize
serve set shape share shift show shrink shuffle shut sign signal simulate skip sleep slice
snapshot solve sort spawn split spread stack stage start state step stop store stream strip submit
subtract sum summarize swap switch synchronize tabulate take tell test throw tile time touch trace
track train transfer translate transpose traverse trim truncate try tune turn unbind undo unfold
union unlink unlock unpack unpickle unpin unregister unwrap update upgrade upload use validate
verify view visit wait walk warm warn weigh widen wire withdraw work wrap write yield zero zip
"""
VERBS = frozenset(_VERBS.split())


class Finding(NamedTuple):
    """One place.

    Attributes:
        path: of the file, from the root of the repository.
        line: from 1.
        rule: "words", "length", "verb" or "noun".
        says: what stands there, and what should.
    """

    path: str
    line: int
    rule: str
    says: str


def words_in(path: str, text: str) -> Iterator[Finding]:
    """Find words that stand for something else, also where a line break divides them."""
    for match in PERSONS.finditer(re.sub(r"\n[ \t]*(?:#|//|\*|>)?[ \t]*", _spaces, text)):
        instead = next(to for word, to in INSTEAD if word.match(match.group()))
        line = text.count("\n", 0, match.start()) + 1
        yield Finding(path, line, "words", f"{match.group()!r}: write {instead}")


def _spaces(match: re.Match[str]) -> str:
    """Replace a line break by as many spaces."""
    return " " * len(match.group())


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Split prose into sentences, each with its line from 0; without code, tables and headings.

    An item of a list, and an entry of a section such as Args, begins a paragraph.
    """
    paragraph: list[tuple[int, str]] = []
    fenced = False
    example = -1  # the indentation below which an indented block ends
    lines = [*text.split("\n"), ""]
    for number, line in enumerate(lines):
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if bare.startswith(("```", "~~~")):
            fenced = not fenced
            bare = ""
        if example >= 0 and bare and indent < example:
            example = -1
        code = fenced or example >= 0 or bare.startswith((">>>", "... ", "|", "#", "<", "!["))
        begins = re.match(r"([-*+] |\d+\. |\*{0,2}[\w.`, *]+(\([^)]*\))?: )", bare) is not None
        if paragraph and (not bare or code or begins):
            yield from _split(paragraph)
            paragraph = []
        if bare and not code:
            paragraph.append((number, re.sub(r"^([-*+]|\d+\.) ", "", bare)))
            if bare.endswith("::"):
                example = indent + 1
                yield from _split(paragraph)
                paragraph = []


def _split(paragraph: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Split one paragraph at full stops."""
    begin = paragraph[0][0]
    sentence: list[str] = []
    for number, line in paragraph:
        for part in re.split(r"(?<=[.?!])(?:[)*\"'`]*)\s+", line):
            if not sentence:
                begin = number
            sentence.append(part)
            ends = re.search(r"[.?!][)*\"'`]*$", part)
            if ends and not re.search(r"(e\.g|i\.e|etc|vs)\.$", part):
                yield begin, " ".join(sentence)
                sentence = []
    if sentence:
        yield begin, " ".join(sentence)


def number_of_words(sentence: str) -> int:
    """Count words; a piece of code and a link's address are one and none."""
    sentence = re.sub(r"``?[^`]+``?", "code", sentence)
    sentence = re.sub(r"\]\([^)]*\)", "]", sentence)
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def long_sentences(path: str, text: str, first_line: int = 1) -> Iterator[Finding]:
    """Find sentences of more than `MOST_WORDS` words."""
    for line, sentence in sentences(text):
        words = number_of_words(sentence)
        if words > MOST_WORDS:
            says = f"{words} words, at most {MOST_WORDS}: {sentence[:60]}..."
            yield Finding(path, first_line + line, "length", says)


def docstrings(path: str, source: str) -> Iterator[Finding]:
    """Find docstrings that begin otherwise than the rules say, or have long sentences."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        line = node.body[0].lineno
        yield from long_sentences(path, text, line)
        first = text.split()[0].strip(".,:;`'\"").lower()
        if isinstance(node, ast.Module | ast.ClassDef):
            if first in QUESTIONS:
                yield Finding(path, line, "noun", f"begins with {first!r}: begin with a noun")
            elif isinstance(node, ast.ClassDef) and first in THIRD_PERSON:
                yield Finding(path, line, "noun", f"class begins with {first!r}: begin with a noun")
        elif not _is_noun(node) and first not in VERBS:
            says = f"{node.name} begins with {first!r}: begin with an imperative verb (`VERBS`)"
            yield Finding(path, line, "verb", says)


def _third_person(verb: str) -> str:
    """Give a verb the ending of the third person."""
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


# nouns of the field that are verbs, too
THIRD_PERSON = {_third_person(verb) for verb in VERBS} - {
    *("bytes", "caches", "counts", "hashes", "indexes", "initializes", "models", "numbers"),
    *("places", "plans", "ranks", "records", "requests", "scores", "states", "steps", "times"),
}


def _is_noun(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as an attribute, or has a name of Python's own."""
    decorators = {ast.unparse(of).split("(")[0].split(".")[-1] for of in node.decorator_list}
    nouns = {"property", "cached_property", "setter", "fixture"}
    return bool(decorators & nouns) or node.name.startswith("__")


def findings(path: str, text: str) -> Iterator[Finding]:
    """Find everything in one file.

    Args:
        path: from the root of the repository.
        text: of the file.
    """
    found = list(words_in(path, text))
    if path.endswith(".md"):
        found += long_sentences(path, re.sub(r"(?m)^ {4}.*$", "", text))  # without code
    if path.endswith(".py") and path.startswith(REFERENCE):
        found += docstrings(path, text)
    lines = text.split("\n")
    allowed = [passes for name, passes in ALLOWED.items() if path.startswith(name)]
    for finding in sorted(found, key=lambda of: of.line):
        if not any(re.search(line, lines[finding.line - 1] + " ") for line in allowed):
            yield finding


def tracked(paths: list[str]) -> list[str]:
    """List text files that git knows or would add, from the root of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = sorted(set(listed.stdout.splitlines()))
    return [name for name in names if name.endswith(TEXTS) and (ROOT / name).is_file()]


def main(arguments: list[str] | None = None) -> int:
    """Print what is found; return 1 if there is something."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders (default: all)")
    parser.add_argument("--count", action="store_true", help="print numbers by rule and folder")
    options = parser.parse_args(arguments)
    paths = [str(Path(path).resolve().relative_to(ROOT)) for path in options.paths]
    found = [
        finding
        for name in tracked(paths)
        for finding in findings(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    rules = Counter(finding.rule for finding in found)
    if options.count:
        folders = Counter("/".join(finding.path.split("/")[:2]) for finding in found)
        for folder, number in folders.most_common():
            print(f"{number:6} {folder}")
    else:
        for finding in found:
            print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.says}")
    said = ", ".join(f"{number} {rule}" for rule, number in sorted(rules.items()))
    print(f"{len(found)} places" + (f": {said}" if found else ""))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
