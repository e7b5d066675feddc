"""Fills tldr-pages placeholders with the same values in request and command.

The model learns to copy values from such pairs.
"""

from __future__ import annotations

import random
import re

STEMS = (
    "notes", "report", "data", "photo", "backup", "main", "index", "config", "server", "draft", "invoice", "results",
    "users", "todo", "log", "archive", "sample", "input", "test", "output", "summary", "project", "access", "old",
)  # fmt: skip
FOLDERS = (
    "src", "build", "docs", "Downloads", "/media/usb", "/var/log", "~/projects", "photos", "music", "/etc", "backup",
    "dist", "~/Documents", "/home/alice", "data", "logs", "public", "/opt/app", "my_folder", "/srv/www",
)  # fmt: skip
WORDS = (
    "alpha", "web", "alice", "bob", "demo", "api", "blue", "nginx", "redis", "dev", "staging", "feature-x", "worker",
    "mysql", "python", "prod", "carol", "frontend", "cache", "app1", "vm2", "release", "hello", "error", "TODO",
)  # fmt: skip
HOSTS = ("example.org", "host1", "10.0.0.5", "192.168.1.20", "server.local", "db.internal", "mysite.com", "8.8.8.8")
URLS = ("https://example.org/file.zip", "https://mysite.com", "http://localhost:8080", "https://api.example.org/v1")
EXTENSIONS = ("txt", "csv", "log", "json", "md", "py", "xml", "html", "conf")

PLACEHOLDER = re.compile(r"<([A-Za-z0-9_./\\-]+)>")
NOUN_GROUPS = {
    "folder": ("directory", "folder", "path"),
    "host": ("host", "server", "domain", "machine", "website", "address", "ip address", "hostname"),
    "url": ("url", "link", "website", "page", "webpage"),
    "number": ("number", "pid", "port", "id", "count"),
}


def value_for(name: str, rng: random.Random) -> tuple[str, tuple[str, ...]] | None:
    """A plausible value for a placeholder, and nouns that a request may use for it; None for unknown placeholders."""
    leaf = re.split(r"[/\\]", name)[-1].lower()
    noun = leaf.replace("_", " ")
    made: tuple[str, tuple[str, ...]] | None = None
    if name.startswith(("path/to/", "path\\to\\")) and "or" not in leaf.split("_"):
        made = path_for(leaf, rng)
    elif leaf in ("host", "hostname", "domain", "ip_address", "remote_host", "ip", "address", "example.com"):
        made = rng.choice(HOSTS), NOUN_GROUPS["host"]
    elif leaf == "url":
        made = rng.choice(URLS), NOUN_GROUPS["url"]
    elif leaf in ("port", "port_number"):
        made = str(rng.choice((22, 80, 443, 3000, 5432, 8000, 8080, 9000))), ("port",)
    elif leaf in ("pid", "process_id", "id", "number", "n", "count"):
        made = str(rng.randint(2, 9999)), (noun, *NOUN_GROUPS["number"], "process")
    elif re.fullmatch(r"[a-z_]{4,}", leaf):
        made = rng.choice(WORDS), (noun, noun.removesuffix(" name"), noun.removeprefix("remote "))
    return made


def path_for(leaf: str, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """A value and nouns for a path placeholder whose last component is `leaf`; an extension is kept."""
    if "directory" in leaf or "folder" in leaf:
        return rng.choice(FOLDERS), NOUN_GROUPS["folder"]
    extension = re.search(r"\.([a-z0-9.]{1,7})$", leaf)
    suffix = extension.group(1) if extension else rng.choice(EXTENSIONS)
    nouns = (leaf.partition(".")[0].strip("0123456789"), f"{suffix} file", suffix, "file", "archive")
    return f"{rng.choice(STEMS)}{rng.choice(('', '', '1', '2', '_2024', '-old'))}.{suffix}", nouns


def fill(request: str, command: str, rng: random.Random) -> tuple[str, str]:
    """Put a value into the request and the command; both are unchanged if no noun matches."""
    for match in PLACEHOLDER.finditer(command):
        made = value_for(match.group(1), rng)
        if made is None:
            continue
        value, nouns = made
        named = name_it(request, value, nouns, rng)
        if named is not None:
            return named, command.replace(match.group(), value)
    return request, command


def name_it(request: str, value: str, nouns: tuple[str, ...], rng: random.Random) -> str | None:
    """Replace "a specific NOUN" in the request by `value`; None if there is no such phrase."""
    alternatives = "|".join(re.escape(noun) for noun in sorted(nouns, key=len, reverse=True) if noun)
    adjectives = "specific |given |specified |particular |single |existing |new "
    pattern = rf"\b(?:an?|the|one)\s+(?:{adjectives})?({alternatives})\b"
    found = re.search(pattern, request, flags=re.IGNORECASE)
    if found is None:
        return None
    # Mostly the bare name, as a user would write; sometimes "the file NAME".
    spoken = value if rng.random() < 0.6 else f"the {found.group(1)} {value}"
    return request[: found.start()] + spoken + request[found.end() :]
