"""A model's chat template: from a list of messages to the text that the model was trained to continue.

The template is code that came with the weights. It runs in jinja2's sandbox: it cannot reach Python's objects, change
what it is given, or loop over more than a bounded range.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from piecework.errors import ModelError
from piecework.server.faults import Refusal

_FILE, _FOLDER, _CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
DEFAULT_NAME = "default"


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template, and the special tokens that it may write."""

    template: Template
    special: Mapping[str, str] = field(default_factory=dict)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any
    ) -> str:
        """Return the prompt of a conversation; `more` is what a template takes besides, such as `enable_thinking`."""
        values = {**self.special, **more, "messages": messages, "add_generation_prompt": add_generation_prompt}
        values.setdefault("tools", None)
        values.setdefault("documents", None)
        try:
            return self.template.render(values)
        except Refusal:
            raise
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise Refusal(
                400,
                f"the model's chat template does not take these messages: {error}",
                hint="roles, their order and the kind of `content` have to be those that the model was trained with",
                param="messages",
                code="chat_template",
            ) from error


def read_template(folder: Path, given: Path | None = None) -> ChatTemplate | None:
    """Read the template of a model folder, or the file that is given for it; None where there is none."""
    config = _read_config(folder / _CONFIG)
    special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name)))}
    if given is not None:
        return ChatTemplate(_compile(_read(given), str(given)), special)
    if (folder / _FILE).is_file():
        return ChatTemplate(_compile(_read(folder / _FILE), _FILE), special)
    kept = config.get("chat_template")
    if isinstance(kept, list):  # several by name, as older folders have them
        named = {each.get("name"): each.get("template") for each in kept if isinstance(each, Mapping)}
        kept = named.get(DEFAULT_NAME) or next(iter(named.values()), None)
    if kept is None and (folder / _FOLDER / f"{DEFAULT_NAME}.jinja").is_file():
        kept = _read(folder / _FOLDER / f"{DEFAULT_NAME}.jinja")
    return ChatTemplate(_compile(kept, _CONFIG), special) if isinstance(kept, str) else None


class _Generation(Extension):
    """Reads `{% generation %}`, by which templates mark what the model wrote; here its content stands as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the two tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _compile(text: str, where: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template in `{where}` cannot be read: line {error.lineno}: {error.message}",
            hint="fetch the model again, or give another with `--chat-template FILE`",
            facts={"file": where, "line": error.lineno},
        ) from error


def _refuse(message: str) -> None:
    raise Refusal(
        400,
        f"the model's chat template refuses these messages: {message}",
        hint="the message is the template's own",
        param="messages",
        code="chat_template",
    )


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Write JSON as it is: jinja2's own filter escapes what HTML would need."""
    if isinstance(value, Undefined | Macro):
        raise TemplateError("an undefined value was to be written as JSON")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _token_text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the chat template `{file}` cannot be read: {error}", hint="it has to be a text file in UTF-8"
        ) from error


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"`{file.name}` in `{file.parent}` is not JSON: {error}", hint="the file is damaged: fetch it again"
        ) from error
    return value if isinstance(value, dict) else {}
