"""Every block of code in the pages that teach runs, in the order of its page."""

from __future__ import annotations

import functools
import inspect
import json
import pydoc
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
from processes import ROOT, on_arena

import tfswap

DOCS = ROOT / "docs"
README = "../README.md"
PAGES = (
    README,
    "tutorial.md",
    "new_tactic.md",
    *(f"howto/{path.name}" for path in sorted(DOCS.glob("howto/*.md"))),
)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATUS = re.compile(r"#\s*exit status (\d)")
GIVEN = """
import keras
import tensorflow as tf

model = keras.Sequential([keras.layers.Input([32]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam()
x, y = tf.random.stateless_normal([128, 32], (1, 2)), tf.zeros([128], tf.int64)

class Saved(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.random.stateless_normal([32, 32], (3, 4)))

    @tf.function(input_signature=[tf.TensorSpec([None, 32], tf.float32)])
    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ self.w) @ self.w) ** 2)
        self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
        return loss

saved = Saved()
tf.saved_model.save(saved, "SAVED_MODEL_DIR", signatures=saved.train_step)
"""
"""The model and the data that the README's examples leave to the reader."""
NOT_RUN = {"", "text"}
NAMED_FILE = re.compile(r"`([\w/]+\.py|[\w/]+/\w+\.(?:cc|h|json|toml))`")
NAMED = re.compile(r"`(?:\w+\.)*([A-Za-z_]\w*)`")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and content of each."""
    return [(language, code) for language, code in FENCE.findall((DOCS / page).read_text(encoding="utf-8"))]


def program(page: str, folder: Path) -> str:
    """All blocks of a page as one program: Python as it is, commands as the command line's own calls."""
    lines = [f"import os; os.chdir({str(folder)!r})", "from tfswap.frontends import cli as _cli"]
    for language, code in blocks(page):
        if language == "python":
            lines.append(code)
        elif language == "sh":
            for line in filter(None, map(str.strip, code.splitlines())):
                status = STATUS.search(line)
                words = line.partition("  #")[0].split()
                assert words[0] == "tfswap", f"{page}: {line} can't be run here"
                lines.append(f"assert _cli.main({words[1:]!r}) == {status[1] if status else 0}, {line!r}")
    return "\n".join([*lines, "print()", 'print("true")'])


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    moved, code = program(page, tmp_path).split("\n", 1)
    assert on_arena("\n".join([moved, *([GIVEN] if page == README else []), code])) is True


@pytest.mark.parametrize("page", PAGES)
def test_code_has_a_language_that_is_run(page: str) -> None:
    for language, code in blocks(page):
        assert language in {"python", "sh"} | NOT_RUN
        if language == "python":
            compile(textwrap.dedent(code), page, "exec")


def test_the_site_has_all_pages() -> None:
    listed = set(re.findall(r"[\w/]+\.(?:md|ipynb)", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*") if path.suffix in {".md", ".ipynb"}}


@functools.cache
def is_a_file(name: str) -> bool:
    """Whether the project has a file whose path ends so."""
    folders = ("tfswap", "tests", "benchmarks", "docs", "examples")
    return any(
        path.as_posix().endswith("/" + name) for folder in folders for path in (ROOT / folder).rglob(Path(name).name)
    )


def test_pages_name_files_that_there_are() -> None:
    for page in DOCS.rglob("*.md"):
        for name in NAMED_FILE.findall(page.read_text(encoding="utf-8")):
            assert is_a_file(name), f"{page.name} names {name}"


def test_sources_name_files_that_there_are() -> None:
    parts = "|".join(path.name for path in (ROOT / "tfswap").iterdir() if (path / "__init__.py").exists())
    named = re.compile(rf"(?<![\w/.])((?:{parts}|csrc|tests|benchmarks|docs)/[\w/]+\.(?:py|cc|h|md))\b")
    for source in (ROOT / "tfswap").rglob("*"):
        if source.suffix in {".py", ".cc", ".h"}:
            for name in named.findall(source.read_text(encoding="utf-8")):
                assert is_a_file(name), f"{source} names {name}"


def test_the_design_names_what_the_sources_have() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "tfswap").rglob("*")
        if path.suffix in {".py", ".cc", ".h", ".js"}
    )
    words = {*re.findall(r"\w+", sources)}
    for page in (DOCS / "design").glob("*.md"):
        for name in NAMED.findall(page.read_text(encoding="utf-8")):
            assert name in words, f"{page.name} names {name}"


def test_pages_answer_their_question_first() -> None:
    for page in (*(DOCS / "design").glob("*.md"), *(DOCS / "measurements").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert page.name == "index.md" or re.match(r"# [^\n]+\n\n\*\*[^*]+\?\*\* ", text), page


def test_stages_of_the_design_have_diagrams() -> None:
    for page in {*(DOCS / "design").glob("*.md")} - {DOCS / "design" / "limitations.md"}:
        assert "```mermaid\n" in page.read_text(encoding="utf-8"), page


def test_the_readme_is_short_and_the_home_page_of_the_site() -> None:
    sys.path.insert(0, str(DOCS))
    from site_hooks import home_page

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 600
    home = home_page(readme)
    assert "docs/" not in home
    linked = re.findall(r"\]\(([^)#]+)", home)
    assert linked and all((DOCS / page).exists() for page in linked)


def test_the_reference_has_all_public_names() -> None:
    import tfswap

    in_reference = set(re.findall(r"^::: ([\w.]+)", (DOCS / "reference.md").read_text(), re.MULTILINE))
    for name in set(tfswap.__all__) - {"keras"}:
        made = getattr(tfswap, name)
        assert {f"{made.__module__}.{name}", made.__module__} & in_reference, json.dumps(name)


def test_the_reference_has_what_pages_call_of_the_ops() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("howto/*.md")]
    called = {name for page in pages for name in re.findall(r"\btfswap\.ops\.(\w+)\(", page.read_text())}
    in_reference = set(
        re.findall(r"^::: tfswap\.ops\.runtime\.(\w+)", (DOCS / "reference.md").read_text(), re.MULTILINE)
    )
    assert {"configure", "stats"} <= called <= in_reference


def test_all_that_is_public_has_a_docstring() -> None:
    public = {name: getattr(tfswap, name) for name in tfswap.__all__}
    members = {
        f"{name}.{member}": getattr(value, "__func__", value)
        for name, kind in public.items()
        if inspect.isclass(kind)
        for member, value in vars(kind).items()
        if not member.startswith("_") and isinstance(value, types.FunctionType | property | classmethod | staticmethod)
    }
    assert [name for name, value in {**public, **members}.items() if not value.__doc__] == []


def test_the_help_of_optimize_is_one_screen() -> None:
    assert pydoc.plain(pydoc.render_doc(tfswap.optimize)).count("\n") <= 40


# --- words ----------------------------------------------------------------------------------------------------

RETIRED = {
    r"\bbeside\b": "concurrent, paired, in addition, next to",
    r"\btold\b": "known, reported, computed, passed, distinguished",
    r"\btells?\b": "reports, shows, gives, distinguishes",
    r"\b(made|makes?) again\b": "recomputed, recomputes",
    r"\b(let|lets|letting) go\b": "free, release",
    r"\bclaim(s|ed|ing)?\b": "register, reservation",
    r"\b(forward|backward|two|both) halves\b": "forward and backward functions",
    r"\bhangs? on\b": "depends on",
    r"\bniches?\b": "reserved slot",
    r"\bfor who asks\b": "opt-in",
    r"\basks for\b": "requests, needs",
    r"\bhopeless": "unsatisfiable",
    r"\bwhat came\b": "bytes allocated by others",
    r"\bt(ake|akes|aken|aking|ook) over\b": "buffer forwarding, more than",
    r"\bat once\b": "immediately, concurrently, the peak",
    r"\b(go|goes|went|going) back\b": "freed, returned, backward loop",
    r"\bwhat is there\b": "persistent bytes, the arena's contents",
    r"\b(he|it|they) likes?\b": "what is not known, or arbitrary",
    r"\bstrange\b": "unexpected, unknown",
    r"\blikewise\b": "the same, too",
    r"\bat hand\b": "this machine, the user's",
    r"\bout of sight\b": "outside of the graph",
    r"\bwhoever\b": "the caller, the thread, whichever",
    r"\bnobody\b": "no thread, no process, no other holder",
    r"\bso many\b": "this number of, the number that",
    r"\ball is well\b": "success, no error",
    r"\b(is|are|was|were|be|been) said\b": "reported, documented, named",
    r"\blook(s|ed|ing)? (at|for)\b": "read, check, search",
    r"\bknows? (nothing|no)\b": "does not depend on, has no",
    r"\bwants\b": "needs, requests, waits for",
    r"\bapply (swaps|order|inside)\b|\btell effects\b": "the pass of that name",
}
"""Words that the sources and pages no longer use, and the field's own; docs/glossary.md has each term once."""

READ = {".py", ".cc", ".h", ".cu", ".cuh", ".html", ".js", ".css", ".txt", ".ipynb", ".md"}


def _words(text: str) -> str:
    """The text with the words of names apart: `free_at_once` and `kFreeAtOnce` have "at once"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ").lower()


def test_retired_words_stay_retired() -> None:
    folders = ("tfswap", "tests", "benchmarks", "examples", "docs")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.*")) if path.suffix in READ]
    for path in (*paths, *ROOT.glob("*.md")):
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        words = _words(text)
        for word, better in RETIRED.items():
            if found := re.search(word, words):
                number = words.count("\n", 0, found.start()) + 1
                line = text.splitlines()[number - 1].strip()
                raise AssertionError(f"{path.relative_to(ROOT)}:{number}: say {better}: {line}")


def test_benchmarks_run_without_changes_of_the_path() -> None:
    changed = [path.name for path in (ROOT / "benchmarks").rglob("*.py") if "sys.path" in path.read_text("utf-8")]
    assert changed == [], "Python finds modules next to the command; tfswap is installed"


def test_the_glossary_has_each_term_once() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for row in rows[2:] for term in row.split(", ")]
    assert len(terms) > 40
    assert len({*terms}) == len(terms), sorted(term for term in {*terms} if terms.count(term) > 1)
