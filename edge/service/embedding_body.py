"""The body of a request for embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .body_decoder import decode_body, unsupported
from .generation_fields import PositiveInt
from .strict_json import RequestLimits
from .text_inputs import TextOrIds, TextsOrIds, texts_or_ids


class EmbeddingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request for embeddings."""

    input: Annotated[TextsOrIds, Meta(description="A text, a list of texts, token ids, or a list of token id lists.")]
    model: Annotated[str | None, Meta(description="Name of the model; null for the one that the server has.")] = None
    encoding_format: Annotated[
        str | None,
        Meta(
            description="Vectors as numbers, or as the base64 of little-endian float32.",
            extra_json_schema={"enum": ["float", "base64", None]},
        ),
    ] = None
    dimensions: Annotated[
        PositiveInt | None, Meta(description="The model's own number: vectors are not shortened.")
    ] = None
    user: Annotated[str | None, Meta(description="Accepted; does not change the answer.")] = None


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts to embed."""

    model: str | None
    inputs: tuple[TextOrIds, ...]
    as_base64: bool = False
    dimensions: int | None = None
    """The length of the vectors that is expected; see `check_dimensions`."""

    @classmethod
    def parse(cls, body: bytes | str | Mapping[str, Any], limits: RequestLimits | None = None) -> EmbeddingRequest:
        """Decode a body; arguments and errors as for `ChatRequest.parse`."""
        limits = limits or RequestLimits()
        fields = decode_body(body, EmbeddingBody, limits)
        return cls(
            model=fields.model,
            inputs=texts_or_ids("input", fields.input, limits),
            as_base64=fields.encoding_format == "base64",
            dimensions=fields.dimensions,
        )

    def check_dimensions(self, length: int) -> None:
        """Check that vectors of this length are what the request asks for.

        Raises:
            RequestError: it asks for another length.
        """
        if self.dimensions not in (None, length):
            raise unsupported(
                "dimensions",
                f"dimensions is {self.dimensions}, and this model's vectors have {length}",
                "vectors are not shortened: leave dimensions out",
            )
