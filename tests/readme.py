"""The code blocks of the README, by the heading they stand under: tests run the very text that users copy."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(heading):
    """List the Python blocks under a heading, in order."""
    return _under(heading, r"```python\n(.*?)```")


def block(heading, marker):
    """Return the one block under `heading` that holds `marker`."""
    (one,) = [text for text in blocks(heading) if marker in text]
    return one


FENCED = re.compile(r"```.*?```", re.S)


def _under(heading, pattern):
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", re.sub(FENCED, _hide, text), re.M | re.S)
    assert found, f"README.md has no heading {heading!r}"
    return [block.replace("\0", "#") for block in re.findall(pattern, found[1], re.S)]


def _hide(found):
    """Hide the # of comments, which at a line's beginning would look like headings."""
    return found[0].replace("#", "\0")


def commands(heading):
    """List the shell blocks under a heading, in order."""
    return _under(heading, r"```\n(.*?)```")
