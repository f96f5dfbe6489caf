"""Python functions as tools of a conversation. A function's signature gives its schema, which validates calls."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from antiphon.client.link import JsonObject

log = logging.getLogger(__name__)


class FunctionTool:
    """A function that the model may call.

    The model gets the function's name, the first paragraph of its docstring, and its typed parameters.
    `Annotated[int, "degrees Celsius"]` describes a parameter. After a call, the model gets the returned string, or
    any other returned value as JSON, or the error that the function raised.

    Args:
        function: A coroutine function, or an ordinary function, which runs in a worker thread.

    Raises:
        TypeError: A parameter has no type, is positional-only, or is `*args` or `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
        hints = get_type_hints(function, include_extras=True)
        fields: list[Any] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(
                    f"{self.name}: a tool's parameters are passed by name, which {parameter} does not allow"
                )
            if parameter.name not in hints:
                raise TypeError(f"{self.name}: the parameter {parameter.name} has no type")
            kind = _described(hints[parameter.name])
            is_required = parameter.default is parameter.empty
            fields.append((parameter.name, kind) if is_required else (parameter.name, kind, parameter.default))
        self._arguments = msgspec.defstruct(self.name, fields, kw_only=True, forbid_unknown_fields=True)

    def definition(self) -> JsonObject:
        """Return the tool's definition, in the form of an entry of a session's `tools`."""
        (found,), parts = msgspec.json.schema_components([self._arguments], ref_template="#/$defs/{name}")
        name = found["$ref"].rpartition("/")[2]
        schema = {k: v for k, v in parts.pop(name).items() if k != "title"}
        if parts:
            schema["$defs"] = parts
        return {"type": "function", "name": self.name, "description": self.description, "parameters": schema}

    async def call(self, arguments: str) -> str:
        """Call the function, and return its output for the model. Does not raise: an error becomes the output.

        Args:
            arguments: The arguments as a JSON object; "" stands for none.
        """
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments)
            values = {name: getattr(given, name) for name in self._arguments.__struct_fields__}
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(**values)
            else:
                result = await asyncio.to_thread(self._function, **values)
            return result if isinstance(result, str) else msgspec.json.encode(result).decode()
        except Exception as error:
            # The function is the application's own code: the model gets any error that it raises, and can report it.
            log.warning("the tool %s failed: %s", self.name, error)
            return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"}).decode()


def _described(kind: Any) -> Any:
    """Return a parameter's type, with the texts of `Annotated` as its description."""
    if get_origin(kind) is not Annotated:
        return kind
    inner, *extras = get_args(kind)
    texts = [extra for extra in extras if isinstance(extra, str)]
    metas = [extra for extra in extras if isinstance(extra, msgspec.Meta)]
    if texts:
        metas.append(msgspec.Meta(description=" ".join(texts)))
    for meta in metas:
        inner = Annotated[inner, meta]
    return inner
