"""The tables of docs/request-fields.md are those of the schemas."""

from __future__ import annotations

from support import request_fields


def test_the_tables_list_every_field_of_the_bodies() -> None:
    page = request_fields.PAGE.read_text(encoding="utf-8")
    assert all(f"\n## {heading}\n" in page for heading in request_fields.BODIES)
    assert request_fields.with_tables(page) == page
