"""The MCP server of `edge-run mcp`: models of this machine as tools for other programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, TypeAlias, TypeVar

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, InputRequiredResult
from pydantic import Field, ValidationError

from ...errors import EdgeError
from ...runtime.encoders.encoder import AnyModel
from ...runtime.engine import Engine
from ...runtime.options import GenerateOptions
from ...runtime.result import Reply
from ...runtime.scheduling.request_run import Cancellation
from ...version import __version__
from ..service.model_pool import ModelPool

_Used = TypeVar("_Used")
_Result = TypeVar("_Result")
_Model: TypeAlias = Annotated[str | None, Field(description="Name of the model; null for the first one.")]


class _Server(MCPServer[Any]):
    """A server that says what is wrong with a call on one line, without the SDK's words around it."""

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool.

        Raises:
            ToolError: there is none of that name, its arguments are wrong, or the model refuses.
        """
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError):
                wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in cause.errors())
                raise ToolError(f"wrong arguments of {name}: {'; '.join(wrong)}") from cause
            if isinstance(cause, ToolError):
                raise cause from cause.__cause__
            raise


async def _use(
    opened: Callable[..., AbstractContextManager[_Used]],
    model: str | None,
    work: Callable[[_Used, Cancellation], _Result],
) -> _Result:
    """Work with a model in a thread, which ends after its current pass where the call is cancelled."""
    cancellation = Cancellation()

    def run() -> _Result:
        try:
            with opened(model, cancellation=cancellation) as engine:
                return work(engine, cancellation)
        except EdgeError as error:
            raise ToolError(str(error)) from error

    try:
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
    finally:
        cancellation.cancel()


def mcp_server(pool: ModelPool) -> MCPServer[Any]:
    """A server with the tools `generate`, `embed`, `rerank` and `count_tokens`.

    Args:
        pool: the models.
    """
    names = ", ".join(entry.id for entry in pool.offered.entries())
    server = _Server("edge-run", instructions=f"Models: {names}", version=__version__, log_level="ERROR")

    @server.tool()
    async def generate(
        prompt: Annotated[str, Field(description="What a user says to the model.")],
        system: Annotated[str | None, Field(description="System message.")] = None,
        max_tokens: Annotated[int | None, Field(description="Largest number of tokens to write.")] = None,
        temperature: Annotated[float | None, Field(description="0 for the most likely text.")] = None,
        model: _Model = None,
    ) -> str:
        """Answer a prompt with a language model that runs on this machine."""

        def answer(engine: Engine, cancellation: Cancellation) -> str:
            options = GenerateOptions(system=system, max_tokens=max_tokens, temperature=temperature)
            with cancellation.reading(engine.stream(prompt, options)) as stream:
                return Reply.of(list(stream)).text

        return await _use(pool.use, model, answer)

    @server.tool()
    async def embed(
        texts: Annotated[list[str], Field(description="The texts, each at most as long as the context.")],
        model: _Model = None,
    ) -> dict[str, list[list[float]]]:
        """Embed texts: vectors of length 1, whose dot products say how similar the texts are."""

        def vectors(engine: AnyModel, cancellation: Cancellation) -> dict[str, list[list[float]]]:
            return {"embeddings": engine.embed(texts, cancelled=lambda: cancellation.cancelled).tolist()}

        return await _use(pool.use_any, model, vectors)

    @server.tool()
    async def rerank(query: str, documents: list[str], model: _Model = None) -> dict[str, list[float]]:
        """Say how relevant each document is to a query, from 0 to 1."""

        def scores(engine: AnyModel, cancellation: Cancellation) -> dict[str, list[float]]:
            return {"scores": engine.score(query, documents, cancelled=lambda: cancellation.cancelled).scores.tolist()}

        return await _use(pool.use_any, model, scores)

    @server.tool()
    async def count_tokens(text: str, model: _Model = None) -> dict[str, int]:
        """Count the tokens of a text, and tell how many the context of the model has."""

        def count(engine: AnyModel, _cancellation: Cancellation) -> dict[str, int]:
            tokens = engine.tokenizer.encode(text, add_special_tokens=False)
            return {"tokens": len(tokens), "context": engine.context}

        return await _use(pool.use_any, model, count)

    return server
