"""`/openapi.json`: what may be asked and what is told, made from the table of addresses.

Requests are described by the structures that decode them, answers by those that the client reads them with, so there
is no second description that could fall behind.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, cast

from msgspec import inspect

from tidefast.protocol.ids import DERIVED_ID_PATTERN, ID_PATTERN
from tidefast.server.access import MAY
from tidefast.server.table import VERBS, Listed, Verb
from tidefast.wire import messages as m
from tidefast.wire.answers import SHAPES
from tidefast.wire.chat import STEP_HEADER, WAIT_HEADER

Schema = dict[str, Any]
_TYPES = ["null", "boolean", "object", "array", "number", "string"]
_FORMS: Mapping[str, Schema] = {
    "id": {"type": "string", "pattern": f"^{ID_PATTERN}$"},
    "named_id": {"type": "string", "pattern": f"^({ID_PATTERN}|{DERIVED_ID_PATTERN})$"},
    "step_path": {
        "type": "string",
        "pattern": f"^({ID_PATTERN}|{DERIVED_ID_PATTERN})/({ID_PATTERN}|{DERIVED_ID_PATTERN})$",
    },
    "word": {"type": "string", "pattern": f"^[!-~]{{1,{m.WORD_LENGTH_MAX}}}$"},
    "json": {"type": _TYPES},
    "object": {"type": "object"},
}
_CHAT: Schema = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "items": {"type": "object"}},
        "stream": {"type": "boolean"},
    },
    "additionalProperties": True,
}
_PROBLEM: Schema = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "reason", "kept", "next"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "title", "detail", "code", "reason", "kept", "next")},
        "status": {"type": "integer"},
        "retry_after_ms": {"type": "integer"},
        "facts": {"type": "object"},
    },
}


def document() -> Schema:
    """The whole description."""
    schemas: Schema = {"Problem": _PROBLEM}
    paths = {
        path: {method.lower(): _operation(method, path, verb, schemas) for method, verb in table.items()}
        for path, table in VERBS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tidefast", "version": version("tidefast"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Who calls; needed by `serve --keys`."},
                "lease": {"type": "apiKey", "in": "header", "name": "Tidefast-Lease", "description": "Of the grant."},
            },
        },
    }


def _operation(method: str, path: str, verb: Verb, schemas: Schema) -> Schema:
    access = MAY[verb.guard]
    told: Schema = {"description": "Done.", "content": _content(verb, schemas)}
    refused = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    operation: Schema = {
        "operationId": verb.ask.__name__,
        "summary": (verb.ask.__doc__ or verb.ask.__name__.replace("_", " ")).strip().splitlines()[0],
        "responses": {
            **{str(status): told for status in verb.statuses},
            "default": {"description": "Refused.", "content": refused},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _FORMS["named_id"]}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if method == "GET":
        parameters += [
            {"name": field.encode_name, "in": "query", "required": field.required, "schema": _member(field, schemas)}
            for field in _struct(verb.message).fields
        ]
    elif verb.message is not m.Empty:
        is_passed_on = verb.message is m.Chat
        schema = _CHAT if is_passed_on else _reference(verb.message, schemas)
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {
            "required": any(f.required for f in _struct(verb.message).fields),
            "content": content,
        }
    if verb.named_by_headers:
        step = {"name": STEP_HEADER, "in": "header", "required": True, "schema": _FORMS["named_id"]}
        wait = {"name": WAIT_HEADER, "in": "header", "required": False, "schema": {"type": "integer", "minimum": 0}}
        parameters += [step, wait]
    if parameters:
        operation["parameters"] = parameters
    if verb.guard != "public":
        lease: Schema = {"lease": []} if access.lease else {}
        operation["security"] = [lease, {"key": [], **lease}] if access.is_open else [{"key": []}]
    return operation


def _content(verb: Verb, schemas: Schema) -> Schema:
    match verb.answer:
        case None:
            schema: Schema = {"type": "object"}
        case str(media):
            return {media: {"schema": {"type": "string"}}}
        case Listed(name=name, of=kind):
            entries = {"type": "array", "items": _reference(SHAPES[kind], schemas)}
            schema = {"type": "object", "required": [name], "properties": {name: entries}}
        case kind:
            schema = _reference(SHAPES[kind], schemas)
    content: Schema = {"application/json": {"schema": schema}}
    if verb.is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content


def _struct(kind: type) -> inspect.StructType:
    return cast(inspect.StructType, inspect.type_info(kind))


def _reference(kind: type, schemas: Schema) -> Schema:
    is_request = issubclass(kind, m.Message)
    name = kind.__name__.lstrip("_") + ("Request" if is_request else "")
    if name not in schemas:
        schemas[name] = {}  # a structure may name itself
        info = _struct(kind)
        schemas[name] = {
            "type": "object",
            "required": [field.encode_name for field in info.fields if field.required],
            "properties": {field.encode_name: _member(field, schemas, is_request=is_request) for field in info.fields},
            **({"additionalProperties": False} if info.forbid_unknown_fields else {}),
        }
    return {"$ref": f"#/components/schemas/{name}"}


def _member(field: inspect.Field, schemas: Schema, *, is_request: bool = True) -> Schema:
    """A member of a request may be left out, and null is no way to say so; one of an answer says null."""
    schema = _schema(field.type, schemas)
    if not is_request and isinstance(field.type, inspect.UnionType):
        return {"anyOf": [schema, {"type": "null"}]}
    is_plain = isinstance(field.default, str | int | bool)
    return {**schema, "default": field.default} if is_plain and field.default != "null" else schema


def _schema(info: inspect.Type, schemas: Schema) -> Schema:
    if isinstance(info, inspect.Metadata):
        extra = info.extra or {}
        return _FORMS[extra["form"]] if "form" in extra else _schema(info.type, schemas)
    match info:
        case inspect.UnionType(types=types):
            (inner,) = (_schema(member, schemas) for member in types if not isinstance(member, inspect.NoneType))
            return inner
        case inspect.IntType(ge=low, le=high):
            bounds = {"minimum": low, "maximum": high}
            return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.StrType(max_length=longest):
            return {"type": "string", **({} if longest is None else {"maxLength": longest})}
        case inspect.LiteralType(values=words):
            return {"enum": list(words)}
        case inspect.ListType(item_type=item, min_length=least, max_length=most):
            bounds = {"minItems": least, "maxItems": most}
            sizes = {name: bound for name, bound in bounds.items() if bound is not None}
            return {"type": "array", "items": _schema(item, schemas), **sizes}
        case inspect.DictType(key_type=key, value_type=item):
            return {
                "type": "object",
                "propertyNames": _schema(key, schemas),
                "additionalProperties": _schema(item, schemas),
            }
        case inspect.StructType(cls=kind):
            return _reference(kind, schemas)
        case inspect.RawType():
            return {"type": _TYPES}
        case _:
            raise TypeError(f"no schema for {info}")
