"""Light rewording of requests."""

from __future__ import annotations

import random
import re

OPENINGS = (
    "how do I {}",
    "how do I {}?",
    "how to {}",
    "how to {}?",
    "how can I {}?",
    "please {}",
    "can you {}?",
    "show me how to {}",
    "I want to {}",
    "I need to {}",
    "command to {}",
    "a command to {}",
    "what is the command to {}?",
    "help me {}",
)

SYNONYMS = (
    ("display", "show", "print"),
    ("list", "show"),
    ("delete", "remove"),
    ("directory", "folder"),
    ("directories", "folders"),
    ("create", "make"),
    ("search for", "find", "look for"),
    ("specific", "given", "specified", "particular"),
    ("current directory", "current folder", "this directory", "here"),
    ("start", "launch", "run"),
    ("stop", "halt", "end"),
    ("install", "set up"),
    ("download", "fetch", "get"),
    ("change", "modify", "set"),
    ("retrieve", "get"),
    ("execute", "run"),
    ("count", "count the number of"),
    ("file name", "filename"),
    ("bigger than", "larger than", "greater than", "over", "more than"),
    ("smaller than", "less than", "under"),
    ("recursively", "including subdirectories", "and its subdirectories"),
    ("terminate", "kill"),
    ("convert", "turn", "transform"),
    ("information about", "details about", "info about", "details of"),
    ("information", "info", "details"),
    ("extract", "unpack"),
    ("interactively", "in interactive mode"),
    ("repository", "repo"),
)
SYNONYM_PATTERNS = tuple(
    (re.compile(r"\b(" + "|".join(map(re.escape, sorted(group, key=len, reverse=True))) + r")\b", re.IGNORECASE), group)
    for group in SYNONYMS
)


def reword(request: str, rng: random.Random) -> str:
    """Vary a request: letter case, punctuation, synonyms, an opening, or a dropped article."""
    text = request
    if rng.random() < 0.35:
        text = replace_synonym(text, rng)
    if rng.random() < 0.2:
        text = re.sub(r"\b(the|a|an)\s+", lambda m: "" if rng.random() < 0.6 else m.group(), text, flags=re.IGNORECASE)
    if rng.random() < 0.15:
        # Asides such as "(e.g. ...)" are written by manuals, not by users.
        text = re.sub(r"\s*\([^()]*\)", "", text) or text
    if rng.random() < 0.3:
        text = text.rstrip(".")
    if rng.random() < 0.25:
        bare = text.rstrip(".")
        # "I/O" and "JSON" keep their capitals; an ordinary first word loses its own.
        head = bare[:1].lower() if bare[1:2].islower() else bare[:1]
        text = rng.choice(OPENINGS).format(head + bare[1:])
    elif rng.random() < 0.4:
        text = text[:1].lower() + text[1:]
    return text.strip() or request


def replace_synonym(text: str, rng: random.Random) -> str:
    """Replace one word or phrase by a synonym; the text is unchanged if it has none."""
    hits = [(found, group) for pattern, group in SYNONYM_PATTERNS if (found := pattern.search(text))]
    if not hits:
        return text
    found, group = rng.choice(hits)
    other = rng.choice([word for word in group if word != found.group().lower()])
    if found.group()[:1].isupper():
        other = other[:1].upper() + other[1:]
    return text[: found.start()] + other + text[found.end() :]
