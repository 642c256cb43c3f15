"""Is the prose plain, by proselint and a small vocabulary? Is each answer two clicks away?"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden.messages import listing

ROOT = Path(__file__).parent.parent
PROSE = (
    "*.md", "docs/**/*.md", "core/**/README.md", "examples/**/README.md", "plugins/*/*.md",
    "integrations/*/*.md", "benchmarks/README.md",
)  # fmt: skip
PAGES = sorted(path for pattern in PROSE for path in ROOT.glob(pattern))
MESSAGES = "messages.md"
TEXTS = {str(p.relative_to(ROOT)): p.read_text() for p in PAGES} | {MESSAGES: listing()}
FENCE, CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL), re.compile(r"`[^`\n]*`")
PASSED_OVER = (": typography.", ": dates_times.dates.decade_apostrophes:")
"""proselint's checks for typeset quotes and signs, which plain text lacks, and of an H200's name."""
INSTEAD = {
    "anew": "again", "etc": "the whole list", "e.g": "for example", "for ever": "always",
    "hence": "so", "i.e": "that is", "in order to": "to", "leverage": "use", "likewise": "also",
    "mended?": "fix", "please": "leave it out", "shall": "must", "simply": "leave it out",
    "thus": "so", "upon": "on", "utili[sz]e": "use", "via": "through", "whence": "from where",
    "whilst": "while", "whoever": "name the caller",
}  # fmt: skip
"""Words that a reader of English as a second language trips over, or that say nothing."""
LONGEST_AVERAGE = 22
"""Words of a sentence of the README and of a tutorial on average, at most."""


def words_of(text: str) -> str:
    """Return a page without its code: fences are blank lines, code within a line a word of its own."""
    text = FENCE.sub(lambda block: re.sub(r"[^\n]", "", block[0]), text)
    number = itertools.count()
    text = CODE.sub(lambda _: f"code{next(number)}x", text)
    # A heading, a list's item or a cell is a sentence: the next one doesn't go on with it.
    text = text.replace(" | ", ".\n\n| ")
    return re.sub(r"^((?:#|- ).*[\w)])$", r"\1.", text, flags=re.MULTILINE)


def lint(texts: dict[str, str], folder: Path) -> list[str]:
    """Return proselint's errors."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "proselint", "-o", "compact", "check", *texts]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode in (0, 1), ran.stderr
    return [e for e in ran.stdout.splitlines() if not any(check in e for check in PASSED_OVER)]


def test_proselint_has_nothing_to_say(tmp_path: Path) -> None:
    texts = {name.replace("/", "__"): words_of(text) for name, text in TEXTS.items()}
    # Formulas and lists of features are no sentences.
    formulas = r"^- (?:.* = .*|[a-z0-9_ ]+)\.?$"
    texts[MESSAGES] = re.sub(formulas, "", texts[MESSAGES], flags=re.MULTILINE)
    errors = lint(texts | {"wrong.md": "This is is very unique.\n"}, tmp_path)
    assert any("wrong.md" in error for error in errors), "the linter sees errors"
    assert [error for error in errors if "wrong.md" not in error] == []


def test_words_that_a_reader_trips_over_have_plainer_ones() -> None:
    wrong = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)
    assert wrong.findall("Utilise it, e.g. via X") == ["Utilise", "e.g", "via"]
    found = [
        f"{name}: {match[0]}"
        for name, text in TEXTS.items()
        for match in wrong.finditer(words_of(text))
    ]
    assert found == []


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))], ids=lambda p: p.name
)  # fmt: skip
def test_sentences_are_short(page: Path) -> None:
    prose = re.sub(r"^[|#!].*?$", "", words_of(page.read_text()), flags=re.MULTILINE)
    sentences = [s.split() for s in re.split(r"(?<=[.:;?])\s+", prose) if s.strip()]
    assert len(sentences) > 10
    assert sum(map(len, sentences)) / len(sentences) < LONGEST_AVERAGE


QUESTIONS = {
    "How do I install on an NVIDIA GPU?": r'pip install --find-links dist "polyattn\[cuda\]"',
    "How do I force a backend?": r"POLYATTN_BACKEND=\w+",
    "How do I force one for decodes alone?": r"prefill=\w+,decode=\w+",
    "Why this backend?": r"polyattn explain",
    "What does a running process use?": r"polyattn why",
    "How do I add a kernel?": r"@backend\(",
    "What can my function do?": r"polyattn claim",
    "How do I read a model's config?": r"from_hf_config",
    "How do I serve an fp8 cache?": r'kv_cache_dtype="fp8_e4m3"|--kv-cache-dtype[ =]fp8',
    "How do I share prefixes?": r"shared_prefix",
    "How do I make it faster on this machine?": r"polyattn tune",
    "How do I capture a step in a CUDA graph?": r"StepGraphs",
    "How do I use it in vLLM?": r"pip install .*vllm|polyattn-vllm",
    "How do I use it in transformers?": r"attn_implementation=",
    "How do I mask with my own function?": r"register_variant",
    "How do I serve MLA?": r"LatentAttention",
    "How do I serve a recurrent layer?": r"polyattn\.Recurrent|Recurrent\(",
    "How do I turn a plugin off?": r"POLYATTN_DISABLE_PLUGINS",
    "What is proven on which hardware?": r"measured in part",
    "How is a release verified?": r"sha256sum --check",
}
"""What a reader asks, and what the answer has."""


def linked(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {Path(os.path.normpath(page.parent / target)) for target in targets}


def test_each_question_is_answered_within_two_clicks() -> None:
    clicks = [{ROOT / "README.md"}]
    for _ in range(2):
        clicks.append(clicks[-1].union(*map(linked, clicks[-1])))
    texts = [page.read_text() for page in clicks[-1]]
    assert len(texts) > 15
    unanswered = [
        question for question, answer in QUESTIONS.items()
        if not any(re.search(answer, text) for text in texts)
    ]  # fmt: skip
    assert unanswered == []
